"""Confirmation of the fastest rows of a table on fresh builds, timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.benchmark_table import TableEntry
from harness.config.sections import TurnSchedule
from harness.progress import Observer
from harness.records import Failed
from harness.results_dir.artifacts import FLOAT_ROW
from harness.selection.paired_timing import PairedComparison, run_comparison, warn_if_disturbed
from harness.statistics import median_ci
from harness.task_setup.task import Task
from harness.timing.confirmation import MAX_GROUP_ROWS, Contender, EngineFactory
from harness.timing.turn_log import TurnMatrix
from search.space import Placement

__all__ = ["BestConfirmation", "median_latencies"]

FASTEST_PER_COMPARISON = 16
"""How many of the fastest meet at a time."""
LOST_ROW_REASON = (
    "it was measured once and did not come through the runoff, so that nothing is known of it but a lucky reading"
)
CONFIRMATION_SCHEDULE = TurnSchedule(builds=1, rounds=20, samples=3)
"""Of those that meet: the table's optimum, and what it fixes, deserve more than a few readings."""
PACE_TOLERANCE = 0.15
"""By how much the float model may be off what it took before the table without a word."""


def median_latencies(rows: Mapping[str, TableEntry]) -> dict[str, float]:
    """Median latency in ms by digest, of the rows that could be measured."""
    return {
        digest: median_ci(row.outcome.samples_ms).value
        for digest, row in rows.items()
        if not isinstance(row.outcome, Failed)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfirmation:
    """Where the rows of a recording meet.

    Attributes:
        cell: Makes the candidates.
        open_engines: Fresh ones, beside those that measure the table.
        folder: Takes a journal for each meeting.
        float_ms: Latency of the float model before the table.
        level_ms: See `harness.selection.confirmation.level`.
    """

    cell: Task
    open_engines: EngineFactory
    folder: Path
    observer: Observer
    float_ms: float
    level_ms: float | None = None

    def confirm_fastest(
        self, name: str, digests: Iterable[str], rows: Mapping[str, TableEntry]
    ) -> dict[str, TableEntry]:
        """Rows that have met others, with their readings: the fastest of all is among them.

        The least of a thousand noisy readings is a lucky one, and would decide what is fixed in a table, or be its
        optimum for ever; see `harness.pipeline.final_selection`. So the fastest meet again and again, until no row
        that has met
        nobody seems faster than they are.

        Args:
            name: Of the journals.
            digests: Of the rows that are looked at.
            rows: All rows.
        """
        asked, met = list(digests), dict[str, TableEntry]()
        while latency_ms := median_latencies({digest: met.get(digest, rows[digest]) for digest in asked}):
            fastest = sorted(latency_ms, key=latency_ms.__getitem__)[:FASTEST_PER_COMPARISON]
            if fastest[0] in met:
                break
            fresh = [digest for digest in fastest if digest not in met]
            met |= self._time_interleaved(f"{name}-runoff-{len(met)}", {digest: rows[digest] for digest in fresh})
        return met

    def _time_interleaved(self, name: str, rows: Mapping[str, TableEntry]) -> dict[str, TableEntry]:
        """The rows with readings taken in turns; one that does not come through has failed, however fast it seemed."""
        cell = self.cell
        contest = PairedComparison(
            name=f"{cell.spec.name} runoff",
            path=self.folder / f"{name}.jsonl",
            header={
                "rows": sorted(rows),
                "plan": CONFIRMATION_SCHEDULE.model_dump(mode="json"),
                "group": MAX_GROUP_ROWS,
            },
            baseline=Contender(name=FLOAT_ROW, candidate=cell.candidate(cell.space.float_placement())),
            rows=tuple(
                Contender(name=digest, candidate=cell.candidate(Placement(row.choices))) for digest, row in rows.items()
            ),
            schedule=CONFIRMATION_SCHEDULE,
        )
        events = run_comparison(contest, self.open_engines, self.observer)
        warn_if_disturbed(contest.name, events, self.observer)
        readings = TurnMatrix(events)
        self._report_pace_change(contest.name, readings)
        return {
            digest: self._merge_fresh_samples(row, *readings.paired_samples(digest, FLOAT_ROW))
            for digest, row in rows.items()
        }

    def _report_pace_change(self, name: str, readings: TurnMatrix) -> None:
        """Tell where the machine went at another pace than before the table, and what that does to its rows."""
        turns_ms = [value for turns in readings.turns[FLOAT_ROW].values() for value in turns.values()]
        now_ms = float(np.median(turns_ms))
        if 1 / (1 + PACE_TOLERANCE) <= now_ms / self.float_ms <= 1 + PACE_TOLERANCE:
            return
        alone = "rows are timed beside the float model, so that they stay on one scale"
        if self.level_ms is None:
            alone = "its rows are on another scale than the others; record the table anew with sampling.beside: always"
        self.observer.say(f"{name}: the float model takes {now_ms:.4g} ms, it took {self.float_ms:.4g} ms; {alone}")

    def _merge_fresh_samples(self, row: TableEntry, bases: list[list[float]], owns: list[list[float]]) -> TableEntry:
        """A row with a sample a turn; beside the float model, where all are timed so."""
        if isinstance(row.outcome, Failed):
            return row
        if not owns:
            spent_s = row.outcome.build_s + row.outcome.measure_s + row.outcome.evaluate_s
            return replace(row, outcome=Failed(stage="build", reason=LOST_ROW_REASON, wall_s=spent_s))
        base_ms, own_ms = np.concatenate(bases), np.concatenate(owns)
        if self.level_ms is None:
            return replace(row, outcome=replace(row.outcome, samples_ms=tuple(own_ms.tolist())))
        turns = replace(
            row.outcome,
            samples_ms=tuple((own_ms / base_ms * self.level_ms).tolist()),
            raw_ms=tuple(own_ms.tolist()),
            beside_ms=tuple(base_ms.tolist()),
        )
        return replace(row, outcome=turns)
