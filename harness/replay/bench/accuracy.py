"""Accuracy of recorded placements: one Parquet file for all tables of a folder, by model, dialect and placement.

Accuracy belongs to the Q/DQ file, so tables of one model and dialect share it, whatever threads and processor they
were recorded with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.accuracy.calibration.ranges import CalibrationBatches
from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.base.errors import CandidateError, UserError, suggest_names
from harness.base.files import explain_write_errors, open_regular, parse_json, read_text
from harness.base.paths import replacing
from harness.base.progress import NullProgress, Observer
from harness.base.random_inputs import random_feeds
from harness.config.experiment import Experiment, plan_tasks
from harness.graph.load import save_to_folder
from harness.graph.rules.dialects import load_dialect
from harness.measure.provenance import format_options
from harness.measure.records import Measured
from harness.plugins import registry
from harness.plugins.api import Array
from harness.results.ownership import exclusive_lock
from harness.run.prepare.float_baseline import BackendProperties
from harness.run.prepare.model_loader import MIN_OPSET, evaluator_spec, input_types, open_model
from harness.run.prepare.task import calibrate_task
from harness.runtimes.onnxruntime import unfused_execution
from harness.runtimes.replay import BenchmarkTable, TableEntry, TableMetadata, read_rows, read_table
from search.space import Placement, Space

ACCURACY_FILE = "scores/accuracy.parquet"  # in a subfolder, as tables are found by their suffix
ACCURACY_SCHEMA = pa.schema([
    ("model", pa.string()), ("model_sha256", pa.string()), ("precision", pa.string()), ("dialect", pa.string()),
    ("digest", pa.string()), ("metric", pa.string()), ("accuracy", pa.float64()),
    ("metrics", pa.map_(pa.string(), pa.float64())), ("failure", pa.string()), ("samples", pa.int32()),
    ("data", pa.string()), ("calibrated_on", pa.string()), ("computed_by", pa.string()),
])  # fmt: skip
MAX_ROWS = 2**20
PRIMARY_METRICS = ("top1", "map", "sqnr_db")
ScoreKey = tuple[str, str, str, str]
"""SHA-256 of the cleaned float model, precision, dialect, digest of the placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementAccuracy:
    """Accuracy of the file of one placement.

    Attributes:
        model: Display name.
        model_sha256: Digest of the cleaned float model.
        precision: Precision of quantized values.
        dialect: Q/DQ dialect.
        digest: Digest of the placement.
        metrics: Figures by name; empty after a failure.
        failure: Reason of a failure, or "".
        samples: Number of scored samples.
        data: The samples, with a digest.
        calibrated_on: Data of the activation ranges of the scored file.
        computed_by: Runtime, its version and its level of graph optimization.
    """

    model: str
    model_sha256: str
    precision: str
    dialect: str
    digest: str
    metrics: Mapping[str, float]
    failure: str
    samples: int
    data: str
    calibrated_on: str
    computed_by: str

    @property
    def metric(self) -> str:
        """Return the name of the metric on labels, or of the agreement with the float model where there are none."""
        return next((name for name in PRIMARY_METRICS if name in self.metrics), "")

    @property
    def accuracy(self) -> float | None:
        """Return the value of `metric`; None after a failure."""
        return self.metrics.get(self.metric)

    @property
    def key(self) -> ScoreKey:
        """Return the key of the placement."""
        return self.model_sha256, self.precision, self.dialect, self.digest


def score_key(metadata: TableMetadata, digest: str) -> ScoreKey:
    """Return the key of a placement of a table."""
    return metadata.model_sha256, metadata.precision, metadata.dialect, digest


def read_accuracy(path: Path) -> Mapping[ScoreKey, PlacementAccuracy]:
    """Read a file of accuracies; a missing one is empty."""
    return _read(path, path.lstat().st_mtime_ns) if os.path.lexists(path) else {}


@lru_cache(maxsize=4)
def _read(path: Path, _changed_ns: int) -> Mapping[ScoreKey, PlacementAccuracy]:
    try:
        with open_regular(path) as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
            if not file.schema_arrow.remove_metadata().equals(ACCURACY_SCHEMA):
                raise ValueError("other columns")
            lines = list(read_rows(path, file, MAX_ROWS))
        fields = [field.name for field in dataclasses.fields(PlacementAccuracy)]
        rows = [
            PlacementAccuracy(**{n: line[n] for n in fields} | {"metrics": dict(line["metrics"])}) for line in lines
        ]
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{path}: no accuracies of placements, or damaged ({error}); see 'qdq bench score'") from error
    return {row.key: row for row in rows}


def write_accuracy(path: Path, rows: Mapping[ScoreKey, PlacementAccuracy]) -> None:
    """Write a file of accuracies atomically, in the order of their keys."""
    listed: list[dict[str, Any]] = [
        {name: getattr(rows[key], name) for name in ACCURACY_SCHEMA.names}
        | {"metrics": sorted(rows[key].metrics.items())}
        for key in sorted(rows)
    ]
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            table = pa.Table.from_pylist(listed, schema=ACCURACY_SCHEMA)
            pq.write_table(table, part, compression="zstd", compression_level=9, write_page_checksum=True)


def join_accuracy(table: BenchmarkTable, scores: Mapping[ScoreKey, PlacementAccuracy]) -> BenchmarkTable:
    """Return a table whose measured rows have the accuracy of their placements among their metrics."""

    def joined(digest: str, row: TableEntry) -> TableEntry:
        score = scores.get(score_key(table.metadata, digest))
        if score is None or not isinstance(row.outcome, Measured):
            return row
        return replace(row, outcome=replace(row.outcome, metrics={**row.outcome.metrics, **score.metrics}))

    return replace(table, rows={digest: joined(digest, row) for digest, row in table.rows.items()})


SAMPLES = 64
"""Number of random inputs for a model without labels."""
RANDOM_SEED = 1  # calibration has seed 0
RUNTIME = unfused_execution("basic")
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
    scores, scored = dict(read_accuracy(out)), 0
    for line in read_text(parts, "accuracies of placements").splitlines() if os.path.lexists(parts) else ():
        with suppress(ValueError, TypeError):  # a line that was cut off
            row = PlacementAccuracy(**parse_json(line))
            scores[row.key] = row
    with explain_write_errors(out), exclusive_lock(out.parent, "scoring placements"):
        with parts.open("a", encoding="utf-8") as file:
            for path in tables:
                table = read_table(path)
                subspace, missing = table.subspace, dict[str, Placement]()
                inside = map(subspace.to_full_space, subspace.placements())
                for placement in (*map(Placement, table.metadata.anchors.values()), *inside):
                    digest = subspace.full_space.digest(placement)
                    if score_key(table.metadata, digest) not in scores:
                        missing[digest] = placement
                if not missing:
                    continue
                with TemporaryDirectory(prefix="qdq-score-") as work, observer.work(path.stem, len(missing)) as step:
                    scorer = PlacementScorer(experiment, table.metadata, Path(work))
                    for placement in missing.values():
                        row = scorer.score(placement)
                        scores[row.key] = row
                        file.write(json.dumps(asdict(row)) + "\n")
                        file.flush()
                        scored += 1
                        step.advance(row.failure)
        write_accuracy(out, scores)
        parts.unlink()
    return scored


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
        self._runtime: Any = registry.create_plugin("benchmarker", RUNTIME.use, RUNTIME.params)
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
            computed_by=f"ONNX Runtime {self._runtime.describe()['version']}, {format_options(RUNTIME.params)}",
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
        first = next(iter(self._floats[0].values()))
        if (
            len(self._floats[0]) == 1 and max(first.shape, default=0) == first.size
        ):  # the only output is a row of logits
            classes = [[int(next(iter(each.values())).argmax()) for each in some] for some in (self._floats, outputs)]
            metrics["agreement"] = float(np.mean(np.equal(classes[0], classes[1])))
        return replace(row, metrics=metrics)

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
