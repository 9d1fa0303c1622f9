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
from harness.measure.events import TWIN, Block, Dropped, Event, Key, Readings
from harness.measure.stats import Interval, block_ci, floor_from, paired_ratio_ci, verdict
from harness.records import Failed
from harness.run.config import Rounds, Sampling

__all__ = ["OpenEngines", "Row", "RowSummary", "Summary", "confirm", "floor_of", "summarise"]

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
        verdict: "faster", "tie" or "slower"; "wrong result in RUNTIME" or "saturates" where an engine computes
            something else than its file says, see `harness.run.runtime_check`.
        latency_ms: Median latency.
        speedup: Latency of the baseline over that of the row, paired by turns.
        builds: Fresh builds that were tried.
        builds_ok: Those that gave readings.
    """

    latency_ms: Interval
    speedup: Interval
    verdict: str
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
    held back and taken again at the end of the build; what is disturbed then is marked, and counts.

    Args:
        open_engines: Gives fresh engines.
        done: Events of an interrupted confirmation of the same rows; finished workers are not repeated, for an
            unfinished one there is another whose events replace its.

    Raises:
        UserError: The baseline failed, so there is nothing to compare with.
        ValueError: Two rows share a name.
    """
    names = [baseline.name, TWIN, *(row.name for row in rows)]
    if len(set(names)) != len(names):
        raise ValueError(f"rows of a confirmation need names of their own, but got {', '.join(names)}")
    groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)] or [()]
    known = Readings(done)
    finished = _finished(known, plan.rounds)
    for build, streams in enumerate(rng.spawn(plan.builds)):
        for group, (members, stream) in enumerate(zip(groups, streams.spawn(len(groups)), strict=True)):
            wanted = {baseline.name, TWIN, *(row.name for row in members)}
            if wanted <= finished[build, group]:
                continue
            worker = known.workers.get((build, group), -1) + 1
            yield from _Turns(build, group, worker, baseline, plan, stream).run(members, open_engines)


class _Turns:
    """One group of rows in one build.

    Attributes:
        worker: See `Block.worker`.
    """

    def __init__(
        self, build: int, group: int, worker: int, baseline: Row, plan: Rounds, rng: np.random.Generator
    ) -> None:
        self.worker = worker
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
            self.worker += 1

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
        held: dict[int, Sequence[Block]] = {}
        for number in range(self._rounds):
            blocks = yield from self._round(number, engines, handles, alive)
            if blocks is None:
                return False
            if any(block.disturbed for block in blocks):
                held[number] = blocks
            else:
                yield from blocks
        # Where it was most of them, whatever works beside us stays; taking them again would tell the same.
        hopeless = 2 * len(held) > self._rounds
        for number, first in held.items():
            blocks = first if hopeless else (yield from self._round(number, engines, handles, alive))
            if blocks is None:
                return False
            yield from (block for block in (blocks if hopeless else _again(blocks, first)) if block.row in alive)
        return True

    def _round(
        self, number: int, engines: Engines, handles: Mapping[str, int], alive: dict[str, Row]
    ) -> Generator[Event, None, Sequence[Block] | None]:
        """A turn of each row in random order; None where one takes the worker with it. Gives the rows that fail."""
        blocks: list[Block] = []
        for row in self._shuffled(alive):
            samples = engines.sample(handles[row], self._sampling)
            if isinstance(samples, Failed):
                yield self._drop(row, samples, alive)
                if samples.stage in _LOST:
                    return None
            else:
                block = Block(
                    **self._key,
                    worker=self.worker,
                    round=number,
                    row=row,
                    samples_ms=samples.latency_ms,
                    discarded_ms=samples.discarded_ms,
                    disturbed=samples.disturbed,
                )
                blocks.append(block)
        return blocks

    def _drop(self, row: str, failed: Failed, alive: dict[str, Row]) -> Dropped:
        if row in [base.name for base in self._bases]:
            why = f"{failed.stage}: {failed.reason}\n{failed.log_tail}"
            raise UserError(f"the baseline failed in the confirmation, so there is nothing to compare with; {why}")
        del alive[row]
        return Dropped(**self._key, row=row, failed=failed)

    def _shuffled(self, rows: Mapping[str, Row]) -> list[str]:
        names = list(rows)
        return [names[index] for index in self._rng.permutation(len(names))]


def _again(blocks: Iterable[Block], first: Iterable[Block]) -> Iterator[Block]:
    """A round that was taken again, with what the first take read."""
    earlier = {block.row: (*block.discarded_ms, *block.samples_ms) for block in first}
    for block in blocks:
        yield replace(block, discarded_ms=(*earlier.get(block.row, ()), *block.discarded_ms))


def summarise(events: Iterable[Event], baseline: str, floor: float = 0.0) -> Summary:
    """Latency, speedup and verdict of each row.

    Args:
        baseline: Name of the baseline's row.
        floor: Known noise floor; the one of these events is used where it is larger.
    """
    readings = Readings(events)
    floor = max(floor, floor_of(readings, baseline))
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


def floor_of(readings: Readings, baseline: str) -> float:
    """The A/A noise floor of some builds: what the baseline gains over its twin, see `harness.measure.stats`."""
    bases, twins = readings.paired(TWIN, baseline)
    return floor_from([float(np.median(np.divide(base, twin))) for base, twin in zip(bases, twins, strict=True)])


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
