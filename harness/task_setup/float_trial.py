"""Trial of the float model on a few samples, to find unfit data, preprocessing or decoder early."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness import registry
from harness.accuracy.data.datasets import ALLOWED_DATA_KEYS
from harness.accuracy.metrics.base import low_reference_warning
from harness.api import Accuracy, Candidate
from harness.config.sections import Limits, ModelSpec, PluginSpec
from harness.errors import UserError
from harness.graph.model import Model
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER, Failed
from harness.task_setup.model_loader import evaluator_spec
from harness.timing.workers.engines import Engines, WorkerSpec
from harness.timing.workers.sandbox import Sandbox
from search.space import edges_digest

__all__ = ["FloatTrial"]

SAMPLE_COUNT = 8
"""Samples that are scored."""
UNLABELLED_SAMPLE_FACTOR = 8
"""So many times as many where none of them has a label, and all of them where those are not enough."""


class FloatTrial:
    """Score the float model on the first samples of the evaluator's data, with ONNX Runtime on the CPU, in a worker.

    Skipped for an evaluator whose parameter `data` is none of `harness.accuracy.data.datasets` (the scoring of the
    float
    model covers it), and for a model that ONNX Runtime does not run (the calibration reports that).

    Args:
        work: Scratch folder.
        limits: Of the worker.
        observer: Told where the score is next to nothing.
    """

    def __init__(self, work: Path, limits: Limits, observer: Observer) -> None:
        self._work, self._limits, self._observer = work / "tryout", limits, observer

    def run(self, spec: ModelSpec, model: Model, file: Path) -> None:
        """Score a model whose file this is; without an evaluator nothing is done.

        Raises:
            UserError: The float model cannot be scored.
        """
        asked = evaluator_spec(spec, model, self._work)
        use = None if asked is None else _with_few_samples(asked)
        if use is None:
            return
        runtime = PluginSpec(use="onnxruntime", params={"optimization": "basic"})
        worker = WorkerSpec(
            benchmarkers={MAIN_BENCHMARKER: runtime}, workdir=self._work, evaluators={MAIN_BENCHMARKER: use}
        )
        title = f"{model.source}: try the evaluator on a few samples"
        with self._observer.work(title, 1) as step, Sandbox(worker, self._limits) as engines:
            found = _score_float_model(engines, file, compares="reference" in use.params)
            step.advance()
        if isinstance(found, Failed):
            raise UserError(f"evaluator {use.use!r}: the float model cannot be scored; {found.stage}: {found.reason}")
        factory = registry.load_plugin("evaluator", use.use)
        metric, higher = getattr(factory, "metric", ""), getattr(factory, "higher_is_better", True)
        if found is not None and (said := low_reference_warning(found, metric, higher, use.params)):
            self._observer.say(f"{spec.name}, on the first samples: {said}")


def _with_few_samples(use: PluginSpec) -> PluginSpec | None:
    """Return the evaluator on as few samples of its data as it can be made for; None where its data are its own."""
    data = use.params.get("data")
    if not isinstance(data, Mapping) or data.get("use") not in ALLOWED_DATA_KEYS:
        return None
    most = data.get("count")
    for count in (SAMPLE_COUNT, SAMPLE_COUNT * UNLABELLED_SAMPLE_FACTOR):
        if isinstance(most, int) and most <= count:
            return use
        short = use.model_copy(update={"params": {**use.params, "data": {**data, "count": count}}})
        with suppress(UserError):  # there are fewer samples, or none of them has a label
            registry.create_plugin("evaluator", use.use, short.params)
            return short
    return use


def _score_float_model(engines: Engines, file: Path, *, compares: bool) -> Accuracy | Failed | None:
    """Return the accuracy; None where the model does not run, or of an evaluator that compares with the float model."""
    built = engines.build(Candidate(digest=edges_digest(()), edges=(), source=lambda: file))
    if isinstance(built, Failed):
        return None
    if compares:
        return engines.prepare(built.handle)
    return engines.evaluate(built.handle)
