"""The decision rule: who wins, by which margin, and when a decision must not be kept.

The reference stands unless somebody beats it by more than noise can explain; a stored winner stands unless somebody
beats it by three percent. Where a device's clock follows its load nobody knows at which clock a launch will serve: the
winner is who loses least at the pace that suits it worse. Among those that cannot be told apart the kernel's own
declaration decides, so that neither noise nor the order of the candidates does. Pure functions of readings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kalign_core.records import Condition, Timing
from kalign_core.tuner.readings import RESTED, Contender, Noise, timing, uncertainty_us, usable

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
# Where nobody says who else is there: a launch that waits for others waits about as long as it runs. On an H200 of
# one's own the share was 0.0 to 0.2.
WAITS_LIMIT = 1.0
# Fewer readings than this say nothing about drift or spread.
FEWEST = 5


def winner(
    home: Contender, incumbent: Contender | None, rivals: Sequence[Contender], kind: str, noise: Noise
) -> Contender:
    """Who is to serve from now on: the reference ``home``, the stored winner ``incumbent`` or one of ``rivals``.

    The fastest rival, by ``kind`` of reading, if it beats the reference by 2 % and three times the spread; else the
    reference. A stored winner, the reference too where that was stored, gives way only to who beats it by 3 %.
    """
    kinds = kinds_that_decide(home, kind)
    better = [rival for rival in rivals if beats(rival, home, kinds, noise, PROMOTE_SHARE)]
    best = _fastest(better, kinds, noise) or home
    if incumbent is None or incumbent.out or best is incumbent or not _known(incumbent, kinds):
        return best
    return best if beats(best, incumbent, kinds, noise, REPLACE_SHARE) else incumbent


def kinds_that_decide(home: Contender, kind: str) -> tuple[str, ...]:
    """``kind``, and the same on a rested device where that was found to be another matter."""
    return (kind, RESTED) if home.rested else (kind,)


def beats(challenger: Contender, holder: Contender, kinds: Sequence[str], noise: Noise, share: float) -> bool:
    """Whether ``challenger`` is faster by more than ``share`` of the holder's time and more than noise explains.

    On the average over ``kinds``, and slower in none of them by more than makes a tie.
    """
    if challenger.out or not (_known(challenger, kinds) and _known(holder, kinds)):
        return False
    gains, margins = [], []
    for kind in kinds:
        ours, theirs = _timing(challenger, kind), _timing(holder, kind)
        gains.append(1 - ours.median_us / theirs.median_us)
        margins.append(max(SPREADS * max(ours.mad_us, theirs.mad_us) / theirs.median_us, 2 * noise.difference))
    return statistics.fmean(gains) > max(share, statistics.fmean(margins)) and min(gains) >= -TIE_SHARE


def _known(contender: Contender, kinds: Sequence[str]) -> bool:
    return all(contender.readings(kind) for kind in kinds)


def _timing(contender: Contender, kind: str) -> Timing:
    measured = timing(contender.readings(kind))
    assert measured is not None  # asked only of those that are known
    return measured


def _fastest(contenders: Sequence[Contender], kinds: Sequence[str], noise: Noise) -> Contender | None:
    """Who loses least to the fastest, at the kind that suits it worse; of those that tie the first by declaration."""
    if not contenders:
        return None
    least = {kind: min(_timing(contender, kind).median_us for contender in contenders) for kind in kinds}
    losses = {c: max(_timing(c, kind).median_us / least[kind] for kind in kinds) for c in contenders}
    tie = min(TIE_LIMIT, max(TIE_SHARE, noise.difference))
    bound = min(losses.values()) * (1 + tie)
    return min((contender for contender, loss in losses.items() if loss <= bound), key=lambda c: c.order)


# --- when not to keep it ------------------------------------------------------------------------------------------


def spoiled(before: Condition, after: Condition, home: Contender, kind: str, noise: Noise) -> str:
    """Why what was measured between two conditions must not be stored, or an empty string.

    ``home`` is the reference, whose readings of ``kind`` tell of the device.
    """
    throttle = sorted({*before.throttle, *after.throttle})
    if throttle:
        return f"the device was slowed down ({', '.join(throttle)})"
    company = [condition.foreign_processes for condition in (before, after)]
    if any(company):
        return "another process was on the device"
    if None in company and home.waits and statistics.fmean(home.waits) > WAITS_LIMIT:
        return f"launches took {1 + statistics.fmean(home.waits):.1f} times as long to come back as they ran"
    return _restless(home, kind, noise)


def _restless(home: Contender, kind: str, noise: Noise) -> str:
    """What the reference's own readings say of the device: drift, bursts, and what its rounds do not share: spread."""
    raw = [reading for reading in home.raw.get(kind, ()) if usable(reading)]
    measured, counting = timing(raw), timing(home.readings(kind))
    if measured is None or counting is None or measured.samples < FEWEST:
        return ""
    moved = drift(raw)
    if moved > max(DRIFT_LIMIT, _follows(home, kind), drift_by_chance(measured.samples, noise)):
        return f"the reference drifted by {moved:.1%} while it was measured"
    spread = counting.mad_us / counting.median_us
    if spread > max(QUIET_SPREAD, SPREAD_GROWTH * noise.spread):
        return f"the reference's readings spread by {spread:.1%}, by {noise.spread:.1%} before"
    if spread > SPREAD_LIMIT:
        return f"the reference's readings spread by {spread:.1%}"
    bursts = sum(reading > OUTLIER * measured.median_us for reading in raw)
    if bursts > OUTLIER_SHARE * measured.samples:
        return f"{bursts} of {measured.samples} readings of the reference were far above the others"
    return ""


def _follows(home: Contender, kind: str) -> float:
    """By how much the reference is slower under load than rested: a clock that follows the load moves as far itself."""
    loaded, rested = timing(home.readings(kind)), timing(home.rested)
    return loaded.median_us / rested.median_us - 1 if loaded and rested else 0.0


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
