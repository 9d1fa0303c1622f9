"""Benchmarker that takes its readings from a replay table instead of a device."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.base.errors import BuildFailed, CandidateError, EvaluationFailed, MeasureFailed, UserError
from harness.base.files import from_json
from harness.base.paths import resolve_path
from harness.config.yaml_loader import to_user_error
from harness.measure.records import Failed, Measured, Outcome
from harness.plugins.api import Array, Artifact, Candidate, Capabilities
from search.space import Dimension, Placement, Space

__all__ = [
    "MAX_PLACEMENTS", "MAX_TABLE_BYTES", "BenchmarkTable", "TableEntry", "TableMetadata", "TableSubspace", "read_rows",
    "read_table", "read_table_metadata", "space_digest", "write_table",
]  # fmt: skip

TABLE_VERSION = 1
METADATA_KEY = b"qdq-bench replay table"
DIGEST_KEY = b"qdq-bench replay table sha256"
MAX_TABLE_BYTES = 32 * 2**20
MAX_DECODED_BYTES = 2**28
MAX_PLACEMENTS = 2**16
MAX_TABLE_ROWS = 2 * MAX_PLACEMENTS  # placements of the subspace, and others from which sensitivities were computed
READ_BATCH_ROWS = 32
_READINGS, _NUMBERS = pa.list_(pa.float32()), pa.map_(pa.string(), pa.float64())
TABLE_SCHEMA = pa.schema([
    ("digest", pa.string()), ("number", pa.int32()), ("choices", pa.list_(pa.int8())), ("samples_ms", _READINGS),
    ("discarded_ms", _READINGS), ("raw_ms", _READINGS), ("reference_ms", _READINGS), ("disturbance", pa.string()),
    ("conditions", _NUMBERS), ("warmup", pa.int32()), ("stable", pa.bool_()), ("build_s", pa.float32()),
    ("measure_s", pa.float32()), ("evaluate_s", pa.float32()), ("metrics", _NUMBERS), ("info", pa.string()),
    ("failed_stage", pa.string()), ("failed_reason", pa.string()),
])  # fmt: skip
LATENCY_COLUMNS = ("samples_ms", "discarded_ms", "raw_ms", "reference_ms")
#: Fields of `Measured` that are stored unchanged; `rebuilt_ms` needs an incumbent, which a table does not have.
MEASURED_COLUMNS = (*LATENCY_COLUMNS, "disturbance", "warmup", "stable", "build_s", "measure_s", "evaluate_s")
MAP_COLUMNS = ("metrics", "conditions")


class TableMetadata(BaseModel):
    """Metadata of a replay table: model, space, runtime and settings of the measurement.

    Attributes:
        version: Version of the file format.
        model: Display name of the model.
        source: Path or name of the model that the user gave.
        model_sha256: Digest of the cleaned float model.
        dimensions: Whole space of the model.
        varied: Names of the dimensions that the table enumerates.
        base: Choices for the whole space, from which every row has the choices of the fixed dimensions.
        anchors: Choices of the placements "float", "all" and "linear", which have rows too.
        sensitivity: Typical change of the log latency when this dimension alone changes, by name; the dimensions with
            the largest values are varied.
        precision: Precision of quantized values.
        dialect: Q/DQ dialect.
        backend: Result of the benchmarker's `describe`, with `device` and `version`.
        calibrated_on: Name of the calibration data.
        ranges: Digest of the activation ranges.
        sampling: Settings of the timing.
        environment: Machine and installation.
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
    """Entry of a placement: position in the order of measurement, choices for the whole space, and outcome."""

    number: int
    choices: tuple[int, ...]
    outcome: Outcome


@dataclass(frozen=True)
class TableSubspace:
    """Some dimensions of a space, with the others fixed.

    Attributes:
        full_space: Space of the model.
        varied: Indices of the dimensions that vary.
        base: Placement in the full space that gives the choices of the fixed dimensions.
    """

    full_space: Space
    varied: tuple[int, ...]
    base: Placement

    @cached_property
    def space(self) -> Space:
        """Return the space of the varied dimensions."""
        return self.full_space.subspace(self.varied)

    def to_full_space(self, placement: Placement) -> Placement:
        """Return a placement of the subspace as a placement of the full space."""
        choices = list(self.base.choices)
        for index, choice in zip(self.varied, placement.choices, strict=True):
            choices[index] = choice
        return Placement(tuple(choices))

    def placements(self) -> Iterator[Placement]:
        """Yield all placements of the subspace, the last dimension changing fastest."""
        for choices in itertools.product(*(range(size) for size in self.space.sizes)):
            yield Placement(choices)

    def __len__(self) -> int:
        return math.prod(self.space.sizes)


@dataclass(frozen=True)
class BenchmarkTable:
    """Replay table that was read and checked.

    Attributes:
        path: File of the table.
        rows: Entries by the digest of their placement in the whole space; besides the subspace, also the placements
            from which sensitivities were computed.
    """

    path: Path
    metadata: TableMetadata
    rows: Mapping[str, TableEntry]

    @cached_property
    def subspace(self) -> TableSubspace:
        """Return the subspace that the table enumerates."""
        space = Space(self.metadata.dimensions)
        names = [dimension.name for dimension in space.dimensions]
        varied = tuple(names.index(name) for name in self.metadata.varied)
        return TableSubspace(space, varied, Placement(self.metadata.base))

    def row(self, placement: Placement) -> TableEntry:
        """Return the entry of a placement of the subspace; raise KeyError if the table lacks it."""
        return self.rows[self.subspace.full_space.digest(self.subspace.to_full_space(placement))]


def space_digest(space: Space) -> str:
    """Return a digest (16 hexadecimal digits) of the dimensions of a space."""
    return hashlib.sha256(repr(space.dimensions).encode()).hexdigest()[:16]


def write_table(path: Path, metadata: TableMetadata, rows: Mapping[str, TableEntry]) -> None:
    """Write a table atomically; the keys of `rows` are the digests of the placements in the whole space."""
    body = pa.Table.from_pylist([_encode_entry(digest, row) for digest, row in rows.items()], schema=TABLE_SCHEMA)
    text = metadata.model_dump_json().encode()
    body = body.replace_schema_metadata({METADATA_KEY: text, DIGEST_KEY: hashlib.sha256(text).hexdigest()})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(body, temporary, compression="zstd", compression_level=9, write_page_checksum=True)
    temporary.replace(path)


def read_table(path: Path) -> BenchmarkTable:
    """Read and check a table.

    Raises:
        UserError: The file is missing, no replay table, damaged, incomplete, or larger than a table can be.
    """
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise UserError(f"{path}: larger than the {MAX_TABLE_BYTES >> 20} MiB limit of a replay table")
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = _read_metadata(path, file.schema_arrow.metadata or {})
            if not file.schema_arrow.remove_metadata().equals(TABLE_SCHEMA):
                raise UserError(f"{path}: its columns are not those of a replay table; record it again")
            _limit_decoded(path, sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)))
            listed = list(read_rows(path, file, MAX_TABLE_ROWS))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"{path}: no replay table, or damaged ({error}); 'qdq bench record MODEL' makes one") from error
    try:
        table = BenchmarkTable(path, metadata, {line["digest"]: _decode_entry(line) for line in listed})
        _check_table(table)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}; record it again") from error
    return table


def read_table_metadata(path: Path) -> TableMetadata:
    """Read the description of a table without its rows.

    Raises:
        UserError: The file cannot be read, or is no replay table.
    """
    try:
        return _read_metadata(path, pq.read_schema(path).metadata or {})
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a name that is no UTF-8
        raise UserError(f"{path}: no replay table, or damaged ({error}); 'qdq bench record MODEL' makes one") from error


def read_rows(path: Path, file: pq.ParquetFile, most: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open file as dictionaries.

    Raises:
        UserError: The file has more than `most` rows, or more than `MAX_DECODED_BYTES` decompressed.
    """
    if file.metadata.num_rows > most:
        raise UserError(f"{path}: {file.metadata.num_rows} rows, more than the limit of {most}")
    decoded = 0
    for batch in file.iter_batches(batch_size=READ_BATCH_ROWS):
        decoded += batch.nbytes  # the sizes in the file do not count repeated values
        _limit_decoded(path, decoded)
        yield from batch.to_pylist()


def _limit_decoded(path: Path, size: int) -> None:
    if size > MAX_DECODED_BYTES:
        raise UserError(f"{path}: decompresses to more than the {MAX_DECODED_BYTES >> 20} MiB limit")


def _read_metadata(path: Path, stored: Mapping[bytes, bytes]) -> TableMetadata:
    text = stored.get(METADATA_KEY)
    if text is None:
        raise UserError(f"{path}: a Parquet file, but no replay table; 'qdq bench record MODEL' makes one")
    if stored.get(DIGEST_KEY, digest := hashlib.sha256(text).hexdigest().encode()) != digest:
        raise UserError(f"{path}: damaged: its description does not match its checksum; record it again")
    try:
        return TableMetadata.model_validate_json(text)
    except ValidationError as error:
        raise to_user_error(TableMetadata, f"{path}: its description does not fit this version", error) from error


def _check_table(table: BenchmarkTable) -> None:
    """Raise `ValueError` if a table is inconsistent or incomplete."""
    space, metadata = table.subspace.full_space, table.metadata
    if len(set(metadata.varied)) != len(metadata.varied):
        raise ValueError("a dimension is varied twice")
    for choices in (metadata.base, *metadata.anchors.values()):
        space.validate(Placement(choices))
    if set(metadata.sensitivity) != {dimension.name for dimension in space.dimensions}:
        raise ValueError("its sensitivity is not one number for each dimension")
    for key in ("name", "version", "device", "float_precision"):
        if key not in metadata.backend:
            raise ValueError(f"its backend has no {key!r}")
    for digest, row in table.rows.items():
        if not isinstance(row.number, int):
            raise ValueError(f"the row of the placement {digest} has no number")
        if space.digest(space.validate(Placement(row.choices))) != digest:
            raise ValueError(f"row {row.number} is not the placement {digest}")
        if isinstance(row.outcome, Measured) and not row.outcome.samples_ms:
            raise ValueError(f"row {row.number} has no latency")
        if isinstance(row.outcome, Measured) and any(map(math.isnan, row.outcome.metrics.values())):
            raise ValueError(f"row {row.number} has a metric that is no number")
    if len({row.number for row in table.rows.values()}) != len(table.rows):
        raise ValueError("two rows have the same number")
    if (count := math.prod(table.subspace.space.sizes)) > MAX_PLACEMENTS:  # `len` has a limit of its own
        raise ValueError(f"{count} placements, more than the limit of {MAX_PLACEMENTS}")
    missing = sum(space.digest(table.subspace.to_full_space(p)) not in table.rows for p in table.subspace.placements())
    if missing:
        raise ValueError(f"incomplete: {missing} of {len(table.subspace)} placements have no row")
    lost = [name for name, choices in metadata.anchors.items() if space.digest(Placement(choices)) not in table.rows]
    if lost:
        raise ValueError(f"incomplete: no row for {', '.join(map(repr, lost))}")


def _encode_entry(digest: str, row: TableEntry) -> dict[str, Any]:
    line: dict[str, Any] = {"digest": digest, "number": row.number, "choices": row.choices}
    outcome = row.outcome
    if isinstance(outcome, Failed):
        return line | {"failed_stage": outcome.stage, "failed_reason": outcome.reason, "build_s": outcome.wall_s}
    line |= {name: getattr(outcome, name) for name in MEASURED_COLUMNS}
    line |= {name: list(getattr(outcome, name).items()) for name in MAP_COLUMNS}
    return line | {"info": json.dumps(outcome.info)}


def _decode_entry(line: dict[str, Any]) -> TableEntry:
    outcome: Outcome
    try:
        if line["failed_stage"] is not None:
            reason, wall_s = line["failed_reason"] or "", line["build_s"] or 0.0
            outcome = from_json(Failed, {"stage": line["failed_stage"], "reason": reason, "wall_s": wall_s})
        else:
            info = json.loads(line["info"])
            values = from_json(Measured, {name: line[name] for name in MEASURED_COLUMNS} | {"info": info})
            # Other than in a journal, a metric may be infinite: such a placement is beyond every bound.
            outcome = replace(values, metrics=dict(line["metrics"]), conditions=dict(line["conditions"]))
    except ValueError as error:
        raise ValueError(f"row {line['number']}: {error}") from error
    return TableEntry(number=line["number"], choices=tuple(line["choices"]), outcome=outcome)


ERROR_BY_STAGE: Mapping[str, type[CandidateError]] = {"measure": MeasureFailed, "evaluate": EvaluationFailed}


class ReplayBenchmarker:
    """Benchmarker that draws a placement's samples from recorded ones, instead of timing an engine.

    Args:
        table: Replay table, a file that `qdq bench record` wrote.
        noise_seed: Seed of the draws; None: other draws in each run, as on a real machine.
        base: Folder that a relative path starts from, which the harness sets; None: the working folder.

    Raises:
        UserError: The table does not exist or is damaged.
    """

    capabilities = Capabilities(in_process=True)

    def __init__(self, table: str | Path, noise_seed: int | None = None, base: str | Path | None = None) -> None:
        path = resolve_path(str(table), None if base is None else Path(base))
        self._table = read_table(path)
        self._sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self._edges = {edge for dimension in self._table.metadata.dimensions for edge in dimension.edges}
        self._noise_seed = noise_seed
        self._rng = np.random.default_rng(noise_seed)
        self.capabilities = Capabilities(dialect=self._table.metadata.dialect, in_process=True)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Return the recorded engine.

        Raises:
            BuildFailed: The table does not have the placement, or has a failure of its build.
            MeasureFailed, EvaluationFailed: The table has a failure of its timing or evaluation.
        """
        facts, row = self._table.metadata, self._table.rows.get(candidate.digest)
        foreign = next((edge for edge, _ in candidate.edges if edge not in self._edges), None)
        if foreign is not None:
            raise BuildFailed(
                f"table {self._table.path.name} is of another model: {facts.model} has no edge "
                f"{foreign.tensor!r} -> {foreign.consumer!r}; record one of this model with 'qdq bench record'"
            )
        if row is None:
            raise BuildFailed(
                f"placement {candidate.digest} is not in table {self._table.path.name}, which has the "
                f"{len(self._table.subspace)} placements of {len(facts.varied)} dimensions of {facts.model}; "
                "search that subspace with 'qdq bench replay'"
            )
        if isinstance(row.outcome, Failed):
            raise ERROR_BY_STAGE.get(row.outcome.stage, BuildFailed)(
                f"recorded {row.outcome.stage}: {row.outcome.reason}"
            )
        info = {**row.outcome.info, "build_s": row.outcome.build_s, "recorded": True}
        return Artifact(engine=_ReplayProbe(row.outcome.samples_ms, self._rng), info=info)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_ReplayProbe]:
        """Open the probe that `build` made."""
        yield artifact.engine

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the recorded backend, with the device that was measured, under the name "replay"."""
        backend = self._table.metadata.backend
        return {
            "name": "replay",
            "version": "1",
            "device": backend["device"],
            "options": {"table_sha256": self._sha256, "noise_seed": self._noise_seed, "recorded_on": backend},
            "float_precision": backend["float_precision"],
            "model_sha256": self._table.metadata.model_sha256,
        }


class _ReplayProbe:
    """Probe that draws readings from recorded samples."""

    def __init__(self, samples_ms: Sequence[float], rng: np.random.Generator) -> None:
        self._samples_ms = np.asarray(samples_ms)
        self._rng = rng

    def sample(self, n: int) -> Sequence[float]:
        """Draw n readings."""
        drawn: list[float] = self._rng.choice(self._samples_ms, size=n).tolist()
        return drawn

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise, because a recording has no engine."""
        raise EvaluationFailed("a replay has only recorded latencies, no outputs to score")
