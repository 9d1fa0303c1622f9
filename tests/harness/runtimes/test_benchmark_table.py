"""Replay tables are read as they were written; other files are refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_tables import facts_of

from harness.base.errors import UserError
from harness.measure.records import Failed, Measured
from harness.runtimes import replay
from harness.runtimes.replay import (
    METADATA_KEY,
    TABLE_SCHEMA,
    TableEntry,
    TableMetadata,
    TableSubspace,
    read_table,
    write_table,
)
from search.space import Placement, Space
from search.synthetic_problem import synthetic_space

SPACE = Space(synthetic_space(5, groups=2, seed=1).dimensions)
SUBSPACE = TableSubspace(SPACE, (1, 3), Placement((1, 0, 0, 0, 1)))
MEASURED = Measured(
    samples_ms=(1.5, 1.25, 1.75), discarded_ms=(2.0,), build_s=0.5, measure_s=0.25, warmup=4, stable=False,
    metrics={"sqnr_db": 21.5}, disturbance="drift", conditions={"load": 0.5}, info={"layers": {"u8": 3}},
)  # fmt: skip


def facts(**changes: Any) -> TableMetadata:
    anchors = {"linear": SUBSPACE.base.choices}
    return facts_of(SPACE, SUBSPACE.varied, SUBSPACE.base, **{"anchors": anchors, **changes})


def rows() -> dict[str, TableEntry]:
    found = {}
    for number, placement in enumerate(SUBSPACE.placements()):
        full = SUBSPACE.to_full_space(placement)
        outcome = Failed(stage="timeout", reason="too slow", wall_s=2.0) if number == 2 else MEASURED
        found[SPACE.digest(full)] = TableEntry(number=number, choices=full.choices, outcome=outcome)
    return found


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some" / "table.parquet"


def test_table_round_trip(path):
    write_table(path, facts(), rows())
    table = read_table(path)
    assert table.metadata == facts()
    assert table.rows == rows()
    assert table.subspace.space.dimensions == (SPACE.dimensions[1], SPACE.dimensions[3])
    assert table.row(Placement((1, 0))).outcome == Failed(stage="timeout", reason="too slow", wall_s=2.0)
    assert table.row(Placement((1, 1))).choices == (1, 1, 0, 1, 1)
    assert list(path.parent.iterdir()) == [path]


def test_samples_are_kept_as_single_precision_and_compressed(path):
    write_table(path, facts(), rows())
    with pq.ParquetFile(path) as file:
        assert file.schema_arrow.field("samples_ms").type == pa.list_(pa.float32())
        assert file.metadata.row_group(0).column(3).compression == "ZSTD"
        assert b'"model_sha256"' in file.schema_arrow.metadata[METADATA_KEY]


def test_changed_byte_is_rejected_or_harmless(path):
    write_table(path, facts(), rows())
    intact, seen = path.read_bytes(), 0
    for position in range(0, len(intact), max(1, len(intact) // 400)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        try:
            table = read_table(path)
        except UserError:
            seen += 1
        else:  # bytes that carry no value, such as those of the Arrow schema's padding
            assert (table.metadata, table.rows) == (facts(), rows()), position
    assert seen > 200


def test_2048_placements_take_less_than_1_mb(path):
    space = synthetic_space(60, groups=8, seed=1)
    subspace = TableSubspace(space, tuple(range(0, 22, 2)), space.float_placement())
    samples = Measured(samples_ms=tuple(1.0 + i / 7919 for i in range(15)), build_s=0.3, measure_s=0.2)
    found = {
        space.digest(full): TableEntry(number=i, choices=full.choices, outcome=samples)
        for i, full in enumerate(subspace.to_full_space(p) for p in subspace.placements())
    }
    write_table(path, facts_of(space, subspace.varied, subspace.base, anchors={}), found)
    assert path.stat().st_size < 1e6
    assert len(read_table(path).subspace) == 2048


Change = Callable[[dict[str, TableEntry]], dict[str, TableEntry]]


def with_row(number: int, **changes: Any) -> Change:
    """Return a function that changes the outcome of a row."""

    def change(found: dict[str, TableEntry]) -> dict[str, TableEntry]:
        digest, row = list(found.items())[number]
        return {**found, digest: replace(row, outcome=replace(row.outcome, **changes))}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {digest: replace(row, number=0) for digest, row in found.items()}, "two rows have the same num"),
        (with_row(0, metrics={"sqnr_db": math.nan}), "row 0 has a metric that is no number"),
        (with_row(0, build_s=math.nan), "row 0: build_s: .* finite"),
        (with_row(0, measure_s=-1.0), "row 0: measure_s: .* 0"),
        (with_row(0, samples_ms=(0.0,)), "row 0: samples_ms.0: .* greater than 0"),
        (with_row(0, samples_ms=()), "row 0 has no latency"),
        (with_row(2, wall_s=math.nan), "row 2: wall_s: .* finite"),
        (lambda found: dict(list(found.items())[1:]), "incomplete: 1 of 4 placements have no row; record it again"),
        (lambda found: {"0" * 16: next(iter(found.values())), **dict(list(found.items())[1:])}, "row 0 is not the pl"),
    ],
)
def test_invalid_rows_are_rejected(path, change, message):
    write_table(path, facts(), change(rows()))
    with pytest.raises(UserError, match=f"table.parquet: damaged: {message}"):
        read_table(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": (0, 0)}, "a placement here has 5 choices, but got 2"),
        ({"base": (0, 0, 0, 0, 7)}, "choice 0 to 1, but got 7"),
        ({"varied": ("unknown",)}, "'unknown' is not in list"),
        ({"varied": (SPACE.dimensions[1].name,) * 2}, "a dimension is varied twice|share one name"),
        ({"anchors": {"float": (0,) * 5}}, "damaged: incomplete: no row for 'float'; record it again"),
        ({"sensitivity": {}}, "its sensitivity is not one number for each dimension"),
        ({"backend": {"name": "x"}}, "its backend has no 'version'"),
        ({"dimensions": SPACE.dimensions[:1] * 5}, "two dimensions of a space share one name"),
    ],
)
def test_inconsistent_metadata_is_rejected(path, changes, message):
    write_table(path, facts(**changes), rows())
    with pytest.raises(UserError, match=message):
        read_table(path)


def test_file_that_is_no_table_is_rejected(path, monkeypatch):
    with pytest.raises(UserError, match=r"table\.parquet: cannot be read: No such file"):
        read_table(path)
    path.parent.mkdir()
    with pytest.raises(UserError, match=r"cannot be read|no replay table"):
        read_table(path.parent)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="no replay table, or damaged"):
        read_table(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UserError, match="a Parquet file, but no replay table; 'qdq bench record MODEL' makes one"):
        read_table(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({METADATA_KEY: facts().model_dump_json()}), path)
    with pytest.raises(UserError, match="its columns are not those of a replay table"):
        read_table(path)
    empty = TABLE_SCHEMA.empty_table().replace_schema_metadata({METADATA_KEY: '{"version": 1}'})
    pq.write_table(empty, path)
    with pytest.raises(UserError, match="its description does not fit this version: model: this key is required"):
        read_table(path)
    newer = facts().model_dump_json().replace('"version":1', '"version":9', 1)
    pq.write_table(TABLE_SCHEMA.empty_table().replace_schema_metadata({METADATA_KEY: newer}), path)
    with pytest.raises(UserError, match="does not fit this version: version: Input should be less than or equal to 1"):
        read_table(path)
    write_table(path, facts(), rows())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="no replay table, or damaged"):
        read_table(path)
    write_table(path, facts(), rows())
    body = pq.read_table(path)
    for name, value, message in (
        ("info", "[" * 200_000, "damaged: maximum recursion depth exceeded|damaged: .*recursion"),
        ("number", None, "has no number; record it again"),
        ("build_s", None, "damaged: "),
    ):
        column = pa.array([value] * len(body), TABLE_SCHEMA.field(name).type)
        pq.write_table(body.set_column(body.column_names.index(name), TABLE_SCHEMA.field(name), column), path)
        with pytest.raises(UserError, match=message):
            read_table(path)
    write_table(path, facts(), rows())
    monkeypatch.setattr(replay, "MAX_TABLE_ROWS", 3)
    with pytest.raises(UserError, match="4 rows, more than the limit of 3"):
        read_table(path)
    monkeypatch.setattr(replay, "MAX_TABLE_BYTES", 10)
    with pytest.raises(UserError, match="larger than the 0 MiB limit"):
        read_table(path)


def test_subspace_above_placement_limit_is_rejected(path):
    many = tuple(replace(SPACE.dimensions[0], name=f"d{number}") for number in range(70))
    names = tuple(dimension.name for dimension in many)
    changes = {"dimensions": many, "varied": names, "base": (0,) * 70, "sensitivity": dict.fromkeys(names, 0.1)}
    write_table(path, facts(**changes, anchors={}), {})
    with pytest.raises(UserError, match="placements, more than the limit of 65536"):
        read_table(path)


def test_decompression_bomb_is_rejected_before_decompression(path):
    write_table(path, facts(), rows())
    first = pq.read_table(path).slice(0, 1)
    text = pa.array(["x" * 100_000], pa.string())
    large = first.set_column(first.column_names.index("info"), "info", text)
    pq.write_table(pa.concat_tables([large] * 2_700).combine_chunks(), path, compression="zstd")
    assert path.stat().st_size < 2**20
    with pytest.raises(UserError, match="decompresses to more than the 256 MiB limit"):
        read_table(path)
