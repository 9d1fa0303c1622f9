"""Confirmation: winners and baselines built afresh, timed in random turns, judged by paired ratios.

The samples of a search choose, these report: whoever looked best by luck does not keep it here. Every
fresh worker holds the baseline twice; the second is its A/A twin, so the noise floor comes from the
same builds, the same minutes and the same arithmetic as the speedups that it limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from harness.api import Candidate
from harness.errors import UserError
from harness.measure.engines import MAIN, Engines
from harness.measure.events import TWIN, Block, Dropped, Event, Key, Readings, decode_event, encode_event
from harness.measure.stats import Interval, Verdict, block_ci, floor_from, paired_ratio_ci, verdict
from harness.records import Failed
from harness.run.config import Rounds, Sampling

__all__ = [
    "TWIN", "Block", "Dropped", "Event", "Row", "RowSummary", "Summary", "confirm", "decode_event", "disturbance_note",
    "encode_event", "summarise",
]  # fmt: skip

GROUP = 10
"""Rows that are open at once beside the baseline and its twin; more would cost memory, not precision."""
TURN_MS = 50.0
"""A turn lasts at least so long. Machines change their speed within a second (a sibling thread that works, a neighbour
in the cloud): many short turns see the same mixture for every row, few long ones do not."""
WARMUP_MS = 10.0
"""Before each turn: enough to bring an engine that others pushed out back into the caches."""
MOST = 200
"""Inferences of one turn, however fast the engine."""
NEVER = 1e-9
"""Width of an interval that no reading reaches: turns end by time, so that no row gets more than another."""
DISTURBED = 0.10
"""Share of disturbed turns that is worth a word: medians over turns bear less."""
_LOST = ("crash", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a model on one of the benchmarkers that the workers have."""

    name: str
    candidate: Candidate
    benchmarker: str = MAIN


OpenEngines = Callable[[], AbstractContextManager[Engines]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """What the confirmation says of one row.

    Attributes:
        latency_ms: Median latency.
        speedup: Latency of the baseline over that of the row, paired by turns.
        builds: Fresh builds that were tried.
        builds_ok: Those that gave readings.
    """

    latency_ms: Interval
    speedup: Interval
    verdict: Verdict
    builds: int
    builds_ok: int

    @property
    def recommended(self) -> bool:
        """Whether to deliver this row; where not, the baseline: a tie is no reason to lose any accuracy."""
        return self.verdict == "faster"

    def shrinkage(self, search_speedup: float) -> float:
        """How much less it is than the speedup that the search saw; choosing the lowest reading makes it positive."""
        return search_speedup - self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the confirmation says.

    Attributes:
        floor: Gain of the baseline over its twin; smaller ones are ties.
        builds: Number of builds that every row went through to the end.
        rows: By name, the baseline among them; rows without any reading are absent.
        failed: By name, the last failure of each row that has one.
        disturbed: Share of the turns in which something else was at work on the machine.
    """

    floor: float
    builds: int
    rows: Mapping[str, RowSummary]
    failed: Mapping[str, Failed]
    disturbed: float = 0.0


def confirm(
    rows: Sequence[Row],
    baseline: Row,
    *,
    open_engines: OpenEngines,
    plan: Rounds,
    rng: np.random.Generator,
    done: Iterable[Event] = (),
) -> Iterator[Event]:
    """Time the rows against the baseline; whoever iterates writes each event down as it happens.

    For each of `plan.builds` and each group of rows: a fresh worker builds them all, then each gets its
    turn in each of `plan.rounds`, in random order. A row that fails drops out of that build; where it took
    the worker with it, the others start again in a fresh one. Rounds that something else on the machine disturbed are
    taken again at the end, and the later take counts; what is disturbed then is marked, and counts.

    Args:
        open_engines: Gives fresh engines.
        done: Events of an interrupted confirmation of the same rows; finished workers are not repeated,
            an unfinished one starts again and its events replace the earlier ones.

    Raises:
        UserError: The baseline failed, so there is nothing to compare with.
        ValueError: Two rows share a name.
    """
    names = [baseline.name, TWIN, *(row.name for row in rows)]
    if len(set(names)) != len(names):
        raise ValueError(f"rows of a confirmation need names of their own, but got {', '.join(names)}")
    groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)] or [()]
    finished = _finished(Readings(done), plan.rounds)
    for build, streams in enumerate(rng.spawn(plan.builds)):
        for group, (members, stream) in enumerate(zip(groups, streams.spawn(len(groups)), strict=True)):
            wanted = {baseline.name, TWIN, *(row.name for row in members)}
            if wanted <= finished[build, group]:
                continue
            yield from _Turns(build, group, baseline, plan, stream).run(members, open_engines)


class _Turns:
    """One group of rows in one build."""

    def __init__(self, build: int, group: int, baseline: Row, plan: Rounds, rng: np.random.Generator) -> None:
        self._key = {"build": build, "group": group}
        self._bases = (baseline, replace(baseline, name=TWIN))
        self._rounds = plan.rounds
        count = max(3, plan.samples)
        self._sampling = Sampling(
            warmup_ms=WARMUP_MS, min_samples=count, max_samples=max(count, MOST), max_ms=TURN_MS, target=NEVER
        )
        self._rng = rng

    def run(self, members: Sequence[Row], open_engines: OpenEngines) -> Iterator[Event]:
        """Events of this group, over as many workers as its rows wear out."""
        alive = {row.name: row for row in (*self._bases, *members)}
        intact = False
        while not intact:
            with open_engines() as engines:
                intact = yield from self._worker(engines, alive)

    def _worker(self, engines: Engines, alive: dict[str, Row]) -> Generator[Event, None, bool]:
        """Events of one worker's life; rows that fail leave `alive`. False where the worker died early."""
        handles: dict[str, int] = {}
        for row in self._shuffled(alive):
            built = engines.build(alive[row].candidate, alive[row].benchmarker)
            if isinstance(built, Failed):
                yield self._drop(row, built, alive)
                if built.stage in _LOST:
                    return False
            else:
                handles[row] = built.handle
        disturbed = []
        for number in range(self._rounds):
            events = self._round(number, engines, handles, alive)
            yield from events
            if _lost(events):
                return False
            if _disturbed(events):
                disturbed.append(number)
        # Where it was most of them, whatever works beside us stays; taking them again would tell the same.
        for number in disturbed if 2 * len(disturbed) <= self._rounds else ():
            events = self._round(number, engines, handles, alive)
            yield from events
            if _lost(events):
                return False
        return True

    def _round(
        self, number: int, engines: Engines, handles: Mapping[str, int], alive: dict[str, Row]
    ) -> Sequence[Event]:
        """A turn of each row in random order, as a whole; it ends where a row takes the worker with it."""
        events: list[Event] = []
        for row in self._shuffled(alive):
            samples = engines.sample(handles[row], self._sampling)
            if isinstance(samples, Failed):
                events.append(self._drop(row, samples, alive))
                if samples.stage in _LOST:
                    break
            else:
                block = Block(
                    **self._key,
                    round=number,
                    row=row,
                    samples_ms=samples.latency_ms,
                    discarded_ms=samples.discarded_ms,
                    disturbed=samples.disturbed,
                )
                events.append(block)
        return events

    def _drop(self, row: str, failed: Failed, alive: dict[str, Row]) -> Dropped:
        if row in [base.name for base in self._bases]:
            why = f"{failed.stage}: {failed.reason}\n{failed.log_tail}"
            raise UserError(f"the baseline failed in the confirmation, so there is nothing to compare with; {why}")
        del alive[row]
        return Dropped(**self._key, row=row, failed=failed)

    def _shuffled(self, rows: Mapping[str, Row]) -> list[str]:
        names = list(rows)
        return [names[index] for index in self._rng.permutation(len(names))]


def _lost(events: Iterable[Event]) -> bool:
    return any(isinstance(event, Dropped) and event.failed.stage in _LOST for event in events)


def _disturbed(events: Iterable[Event]) -> bool:
    return any(isinstance(event, Block) and event.disturbed for event in events)


def summarise(events: Iterable[Event], baseline: str, floor: float = 0.0) -> Summary:
    """Latency, speedup and verdict of each row.

    Args:
        baseline: Name of the baseline's row.
        floor: Known noise floor; the one of these events is used where it is larger.
    """
    readings = Readings(events)
    bases, twins = readings.paired(TWIN, baseline)
    ratios = [float(np.median(np.divide(base, twin))) for base, twin in zip(bases, twins, strict=True)]
    floor = max(floor, floor_from(ratios))
    rows = {}
    for name in readings.turns:
        base, own = readings.paired(name, baseline)
        if own and name != TWIN:
            speedup = paired_ratio_ci(base, own)
            rows[name] = RowSummary(
                latency_ms=block_ci(own),
                speedup=speedup,
                verdict=verdict(speedup, floor),
                builds=len(own) + len(readings.failed[name]),
                builds_ok=len(own),
            )
    failed = {name: list(found.values())[-1] for name, found in readings.failed.items() if found}
    return Summary(
        floor=floor,
        builds=_complete_builds(readings),
        rows=rows,
        failed=failed,
        disturbed=readings.disturbed_share,
    )


def disturbance_note(share: float) -> str:
    """What readings are worth where so large a share of their turns was disturbed; "" where it was too small to matter.

    A pace that all engines share cancels in their ratios, other processes do not: they take whole slices of time, which
    the slower of two engines meets more of.
    """
    if share <= DISTURBED:
        return ""
    return f"something else was at work in {share:.0%} of the turns, which distorts speedups, upwards as a rule"


def _finished(readings: Readings, rounds: int) -> Mapping[Key, set[str]]:
    """The rows that went through to the end, or failed, in each worker."""
    found: dict[Key, set[str]] = defaultdict(set)
    for row in {*readings.turns, *readings.failed}:
        ended = [key for key, turns in readings.turns[row].items() if len(turns) >= rounds]
        for key in (*ended, *readings.failed[row]):
            found[key].add(row)
    return found


def _complete_builds(readings: Readings) -> int:
    rounds = max((len(turns) for found in readings.turns.values() for turns in found.values()), default=0)
    finished = _finished(readings, rounds)
    rows: dict[int, set[str]] = defaultdict(set)
    for (build, _), names in finished.items():
        rows[build] |= names
    return sum(names == set().union(*rows.values()) for names in rows.values())
