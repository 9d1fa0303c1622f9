"""Scoring of recorded placements on fixed samples: labels where there are some, and agreement with the float model.

The file is executed as it describes itself: ONNX Runtime uses float kernels between its Q/DQ pairs. Figures thus do not
depend on integer kernels of a runtime, and on the instruction set only by the rounding of float sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness.accuracy.calibration.calibration_batches import CalibrationBatches
from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.base.errors import CandidateError, UserError, suggest_names
from harness.base.files import explain_write_errors
from harness.base.progress import NullProgress, Observer
from harness.base.random_inputs import random_feeds
from harness.config.experiment import Experiment
from harness.config.plan import plan_tasks
from harness.graph.load import save_to_folder
from harness.graph.rules.dialects import load_dialect
from harness.plugins import registry
from harness.plugins.api import Array
from harness.replay.bench.accuracy import (
    PlacementAccuracy,
    ScoreKey,
    read_accuracy,
    read_parts,
    score_key,
    write_accuracy,
)
from harness.results.ownership import exclusive_lock
from harness.run.prepare.float_baseline import BackendProperties
from harness.run.prepare.model_loader import MIN_OPSET, evaluator_spec, input_types, open_model
from harness.run.prepare.task import calibrate_task
from harness.runtimes.benchmark_table import BenchmarkTable, TableMetadata, read_table
from search.space import Placement, Space

SAMPLES = 64
"""Number of random inputs for a model without labels."""
RANDOM_SEED = 1  # calibration has seed 0
RUNTIME = {"optimization": "basic"}
"""Parameters of ONNX Runtime; below "extended" no Q/DQ pair becomes an integer kernel."""
Outputs = Sequence[Mapping[str, Array]]


def score_tables(experiment: Experiment, tables: Sequence[Path], out: Path, observer: Observer) -> int:
    """Score the placements of tables that have no accuracy yet, and return how many were scored.

    Each placement of a table's subspace, and its named placements, are scored once for each model, precision and
    dialect. An interrupted scoring continues: lines in `OUT.jsonl` are kept until all tables are complete.

    Args:
        experiment: Models with calibration data and evaluators; a table belongs to the model of its name.
        tables: Files of `qdq bench record`.
        out: Parquet file of accuracies (`harness.replay.bench.accuracy`); others in it are kept.
        observer: Shows progress.

    Raises:
        UserError: The experiment lacks the model of a table, or has another version of it.
    """
    parts = out.with_name(f"{out.name}.jsonl")
    scores, scored = dict(read_accuracy(out)) | {row.key: row for row in read_parts(parts)}, 0
    with explain_write_errors(out), exclusive_lock(out.parent, "scoring placements"):
        with parts.open("a", encoding="utf-8") as file:
            for path in tables:
                table = read_table(path)
                missing = missing_placements(table, scores)
                if not missing:
                    continue
                with TemporaryDirectory(prefix="qdq-score-") as work, observer.work(path.stem, len(missing)) as step:
                    scorer = PlacementScorer(experiment, table.metadata, Path(work))
                    for placement in missing:
                        row = scorer.score(placement)
                        scores[row.key] = row
                        file.write(json.dumps(asdict(row)) + "\n")
                        file.flush()
                        scored += 1
                        step.advance(row.failure)
        write_accuracy(out, scores)
        parts.unlink()
    return scored


def missing_placements(table: BenchmarkTable, scores: Mapping[ScoreKey, PlacementAccuracy]) -> list[Placement]:
    """Return the placements of a table that have no accuracy yet, each once."""
    subspace = table.subspace
    listed = [*map(Placement, table.metadata.anchors.values()), *map(subspace.to_full_space, subspace.placements())]
    digests = {subspace.full_space.digest(placement): placement for placement in listed}
    return [p for digest, p in digests.items() if score_key(table.metadata, digest) not in scores]


class PlacementScorer:
    """Scorer of the placements of a table: the model in the table's dialect, calibrated, with its float outputs.

    Args:
        experiment: Experiment that has the model under the name of the table.
        metadata: Metadata of the table.
        work: Folder for files.

    Raises:
        UserError: The experiment has no such model, or its file differs from that of the table; the float model cannot
            be scored.
    """

    def __init__(self, experiment: Experiment, metadata: TableMetadata, work: Path) -> None:
        specs = {task.model.name: task for task in plan_tasks(experiment)}
        if metadata.model not in specs:
            raise UserError(f"no model is called {metadata.model!r}; {suggest_names(metadata.model, specs)}")
        spec = replace(specs[metadata.model], precision=metadata.precision)
        dialect = load_dialect(metadata.dialect)
        model = open_model(spec.model, work, max(MIN_OPSET, dialect.opset(spec.precisions)))
        if model.sha256 != metadata.model_sha256:
            raise UserError(f"{spec.model.use}: another version than that of the table ({metadata.model_sha256[:16]})")
        feeds = CalibrationBatches(spec.model, model, input_types(model))
        properties = BackendProperties(dialect=dialect, emulated=frozenset(), facts={}, is_in_process=False)
        file, space = save_to_folder(model, work), Space(metadata.dimensions)
        task = calibrate_task(spec, model, file, space, runtime=properties, feeds=feeds, observer=NullProgress())
        self._task = replace(task, space=space)  # with the points whose activations do not vary on these samples
        self._runtime: Any = registry.create_plugin("benchmarker", "onnxruntime", RUNTIME)
        use = evaluator_spec(spec.model, model, work)
        self._evaluator: Any = None
        if use is not None:
            self._evaluator = registry.create_plugin("evaluator", use.use, use.params)
        self._floats, _ = self._run_samples(space.float_placement())
        self._layout = plan_comparison(self._floats)
        described, basis = "random inputs", f"random {RANDOM_SEED}"
        if self._evaluator is not None:
            described, basis = "labelled images", self._evaluator.fingerprint
        self._facts = PlacementAccuracy(
            model=metadata.model,
            model_sha256=metadata.model_sha256,
            precision=metadata.precision,
            dialect=metadata.dialect,
            digest="",
            metrics={},
            failure="",
            samples=len(self._floats),
            data=f"{described}, {hashlib.sha256(basis.encode()).hexdigest()[:16]}",
            calibrated_on=task.calibrated_on,
            computed_by=f"ONNX Runtime {self._runtime.describe()['version']}, optimization {RUNTIME['optimization']}",
        )

    def score(self, placement: Placement) -> PlacementAccuracy:
        """Return the accuracy of the file of a placement, or why it has none (`failure`)."""
        row = replace(self._facts, digest=self._task.space.digest(placement))
        try:
            outputs, metrics = self._run_samples(placement)
            metrics |= compare_outputs(zip(self._floats, outputs, strict=True), self._layout).metrics
        except CandidateError as error:
            return replace(row, failure=str(error))
        finally:
            for file in (self._task.work / "candidates").glob("*"):
                file.unlink()
        return replace(row, metrics=metrics | _agreement(self._floats, outputs))

    def _run_samples(self, placement: Placement) -> tuple[Outputs, dict[str, float]]:
        """Return the outputs of a placement's file for each sample, and the metrics of the evaluator."""
        task, outputs = self._task, list[Mapping[str, Array]]()
        with self._runtime.open(self._runtime.build(task.candidate(placement), task.work)) as probe:

            def infer(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
                outputs.append(probe.infer(feeds))
                return outputs[-1]

            if self._evaluator is not None:
                return outputs, dict(self._evaluator.score(infer).metrics)
            for feeds in random_feeds(input_types(task.model), SAMPLES, RANDOM_SEED):
                infer(feeds)
        return outputs, {}


def _agreement(floats: Outputs, outputs: Outputs) -> dict[str, float]:
    """Return the share of samples with the float model's class, if the only output is a row of logits."""
    if len(floats[0]) != 1 or any(max(a.shape, default=0) != a.size for a in floats[0].values()):
        return {}
    classes = [[int(next(iter(each.values())).argmax()) for each in some] for some in (floats, outputs)]
    return {"agreement": float(np.mean(np.equal(classes[0], classes[1])))}
