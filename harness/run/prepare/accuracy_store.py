"""Store of the accuracy of a task's rows: each exported file is built again and scored by the evaluator.

A runtime may compute a file wrongly, or saturate, and a wrong figure may be close to the float model's by chance. So
each file of another tool is scored a second time by a reference execution: ONNX files in ONNX Runtime without graph
optimizations, an OpenVINO IR in OpenVINO without integer kernels. So is the float model if some of its outputs cannot
be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.paths import hide_paths
from harness.base.progress import Observer, ProgressTask
from harness.config.experiment import TOOL_NAMES
from harness.config.sections import Limits, PluginSpec
from harness.graph.io.digests import IR_SUFFIX, digest_file
from harness.measure.provenance import count_cores
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins.api import Accuracy, Candidate
from harness.results.artifacts import ExportedModel, FinalistSet
from harness.results.manifest import write_record
from harness.results.scores import ACCURACY_FILE_NAME, FILE_BENCHMARKER, read_stored_scores, score_key
from harness.runtimes.onnxruntime import unfused_execution
from harness.runtimes.openvino import float_execution
from harness.workers.engines import Engines, ScoringCallback, WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import edges_digest


class AccuracyStore:
    """Accuracy of model files, saved in `accuracy.json`, so that no file is scored twice.

    The key of a score is file, benchmarker and evaluator, as there is another evaluator for the half of the data that
    searches use.

    Args:
        folder: Folder of the task.
        observer: Receives the progress of each scoring, and the notes of evaluators about the float model.
        engines: Engines that build and score the models.
        evaluator: Description of the scoring; stored scores with another description are ignored.
        keep_mixable: Store `harness.plugins.api.Accuracy.mixable` of the float model.
    """

    def __init__(
        self, folder: Path, engines: Engines, observer: Observer, evaluator: str = "", *, keep_mixable: bool = False
    ) -> None:
        self._path = folder / ACCURACY_FILE_NAME
        self._engines = engines
        self.observer = observer
        self._evaluator = evaluator
        self._keep_mixable = keep_mixable
        self._scores = read_stored_scores(folder)
        self._shown: set[str] = set()

    def known_float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | None:
        """Return the stored accuracy of the float model, or None, without preparing the evaluator for other models."""
        return self._stored_score(score_key(digest_file(model_file), MAIN_BENCHMARKER, evaluator))

    def float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | Failed:
        """Return the accuracy of the float model, stored or new, or the failure to score it.

        The first call with an evaluator also prepares it with the engine of the float model, for later scores.
        """
        candidate = Candidate(digest=edges_digest(()), edges=(), source=lambda: model_file)
        is_prepared = evaluator in self._shown
        with self.observer.work("score the float model", 1) as step:
            key = score_key(digest_file(model_file), MAIN_BENCHMARKER, evaluator)
            score = self._score(candidate, key, evaluator, prepare=not is_prepared)
            step.advance()
        if isinstance(score, Accuracy):
            self._shown.add(evaluator)
        if isinstance(score, Accuracy) and score.note and not is_prepared:
            self.observer.say(score.note)
        return score

    def require_float_score(self, model_file: Path, evaluator: str = MAIN_BENCHMARKER) -> Accuracy:
        """Return the accuracy of the float model, see `float_score`.

        Raises:
            UserError: The float model cannot be scored.
        """
        score = self.float_score(model_file, evaluator)
        if isinstance(score, Failed):
            raise UserError(f"the float model cannot be scored; {score.stage}: {score.reason}")
        return score

    def has_unscored_rows(self, table: FinalistSet) -> bool:
        """Return whether a row has no score yet; a failed one counts as none."""
        return any(self._stored_score(score_key(row.sha256, row.benchmarker)) is None for row in table.rows)

    def score_row(self, candidate: Candidate, row: ExportedModel) -> Accuracy | Failed:
        """Return the stored or new accuracy of a row, or the failure to score it; `candidate` is its model."""
        return self._score(candidate, score_key(row.sha256, row.benchmarker), row=row)

    def score_file(self, path: Path, name: str, evaluator: str = MAIN_BENCHMARKER) -> Accuracy | Failed:
        """Return the stored or new accuracy of a Q/DQ model file, or the failure to score it.

        Args:
            name: Name of the file in the progress bar.
            evaluator: Name in `WorkerSpec.evaluators`; `MAIN_BENCHMARKER` is also that of the main evaluator.
        """
        sha256 = digest_file(path)
        candidate = Candidate(digest=sha256[:16], edges=(), source=lambda: path)
        return self._score(candidate, score_key(sha256, MAIN_BENCHMARKER, evaluator), evaluator, name=name)

    def score_by_file(self, engines: Engines, path: Path) -> Accuracy | Failed:
        """Return the stored or new accuracy of the float model by engines that compute what its file describes."""
        candidate = Candidate(digest=edges_digest(()), edges=(), source=lambda: path)
        store = copy(self)  # which shares the scores
        store._engines = engines
        return store._score(candidate, score_key(digest_file(path), FILE_BENCHMARKER), name="the float file")

    def score_rows(self, table: FinalistSet) -> None:
        """Score the rows that have no score yet; failures are stored with their reason."""
        with self.observer.work("score finalists", len(table.rows)) as step:
            for row in table.rows:
                score = self.score_row(table.candidate(row), row)
                step.advance(f"{row.id}: {score.reason}" if isinstance(score, Failed) else row.id)

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
        stored = self._stored_score(key)
        if stored is not None and not prepare:
            return stored
        name, benchmarker = (name, MAIN_BENCHMARKER) if row is None else (row.id, row.benchmarker)
        with scoring_progress(self.observer, f"inferences of {name}") as watch:
            built = self._engines.build(candidate, benchmarker)
            result: Accuracy | Failed
            if isinstance(built, Failed):
                result = built
            else:
                try:
                    unprepared = self._engines.prepare(built.handle, evaluator, watch) if prepare else None
                    result = unprepared or stored or self._engines.evaluate(built.handle, evaluator, watch)
                finally:
                    self._engines.release(built.handle)
        if stored is not None:
            return result
        if isinstance(result, Failed):
            score: dict[str, Any] = {"failed": result.stage, "reason": hide_paths(result.reason)}
        else:
            details = {"per_item": list(result.per_item), "evidence": result.evidence}
            mixable = result.mixable if self._keep_mixable and prepare else ""
            texts = {name: text for name, text in (("mixable", mixable), ("note", result.note)) if text}
            score = {"metrics": dict(result.metrics), **details, **texts}
        self._scores[key] = {"evaluator": self._evaluator, **score}
        write_record(self._path, self._scores)
        return result

    def _stored_score(self, key: str) -> Accuracy | None:
        record = self._scores.get(key, {})
        if "metrics" not in record or record.get("evaluator") != self._evaluator:
            return None
        texts = {part: record.get(part, "") for part in ("evidence", "mixable", "note")}
        return Accuracy(metrics=record["metrics"], per_item=tuple(record["per_item"]), **texts)


def has_float_score(folder: Path) -> bool:
    """Return whether a task has scores; that of the float model is the first.

    Raises:
        UserError: The file is damaged.
    """
    return any(score.get("metrics") for score in read_stored_scores(folder).values())


@contextmanager
def scoring_progress(observer: Observer, title: str) -> Iterator[ScoringCallback]:
    """Yield a callback with the numbers of done and all parts of one scoring; its first call opens a progress bar."""
    with ExitStack() as stack:
        bar: ProgressTask | None = None
        reported = 0

        def watch(done: int, total: int) -> None:
            nonlocal bar, reported
            if bar is None:
                bar = stack.enter_context(observer.work(title, total))
            for _ in range(done - reported):
                bar.advance()
            reported = done

        yield watch


def score_float_file(store: AccuracyStore, path: Path, worker: WorkerSpec, limits: Limits) -> Accuracy | Failed:
    """Return the stored or new score of the float model by a reference execution; for the arguments see below."""
    use = _reference_runtimes()[path.suffix]
    reference = replace(worker, benchmarkers={MAIN_BENCHMARKER: use}, adapt=None)
    with open_engines(reference, limits) as engines:
        return store.score_by_file(engines, path)


def score_tool_files(
    table: FinalistSet, worker: WorkerSpec, limits: Limits, observer: Observer, evaluator: str
) -> None:
    """Score the unscored rows of PTQ tools by a reference execution; store scores or failures in `accuracy.json`.

    Args:
        table: Exported models of the task, in whose folder the file is.
        worker: Worker of the task, whose evaluators are used.
        limits: Limits of each build and scoring.
        evaluator: Digest of the evaluator's settings; scores with another digest are outdated.
    """
    rows = [row for row in table.rows if row.id in TOOL_NAMES]
    for suffix, use in _reference_runtimes().items():
        own = tuple(replace(row, benchmarker=FILE_BENCHMARKER) for row in rows if Path(row.file).suffix == suffix)
        if not own:
            continue
        reference = replace(worker, benchmarkers={MAIN_BENCHMARKER: use, FILE_BENCHMARKER: use}, adapt=None)
        with open_engines(reference, limits) as engines:
            store = AccuracyStore(table.folder, engines, observer, evaluator)
            if store.has_unscored_rows(files := replace(table, rows=own)):
                store.score_rows(files)


def _reference_runtimes() -> Mapping[str, PluginSpec]:
    """Return the runtime for the reference execution of a file, by its suffix."""
    threads = count_cores()
    return {
        ".onnx": unfused_execution(threads=threads),
        IR_SUFFIX: float_execution(threads),
    }
