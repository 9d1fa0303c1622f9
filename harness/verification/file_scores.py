"""Scores of files by a reference execution, in addition to those by the runtime.

A runtime may compute a file wrongly, or saturate, and a wrong figure may be close to the float model's by chance. So
each file of another tool is scored a second time: ONNX files in ONNX Runtime without graph optimizations, an OpenVINO
IR in OpenVINO without integer kernels. So is the float model if some of its outputs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.accuracy.metrics.intervals import drop_estimate
from harness.api import Accuracy
from harness.config.initial import BASELINE_TOOLS, PTQ_TOOLS
from harness.config.sections import Limits, PluginSpec
from harness.graph.io.digests import IR_SUFFIX
from harness.progress import Observer
from harness.records import MAIN_BENCHMARKER, Failed
from harness.results_dir.artifacts import FinalistSet
from harness.timing.provenance import count_cores
from harness.timing.workers.engines import WorkerSpec
from harness.timing.workers.sandbox import open_engines
from harness.verification.accuracy_store import FILE_BENCHMARKER, AccuracyStore
from harness.verification.output_comparison import MIN_FLOAT_SQNR_DB

MAX_SCORE_DIFFERENCE = 0.01
"""Largest difference of a metric that rounding alone explains."""
MAX_HALF_SCORE_DIFFERENCE = 0.05
"""The same for a float model in a runtime at a lower precision than FP32."""


def score_difference(by_runtime: Accuracy, by_file: Accuracy, metric: str, float_precision: str | None = None) -> str:
    """Return how the metric of a runtime contradicts that of a reference execution, or "".

    They differ if the paired interval excludes 0 and the difference is above `MAX_SCORE_DIFFERENCE`.

    Args:
        by_runtime: Score by the runtime.
        by_file: Score by the reference execution.
        metric: Name of the metric.
        float_precision: Precision of the float model in the runtime, for which a metric without an interval is compared
            too; None for a quantized model.
    """
    estimate = drop_estimate(by_file, by_runtime, metric)
    found, expected = by_runtime.metrics[metric], by_file.metrics[metric]
    largest = MAX_SCORE_DIFFERENCE
    if float_precision is not None and float_precision not in MIN_FLOAT_SQNR_DB:
        largest = MAX_HALF_SCORE_DIFFERENCE
    if estimate is None:
        differs = float_precision is not None and abs(found - expected) > largest * max(1.0, abs(expected))
    else:
        low, high = estimate.interval.low, estimate.interval.high
        differs = abs(estimate.interval.value) > largest and (low > 0 or high < 0)
    return f"{metric} is {found:.4f} by the runtime, and {expected:.4f} by the file" if differs else ""


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
    rows = [row for row in table.rows if row.id in {*PTQ_TOOLS, *BASELINE_TOOLS}]
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
        ".onnx": PluginSpec(use="onnxruntime", params={"optimization": "disabled", "threads": threads}),
        IR_SUFFIX: PluginSpec(
            use="openvino", params={"integer_kernels": False, "precision": "f32", "threads": threads}
        ),
    }
