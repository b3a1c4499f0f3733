"""Deliberately bad kernels, each posing as a candidate of a good reference: what a verifier must refute.

Every kind of fault that reports and reasoning say an ordinary test misses has at least one, over pointwise, row-wise,
dot, online-softmax and gradient kernels. Each says which check must catch it (an earlier one may), whether the quick
suite has to, and where the fault shows: under an interpreter, or on a GPU only.
"""

from tests.bad_kernels.dot import DOT
from tests.bad_kernels.gradient import GRADIENT
from tests.bad_kernels.pointwise import POINTWISE
from tests.bad_kernels.rowwise import ROWWISE
from tests.bad_kernels.softmax import SOFTMAX
from tests.bad_kernels.store import KINDS, Bad, open_bench, posing_as

BAD: tuple[Bad, ...] = (*POINTWISE, *ROWWISE, *DOT, *SOFTMAX, *GRADIENT)

__all__ = ["BAD", "KINDS", "Bad", "open_bench", "posing_as"]
