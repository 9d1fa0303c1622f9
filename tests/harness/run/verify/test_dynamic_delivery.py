"""Models that were searched at fixed sizes, delivered with their dynamic axes."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx_models import run_onnxruntime

from harness.accuracy.calibration.range_estimators import finite_ranges
from harness.accuracy.calibration.ranges import calibrate
from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.base.random_inputs import random_feeds
from harness.cli.main import main
from harness.config.sections import Sampling
from harness.graph.builder import GraphBuilder
from harness.graph.dynamic_axes import TransferError, transfer_changes, transfer_file
from harness.graph.load import load, save_to_folder
from harness.graph.model import TensorType
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.results.artifacts import ExportedModel, FinalistSet
from harness.run.verify import dynamic_check
from harness.run.verify.dynamic_check import (
    DynamicCheckTarget,
    DynamicModel,
    other_shapes,
    resize_array,
    write_dynamic_model,
    write_dynamic_rows,
)
from search.space import Placement, Space

DIM, HEADS = 16, 2


def linear(g: GraphBuilder, x: str, width: int, rng: np.random.Generator) -> str:
    weight = rng.standard_normal((DIM, width)).astype(np.float32) / 4
    return g.op("Add", g.op("MatMul", x, g.const(weight)), g.const(rng.standard_normal(width).astype(np.float32)))


def transformer(g: GraphBuilder) -> None:
    """One attention layer that computes the shapes of its Reshapes from those of its inputs, as PyTorch exports it."""
    rng = np.random.default_rng(0)
    x = g.input("x", ("batch", "time", DIM))
    batch, time = (g.op("Gather", g.op("Shape", x), g.const(np.array([axis]))) for axis in (0, 1))
    x = g.op("Add", x, g.op("Slice", g.const(rng.standard_normal((1, 40, DIM)).astype(np.float32)),
                            g.const(np.array([0])), time, g.const(np.array([1]))))  # fmt: skip
    x = g.op("LayerNormalization", x, g.const(np.ones(DIM, np.float32)), g.const(np.zeros(DIM, np.float32)))
    split = g.op("Concat", batch, time, g.const(np.array([HEADS, DIM // HEADS])), axis=0)
    heads = [g.op("Reshape", linear(g, x, DIM, rng), split) for _ in range(3)]
    perms = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    q, k, v = (g.op("Transpose", each, perm=perm) for each, perm in zip(heads, perms, strict=True))
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", g.op("MatMul", q, k), axis=-1), v), perm=[0, 2, 1, 3])
    joined = g.op("Reshape", mixed, g.op("Concat", batch, time, g.const(np.array([DIM])), axis=0))
    g.output(g.op("Add", x, linear(g, joined, DIM, rng)), ("batch", "time", DIM), name="y")


def convolutions(g: GraphBuilder) -> None:
    """Two convolutions, and a Resize back to the size of the input."""
    x = g.input("x", ("N", 3, 16, "width"))
    weight = g.const(np.random.default_rng(0).standard_normal((3, 8, 1, 1)).astype(np.float32) / 3)
    y = g.op("Conv", g.op("Relu", g.batch_norm(g.conv(x, 8, 3, stride=2))), weight)
    sizes = g.op("Concat", g.op("Shape", y, end=2), g.op("Shape", x, start=2), axis=0)
    y = g.op("Add", g.op("Resize", y, "", "", sizes, mode="nearest"), x)
    g.output(g.op("Conv", y, g.const(np.ones((4, 3, 1, 1), np.float32))), ("N", 4, 16, "width"), name="y")


def recurrent(g: GraphBuilder) -> None:
    """An LSTM whose states have the batch as their second dimension."""
    rng = np.random.default_rng(0)
    x, h, c = g.input("x", ("batch", "time", DIM)), g.input("h", (1, "batch", 8)), g.input("c", (1, "batch", 8))
    x = g.op("Transpose", linear(g, x, DIM, rng), perm=[1, 0, 2])
    w, r = (g.const(rng.standard_normal((1, 32, width)).astype(np.float32) / 4) for width in (DIM, 8))
    y, h, c = g.op("LSTM", x, w, r, "", "", h, c, outputs=3, hidden_size=8)
    weight = g.const(rng.standard_normal((8, 4)).astype(np.float32))
    g.output(g.op("MatMul", g.op("Squeeze", y, g.const(np.array([1]))), weight), ("time", "batch", 4), name="y")
    g.output(h, (1, "batch", 8), name="hn")


def positions(g: GraphBuilder) -> None:
    """A matrix product with position embeddings that are cut to the length of the input."""
    rng = np.random.default_rng(0)
    x = g.input("x", ("batch", "time", DIM))
    time = g.op("Gather", g.op("Shape", x), g.const(np.array([1])))
    table = g.const(rng.standard_normal((DIM, 40)).astype(np.float32))
    cut = g.op("Slice", table, g.const(np.array([0])), time, g.const(np.array([1])))
    g.output(g.op("MatMul", x, cut, name="product"), ("batch", "time", "time"), name="y")


def quantized(
    build: Callable[[GraphBuilder], None], folder: Path, dialect: str, *, offset: float | None = None, **dims: int
) -> DynamicModel | None:
    """Quantize all insertion points of a model at fixed sizes, and deliver it with dynamic axes.

    offset: Mean of the data for calibration and check; None: standard normal values, and none for the check.
    """
    builder = GraphBuilder("net", seed=0)
    build(builder)
    model, rules = load(builder.save(folder / "net.onnx"), dims=dims), load_dialect(dialect)
    space = build_space(model, rules)
    resolved = space.resolve(Placement(tuple(len(d.choices) - 1 for d in space.dimensions)))
    types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
    tensors = {edge.tensor for edge, _ in resolved if edge.tensor not in model.constants}
    data = [{name: array + (offset or 0) for name, array in feeds.items()} for feeds in random_feeds(types, 8)]
    ranges = finite_ranges(calibrate(save_to_folder(model, folder / "float"), tensors, data))
    Inserter(model, rules, ranges).export(resolved, folder / "q.onnx")
    return write_dynamic_model(model, folder / "q.onnx", dialect, data=() if offset is None else data)


@pytest.mark.parametrize("dialect", ["openvino", "onnxruntime"])
@pytest.mark.parametrize(
    ("build", "dims"), [(transformer, {"time": 8}), (convolutions, {"width": 20}), (recurrent, {"time": 6})]
)
def test_dynamic_file_keeps_edges_scales_names_and_outputs(build, dims, dialect, tmp_path):
    made = quantized(build, tmp_path, dialect, **dims)
    assert made.file == tmp_path / "q.dynamic.onnx", made.remark
    assert all(word in made.remark for word in ("checked at", "onnxruntime", "openvino"))
    given, fixed, dynamic = (onnx.load(tmp_path / name) for name in ("net.onnx", "q.onnx", "q.dynamic.onnx"))
    assert list(dynamic.graph.input) == list(given.graph.input)
    assert list(dynamic.graph.output) == list(given.graph.output)
    assert QDQGraph(dynamic).edges == QDQGraph(fixed).edges
    assert QDQGraph(fixed).edges
    before = {tensor.name: tensor for tensor in fixed.graph.initializer if "@qdq" in tensor.name}
    after = {tensor.name: tensor for tensor in dynamic.graph.initializer if "@qdq" in tensor.name}
    positions_cut = {name for name in before if name.startswith("Slice_out@") and before[name].dims}  # computed now
    assert after == {name: tensor for name, tensor in before.items() if name not in positions_cut}
    assert any(numpy_helper.to_array(tensor).dtype == np.float32 for tensor in before.values())
    session = onnxruntime.InferenceSession(made.file)
    shape = [5, 11, DIM] if build is not convolutions else [5, 3, 16, 26]
    feeds = {"x": np.ones(shape, np.float32)}
    feeds |= {value.name: np.zeros((1, 5, 8), np.float32) for value in session.get_inputs()[1:]}
    assert session.run(["y"], feeds)[0].size > 0


def test_check_uses_data_where_there_are_some(tmp_path):
    """The ranges are of data near 9, which random inputs near 0 hardly use."""
    made = quantized(convolutions, tmp_path, "onnxruntime", offset=9.0, width=20)
    assert made.file is not None, made.remark
    assert "on calibration data" in made.remark
    differences = re.findall(r"difference to the float model (\S+), (\S+) \((\S+) at", made.remark)
    assert [max(map(float, each)) < 0.05 for each in differences] == [True, True]


def test_data_are_resized_by_their_nearest_values():
    array = np.array([[1, 2, 3, 4]])
    assert resize_array(array, (2, 2)).tolist() == [[1, 3], [1, 3]]
    assert resize_array(array, (1, 6)).tolist() == [[1, 1, 2, 3, 3, 4]]


def test_edge_constant_only_at_fixed_shapes_is_named(tmp_path):
    made = quantized(positions, tmp_path, "openvino", time=8)
    assert made.file is None
    assert "-> input 1 of 'product'" in made.remark
    assert not (tmp_path / "q.dynamic.onnx").exists()


def test_pair_named_like_the_replaced_constant(tmp_path):
    """ONNX Runtime's quantize_static names the DequantizeLinear of a bias like the bias."""
    g = GraphBuilder("net", seed=3)
    g.output(g.conv(g.input("x", (1, 3, 8, "width")), 4, 3, bias=True))
    path = g.save(tmp_path / "net.onnx")
    model, other = (load(path, dims={"width": width}) for width in (8, 16))
    made = onnx.ModelProto()
    made.CopyFrom(model.proto)
    (node,) = (node for node in made.graph.node if node.op_type == "Conv")
    (bias,) = (tensor for tensor in made.graph.initializer if tensor.name == node.input[2])
    values = numpy_helper.to_array(bias)
    made.graph.initializer.remove(bias)
    made.graph.initializer.extend(
        [numpy_helper.from_array(np.round(values / 0.01).astype(np.int32), "stored"),
         numpy_helper.from_array(np.array(0.01, np.float32), "scale"), numpy_helper.from_array(np.int32(0), "zero")]
    )  # fmt: skip
    pair = onnx.helper.make_node("DequantizeLinear", ["stored", "scale", "zero"], [bias.name], name="pair")
    made.graph.node.insert(0, pair)
    onnx.save(made, tmp_path / "made.onnx")
    moved = transfer_file(model.proto, tmp_path / "made.onnx", other.proto, tmp_path / "moved.onnx")
    feeds = {"x": np.ones((1, 3, 8, 16), np.float32)}
    (found,), (floating,) = run_onnxruntime(moved, feeds), run_onnxruntime(path, feeds)
    np.testing.assert_allclose(found, floating, atol=0.006)


def small_graph(nodes: str, **constants: object) -> onnx.ModelProto:
    """Return a model of nodes that are written as NAME:OPERATOR INPUT,...:OUTPUT."""
    made = []
    for text in nodes.split():
        name, op, inputs, output = text.split(":")
        axis = {"axis": int(op[-1])} if op[-1].isdigit() else {}
        made.append(onnx.helper.make_node(op.rstrip("0123456789"), inputs.split(","), [output], name=name, **axis))
    values = [onnx.helper.make_tensor_value_info(name, 1, ["n"]) for name in ("x", "y")]
    stored = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()]
    return onnx.helper.make_model(onnx.helper.make_graph(made, "net", values[:1], values[1:], stored))


FIXED = "add:Add:x,c:t soft:Softmax1:t:y"
PLACED = "dq:DequantizeLinear:q,s,z:d add:Add:x,d:t soft:Softmax1:t:y"
STORED = {"q": 1, "s": 1, "z": 0}


@pytest.mark.parametrize(
    ("placed", "dynamic", "said"),
    [
        ((PLACED, STORED), ("add:Add:x,c:t soft:Softmax1:t:y", {"c": [2]}), "the constant has other values"),
        ((PLACED, STORED), ("add:Add:x,e:t soft:Softmax1:t:y", {"e": [1]}), "with dynamic axes it reads 'e'"),
        ((PLACED, STORED), ("add:Mul:x,c:t soft:Softmax1:t:y", {"c": [1]}), "is Add at fixed shapes and Mul at others"),
        ((PLACED, STORED), ("soft:Softmax1:x:y", {}), "edge 'c' -> input 1 of 'add': the node exists only at fixed"),
        (
            (PLACED, STORED),
            ("add:Add:x,c:t soft:Softmax1:t:y", {}),
            "edge 'c' -> input 1 of 'add': the tensor is a con",
        ),
        (
            (PLACED, STORED | {"s": [1, 2]}),
            ("cut:Relu:x:c add:Add:x,c:t soft:Softmax1:t:y", {}),
            "a constant only at fixed shapes, with a scale for each channel",
        ),
        ((PLACED, {"s": 1, "z": 0}), (FIXED, {"c": [1]}), "edge 'q' -> input 0 of DequantizeLinear: the tensor is not"),
        (("add:Add:x,c:y", {"c": [1]}), (FIXED, {"c": [1]}), "node 'soft' is not in the quantized model"),
        (
            ("add:Add:x,c:t soft:Softmax2:t:y", {"c": [1]}),
            ("add:Add:x,c:t soft:Softmax0:t:y", {"c": [1]}),
            "node 'soft' has other attributes at fixed shapes",
        ),
    ],
)
def test_differences_without_a_counterpart_are_named(placed, dynamic, said):
    fixed, quantized, other = (
        small_graph(nodes, **constants) for nodes, constants in ((FIXED, {"c": [1]}), placed, dynamic)
    )
    with pytest.raises(TransferError, match=re.escape(said)):
        transfer_changes(fixed, quantized, other)


def test_static_model_has_no_dynamic_file(tmp_path):
    assert quantized(lambda g: g.output(g.conv(g.input("x", (1, 3, 8, 8)), 4, 3)), tmp_path, "openvino") is None


def test_only_outdated_records_are_written_again(tmp_path, monkeypatch):
    builder = GraphBuilder("net", seed=0)
    convolutions(builder)
    model = load(builder.save(tmp_path / "net.onnx"), dims={"width": 20})
    rows = [ExportedModel(id=name, file=f"{name}.onnx", sha256=name, pairs=1) for name in ("a", "b")]
    written, read = [], []

    def write(model, file, *_):
        written.append(file.name)
        return DynamicModel(file=None, remark="not written")

    def data():
        read.append("data")
        yield {"x": np.zeros((1, 3, 16, 20), np.float32)}

    monkeypatch.setattr(dynamic_check, "write_dynamic_model", write)

    def deliver():
        write_dynamic_rows(
            model,
            FinalistSet(folder=tmp_path, space=Space(dimensions=()), rows=tuple(rows)),
            "openvino",
            NullProgress(),
            data=data(),
        )

    deliver()
    assert (written, read) == (["a.onnx", "b.onnx"], ["data"])
    deliver()
    assert (len(written), len(read)) == (2, 1), "nothing to write, so no data are read"
    records = read_json(tmp_path / "dynamic.json")
    records["b"]["said"] = records["b"].pop("remark")  # as an earlier version wrote it
    write_json(tmp_path / "dynamic.json", records)
    deliver()
    assert written[2:] == ["b.onnx"]
    assert read_json(tmp_path / "dynamic.json")["b"]["remark"] == "not written"


def test_tested_sizes_agree_with_symbols_and_expressions():
    axes = {"x": ("batch", "time"), "past": (3, "batch", "past"), "mask": ("batch", "past + time")}
    for made in other_shapes(axes, {"x": (1, 8), "past": (3, 1, 4), "mask": (1, 12)}):
        (batch, time), (three, same, past), mask = made["x"], made["past"], made["mask"]
        assert (three, same, mask) == (3, batch, (batch, past + time))


AXES = {"x": ("batch", "time")}
SEARCHED, LARGE = (1, 8), (2, 16)
ONES = (np.ones(4, np.float32), np.arange(4))
FAILS, NOT_FINITE = None, (np.array([1, 1, 1, np.nan], np.float32), np.arange(4))
FAR, COUNTS, SHORT = (9 * ONES[0], ONES[1]), (ONES[0], ONES[1] + 1), (ONES[0][:3], ONES[1])


@pytest.mark.parametrize(
    ("runtime", "file", "outputs", "at", "said"),
    [
        ("", "", ONES, "", "checked at batch 2, time 16 and batch 3, time 7 on random inputs ("),
        ("onnxruntime", "floating", "no kernel", "", "not checked: ONNX Runtime does not run the float model ("),
        ("onnxruntime", "floating", FAILS, "search", "not checked: ONNX Runtime does not run the float model at"),
        ("onnxruntime", "floating", FAILS, "others", "not checked at other sizes: the float model runs at none"),
        ("openvino", "fixed", FAILS, "search", "not checked in openvino (it does not run the fixed file)"),
        ("openvino", "fixed", "no plug-in", "", "not checked in openvino (no plug-in)"),
        ("openvino", "dynamic", "no kernel", "", "not for openvino: the file with dynamic axes fails: no kernel"),
        ("openvino", "dynamic", FAR, "others", "not for openvino: at other sizes its outputs differ from the float"),
        ("openvino", "dynamic", SHORT, "others", "checked at batch 2, time 16"),  # the number of boxes may differ
        ("onnxruntime", "dynamic", FAILS, "others", "!fails at {'x': (2, 16)}, where the float model runs"),
        *(
            ("onnxruntime", "dynamic", outputs, "search", "!differ from the fixed file's by")
            for outputs in (FAR, COUNTS, SHORT, NOT_FINITE)
        ),
    ],
)
def test_dynamic_files_are_checked_at_each_size_in_each_runtime(monkeypatch, runtime, file, outputs, at, said):
    files = {name: Path(name) for name in ("floating", "fixed", "dynamic")}

    def open_model(run_runtime, path):
        is_changed = (run_runtime, path.name) == (runtime, file)
        if is_changed and isinstance(outputs, str):
            raise RuntimeError(outputs)

        def infer(feeds):
            changed = is_changed and at == ("search" if feeds["x"].shape == SEARCHED else "others")
            if changed and outputs is FAILS:
                raise RuntimeError("no memory")
            return outputs if changed else ONES

        return infer

    monkeypatch.setattr(dynamic_check, "call_in_helper_process", lambda what, work, *args, **_: work(*args))
    for name in ("onnxruntime", "openvino"):
        monkeypatch.setattr(dynamic_check, f"_open_{name}", partial(open_model, name))
    target = DynamicCheckTarget(axes=AXES, types={"x": TensorType("float", SEARCHED)}, **files)
    with pytest.raises(UserError, match=re.escape(said[1:])) if said[0] == "!" else nullcontext():
        assert said in dynamic_check.check_dynamic_model(target, "onnxruntime")


def test_autotune_and_run_write_the_dynamic_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    builder = GraphBuilder("net", seed=0)
    convolutions(builder)
    builder.save(tmp_path / "net.onnx")
    monkeypatch.setattr("harness.compat.modelopt_autotune.benchmark.Sampling", partial(Sampling, max_ms=20.0))
    main(["autotune", "-m", "net.onnx", "-o", "tuned", "--dim", "width=20", "--max_evals", "3", "--timing_runs", "3",
          "--backend", "here:OpenVINO"])  # fmt: skip
    tuned = onnx.load("tuned/optimized_final.dynamic.onnx")
    assert list(tuned.graph.input) == list(onnx.load("net.onnx").graph.input)
    assert "optimized_final.dynamic.onnx keeps the dynamic axes" in Path("tuned/logs/final.log").read_text()
    Path("e.yaml").write_text(
        "experiment: e\nmodels: [{use: net.onnx, dims: {width: 20}}]\nsearchers: [random]\ninitial: [float, linear]\n"
        "baselines: [linear]\nbudget: {evaluations: [4]}\nconfirmation: {builds: 3, rounds: 3, samples: 3}\n"
        "sampling: {warmup_ms: 1, min_samples: 3, max_ms: 10}\n"
        "backends: [{use: 'here:OpenVINO', label: openvino, params: {precision: f32}}]\n"
    )
    main(["run", "e.yaml", "--out", "out"])
    models = next(Path("out").glob("*/models"))
    names = {path.name for path in models.glob("*.onnx")}
    fixed = {name for name in names if not name.endswith(".dynamic.onnx") and name != "float.onnx"}
    assert fixed
    assert {name.replace(".onnx", ".dynamic.onnx") for name in fixed} <= names
