"""The decision rule: who wins, by which margin, and when a decision must not be kept.

The reference stands unless somebody beats it by more than noise can explain; a stored winner stands unless somebody
beats it by three percent. Among those that cannot be told apart the kernel's own declaration decides, so that neither
noise nor the order of the candidates does. Pure functions of readings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kalign_core.records import Condition, Timing
from kalign_core.tuner.measure import Contender, Noise, timing, uncertainty_us

PROMOTE_SHARE = 0.02
REPLACE_SHARE = 0.03
TIE_SHARE = 0.005
TIE_LIMIT = 0.01
SPREADS = 3.0
DRIFT_LIMIT = 0.03
SPREAD_LIMIT = 0.05
SPREAD_GROWTH = 5.0
QUIET_SPREAD = 0.02
OUTLIER = 1.5
OUTLIER_SHARE = 0.25
# Fewer readings than this say nothing about drift or spread.
FEWEST = 5


def winner(
    home: Contender, incumbent: Contender | None, rivals: Sequence[Contender], kind: str, noise: Noise
) -> Contender:
    """Who is to serve from now on: the reference ``home``, the stored winner ``incumbent`` or one of ``rivals``.

    The fastest rival, by ``kind`` of reading, if it beats the reference by 2 % and three times the spread; else the
    reference. A stored winner, the reference too where that was stored, gives way only to who beats it by 3 %.
    """
    best = _fastest([rival for rival in rivals if beats(rival, home, kind, noise, PROMOTE_SHARE)], kind, noise) or home
    if incumbent is None or incumbent.out or best is incumbent or timing(incumbent.readings(kind)) is None:
        return best
    return best if beats(best, incumbent, kind, noise, REPLACE_SHARE) else incumbent


def beats(challenger: Contender, holder: Contender, kind: str, noise: Noise, share: float) -> bool:
    """Whether ``challenger`` is faster by more than ``share`` of the holder's time and more than noise explains."""
    ours, theirs = timing(challenger.readings(kind)), timing(holder.readings(kind))
    if ours is None or theirs is None or challenger.out:
        return False
    noise_us = max(SPREADS * max(ours.mad_us, theirs.mad_us), 2 * noise.difference * theirs.median_us)
    return theirs.median_us - ours.median_us > max(share * theirs.median_us, noise_us)


def _fastest(contenders: Sequence[Contender], kind: str, noise: Noise) -> Contender | None:
    """The first by declaration of those that tie with the fastest."""
    medians = {contender: statistics.median(contender.readings(kind)) for contender in contenders}
    if not medians:
        return None
    tie = min(TIE_LIMIT, max(TIE_SHARE, noise.difference))
    least = min(medians.values())
    return min((c for c, median in medians.items() if median <= least * (1 + tie)), key=lambda c: c.order)


# --- when not to keep it ------------------------------------------------------------------------------------------


def spoiled(before: Condition, after: Condition, reference: Sequence[float], noise: Noise) -> str:
    """Why what was measured between two conditions must not be stored, or an empty string."""
    throttle = sorted({*before.throttle, *after.throttle})
    if throttle:
        return f"the device was slowed down ({', '.join(throttle)})"
    if (before.foreign_processes or 0) + (after.foreign_processes or 0) > 0:
        return "another process was on the device"
    return _restless(reference, noise)


def _restless(reference: Sequence[float], noise: Noise) -> str:
    """What the reference's own readings say of the device: drift, spread, bursts."""
    measured = timing(reference)
    if measured is None or measured.samples < FEWEST:
        return ""
    moved = drift(reference)
    if moved > max(DRIFT_LIMIT, drift_by_chance(measured.samples, noise)):
        return f"the reference drifted by {moved:.1%} while it was measured"
    spread = measured.mad_us / measured.median_us
    if spread > max(QUIET_SPREAD, SPREAD_GROWTH * noise.spread):
        return f"the reference's readings spread by {spread:.1%}, by {noise.spread:.1%} before"
    if spread > SPREAD_LIMIT:
        return f"the reference's readings spread by {spread:.1%}"
    bursts = sum(reading > OUTLIER * measured.median_us for reading in reference)
    if bursts > OUTLIER_SHARE * measured.samples:
        return f"{bursts} of {measured.samples} readings of the reference were far above the others"
    return ""


def drift(readings: Sequence[float]) -> float:
    """How far the second half's median lies from the first half's, as a share."""
    half = len(readings) // 2
    if half < 2:
        return 0.0
    first, second = statistics.median(readings[:half]), statistics.median(readings[-half:])
    return abs(second - first) / first if math.isfinite(first) and first else 0.0


def drift_by_chance(samples: int, noise: Noise) -> float:
    """What ``drift`` of steady readings with this noise stays below: three standard errors of the difference."""
    half = Timing(1.0, noise.spread, max(samples // 2, 1))
    return 3 * math.sqrt(2) * uncertainty_us(half)
