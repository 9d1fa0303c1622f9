"""Set-up of accuracy in a task: the evaluator, its half of the data, the proxy, and the objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import registry
from harness.accuracy.metrics.base import low_reference_warning
from harness.api import Accuracy
from harness.config.objective import Objective, absolute_bound, check_objective
from harness.config.sections import ModelSpec, PluginSpec
from harness.errors import UserError
from harness.graph.model import Model
from harness.records import MAIN_BENCHMARKER, Failed
from harness.results_dir.fingerprint import facts_digest
from harness.search_loop.accuracy_gate import AccuracyGate
from harness.search_loop.objective import Goal
from harness.selection.confirmation import baseline_latency
from harness.task_setup.model_loader import evaluator_spec
from harness.verification.accuracy_store import AccuracyStore

__all__ = ["PROXY_EVALUATOR", "SEARCH_EVALUATOR", "Scoring", "make_proxy_evaluator", "make_scoring"]

SEARCH_EVALUATOR = "search"
"""Name of the evaluator that searches score with, where it is not the finalists' own."""
PROXY_EVALUATOR = "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Evaluators of a task and the data that they score on.

    Attributes:
        evaluators: By name: `MAIN_BENCHMARKER` scores the finalists, `SEARCH_EVALUATOR` the candidates of searches if
            they have their own half of the data, `PROXY_EVALUATOR` is the proxy. Empty if the model has no evaluator.
        metric: Metric of `MAIN_BENCHMARKER`; None without an evaluator.
        facts: How the searches' figures came about; what a run depends on.
        data: Digests of what the evaluators score on, by their names, as far as they tell it; a run depends on it too.
    """

    objective: Objective
    evaluators: Mapping[str, PluginSpec]
    metric: str | None
    higher_is_better: bool
    facts: Mapping[str, Any]
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def search_evaluator(self) -> str:
        """Return the name of the evaluator that searches score with."""
        return SEARCH_EVALUATOR if SEARCH_EVALUATOR in self.evaluators else MAIN_BENCHMARKER

    def goal(self, book: AccuracyStore, model_file: Path, folder: Path) -> Goal:
        """Return the goal of the searches, scoring the float model (the reference of every drop) if it has no score
        yet.

        Reports to the observer if the float model scores next to nothing.

        Args:
            book: The cell's.
            model_file: The float model.
            folder: The cell's, whose floor tells the float model's latency.

        Raises:
            UserError: The float model itself cannot be scored.
        """
        if self.metric is None:
            return Goal()
        known = {name: book.known_float_score(model_file, name) for name in self.evaluators}
        if None in known.values():
            known = dict(self.prepare_evaluators(book, model_file))
        if said := next(filter(None, self._float_score_warnings(known)), ""):
            book.observer.say(f"{folder.name}: {said}")
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

    def _float_score_warnings(self, known: Mapping[str, Accuracy | None]) -> Iterator[str]:
        """Yield warnings about a float model that itself scores next to nothing."""
        for name, accuracy in known.items():
            if accuracy is not None and name != PROXY_EVALUATOR:
                yield low_reference_warning(
                    accuracy, self.metric or "", self.higher_is_better, self.evaluators[name].params
                )

    def prepare_evaluators(self, book: AccuracyStore, model_file: Path) -> Mapping[str, Accuracy]:
        """Let the evaluators run the float model before they score any other, and return its scores.

        Raises:
            UserError: The float model itself cannot be scored.
        """
        found = {}
        for name in self.evaluators:
            accuracy = book.float_score(model_file, name)
            if isinstance(accuracy, Failed):
                raise UserError(f"the float model cannot be scored; {accuracy.stage}: {accuracy.reason}")
            found[name] = accuracy
        return found

    def make_accuracy_gate(self, goal: Goal) -> AccuracyGate:
        """Return the accuracy gate of candidates for a goal."""
        proxy = PROXY_EVALUATOR if PROXY_EVALUATOR in self.evaluators else None
        return AccuracyGate(goal=goal, evaluator=self.search_evaluator, proxy=proxy)


def make_scoring(objective: Objective, spec: ModelSpec, model: Model, work: Path) -> Scoring:
    """Return the scoring of a task's models.

    Args:
        work: Scratch folder, for outputs of the float model.

    Raises:
        UserError: The evaluator cannot be used, has not the metric that the objective names, or its data no halves.
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
    if objective.uses_accuracy and objective.proxy and main.use != "fidelity":
        evaluators[PROXY_EVALUATOR] = make_proxy_evaluator(objective.proxy, spec, model, work)
    return Scoring(
        objective=objective,
        evaluators=evaluators,
        metric=factory.metric,
        higher_is_better=factory.higher_is_better,
        facts=facts,
        data={name: told for name, use in evaluators.items() if (told := _evaluator_data_digest(use))},
    )


def _evaluator_data_digest(use: PluginSpec) -> str:
    """Return a digest of the evaluator's data and preprocessing, or "" if it does not give one."""
    made = registry.call_plugin(
        f"evaluator {use.use!r}", lambda: registry.create_plugin("evaluator", use.use, use.params)
    )
    told = getattr(made, "fingerprint", None)
    return facts_digest(told) if isinstance(told, str) else ""


def make_proxy_evaluator(samples: int, spec: ModelSpec, model: Model, work: Path) -> PluginSpec:
    """Return the fidelity evaluator on a few samples of the calibration data; no table reports its values."""
    data = spec.calibration.data
    params = {"samples": samples, **({} if data is None else {"data": data})}
    proxied = spec.model_copy(update={"evaluator": PluginSpec(use="fidelity", params=params)})
    return _require_evaluator(evaluator_spec(proxied, model, work / "proxy"))


def _require_evaluator(use: PluginSpec | None) -> PluginSpec:
    assert use is not None  # the model has an evaluator
    return use
