"""Models that cast their own tensors are searched at FP16 and BF16 like any other, with the float model's scales."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_machine import TensorRT11
from onnx import TensorProto as Type
from onnx import numpy_helper
from onnx_models import everywhere, net, new_node
from typer.testing import CliRunner

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.cli.main import app
from harness.graph.load import load, save_to_folder
from harness.graph.qdq.insert import CastInserter, Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import TENSORRT
from harness.runtimes.tensorrt.options import cast_model

SHAPE = [1, 3, 8, 8]
EXPERIMENT = {
    "experiment": "cast",
    "precision": ["int8"],
    "searchers": ["random"],
    "initial": "none",
    "baselines": ["all"],
    "budget": {"evaluations": [2]},
    "sampling": {"warmup_ms": 0, "min_samples": 3, "max_samples": 3},
    "confirmation": {"builds": 3, "rounds": 2, "samples": 3},
}


def cast(before: str, after: str, to: int) -> onnx.NodeProto:
    return new_node("Cast", [before], after, name=f"cast_{after}", to=to)


def conv(before: str, after: str, weight: str, pad: int = 1) -> onnx.NodeProto:
    return new_node("Conv", [before, weight], after, name=f"conv_{after}", pads=[pad] * 4)


def graph(folder: Path, nodes: list[onnx.NodeProto], inputs: dict[str, int]) -> Path:
    """A model with some inputs of one shape, output "y", and weights "w3", "w4" and "w6"."""
    used = {name for node in nodes for name in node.input}
    shapes = {"w3": (4, 3, 3, 3), "w4": (2, 4, 3, 3), "w6": (4, 6, 3, 3)}
    rng = np.random.default_rng
    weights = {n: (rng(0).standard_normal(s) * 0.3).astype(np.float32) for n, s in shapes.items() if n in used}
    model = net(nodes, dict.fromkeys(inputs, SHAPE), {"y": [1, 2, 8, 8]}, weights, kinds=inputs)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def behind(tensor: str) -> list[onnx.NodeProto]:
    """Two convolutions that read a tensor."""
    relu = new_node("Relu", ["c"], "r", name="relu")
    return [conv(tensor, "c", "w3"), relu, conv("r", "y", "w4")]


def of_input(kind: int) -> tuple[list[onnx.NodeProto], dict[str, int]]:
    return [cast("x", "xf", Type.FLOAT), *behind("xf")], {"x": kind}


def mask(kind: int) -> tuple[list[onnx.NodeProto], dict[str, int]]:
    product = new_node("Mul", ["x", "mf"], "xm", name="mul")
    return [cast("m", "mf", Type.FLOAT), product, *behind("xm")], {"x": Type.FLOAT, "m": kind}


def amp() -> tuple[list[onnx.NodeProto], dict[str, int]]:
    """As exported under automatic mixed precision: to FP16 and back."""
    relu = new_node("Relu", ["ch"], "rh", name="relu")
    there, back = cast("c", "ch", Type.FLOAT16), cast("rh", "r", Type.FLOAT)
    start = [cast("x", "xh", Type.FLOAT16), cast("xh", "xf", Type.FLOAT)]
    return [*start, conv("xf", "c", "w3"), there, relu, back, conv("r", "y", "w4")], {"x": Type.FLOAT}


def chain() -> tuple[list[onnx.NodeProto], dict[str, int]]:
    steps = [cast("x", "a", Type.INT32), cast("a", "b", Type.INT64), cast("b", "d", Type.FLOAT)]
    return [*steps, cast("d", "e", Type.FLOAT), *behind("e")], {"x": Type.UINT8}


def joined() -> tuple[list[onnx.NodeProto], dict[str, int]]:
    concat = new_node("Concat", ["xf", "zf"], "j", name="concat", axis=1)
    pool = new_node("MaxPool", ["j"], "p", name="pool", kernel_shape=[3, 3], pads=[1] * 4)
    relu = new_node("Relu", ["c"], "r", name="relu")
    casts = [cast("x", "xf", Type.FLOAT), cast("z", "zf", Type.FLOAT)]
    return [*casts, concat, pool, conv("p", "c", "w6"), relu, conv("r", "y", "w4")], {
        "x": Type.UINT8,
        "z": Type.FLOAT16,
    }


CASES = {
    **{name.lower(): of_input(getattr(Type, name)) for name in ("UINT8", "INT32", "INT64", "BOOL", "FLOAT16")},
    "mask_bool": mask(Type.BOOL),
    "mask_int64": mask(Type.INT64),
    "amp": amp(),
    "chain": chain(),
    "joined": joined(),
}


def scales(path: Path) -> dict[tuple[str, int], float]:
    """Scale of the activation at each quantized input, by node and input."""
    proto = onnx.load(path)
    made = {name: node for node in proto.graph.node for name in node.output}
    values = {tensor.name: tensor for tensor in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        for slot, name in enumerate(node.input):
            pair = made.get(name)
            if pair is not None and pair.op_type == "DequantizeLinear" and pair.input[0] not in values:
                found[node.name, slot] = float(numpy_helper.to_array(values[pair.input[1]]))
    return found


@pytest.mark.parametrize("precision", ["f16", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_cast_model_uses_the_scales_of_the_float_model(case, precision, tmp_path):
    model = load(graph(tmp_path, *CASES[case]))
    resolved = everywhere(model, TENSORRT)
    tensors = sorted({edge.tensor for edge, _ in resolved}.difference(model.constants))
    ranges = {tensor: (-1.0 - index, 2.0 + index) for index, tensor in enumerate(tensors)}
    file = cast_model(save_to_folder(model, tmp_path / "float"), precision, tmp_path)
    inserter = CastInserter(load(file), TENSORRT, ranges, model)
    found = scales(inserter.export(resolved, tmp_path / "cast_q.onnx"))
    wanted = scales(Inserter(model, TENSORRT, ranges).export(resolved, tmp_path / "float_q.onnx"))
    assert found == pytest.approx(wanted, rel=0.01)
    assert len(wanted) == sum(edge.tensor not in model.constants for edge, _ in resolved)


def test_a_mask_beyond_fp16_has_a_finite_scale(tmp_path):
    nodes, inputs = CASES["mask_int64"]
    model = load(graph(tmp_path, nodes, inputs))
    space = build_space(model, TENSORRT)
    ranges = {edge.tensor: (-1e9, 1.0) for dimension in space.dimensions for edge in dimension.edges}
    file = cast_model(save_to_folder(model, tmp_path / "float"), "f16", tmp_path)
    inserter = CastInserter(load(file), TENSORRT, ranges, model)
    found = scales(inserter.export(space.resolve(space.quantize_all()), tmp_path / "q.onnx"))
    assert found
    assert [*found.values()] == pytest.approx([0.99 * 65504 / 127] * len(found), rel=0.01)


def experiment(folder: Path, **params: str) -> list[str]:
    """Write an experiment on the stand-in for TensorRT 11; the arguments that run it."""
    backend = {"use": "fake_machine:TensorRT11", "label": "trt", "params": params}
    text = {**EXPERIMENT, "models": [{"use": "net.onnx", "label": "net"}], "backends": [backend]}
    (folder / "run.yaml").write_text(json.dumps(text))
    return ["run", str(folder / "run.yaml"), "--out", str(folder / "out")]


def test_fp16_experiment_runs_without_failures(tmp_path, monkeypatch):
    graph(tmp_path, *CASES["amp"])
    done = CliRunner().invoke(app, experiment(tmp_path, precision="f16"))
    assert done.exit_code == 0, done.output
    task = tmp_path / "out" / "net-trt-int8"
    rows = read_json(task / "rows.json")["rows"]
    assert len(rows) > 1
    assert not [file for file in task.rglob("*.jsonl") if "failed" in file.read_text().lower()]


def test_check_reports_models_that_cannot_be_cast(tmp_path, monkeypatch):
    nodes, _ = CASES["uint8"]
    graph(tmp_path, nodes, {"x": Type.DOUBLE})
    check = [*experiment(tmp_path, precision="f16"), "--check"]
    with pytest.raises(UserError, match=r"model 'net'.* cannot cast it to f16"):
        CliRunner().invoke(app, check, catch_exceptions=False)
    graph(tmp_path, *CASES["uint8"])
    assert CliRunner().invoke(app, check).exit_code == 0

    def renaming(self: TensorRT11, path: Path, folder: Path) -> Path:
        proto = onnx.load(path)
        next(node for node in proto.graph.node if node.name == "conv_y").name = "replaced"
        onnx.save(proto, folder / "cast.onnx")
        return folder / "cast.onnx"

    monkeypatch.setattr(TensorRT11, "cast", renaming, raising=False)
    with pytest.raises(UserError, match="'conv_y'"):
        CliRunner().invoke(app, check, catch_exceptions=False)


def test_check_names_unavailable_float_precisions(tmp_path):
    graph(tmp_path, CASES["uint8"][0], {"x": Type.DOUBLE})
    run = experiment(tmp_path, precision="auto")
    text = (tmp_path / "run.yaml").read_text().replace("TensorRT11", "HalfAndFull11")
    (tmp_path / "run.yaml").write_text(text)
    done = CliRunner().invoke(app, [*run, "--check"])
    assert done.exit_code == 0, done.output
    assert "no f16" in done.output
