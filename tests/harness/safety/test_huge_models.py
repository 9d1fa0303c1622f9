"""Models that declare more than any machine holds: one message, before memory is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from harness.cli.main import main

HUGE = (1, 2**40)
EXPERIMENT = """
experiment: huge
models: [{use: huge.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float]
baselines: [all]
budget: {evaluations: [3]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def write_model(path: Path, what: str) -> None:
    """A convolution behind whatever is huge."""
    x = helper.make_tensor_value_info("x", 1, (1, 3, 2**20, 2**20) if what == "input" else (1, 3, 8, 8))
    dims, raw = (HUGE, b"x" * 16) if what == "weight" else ((4, 3, 3, 3), b"\0" * 432)
    weights = [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=raw),
        helper.make_tensor("s", TensorProto.INT64, [4], (1, 4, *HUGE[1:], 1)),
    ]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1] * 4)]
    if what == "tensor":
        nodes += [
            helper.make_node("ConstantOfShape", ["s"], ["z"], name="fill"),
            helper.make_node("ReduceMax", ["z"], ["m"], name="max"),
            helper.make_node("Add", ["y", "m"], ["a"], name="add"),
        ]
    end = helper.make_tensor_value_info(nodes[-1].output[0], 1, None)
    graph = helper.make_graph(nodes, "huge", [x], [end], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weight", "huge.onnx: the tensor 'w' of shape [1, 1099511627776] has 16 bytes, but needs 4398046511104;"),
        ("input", "huge.onnx: input 'x' has 3,298,534,883,328 elements by its shape"),
        ("tensor", "the float model does not run: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION"),
    ],
)
def test_what_is_declared_huge_ends_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, said: str
) -> None:
    write_model(tmp_path / "huge.onnx", what)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out")])
    error = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2, error
    assert said in error
    assert "huge.onnx" in error
    assert "Traceback" not in error
