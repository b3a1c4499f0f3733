"""Estimators of the divergence between two policies from the log-probabilities of one sampled token.

With ``x = ref_logp - logp`` (the logarithm of the ratio of the reference's probability to the policy's): ``k1 = -x``,
``k2 = x**2 / 2``, ``k3 = exp(x) - 1 - x`` (J. Schulman, "Approximating KL Divergence", 2020).

``exp(x) - 1 - x`` as it stands loses all of its digits near 0, which is where training lives: at ``x = 1e-3`` float32
keeps one. Below 1/2 the Taylor polynomial takes its place: ``x*x * (1/2 + x * (1/6 + ... + x * 1/9!))`` by Horner's
rule, whose remainder is less than half a unit in the last place.
"""

import triton
import triton.language as tl


@triton.jit
def _k3_near(x):
    sum = 1.0 / 40320.0 + x * (1.0 / 362880.0)
    sum = 1.0 / 5040.0 + x * sum
    sum = 1.0 / 720.0 + x * sum
    sum = 1.0 / 120.0 + x * sum
    sum = 1.0 / 24.0 + x * sum
    sum = 1.0 / 6.0 + x * sum
    sum = 0.5 + x * sum
    return (x * x) * sum


@triton.jit
def k3_of(x):
    """``exp(x) - 1 - x`` for ``x`` in float32."""
    return tl.where(tl.abs(x) < 0.5, _k3_near(x), (tl.exp(x) - 1.0) - x)


@triton.jit
def k3_slope(x):
    """The derivative of ``k3`` by ``logp``: ``1 - exp(x)``, near 0 as ``-(x + k3)``."""
    return tl.where(tl.abs(x) < 0.5, -(x + _k3_near(x)), 1.0 - tl.exp(x))
