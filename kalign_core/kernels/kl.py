"""Estimators of the divergence between two policies from the log-probabilities of one sampled token.

With ``x = ref_logp - logp`` (the logarithm of the ratio of the reference's probability to the policy's): ``k1 = -x``,
``k2 = x**2 / 2``, ``k3 = exp(x) - 1 - x`` (J. Schulman, "Approximating KL Divergence", 2020).

``exp(x) - 1 - x`` as it stands loses all of its digits near 0, which is where training lives: at ``x = 1e-3`` float32
keeps one. Below 1/2 a polynomial takes its place, ``x*x`` times that of degree 5 which is nearest to
``(exp(x) - 1 - x) / x**2`` there (its largest relative error, 2.5e-8, is below half a unit in the last place), by
Horner's rule. The derivative needs no such care: beside the ratio's gradient an error of half a unit of 1 is nothing.
"""

import triton
import triton.language as tl


@triton.jit
def k3_of(x):
    """``exp(x) - 1 - x`` for ``x`` in float32."""
    q = 0.00139819974 + x * 0.000198756293
    q = 0.00833345217 + x * q
    q = 0.0416657959 + x * q
    q = 0.166666655 + x * q
    q = 0.5 + x * q
    return tl.where(tl.abs(x) < 0.5, (x * x) * q, (tl.exp(x) - 1.0) - x)


@triton.jit
def k3_slope(x):
    """The derivative of ``k3`` by ``logp``."""
    return 1.0 - tl.exp(x)
