"""A surrogate predicts placements outside of a table, and says how well."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from made_up_tables import make_table
from small import qdq

from harness.base.errors import UserError
from harness.replay.bench.export import write_surrogate

__all__ = ["make_table"]


def test_the_file_predicts_and_states_its_error(tmp_path, make_table):
    onnxruntime = pytest.importorskip("onnxruntime")
    table = make_table(dimensions=7, noise=0.01, path=tmp_path / "t.parquet")
    error = write_surrogate(table, tmp_path / "s.onnx")
    assert error["readings"] == len(table.rows)
    assert 0.9 * error["ceiling"] < error["rank_correlation"] < 1
    assert 0.8 < error["coverage"] < 0.97
    session = onnxruntime.InferenceSession(tmp_path / "s.onnx")
    rows = list(table.rows.values())
    latency, low, high = session.run(None, {"choices": np.array([row.choices for row in rows])})
    recorded = np.array([np.median(row.outcome.samples_ms) for row in rows])
    assert np.corrcoef(latency[:, 0], recorded)[0, 1] > 0.95
    assert ((low < latency) & (latency < high)).all()
    facts = {each.key: each.value for each in onnx.load(tmp_path / "s.onnx").metadata_props}
    assert facts["rank_correlation"] == str(error["rank_correlation"])
    assert qdq("bench", "surrogate", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "again.onnx")) == 0
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "s.onnx").read_bytes()


def test_surrogate_needs_enough_readings(tmp_path, make_table):
    with pytest.raises(UserError, match="fewer than"):
        write_surrogate(make_table(dimensions=4, noise=0.01, path=tmp_path / "t.parquet"), tmp_path / "s.onnx")
