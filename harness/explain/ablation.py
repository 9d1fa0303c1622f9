"""Ablation of a placement: worth of each part by leaving it out, and the smallest part that retains the gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from harness.api import Candidate
from harness.config.sections import Confirmation
from harness.progress import Observer
from harness.statistics import MIN_CLAIMED_GAIN, Interval, noise_floor_from_ratios
from harness.timing.confirmation import ConfirmationSummary, Contender, confirm, summarize_turns
from harness.timing.turn_log import TWIN, TurnMatrix
from harness.timing.workers.engines import Engines
from search.space import Placement, Space

__all__ = ["AblationTimer", "AblationTiming", "backward_elimination", "quantized", "without"]

WHOLE_PLACEMENT = "whole"
TURN_ORDER_SEED = 0
"""Of the order of turns."""
MAX_ELIMINATION_TESTS = 150
"""Placements that the search for the fewest points may build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationTiming:
    """A placement against the whole one.

    Attributes:
        ratio: Its latency over that of the whole placement; None where it has none.
        reason: Why; "" where there is a ratio.
    """

    ratio: Interval | None = None
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class AblationTimer:
    """Times placements beside the whole one: fresh builds, random turns, as a confirmation does.

    Attributes:
        space: Of all placements here.
        whole: The placement that is explained.
        candidate: Makes the candidate of a placement.
        open_engines: Gives fresh engines.
        aa: What the whole placement gained over itself in each worker so far.
        whole_ms: Latency of the whole placement, by the readings that came first; None before.
    """

    space: Space
    whole: Placement
    candidate: Callable[[Placement], Candidate]
    open_engines: Callable[[], AbstractContextManager[Engines]]
    plan: Confirmation
    observer: Observer
    aa: list[float] = field(default_factory=list)
    whole_ms: float | None = None

    @property
    def tolerance(self) -> float:
        """Smaller losses of speed are none."""
        return max(MIN_CLAIMED_GAIN, noise_floor_from_ratios(self.aa))

    def time(self, placements: Mapping[str, Placement], title: str) -> dict[str, AblationTiming]:
        """Each placement against the whole one; those that build the same graph are timed once."""
        own = self.space.digest(self.whole)
        digests = {name: self.space.digest(placement) for name, placement in placements.items()}
        wanted = {digests[name]: placement for name, placement in placements.items() if digests[name] != own}
        summary = self._confirm(wanted, title)
        same = AblationTiming(ratio=Interval(value=1.0, low=1.0, high=1.0))
        timed = {digest: _read_timing(summary, digest) for digest in wanted}
        return {name: timed.get(digest, same) for name, digest in digests.items()}

    def _confirm(self, placements: Mapping[str, Placement], title: str) -> ConfirmationSummary:
        rows = [Contender(name=digest, candidate=self.candidate(placement)) for digest, placement in placements.items()]
        plan = self.plan
        with self.observer.work(title, plan.builds * plan.rounds * len(rows)) as step:
            events = []
            for event in confirm(
                rows,
                Contender(name=WHOLE_PLACEMENT, candidate=self.candidate(self.whole)),
                open_engines=self.open_engines,
                schedule=plan,
                rng=np.random.default_rng(TURN_ORDER_SEED),
            ):
                events.append(event)
                if event.row in placements:
                    step.advance()
        summary = summarize_turns(events, baseline=WHOLE_PLACEMENT)
        own, twins = TurnMatrix(events).paired_samples(TWIN, WHOLE_PLACEMENT)
        self.aa += [float(np.median(np.divide(one, two))) for one, two in zip(own, twins, strict=True)]
        if self.whole_ms is None and WHOLE_PLACEMENT in summary.rows:
            self.whole_ms = summary.rows[WHOLE_PLACEMENT].latency_ms.value
        return summary


def _read_timing(summary: ConfirmationSummary, digest: str) -> AblationTiming:
    if digest in summary.failed:
        failed = summary.failed[digest]
        return AblationTiming(reason=f"{failed.stage}: {failed.reason}")
    row = summary.rows.get(digest)
    if row is None or row.builds_ok < 2:
        return AblationTiming(reason="no readings")
    speedup = row.speedup
    return AblationTiming(ratio=Interval(value=1 / speedup.value, low=1 / speedup.high, high=1 / speedup.low))


def quantized(placement: Placement) -> list[int]:
    """Dimensions that a placement quantizes."""
    return [index for index, choice in enumerate(placement.choices) if choice]


def without(placement: Placement, indices: Sequence[int]) -> Placement:
    """The placement with these dimensions at float."""
    left = set(indices)
    return Placement(tuple(0 if index in left else choice for index, choice in enumerate(placement.choices)))


def backward_elimination(bench: AblationTimer, order: Sequence[int]) -> tuple[list[Placement], int]:
    """Placements with ever fewer quantized dimensions that seem as fast as the whole one, within the noise.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
    Software Engineering 28, 2002): ever smaller chunks are left out; those that can be left out alone are left out
    together where that holds too, else the one that costs least. All tests of a step are timed side by side, and always
    against the whole placement, so that small losses cannot add up unseen. Of many noisy tests the lucky ones are
    taken, so the fewest must be timed anew, beside those before them, before anything is said of them.

    Args:
        bench: Times them.
        order: The dimensions, least valuable first: chunks of useless ones go early.

    Returns:
        The placements, the whole one first, and how many were built to find them.
    """
    kept, chunks, tests = list(order), min(8, len(order)), 0
    found = [bench.whole]
    while kept and tests < MAX_ELIMINATION_TESTS:
        parts = [part.tolist() for part in np.array_split(kept, chunks) if len(part)]
        tested = _test_removals(bench, kept, parts)
        tests += len(parts)
        free = [part for part in parts if tested[str(part)] <= 1 + bench.tolerance]
        if len(free) > 1:
            together = [index for part in free for index in part]
            tests += 1
            if _test_removals(bench, kept, [together])[str(together)] <= 1 + bench.tolerance:
                free = [together]
        if free:
            best = min(free, key=lambda part: (-len(part), tested.get(str(part), 1.0)))
            kept = [index for index in kept if index not in set(best)]
            found.append(without(bench.whole, [index for index in order if index not in set(kept)]))
            chunks = min(max(2, chunks - 1), len(kept)) or 1
        elif chunks >= len(kept):
            break
        else:
            chunks = min(2 * chunks, len(kept))
    return found, tests


def _test_removals(bench: AblationTimer, kept: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Latency over that of the whole placement, with each of the parts left out besides; infinite where it failed."""
    gone = [index for index in quantized(bench.whole) if index not in set(kept)]
    placements = {str(part): without(bench.whole, [*gone, *part]) for part in parts}
    timed = bench.time(placements, f"fewest points, {len(kept)} left")
    return {name: math.inf if t.ratio is None else t.ratio.value for name, t in timed.items()}
