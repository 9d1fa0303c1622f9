"""Accuracy of the rows of a cell: each exported file is built once more and scored by the evaluator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.api import Accuracy, Candidate
from harness.measure.engines import MAIN, Engines
from harness.records import Failed
from harness.run.observe import Observer
from harness.run.rows import FLOAT_ROW, Row, candidate_of, write_json

__all__ = ["ScoreBook", "read_scores"]


class ScoreBook:
    """What the evaluator found, kept in `accuracy.json`; a row that is there already is not scored again."""

    def __init__(self, folder: Path, engines: Engines, observer: Observer) -> None:
        self._path = folder / "accuracy.json"
        self._folder = folder
        self._engines = engines
        self._observer = observer
        self._scores = dict(read_scores(folder))

    def float_score(self, model_file: Path) -> Accuracy | Failed:
        """Accuracy of the float model, the reference of every drop."""
        self._observer.say("scoring the float model")
        return self._score(FLOAT_ROW, Candidate(digest=FLOAT_ROW, edges=(), source=lambda: model_file))

    def score(self, rows: Iterable[Row]) -> None:
        """Score these rows where that is still to do."""
        rows = tuple(rows)
        with self._observer.work("score finalists", len(rows)) as step:
            for row in rows:
                found = self._score(row.id, candidate_of(row, self._folder), row.benchmarker)
                step.advance(f"{row.id}: {found.reason}" if isinstance(found, Failed) else row.id)

    def _score(self, row: str, candidate: Candidate, benchmarker: str = MAIN) -> Accuracy | Failed:
        known = self._scores.get(row)
        if known is not None and "metrics" in known:
            return Accuracy(metrics=known["metrics"], per_item=tuple(known["per_item"]))
        found = _evaluate(self._engines, candidate, benchmarker)
        if isinstance(found, Failed):
            self._scores[row] = {"failed": found.stage, "reason": found.reason}
        else:
            self._scores[row] = {"metrics": dict(found.metrics), "per_item": list(found.per_item)}
        write_json(self._path, self._scores)
        return found


def read_scores(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Scores by row id; none where nothing was scored yet."""
    path = folder / "accuracy.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _evaluate(engines: Engines, candidate: Candidate, benchmarker: str) -> Accuracy | Failed:
    built = engines.build(candidate, benchmarker)
    if isinstance(built, Failed):
        return built
    try:
        return engines.evaluate(built.handle)
    finally:
        engines.release(built.handle)
