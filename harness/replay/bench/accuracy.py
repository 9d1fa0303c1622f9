"""Accuracy of recorded placements: one Parquet file for all tables of a folder, by model, dialect and placement.

Accuracy belongs to the Q/DQ file, so tables of one model and dialect share it, whatever threads and processor they
were recorded with.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.paths import replacing
from harness.base.untrusted import open_regular, parse_json, read_text
from harness.measure.records import Measured
from harness.runtimes.benchmark_table import BenchmarkTable, TableEntry, TableMetadata, read_rows

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


def read_parts(path: Path) -> Iterator[PlacementAccuracy]:
    """Yield the accuracies of an interrupted scoring; a line that was cut off is skipped."""
    for line in read_text(path, "accuracies of placements").splitlines() if os.path.lexists(path) else ():
        try:
            yield PlacementAccuracy(**parse_json(line))
        except (ValueError, TypeError):
            continue


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
