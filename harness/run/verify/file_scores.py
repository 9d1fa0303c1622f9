"""Scores of files by a reference execution, in addition to those by the runtime.

A runtime may compute a file wrongly, or saturate, and a wrong figure may be close to the float model's by chance. So
each file of another tool is scored a second time: ONNX files in ONNX Runtime without graph optimizations, an OpenVINO
IR in OpenVINO without integer kernels. So is the float model if some of its outputs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.base.progress import Observer
from harness.config.experiment import TOOL_NAMES
from harness.config.sections import Limits, PluginSpec
from harness.graph.io.digests import IR_SUFFIX
from harness.measure.provenance import count_cores
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins.api import Accuracy
from harness.results.artifacts import FinalistSet
from harness.results.scores import FILE_BENCHMARKER
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import open_engines


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
        ".onnx": PluginSpec(use="onnxruntime", params={"optimization": "disabled", "threads": threads}),
        IR_SUFFIX: PluginSpec(
            use="openvino", params={"integer_kernels": False, "precision": "f32", "threads": threads}
        ),
    }
