"""A model with dynamic inputs is refused by the check if it does not run at its input sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from harness.base.errors import UserError
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.run.prepare.preflight import check_models


def checked(folder: Path, model: GraphBuilder | onnx.ModelProto, data: Any = None, **settings: Any) -> str:
    """The error or remark of `qdq run --check` on a model."""
    onnx.save(model.build() if isinstance(model, GraphBuilder) else model, folder / "net.onnx")
    if data is not None:
        np.savez(folder / "data.npz", **data)
        settings["calibration"] = {"data": {"use": "npz", "path": "data.npz"}}
    body = {"experiment": "e", "models": [{"use": "net.onnx", **settings}], "backends": ["simulated"]}
    try:
        return "remark: " + "".join(check_models(parse_experiment(json.dumps(body), "e.yaml", folder)))
    except UserError as error:
        return f"error: {error}"


def rows_of(columns: int, *axes: int | str) -> GraphBuilder:
    """A model that takes a multiple of a number of elements."""
    builder = GraphBuilder("net")
    builder.output(builder.op("Reshape", builder.input("x", axes), builder.const(np.array([-1, columns]))), ("r", "c"))
    return builder


def test_sizes_are_named_with_all_their_keys(tmp_path):
    builder = rows_of(19, "N", "h")
    builder.output(builder.op("Relu", builder.input("y", ("N", "h", "w"))), ("N", "h", "w"))
    found = checked(tmp_path, builder, dims={"h": 40, "w": 3})
    assert found.startswith(
        "error: models.0 (model 'net'): dims: net.onnx does not run with N 1, h 40, w 3 on random inputs (Reshape node."
    )
    data = {"x": np.zeros((2, 40), np.float32), "y": np.zeros((2, 40, 3), np.float32)}
    found = checked(tmp_path, builder, data, dims={"h": 40})
    assert "dims or calibration.data: net.onnx does not run with N 1, h 40, w 3 on calibration data (" in found
    assert "): dims: net.onnx" in checked(tmp_path, builder, data, dims={"h": 40, "w": 3})
    assert checked(tmp_path, builder, dims={"h": 38, "w": 3}) == "remark: "


def test_crash_at_the_given_sizes_is_a_remark(tmp_path):
    builder = GraphBuilder("net")
    y = builder.input("y", (1, "h"), "int64")
    builder.output(builder.op("Div", builder.const(6), y))
    found = checked(tmp_path, builder, dims={"h": 40})
    assert found.startswith("remark: model 'net': not run with h 40 on random inputs: ONNX Runtime was ended by SIG")


@pytest.mark.parametrize(("threshold", "value", "refused"), [(2.0, None, True), (2.0, 3.0, False), (1.0, None, False)])
def test_model_that_runs_on_some_values_is_accepted(tmp_path, threshold, value, refused):
    """The model takes the four largest of the values above a threshold."""
    builder = GraphBuilder("net")
    x = builder.input("x", (1, "w"))
    above = builder.op("Compress", x, builder.op("Squeeze", builder.op("Greater", x, builder.const(threshold))), axis=1)
    builder.output(builder.op("TopK", above, builder.const(np.array([4])), outputs=2)[0], (1, 4))
    data = None if value is None else {"x": np.full((1, 40), value, np.float32)}
    found = checked(tmp_path, builder, data, dims={"w": 40})
    assert found.startswith("error: ") if refused else found == "remark: "


@pytest.mark.parametrize(("kind", "words"), [
    (onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, ("h",)), "is of type 'string'"),
    (onnx.helper.make_tensor_sequence_value_info("y", onnx.TensorProto.FLOAT, None), "is of type 'sequence'"),
])  # fmt: skip
def test_model_with_inputs_that_cannot_be_timed_is_refused(tmp_path, kind, words):
    model = rows_of(8, 1, "h").build()
    model.graph.input.append(kind)
    found = checked(tmp_path, model, dims={"h": 40})
    assert found.startswith("error")
    assert f"input 'y' {words}" in found


def test_input_of_one_sample_may_be_widened(tmp_path):
    builder = GraphBuilder("net")
    for name, axes in (("x", (1, 6)), ("y", ("N", "h"))):
        builder.output(builder.op("Relu", builder.input(name, axes)))
    assert checked(tmp_path, builder, shapes={"x": "4x6", "y": "4x40"}) == "remark: "
