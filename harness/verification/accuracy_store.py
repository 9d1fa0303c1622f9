"""Accuracy of the rows of a task: each exported file is built once more and scored by the evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from harness.api import Accuracy, Candidate
from harness.errors import UserError
from harness.graph.io.digests import digest_file
from harness.paths import hide_paths
from harness.progress import Observer, ProgressTask
from harness.records import MAIN_BENCHMARKER, Failed, first_problem
from harness.results_dir.artifacts import ExportedModel, FinalistSet, read_finalists
from harness.results_dir.io import read_json, write_json
from harness.timing.workers.engines import Engines, ScoringCallback
from search.space import edges_digest

ACCURACY_FILE_NAME = "accuracy.json"
"""Name of the file in the folder of a task."""
FILE_BENCHMARKER = "file"
"""Name of the benchmarker that computes a model as its file describes it."""


class AccuracyStore:
    """Accuracy of model files, saved in `accuracy.json`, so that no file is scored twice.

    A score belongs to a file, a benchmarker and an evaluator, for instance one on the half of the data that the
    searches see. Rows are scored by `MAIN_BENCHMARKER`.

    Args:
        folder: Folder of the task.
        observer: Receives the progress of each scoring, and the notes of evaluators about the float model.
        evaluator: Description of the scoring; scores with another one are not used.
        keep_mixable: Keep `harness.api.Accuracy.mixable` of the float model.
    """

    def __init__(
        self, folder: Path, engines: Engines, observer: Observer, evaluator: str = "", *, keep_mixable: bool = False
    ) -> None:
        self._path = folder / ACCURACY_FILE_NAME
        self._engines = engines
        self.observer = observer
        self._evaluator = evaluator
        self._keep_mixable = keep_mixable
        self._scores = _read_stored_scores(folder)
        self._shown: set[str] = set()

    def known_float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | None:
        """Return `float_score` if it is stored, without an engine; to score other models the evaluator needs one."""
        return self._stored_score(_score_key(digest_file(model_file), MAIN_BENCHMARKER, evaluator))

    def float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | Failed:
        """Return the accuracy of the float model, the reference of drops; evaluators see its engine first."""
        candidate = Candidate(digest=edges_digest(()), edges=(), source=lambda: model_file)
        known = evaluator in self._shown
        with self.observer.work("score the float model", 1) as step:
            key = _score_key(digest_file(model_file), MAIN_BENCHMARKER, evaluator)
            found = self._score(candidate, key, evaluator, prepare=not known)
            step.advance()
        if isinstance(found, Accuracy):
            self._shown.add(evaluator)
        if isinstance(found, Accuracy) and found.note and not known:
            self.observer.say(found.note)
        return found

    def require_float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy:
        """Return the accuracy of the float model, see `float_score`.

        Raises:
            UserError: The float model cannot be scored.
        """
        found = self.float_score(model_file, evaluator)
        if isinstance(found, Failed):
            raise UserError(f"the float model cannot be scored; {found.stage}: {found.reason}")
        return found

    def has_unscored_rows(self, table: FinalistSet) -> bool:
        """Return whether a row has no score yet."""
        return any(self._stored_score(_score_key(row.sha256, row.benchmarker)) is None for row in table.rows)

    def score_row(self, candidate: Candidate, row: ExportedModel) -> Accuracy | Failed:
        """Return the accuracy of a row, whose model is given as a candidate."""
        return self._score(candidate, _score_key(row.sha256, row.benchmarker), row=row)

    def score_file(self, path: Path, name: str, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | Failed:
        """Return the accuracy of a Q/DQ model file, which has a name for the progress bar."""
        sha256 = digest_file(path)
        candidate = Candidate(digest=sha256[:16], edges=(), source=lambda: path)
        return self._score(candidate, _score_key(sha256, MAIN_BENCHMARKER, evaluator), evaluator, name=name)

    def score_rows(self, table: FinalistSet) -> None:
        """Score the rows that have no score yet."""
        with self.observer.work("score finalists", len(table.rows)) as step:
            for row in table.rows:
                found = self.score_row(table.candidate(row), row)
                step.advance(f"{row.id}: {found.reason}" if isinstance(found, Failed) else row.id)

    def _score(
        self,
        candidate: Candidate,
        key: str,
        evaluator: str = MAIN_BENCHMARKER,
        *,
        row: ExportedModel | None = None,
        name: str = "the float model",
        prepare: bool = False,
    ) -> Accuracy | Failed:
        known = self._stored_score(key)
        if known is not None and not prepare:
            return known
        name, benchmarker = (name, MAIN_BENCHMARKER) if row is None else (row.id, row.benchmarker)
        with scoring_progress(self.observer, f"inferences of {name}") as watch:
            found = _evaluate(self._engines, candidate, benchmarker, evaluator, watch, prepare=prepare, known=known)
        if known is not None:
            return found
        if isinstance(found, Failed):
            score: dict[str, Any] = {"failed": found.stage, "reason": hide_paths(found.reason)}
        else:
            kept = {"per_item": list(found.per_item), "evidence": found.evidence}
            mixable = found.mixable if self._keep_mixable and prepare else ""
            noted = {name: text for name, text in (("mixable", mixable), ("note", found.note)) if text}
            score = {"metrics": dict(found.metrics), **kept, **noted}
        self._scores[key] = {"evaluator": self._evaluator, **score}
        write_json(self._path, self._scores)
        return found

    def _stored_score(self, key: str) -> Accuracy | None:
        known = self._scores.get(key, {})
        if "metrics" not in known or known.get("evaluator") != self._evaluator:
            return None
        said = {part: known.get(part, "") for part in ("evidence", "mixable", "note")}
        return Accuracy(metrics=known["metrics"], per_item=tuple(known["per_item"]), **said)


class _StoredScore(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    metrics: dict[str, float | None] = {}
    per_item: list[Any] = []
    evidence: str = ""
    mixable: str = ""
    note: str = ""


_SCORES = TypeAdapter(dict[str, _StoredScore])


def read_scores(folder: Path, benchmarker: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Return the stored scores of the present rows by a benchmarker, by default that of the row, by row id."""
    scores = _read_stored_scores(folder)
    rows, _ = read_finalists(folder)
    found = {row.id: scores.get(_score_key(row.sha256, benchmarker or row.benchmarker)) for row in rows}
    return {row: score for row, score in found.items() if score is not None}


def _read_stored_scores(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / ACCURACY_FILE_NAME
    found = read_json(path) if path.exists() else {}
    try:
        _SCORES.validate_python(found)
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)})") from error
    return found


def _score_key(sha256: str, benchmarker: str, evaluator: str = MAIN_BENCHMARKER) -> str:
    return f"{sha256} {benchmarker}" if evaluator == MAIN_BENCHMARKER else f"{sha256} {benchmarker} {evaluator}"


def _evaluate(  # noqa: PLR0913 - what, where and how
    engines: Engines,
    candidate: Candidate,
    benchmarker: str,
    evaluator: str,
    watch: ScoringCallback,
    *,
    prepare: bool,
    known: Accuracy | None,
) -> Accuracy | Failed:
    """Return the known score of a candidate, or score it; let the evaluator see its engine first if asked."""
    built = engines.build(candidate, benchmarker)
    if isinstance(built, Failed):
        return built
    try:
        unprepared = engines.prepare(built.handle, evaluator, watch) if prepare else None
        return unprepared or known or engines.evaluate(built.handle, evaluator, watch)
    finally:
        engines.release(built.handle)


@contextmanager
def scoring_progress(observer: Observer, title: str) -> Iterator[ScoringCallback]:
    """Return a progress callback of one scoring, which shows a bar from its first call on."""
    with ExitStack() as stack:
        bar: ProgressTask | None = None
        seen = 0

        def watch(done: int, total: int) -> None:
            nonlocal bar, seen
            if bar is None:
                bar = stack.enter_context(observer.work(title, total))
            for _ in range(done - seen):
                bar.advance()
            seen = done

        yield watch
