"""Trial of an evaluator before a run: it scores the float model on a few samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.accuracy.data.datasets import ALLOWED_DATA_KEYS, DatasetCache
from harness.accuracy.metrics.base import likely_causes, low_reference_warning
from harness.base.errors import MAX_COUNT, UserError
from harness.config.sections import Limits, ModelSpec, PluginSpec
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy, Candidate
from harness.results.scores import UNIT_INTERVAL_METRICS, metric_name
from harness.run.prepare.model_loader import evaluator_spec, need_own_sizes
from harness.runtimes.shape_set import make_sample_sizes
from harness.workers.engines import Engines, WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import edges_digest

SAMPLE_COUNT = 16
"""Largest number of scored samples."""
UNLABELLED_SAMPLE_FACTOR = 8
"""Factor by which the samples grow if none of them has a label; after that all samples are used."""
ASSUMED_SCORE = 0.3
"""Score of a float model for which none is expected; a model with it scores 0 on nine samples once in 25 times."""
MIN_PLAUSIBILITY = 0.05
"""Probability of a score of 0 below which the trial fails."""
LONG_TRIAL_S = 2.0
"""A shorter trial is repeated to time it, because the first one includes imports."""


def try_float_model(
    spec: ModelSpec, model: Model, data: DatasetCache, work: Path, limits: Limits
) -> tuple[str, float | None]:
    """Score a float model on a few samples with ONNX Runtime in a worker, if it has an evaluator.

    The trial is skipped for an evaluator with data of an unknown kind (the later score of the float model covers it),
    and for a model that ONNX Runtime does not run (the calibration reports it).

    Args:
        spec: Entry of the model in the experiment.
        model: The float model.
        data: Cache of the experiment's data.
        work: Scratch folder.
        limits: Limits of the worker.

    Returns:
        A remark on a score close to 0, else ""; and the seconds that the score of all samples would take, or None.

    Raises:
        UserError: The float model cannot be scored, or its score is 0 and `expect` does not make that plausible.
    """
    evaluator = evaluator_spec(spec, model, work)
    source = None if evaluator is None else evaluator.params.get("data")
    if evaluator is None or not isinstance(source, Mapping) or source.get("use") not in ALLOWED_DATA_KEYS:
        return "", None
    total = min(len(data.open(source, spec.base_dir)), evaluator.params.get("samples") or MAX_COUNT)
    if "samples" in evaluator.params:
        evaluator = evaluator.model_copy(update={"params": {**evaluator.params, "samples": SAMPLE_COUNT}})
    use, every = _with_few_samples(evaluator, source, total)
    samples = -(-total // every)
    counted = f"{samples} of {total} samples"
    file = save_to_folder(model, work)
    worker = WorkerSpec(
        benchmarkers={MAIN_BENCHMARKER: PluginSpec(use="onnxruntime", params={"optimization": "basic"})},
        workdir=work / "tryout",
        evaluators={MAIN_BENCHMARKER: use},
        sizes=make_sample_sizes(model, file) if need_own_sizes(spec, model) else None,
    )
    with open_engines(worker, limits) as engines:
        found, seconds = _score(engines, file, compares="reference" in use.params)
    if isinstance(found, Failed):
        raise UserError(f"{use.use!r}: the float model cannot be scored; {found.stage}: {found.reason}")
    factory: Any = registry.load_plugin("evaluator", use.use)
    metric, higher = getattr(factory, "metric", ""), getattr(factory, "higher_is_better", True)
    remark = ""
    if found is not None:
        if metric in UNIT_INTERVAL_METRICS and found.metrics.get(metric) == 0:
            _require_plausible_zero(spec, samples, f"{metric_name(metric)} 0 on {counted}", use.params, found.note)
        remark = low_reference_warning(found, metric, higher, use.params)
    return remark and f"on {counted} {remark}", None if seconds is None else seconds / samples * total


def _with_few_samples(use: PluginSpec, data: Mapping[str, Any], total: int) -> tuple[PluginSpec, int]:
    """Return (evaluator on every n-th sample, n), so that there are a few samples with labels, evenly spread."""
    for count in (SAMPLE_COUNT, SAMPLE_COUNT * UNLABELLED_SAMPLE_FACTOR):
        every = -(-total // count)
        few = {**data, "every": every * data.get("every", 1)}
        short = use.model_copy(update={"params": {**use.params, "data": few}})
        with suppress(UserError):  # raised if none of the samples has a label
            registry.create_plugin("evaluator", use.use, short.params)
            return short, every
    return use, 1


def _score(engines: Engines, file: Path, *, compares: bool) -> tuple[Accuracy | Failed | None, float | None]:
    """Return accuracy and seconds of a trial; the accuracy is None if the evaluator compares with the float model.

    Both are None if the model does not run.
    """
    found: Accuracy | Failed | None = None
    seconds = 0.0
    for _ in range(2):
        built = engines.build(Candidate(digest=edges_digest(()), edges=(), source=lambda: file))
        if isinstance(built, Failed):
            return None, None
        started_s = time.monotonic()
        found = engines.prepare(built.handle)
        if found is None and not compares:
            found = engines.evaluate(built.handle)
        seconds = time.monotonic() - started_s
        engines.release(built.handle)
        if isinstance(found, Failed) or seconds > LONG_TRIAL_S:
            break
    return found, seconds


def _require_plausible_zero(spec: ModelSpec, samples: int, score: str, params: Mapping[str, Any], note: str) -> None:
    """Raise an error for a score of 0 on some samples unless it is plausible for the score that is expected on all."""
    expected = ASSUMED_SCORE if spec.expect is None else spec.expect
    if (1 - expected) ** samples > MIN_PLAUSIBILITY:
        return
    known = "" if spec.expect is None else f", but expect is {spec.expect:g}"
    raise UserError(
        f"the float model has {score}{known}. {likely_causes(params, note)}. If the model is known to score that low, "
        "give its score by the key 'expect' of the model; 'expect: 0' accepts every score"
    )
