"""The shared operators, ``ops.swiglu`` and its like; each is called as a function, and ``kalign ops`` lists them.

The platform is selected before any kernel is imported: whether kernels are compiled or interpreted is settled when
they are.
"""

from __future__ import annotations

from kalign_core import hal as _hal  # noqa: F401  # selects the platform first
from kalign_core.declare import Kernel
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.ops.base import Operator
from kalign_core.ops.embedding import Embedding
from kalign_core.ops.group_advantage import GroupAdvantage
from kalign_core.ops.grpo_loss import GRPOLoss
from kalign_core.ops.matmul import Matmul
from kalign_core.ops.pack import Pack, Unpack
from kalign_core.ops.ratio_kl import RatioKLOperator
from kalign_core.ops.rms_norm import RMSNorm
from kalign_core.ops.rope import Rope
from kalign_core.ops.selected_logprob import SelectedLogprob
from kalign_core.ops.softmax import LogSoftmax, Softmax
from kalign_core.ops.swiglu import SwiGLU
from kalign_core.records import Problem

embedding = Embedding()
group_advantage = GroupAdvantage()
grpo_loss = GRPOLoss()
log_softmax = LogSoftmax()
matmul = Matmul()
pack = Pack()
ratio_kl = RatioKLOperator()
rms_norm = RMSNorm()
rope = Rope()
selected_logprob = SelectedLogprob()
softmax = Softmax()
swiglu = SwiGLU()
unpack = Unpack()

_shared: tuple[Operator, ...] = (
    swiglu,
    rms_norm,
    softmax,
    log_softmax,
    selected_logprob,
    matmul,
    rope,
    ratio_kl,
    grpo_loss,
    group_advantage,
    embedding,
    pack,
    unpack,
)
_known: dict[str, Operator] = {op.name: op for op in _shared}

__all__ = [
    "embedding", "group_advantage", "grpo_loss", "log_softmax", "matmul", "named", "operators", "pack", "ratio_kl",
    "register", "rms_norm", "rope", "selected_logprob", "softmax", "swiglu", "tune_command", "unpack",
]  # fmt: skip


def operators() -> tuple[Operator, ...]:
    """Every operator known here, in the order they were registered."""
    return tuple(_known.values())


def named(name: str) -> Operator:
    """The operator called ``name``; raises ``UnknownName``."""
    if name not in _known:
        raise UnknownName("operator", name, _known, fix="kalign ops lists them")
    return _known[name]


def register(operator: Operator) -> Operator:
    """Make an operator of your own known to ``named`` and to the command line; gives it back.

    Raises ``BadArgument`` for what is no operator and for a name that another class has; registering a class again
    replaces its operator.
    """
    if not isinstance(operator, Operator):
        raise BadArgument(f"{operator!r} is no operator", fix="ops.register(Scale()) with class Scale(kalign.Operator)")
    other = _known.get(operator.name)
    if other is not None and type(other).__qualname__ != type(operator).__qualname__:
        raise BadArgument(f"the operator name {operator.name!r} is taken by {type(other).__qualname__}")
    _known[operator.name] = operator
    return operator


def tune_command(kernel: Kernel, problem: Problem) -> str:
    """What to type to tune ``kernel`` for ``problem``; without sizes where an operator's are not its kernel's."""
    owner = next((op for op in _known.values() if kernel in op.kernels), None)
    if owner is None:
        return f"kalign.tune(operator, *args) in phase {problem.phase}"
    words = ["kalign tune", owner.name]
    if set(owner.dims) == set(kernel.dims):
        words.append("--shape " + ",".join(f"{dim}={getattr(problem, dim)}" for dim in owner.dims))
    dtype = next((arg.dtype for arg in problem.args if arg.dtype in owner.dtypes), owner.dtypes[0])
    return " ".join((*words, f"--dtype {dtype}", f"--phase {problem.phase}"))
