"""Evaluators of a task (on all data or its halves, the proxy), and the stored scores of its rows.

A runtime may compute a file wrongly, or saturate, and a wrong figure may be close to the float model's by chance. So
each file of another tool is scored a second time: ONNX files in ONNX Runtime without graph optimizations, an OpenVINO
IR in OpenVINO without integer kernels. So is the float model if some of its outputs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.base import likely_causes, low_reference_warning
from harness.accuracy.metrics.intervals import metric_estimate, probability_within
from harness.base.errors import UserError
from harness.base.files import facts_digest
from harness.base.paths import hide_paths
from harness.base.progress import Observer, ProgressTask
from harness.config.experiment import TOOL_NAMES
from harness.config.sections import Limits, ModelSpec, Objective, PluginSpec, absolute_bound, check_objective
from harness.graph.io.digests import IR_SUFFIX, digest_file
from harness.graph.model import Model
from harness.measure.provenance import count_cores
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy, Candidate
from harness.results.artifacts import ExportedModel, FinalistSet
from harness.results.cross_fitting import losses_on_other_folds
from harness.results.manifest import write_record
from harness.results.scores import (
    ACCURACY_FILE_NAME,
    FILE_BENCHMARKER,
    METRIC_CAPS,
    UNIT_INTERVAL_METRICS,
    format_score,
    read_stored_scores,
    score_key,
)
from harness.results.search_log import Goal
from harness.results.turns import baseline_latency
from harness.run.prepare.model_loader import evaluator_spec
from harness.run.search.trial import AccuracyGate
from harness.runtimes.onnxruntime import unfused_execution
from harness.runtimes.openvino import float_execution
from harness.workers.engines import FIRST_STAGE_EVALUATOR, Engines, ScoringCallback, WorkerSpec
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
            result = _evaluate(self._engines, candidate, benchmarker, evaluator, watch, prepare=prepare, known=stored)
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


def _evaluate(
    engines: Engines,
    candidate: Candidate,
    benchmarker: str,
    evaluator: str,
    watch: ScoringCallback,
    *,
    prepare: bool,
    known: Accuracy | None,
) -> Accuracy | Failed:
    """Build a candidate, prepare the evaluator with it if `prepare` is set, and return `known` or a new score."""
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


SEARCH_EVALUATOR = "search"
"""Name of the evaluator of the searches, if it differs from that of the finalists."""
PROXY_EVALUATOR = "proxy"
MIN_STAGE_IMAGES = 30
"""Smallest number of images of the first stage."""
MAX_STAGE_STEP = 4
"""The first stage has at least every n-th image of the search, with this n."""
EXPECTED_WITHIN = 0.02
"""Difference from the expected score that is accepted: two points, of another metric a share of the expected score."""
MAX_FALSE_REJECTION = 0.01
"""Largest probability to keep the bound at which the first stage rejects a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Evaluators of a task and their data.

    Attributes:
        evaluators: Evaluators by name. `MAIN_BENCHMARKER` scores the finalists, `SEARCH_EVALUATOR` the candidates of
            searches on their half of the data, `FIRST_STAGE_EVALUATOR` their first images, `PROXY_EVALUATOR` is the
            proxy. Empty without an evaluator.
        metric: Metric of the evaluator; None without an evaluator.
        facts: Settings on which the scores of the searches depend, for the fingerprint.
        data: Digest of the data by name of the evaluator, if it reports one; part of the fingerprint too.
        expect: Known score of the float model; None: unknown, 0: unchecked.
    """

    objective: Objective
    evaluators: Mapping[str, PluginSpec]
    metric: str | None
    higher_is_better: bool
    facts: Mapping[str, Any]
    data: Mapping[str, str] = field(default_factory=dict)
    expect: float | None = None

    @property
    def search_evaluator(self) -> str:
        """Return the name of the evaluator of the searches."""
        return SEARCH_EVALUATOR if SEARCH_EVALUATOR in self.evaluators else MAIN_BENCHMARKER

    @property
    def cross_fitted(self) -> bool:
        """Return whether cross-fitting estimates the loss of the selected placement.

        That is so if there is a bound on the loss, and the data are not divided into one half for the searches and one
        for the finalists.
        """
        return self.objective.max_drop is not None and not self.objective.halves

    def goal(self, store: AccuracyStore, model_file: Path, folder: Path) -> Goal:
        """Return the goal of the searches; score the float model, the reference of losses, if it has no score.

        The goal is latency alone if there is no evaluator, or the objective does not use accuracy. The observer of the
        store gets the score of the float model, or a warning if it is close to 0.

        Args:
            store: Store of the task's scores.
            model_file: File of the float model.
            folder: Folder of the task, whose record of the noise floor has the latency of the float model.

        Raises:
            UserError: The float model itself cannot be scored, or has another score than `expect`.
        """
        if self.metric is None:
            return Goal()
        known = {name: store.known_float_score(model_file, name) for name in self.evaluators}
        if None in known.values():
            known = dict(self.prepare_evaluators(store, model_file))
        self._check_expected_score(known.get(MAIN_BENCHMARKER))
        if said := next(filter(None, self._float_score_warnings(known)), "") or self._float_score_line(known):
            store.observer.say(f"{folder.name}: {said}")
        own = known[self.search_evaluator]
        objective = self.objective
        if not objective.uses_accuracy or own is None:
            return Goal()
        reference = own.metrics[self.metric]
        float_ms = None if objective.minimize == "latency" else baseline_latency(folder)
        bound, limit = objective.max_drop, objective.max_latency
        return Goal(
            metric=self.metric,
            reference=reference,
            higher_is_better=self.higher_is_better,
            max_drop=None if bound is None else absolute_bound(bound, reference),
            minimize=objective.minimize,
            max_latency_ms=None if limit is None or float_ms is None else absolute_bound(limit, float_ms),
            float_ms=float_ms,
        )

    def _check_expected_score(self, own: Accuracy | None) -> None:
        """Raise an error if `expect` differs from the score by two points, and is outside of its 95 % interval."""
        value = None if own is None else own.metrics.get(self.metric or "")
        if not self.expect or own is None or value is None:
            return
        estimate = metric_estimate(own, self.metric or "")
        low, high = (value, value) if estimate is None else (estimate.interval.low, estimate.interval.high)
        tolerance = EXPECTED_WITHIN * (1.0 if self.metric in UNIT_INTERVAL_METRICS else abs(self.expect))
        if low <= self.expect <= high or abs(value - self.expect) <= tolerance:
            return
        interval = f" [{low:.4g}, {high:.4g}]" if low < high else ""
        where = "the half of the data for the report" if self.objective.halves else "the evaluator's data"
        raise UserError(
            f"expect: the float model has {self.metric} {value:.4g}{interval} on {where}, but {self.expect:g} is "
            f"expected. {likely_causes(self.evaluators[MAIN_BENCHMARKER].params, own.note)}; or give the score on "
            "these data"
        )

    def _float_score_warnings(self, known: Mapping[str, Accuracy | None]) -> Iterator[str]:
        """Yield warnings about a float model with a score close to 0."""
        for name, accuracy in known.items():
            if accuracy is not None and name != PROXY_EVALUATOR:
                yield low_reference_warning(
                    accuracy, self.metric or "", self.higher_is_better, self.evaluators[name].params
                )

    def _float_score_line(self, known: Mapping[str, Accuracy | None]) -> str:
        """Return the float model's score as text; "" for a metric that compares with the float model."""
        own = known.get(MAIN_BENCHMARKER)
        value = None if own is None else own.metrics.get(self.metric or "")
        if own is None or value is None or self.metric in METRIC_CAPS:
            return ""
        samples = f" on {len(own.per_item)} samples" if own.per_item else ""
        return f"the float model scores {format_score(value, self.metric)}{samples}"

    def prepare_evaluators(self, store: AccuracyStore, model_file: Path) -> Mapping[str, Accuracy]:
        """Score the float model by all evaluators, and return its accuracy by the name of the evaluator.

        Call this before other models are scored, because an evaluator may compare with the float model.

        Raises:
            UserError: The float model itself cannot be scored.
        """
        return {name: store.require_float_score(model_file, name) for name in self.evaluators}

    def make_accuracy_gate(self, goal: Goal, store: AccuracyStore, model_file: Path) -> AccuracyGate:
        """Return the gate that accepts candidates by accuracy; call `goal` first, which scores the float model.

        Args:
            goal: Objective and bound of the searches.
            store: Store of the task's scores.
            model_file: File of the float model.
        """
        proxy = PROXY_EVALUATOR if PROXY_EVALUATOR in self.evaluators else None
        reference = store.known_float_score(model_file, FIRST_STAGE_EVALUATOR)
        staged = FIRST_STAGE_EVALUATOR in self.evaluators and reference is not None and goal.metric is not None
        own = store.known_float_score(model_file, MAIN_BENCHMARKER) if self.cross_fitted else None
        return AccuracyGate(
            goal=goal,
            evaluator=self.search_evaluator,
            proxy=proxy,
            rejected_loss=partial(rejected_loss, goal, reference) if staged and reference is not None else None,
            mixable=None if own is None else partial(mixable_record, goal, own),
        )


def rejected_loss(goal: Goal, reference: Accuracy, found: Accuracy) -> float | None:
    """Return the loss of a candidate on the first images if it violates the bound with high confidence, else None.

    This is a sequential test by a paired bootstrap: a rejected candidate is not scored on the other images. None also
    without a bound, or if the records allow no interval.

    Args:
        goal: Objective with the bound.
        reference: Accuracy of the float model on the first images.
        found: Accuracy of the candidate on the first images.
    """
    metric = goal.metric or ""
    if goal.max_drop is None:
        return None
    within = probability_within(reference, found, metric, goal.max_drop, higher_is_better=goal.higher_is_better)
    if within is None or within >= MAX_FALSE_REJECTION:
        return None
    loss = reference.metrics[metric] - found.metrics[metric]
    return loss if goal.higher_is_better else -loss


def mixable_record(goal: Goal, reference: Accuracy, found: Accuracy) -> str:
    """Return `found.mixable` if the candidate keeps the bound on the images outside of at least one fold, else "".

    `harness.results.cross_fitting.cross_fitted_drop` may select such a candidate. For the text see
    `harness.plugins.api.Accuracy`. A record equal to that of the float model is not stored again ("").
    """
    if found.mixable in ("", reference.mixable):
        return ""
    losses = losses_on_other_folds(reference, found, goal.metric or "", higher_is_better=goal.higher_is_better)
    kept = losses is not None and any(goal.loss_excess(float(loss)) == 0 for loss in losses)
    return found.mixable if kept else ""


def make_scoring(objective: Objective, spec: ModelSpec, model: Model, work: Path) -> Scoring:
    """Return the evaluators of a task.

    Args:
        objective: Objective of the experiment.
        spec: Entry of the model in the experiment.
        model: The float model.
        work: Scratch folder for outputs of the float model.

    Raises:
        UserError: The evaluator cannot be used, lacks the metric of the objective, or its data cannot be halved.
    """
    facts: dict[str, Any] = {
        "evaluator": None if spec.evaluator is None else spec.evaluator.model_dump(mode="json"),
        "preprocess": None if spec.preprocess is None else spec.preprocess.model_dump(mode="json"),
    }
    if objective.halves:
        facts["halves"] = True
    main = evaluator_spec(spec, model, work, "report" if objective.halves else None)
    if main is None:
        return Scoring(objective=objective, evaluators={}, metric=None, higher_is_better=True, facts=facts)
    factory: Any = registry.load_plugin("evaluator", main.use)
    check_objective(objective, factory.metric, spec.name)
    evaluators = {MAIN_BENCHMARKER: main}
    if objective.halves:
        evaluators[SEARCH_EVALUATOR] = _require_evaluator(evaluator_spec(spec, model, work, "search"))
    if objective.minimize == "latency" and objective.max_drop is not None and main.use != "fidelity":
        first, every = _first_stage(spec, model, work, "search" if objective.halves else None)
        if first is not None:
            evaluators[FIRST_STAGE_EVALUATOR] = first
            facts["first_stage"] = every
    if objective.uses_accuracy and objective.proxy and main.use != "fidelity":
        evaluators[PROXY_EVALUATOR] = make_proxy_evaluator(objective.proxy, spec, model, work)
    return Scoring(
        objective=objective,
        evaluators=evaluators,
        metric=factory.metric,
        higher_is_better=factory.higher_is_better,
        facts=facts,
        expect=spec.expect,
        data={name: digest for name, use in evaluators.items() if (digest := _evaluator_data_digest(use))},
    )


def _first_stage(spec: ModelSpec, model: Model, work: Path, half: str | None) -> tuple[PluginSpec | None, int]:
    """Return (evaluator on every n-th image of the search, n); the evaluator is None for few images or unknown data."""
    whole = _require_evaluator(evaluator_spec(spec, model, work, half))
    data = whole.params.get("data")
    if not isinstance(data, Mapping) or "every" in data or "reference" in whole.params:
        return None, 0
    made = registry.create_plugin("evaluator", whole.use, whole.params)
    every = min(MAX_STAGE_STEP, getattr(made, "inferences", 0) // MIN_STAGE_IMAGES)
    if every < 2:
        return None, 0
    return whole.model_copy(update={"params": {**whole.params, "data": {**data, "every": every}}}), every


def _evaluator_data_digest(use: PluginSpec) -> str:
    """Return a digest of the evaluator's data and preprocessing, or "" if the evaluator has none."""
    fingerprint = getattr(registry.create_plugin("evaluator", use.use, use.params), "fingerprint", None)
    return facts_digest(fingerprint) if isinstance(fingerprint, str) else ""


def make_proxy_evaluator(samples: int, spec: ModelSpec, model: Model, work: Path) -> PluginSpec:
    """Return the evaluator that screens candidates by SQNR; tables do not show its values.

    Args:
        samples: Number of samples of the calibration data, or of random samples if the model has no such data.
        spec: Entry of the model in the experiment.
        model: The float model.
        work: Scratch folder; the float model's outputs are stored in its folder `proxy`.
    """
    data = spec.calibration.data
    params = {"samples": samples, "sqnr_only": True, **({} if data is None else {"data": data})}
    proxied = spec.model_copy(update={"evaluator": PluginSpec(use="fidelity", params=params)})
    return _require_evaluator(evaluator_spec(proxied, model, work / "proxy"))


def _require_evaluator(use: PluginSpec | None) -> PluginSpec:
    assert use is not None  # the model has an evaluator
    return use


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
