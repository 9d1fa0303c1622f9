"""Replay tables: every placement of a subspace with its raw samples, as one Parquet file.

A searcher can be replayed where every proposal has an answer, so a table is complete: all placements of some
dimensions of a model's space, the other dimensions fixed. The schema's metadata says what was measured where.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UserError
from harness.config.validation_errors import to_user_error
from harness.records import Failed, Measured, Outcome
from search.space import Dimension, Placement, Space

__all__ = [
    "MAX_TABLE_BYTES",
    "MAX_PLACEMENTS",
    "TableMetadata",
    "TableEntry",
    "TableSubspace",
    "BenchmarkTable",
    "read_table",
    "space_digest",
    "write_table",
]

TABLE_VERSION = 1
METADATA_KEY = b"qdq-bench replay table"
MAX_TABLE_BYTES = 32 * 2**20
"""A table's file is no larger, and neither is what is written down about it."""
MAX_DECODED_BYTES = 2**28
MAX_PLACEMENTS = 2**16
MAX_TABLE_ROWS = 2 * MAX_PLACEMENTS
"""Beside the placements there are those that sensitivities were measured with."""
READ_BATCH_ROWS = 32
"""Lines that are unpacked at once."""
TABLE_SCHEMA = pa.schema([
    ("digest", pa.string()),
    ("number", pa.int32()),
    ("choices", pa.list_(pa.int8())),
    ("samples_ms", pa.list_(pa.float32())),
    ("discarded_ms", pa.list_(pa.float32())),
    ("raw_ms", pa.list_(pa.float32())),
    ("beside_ms", pa.list_(pa.float32())),
    ("trouble", pa.string()),
    ("conditions", pa.map_(pa.string(), pa.float64())),
    ("warmup", pa.int32()),
    ("stable", pa.bool_()),
    ("build_s", pa.float32()),
    ("measure_s", pa.float32()),
    ("evaluate_s", pa.float32()),
    ("metrics", pa.map_(pa.string(), pa.float64())),
    ("info", pa.string()),
    ("failed_stage", pa.string()),
    ("failed_reason", pa.string()),
])  # fmt: skip
LATENCY_COLUMNS = ("samples_ms", "discarded_ms", "raw_ms", "beside_ms")
MEASURED_COLUMNS = (*LATENCY_COLUMNS, "trouble", "warmup", "stable", "build_s", "measure_s", "evaluate_s")
"""Fields of `Measured` that are columns as they stand. What one engine has no use for is not kept: readings of other
builds, which are taken only where there is an incumbent."""


class TableMetadata(BaseModel):
    """What a table says about itself.

    Attributes:
        version: Of this format.
        model: Name for people.
        source: As the user named the model.
        model_sha256: Of the cleaned float model.
        dimensions: The model's whole space.
        varied: Names of those that the table enumerates.
        base: Choices over the whole space; those of the dimensions that are not varied hold in every row.
        anchors: Named placements (float, all, linear), which have rows too.
        sensitivity: Typical change of log latency by one dimension alone, by name: why these are varied.
        precision: Of quantized values.
        dialect: The form of Q/DQ.
        backend: The benchmarker's own facts; `device` and `version` are among them.
        calibrated_on: What activation ranges were taken from.
        ranges: Digest of these ranges.
        sampling: How one engine was timed.
        environment: The machine and the installation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=TABLE_VERSION, le=TABLE_VERSION)] = TABLE_VERSION
    model: str
    source: str
    model_sha256: str
    dimensions: tuple[Dimension, ...]
    varied: Annotated[tuple[str, ...], Field(min_length=1)]
    base: tuple[int, ...]
    anchors: dict[str, tuple[int, ...]]
    sensitivity: dict[str, float]
    precision: str
    dialect: str
    backend: dict[str, Any]
    calibrated_on: str
    ranges: str
    sampling: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One placement: its choices over the whole space, its place in the order of first readings, what became of it."""

    number: int
    choices: tuple[int, ...]
    outcome: Outcome


@dataclass(frozen=True)
class TableSubspace:
    """Some dimensions of a space, with the others fixed.

    Attributes:
        whole: The model's space.
        varied: Indices of the dimensions that vary.
        base: Choices over the whole space; those at other indices stay.
    """

    full_space: Space
    varied: tuple[int, ...]
    base: Placement

    @cached_property
    def space(self) -> Space:
        """What searchers see."""
        return Space(tuple(self.full_space.dimensions[index] for index in self.varied))

    def to_full_space(self, placement: Placement) -> Placement:
        """The placement of the whole space that a placement of the subspace stands for."""
        choices = list(self.base.choices)
        for index, choice in zip(self.varied, placement.choices, strict=True):
            choices[index] = choice
        return Placement(tuple(choices))

    def placements(self) -> Iterator[Placement]:
        """All placements of the subspace, the last dimension changing fastest."""
        for choices in itertools.product(*(range(size) for size in self.space.sizes)):
            yield Placement(choices)

    def __len__(self) -> int:
        return math.prod(self.space.sizes)


@dataclass(frozen=True)
class BenchmarkTable:
    """A table that was read: complete, and consistent with itself.

    Attributes:
        path: Where it lies.
        rows: By digest; more than the subspace's, because sensitivity was measured around it.
    """

    path: Path
    metadata: TableMetadata
    rows: Mapping[str, TableEntry]

    @cached_property
    def subspace(self) -> TableSubspace:
        """What the table enumerates."""
        space = Space(self.metadata.dimensions)
        names = [dimension.name for dimension in space.dimensions]
        varied = tuple(names.index(name) for name in self.metadata.varied)
        return TableSubspace(space, varied, Placement(self.metadata.base))

    def row(self, placement: Placement) -> TableEntry:
        """The row of a placement of the subspace."""
        return self.rows[self.subspace.full_space.digest(self.subspace.to_full_space(placement))]


def space_digest(space: Space) -> str:
    """Identity of a space: its dimensions with all that they are."""
    return hashlib.sha256(repr(space.dimensions).encode()).hexdigest()[:16]


def write_table(path: Path, facts: TableMetadata, rows: Mapping[str, TableEntry]) -> None:
    """Write a table; it appears whole or not at all.

    Args:
        rows: By digest.
    """
    text = facts.model_dump_json()
    body = pa.Table.from_pylist([_encode_entry(digest, row) for digest, row in rows.items()], schema=TABLE_SCHEMA)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(body.replace_schema_metadata({METADATA_KEY: text}), part, compression="zstd", compression_level=9)
    part.replace(path)


def read_table(path: Path) -> BenchmarkTable:
    """Read a table and check it whole.

    Raises:
        UserError: No such file, no replay table, damaged, incomplete, or larger than a table can be.
    """
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise UserError(f"{path}: larger than the {MAX_TABLE_BYTES >> 20} MiB that a replay table may have")
        with pq.ParquetFile(path) as file:
            facts = _read_metadata(path, (file.schema_arrow.metadata or {}).get(METADATA_KEY))
            if not file.schema_arrow.remove_metadata().equals(TABLE_SCHEMA):
                raise UserError(f"{path}: its columns are not those of a replay table; record it again")
            decoded = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            if decoded > MAX_DECODED_BYTES:
                raise UserError(f"{path}: unpacks to more than {MAX_DECODED_BYTES >> 20} MiB; no replay table does")
            listed = list(_read_rows(path, file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"{path}: no replay table, or damaged ({error}); 'qdq record MODEL' makes one") from error
    try:
        table = BenchmarkTable(path, facts, {line["digest"]: _decode_entry(line) for line in listed})
        _check_table(table)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}; record it again") from error
    return table


def _read_rows(path: Path, file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    """All lines, as long as they are few and small: equal values are stored once, so the file does not tell."""
    if file.metadata.num_rows > MAX_TABLE_ROWS:
        raise UserError(f"{path}: {file.metadata.num_rows} lines, more than the {MAX_TABLE_ROWS} of the largest table")
    decoded = 0
    for batch in file.iter_batches(batch_size=READ_BATCH_ROWS):
        decoded += batch.nbytes
        if decoded > MAX_DECODED_BYTES:
            raise UserError(f"{path}: unpacks to more than {MAX_DECODED_BYTES >> 20} MiB; no replay table does")
        yield from batch.to_pylist()


def _read_metadata(path: Path, text: bytes | None) -> TableMetadata:
    if text is None:
        raise UserError(f"{path}: a Parquet file, but no replay table; 'qdq record MODEL' makes one")
    try:
        return TableMetadata.model_validate_json(text)
    except ValidationError as error:
        raise to_user_error(TableMetadata, f"{path}: its description does not fit this version", error) from error


def _check_table(table: BenchmarkTable) -> None:
    """Whatever a reader relies on.

    Raises:
        ValueError: What does not hold.
    """
    _check_metadata(table.metadata, table.subspace.full_space)
    whole, anchors = table.subspace.full_space, table.metadata.anchors
    for digest, row in table.rows.items():
        _check_row(whole, digest, row)
    if len({row.number for row in table.rows.values()}) != len(table.rows):
        raise ValueError("two rows have one number")
    if len(table.subspace) > MAX_PLACEMENTS:
        raise ValueError(f"{len(table.subspace)} placements, more than the {MAX_PLACEMENTS} of the largest table")
    missing = sum(whole.digest(table.subspace.to_full_space(p)) not in table.rows for p in table.subspace.placements())
    if missing:
        raise ValueError(f"incomplete: {missing} of {len(table.subspace)} placements have no row")
    if nowhere := [name for name, choices in anchors.items() if whole.digest(Placement(choices)) not in table.rows]:
        raise ValueError(f"incomplete: no row is of {', '.join(map(repr, nowhere))}")


def _check_metadata(facts: TableMetadata, whole: Space) -> None:
    if len(set(facts.varied)) != len(facts.varied):
        raise ValueError("a dimension is varied twice")
    for choices in (facts.base, *facts.anchors.values()):
        whole.validate(Placement(choices))
    if set(facts.sensitivity) != {dimension.name for dimension in whole.dimensions}:
        raise ValueError("its sensitivity is not one number for each dimension")
    for key in ("name", "version", "device", "float_precision"):
        if key not in facts.backend:
            raise ValueError(f"its backend has no {key!r}")


def _check_row(whole: Space, digest: str, row: TableEntry) -> None:
    if not isinstance(row.number, int):
        raise ValueError(f"the row of the placement {digest} has no number")
    if whole.digest(whole.validate(Placement(row.choices))) != digest:
        raise ValueError(f"row {row.number} is not the placement {digest} that it says")
    if isinstance(row.outcome, Measured):
        samples = row.outcome.samples_ms
        if not samples or not all(math.isfinite(value) and value > 0 for value in samples):
            raise ValueError(f"row {row.number} has a latency that is no positive number")
        if any(math.isnan(value) for value in row.outcome.metrics.values()):
            raise ValueError(f"row {row.number} has a metric that is no number")
        spent_s = [row.outcome.build_s, row.outcome.measure_s, row.outcome.evaluate_s]
    else:
        spent_s = [row.outcome.wall_s]
    if not all(math.isfinite(value) and value >= 0 for value in spent_s):
        raise ValueError(f"row {row.number} has a time that is no number of seconds")


def _encode_entry(digest: str, row: TableEntry) -> dict[str, Any]:
    line: dict[str, Any] = {"digest": digest, "number": row.number, "choices": row.choices}
    if isinstance(row.outcome, Failed):
        failed = row.outcome
        return line | {"failed_stage": failed.stage, "failed_reason": failed.reason, "build_s": failed.wall_s}
    kept = asdict(row.outcome)
    maps = {name: list(kept[name].items()) for name in ("metrics", "conditions")}
    return line | {name: kept[name] for name in MEASURED_COLUMNS} | maps | {"info": json.dumps(kept["info"])}


def _decode_entry(line: dict[str, Any]) -> TableEntry:
    choices = tuple(line["choices"])
    if line["failed_stage"] is not None:
        failed = Failed(stage=line["failed_stage"], reason=line["failed_reason"] or "", wall_s=line["build_s"] or 0.0)
        return TableEntry(number=line["number"], choices=choices, outcome=failed)
    plain: dict[str, Any] = {name: tuple(line[name]) if name in LATENCY_COLUMNS else line[name] for name in MEASURED_COLUMNS}
    maps: dict[str, Any] = {name: dict(line[name]) for name in ("metrics", "conditions")}
    measured = Measured(**plain, **maps, info=json.loads(line["info"]))
    return TableEntry(number=line["number"], choices=choices, outcome=measured)
