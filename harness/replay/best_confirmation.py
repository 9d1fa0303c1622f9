"""Confirmation of the fastest rows of a table on fresh builds, timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.base.progress import Observer
from harness.base.statistics import median_ci
from harness.config.sections import TurnSchedule
from harness.measure.records import Failed
from harness.measure.turn_log import TurnMatrix
from harness.measure.turn_statistics import MAX_GROUP_ROWS
from harness.results.artifacts import FLOAT_ROW
from harness.run.confirm.paired_timing import PairedComparison, run_comparison, warn_if_disturbed
from harness.run.confirm.rounds import EngineFactory, TimedRow
from harness.run.prepare.task import Task
from harness.runtimes.benchmark_table import TableEntry
from search.space import Placement

FASTEST_PER_COMPARISON = 16
LOST_ROW_REASON = "it was measured once and failed in the confirmation, so its only reading may be low by chance"
CONFIRMATION_SCHEDULE = TurnSchedule(builds=1, rounds=20, samples=3)
PACE_TOLERANCE = (
    0.15  # relative change of the float model's latency since the start of the recording that is not reported
)


def median_latencies(rows: Mapping[str, TableEntry]) -> dict[str, float]:
    """Return the median latency in ms by digest, without failed rows."""
    return {
        digest: median_ci(row.outcome.samples_ms).value
        for digest, row in rows.items()
        if not isinstance(row.outcome, Failed)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfirmation:
    """Set-up of the confirmation of a recording.

    Attributes:
        task: Task that creates the candidates.
        open_engines: Factory of fresh engines, in addition to those that measure the table.
        folder: Folder for a log of each comparison.
        float_ms: Latency of the float model at the start of the recording in ms.
        level_ms: See `harness.run.confirm.confirmation.reference_latency_if_noisy`.
    """

    task: Task
    open_engines: EngineFactory
    folder: Path
    observer: Observer
    float_ms: float
    level_ms: float | None = None

    def confirm_fastest(
        self, name: str, digests: Iterable[str], rows: Mapping[str, TableEntry]
    ) -> dict[str, TableEntry]:
        """Return rows by digest with the readings of comparisons, among them the fastest of all rows.

        The lowest of a thousand noisy readings is low by chance and must not define the optimum of the table; see
        `harness.run.select.final_selection`. The fastest rows are therefore compared until no other row has a lower
        latency.

        Args:
            name: Prefix of the logs.
            digests: Rows to consider.
            rows: All rows by digest.
        """
        listed, confirmed = list(digests), dict[str, TableEntry]()
        while latency_ms := median_latencies({digest: confirmed.get(digest, rows[digest]) for digest in listed}):
            fastest = sorted(latency_ms, key=latency_ms.__getitem__)[:FASTEST_PER_COMPARISON]
            if fastest[0] in confirmed:
                break
            unconfirmed = {digest: rows[digest] for digest in fastest if digest not in confirmed}
            confirmed |= self._time_interleaved(f"{name}-final-selection-{len(confirmed)}", unconfirmed)
        return confirmed

    def _time_interleaved(self, name: str, rows: Mapping[str, TableEntry]) -> dict[str, TableEntry]:
        """Return the rows with readings taken in turns; a row without such readings becomes a failure."""
        task = self.task
        comparison = PairedComparison(
            name=f"{task.spec.name} final selection",
            path=self.folder / f"{name}.jsonl",
            header={
                "rows": sorted(rows),
                "plan": CONFIRMATION_SCHEDULE.model_dump(mode="json"),
                "group": MAX_GROUP_ROWS,
            },
            baseline=TimedRow(name=FLOAT_ROW, candidate=task.candidate(task.space.float_placement())),
            rows=tuple(
                TimedRow(name=digest, candidate=task.candidate(Placement(row.choices))) for digest, row in rows.items()
            ),
            schedule=CONFIRMATION_SCHEDULE,
        )
        events = run_comparison(comparison, self.open_engines, self.observer)
        warn_if_disturbed(comparison.name, events, self.observer)
        readings = TurnMatrix(events)
        self._report_pace_change(comparison.name, readings)
        return {
            digest: self._with_turns(row, *readings.paired_samples(digest, FLOAT_ROW)) for digest, row in rows.items()
        }

    def _report_pace_change(self, name: str, readings: TurnMatrix) -> None:
        """Report a change of the machine's speed since the start of the recording, with its effect on the rows."""
        turns_ms = [value for turns in readings.turns[FLOAT_ROW].values() for value in turns.values()]
        now_ms = float(np.median(turns_ms))
        if 1 / (1 + PACE_TOLERANCE) <= now_ms / self.float_ms <= 1 + PACE_TOLERANCE:
            return
        effect = "rows are timed in turns with the float model, so they stay on one scale"
        if self.level_ms is None:
            effect = "its rows are on another scale; record the table anew with `sampling.interleave: always`"
        self.observer.say(f"{name}: the float model takes {now_ms:.4g} ms, it took {self.float_ms:.4g} ms; {effect}")

    def _with_turns(
        self, row: TableEntry, baseline_builds: list[list[float]], row_builds: list[list[float]]
    ) -> TableEntry:
        """Return a row with one sample per turn, relative to the float model's turns if `level_ms` is set."""
        outcome = row.outcome
        if isinstance(outcome, Failed):
            return row
        if not row_builds:
            spent_s = outcome.build_s + outcome.measure_s + outcome.evaluate_s
            return replace(row, outcome=Failed(stage="build", reason=LOST_ROW_REASON, wall_s=spent_s))
        base_ms, row_ms = np.concatenate(baseline_builds), np.concatenate(row_builds)
        if self.level_ms is None:
            return replace(row, outcome=replace(outcome, samples_ms=tuple(row_ms.tolist())))
        turns = replace(
            outcome,
            samples_ms=tuple((row_ms / base_ms * self.level_ms).tolist()),
            raw_ms=tuple(row_ms.tolist()),
            reference_ms=tuple(base_ms.tolist()),
        )
        return replace(row, outcome=turns)
