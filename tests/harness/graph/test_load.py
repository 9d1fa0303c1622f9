"""Loading: a loaded model equals its file, and errors name the damage of a file."""

import logging
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper, parser
from onnx_models import everywhere, loaded, run_onnxruntime

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.io import files as write_module
from harness.graph.io.files import write_model
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model, TensorType
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import OPENVINO

ASSETS = Path(os.environ.get("QDQ_ASSETS", "")) / "models"
REAL = {
    "yolox_nano": {}, "nanodet_m_320": {}, "deeplabv3_mnv2_voc_513": {}, "squeezenet1.1": {"data": "1x3x224x224"},
    "mobilenet_v1_0.75_224": {"input": "1x3x224x224"}, "deit_tiny_patch16_224": {"input": (1, 3, 224, 224)},
}  # fmt: skip


def feeds_for(model: Model, seed: int) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(seed), {}
    for name in model.inputs:
        kind = model.types[name]
        if kind.dtype == "string":
            feeds[name] = np.full(kind.shape, "text", dtype=object)
        elif kind.dtype == "bool":
            feeds[name] = np.full(kind.shape, seed % 2 == 0)
        else:
            dtype = {"float": np.float32, "float16": np.float16, "int64": np.int64}[kind.dtype]
            feeds[name] = (rng.random(kind.shape) * 3).astype(dtype)
    return feeds


def assert_same(original: onnx.ModelProto, model: Model, seed: int = 0) -> None:
    feeds = feeds_for(model, seed)
    for before, after in zip(run_onnxruntime(original, feeds), run_onnxruntime(model.proto, feeds), strict=True):
        assert before.dtype == after.dtype
        if before.dtype == object:
            assert (before == after).all()
        else:
            np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)


def checked(built: GraphBuilder | onnx.ModelProto, seed: int = 0, **options) -> Model:
    """The loaded model, which computes the same as the given one."""
    proto = built.build() if isinstance(built, GraphBuilder) else built
    model = loaded(proto, "m.onnx", **options)
    assert_same(proto, model, seed)
    return model


def operators(model: Model) -> list[str]:
    return [node.op for node in model.nodes]


def small(opset: int = 17, batch: int | str = 1) -> onnx.ModelProto:
    g = GraphBuilder("small", opset=opset)
    g.output(g.op("Relu", g.conv(g.input("x", (batch, 3, 8, 8)), 4, 3)), name="y")
    return g.build()


def with_external_data(folder: Path, location: str = "weights.bin") -> Path:
    path = folder / "model.onnx"
    onnx.save_model(small(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    for entry in (entry for tensor in proto.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = location
    path.write_bytes(proto.SerializeToString())
    return path


def test_file_is_loaded_with_nodes_and_types(tmp_path):
    path = write_model(small(), tmp_path / "m.onnx")
    model = load(path)
    assert model.source == str(path)
    assert (model.inputs, model.outputs) == (("x",), ("y",))
    assert operators(model) == ["Conv", "Relu"]
    assert model.types["y"] == TensorType("float", (1, 4, 8, 8))
    assert_same(small(), model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, r"cat: not an ONNX file \(it starts with .*export the model to ONNX")
            for content in (b"\x89PNG\r\n\x1a\n and more", b"PK\x03\x04model", b"just text\n", b"\x00" * 64)
        ),
        (b"", "the file is empty; fetch or export the model again"),
        (b"version https://git-lfs.github.com/spec/v1\noid", r"Git LFS pointer.*run 'git lfs pull'"),
        *((small().SerializeToString()[:size], r"truncated or damaged .*\(\d+ bytes\)") for size in range(3, 775, 75)),
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(path, source="cat")


def test_missing_file_folder_and_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("m", "no such file"), ("", r"a folder; name the .onnx file"), ("pipe", "pipe or a device")):
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)


def test_external_data_is_read_and_hashed(tmp_path):
    path = with_external_data(tmp_path)
    first = load(path)
    assert_same(small(), first)
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    assert load(path).sha256 != first.sha256
    (tmp_path / "weights.bin").write_bytes(b"\x00" * 10)
    with pytest.raises(UserError, match=r"external data of 'Conv_.*' is truncated or damaged"):
        load(path)


@pytest.mark.parametrize("location", ["weights.bin", "..\\weights.bin"])
def test_missing_external_data_is_named(tmp_path, location):
    path = with_external_data(tmp_path, location)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UserError, match=r"data '.*weights.bin' with the weights 'Conv_\w+' is missing; put"):
        load(path)


def test_weight_size_must_match_its_shape(tmp_path):
    g = GraphBuilder("tiny")
    g.output(g.gemm(g.input("x", (1, 4)), 3), name="y")
    proto = g.build()
    weight = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2)
    weight.raw_data = weight.raw_data[:-8]
    with pytest.raises(UserError, match=r"tensor 'Gemm_weight' of shape \[3, 4\] has 40 bytes, but needs 48"):
        load(write_model(proto, tmp_path / "short.onnx"))


@pytest.mark.parametrize(
    "location", ["../outside.bin", "sub/../../outside.bin", "/etc/hostname", "C:\\w.bin", "", "link.bin"]
)
def test_external_data_outside_the_folder_is_refused(tmp_path, location):
    (tmp_path / "outside.bin").write_bytes(b"\x00" * 10_000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(UserError, match="outside of the model's folder, which is refused"):
        load(with_external_data(folder, location))


def test_undefined_tensor_and_cycle_are_refused(capsys):
    proto = small()
    proto.graph.node[1].input[0] = "nowhere"
    with pytest.raises(UserError, match=r"m\.onnx: no valid ONNX model: .*'nowhere'.*export the model again"):
        loaded(proto, "m.onnx")
    proto.graph.node[0].input[0], proto.graph.node[1].input[0] = "y", proto.graph.node[0].output[0]
    with pytest.raises(UserError, match=r"its nodes cannot be put in order: .* cycle"):
        loaded(proto)
    assert capsys.readouterr().out == ""


def test_shapes_that_contradict_each_other(caplog):
    g = GraphBuilder("wrong")
    g.output(g.op("Relu", g.input("x", (2, 3))), (2, 3))
    proto = g.build()
    proto.graph.node[0].op_type = "MatMul"
    proto.graph.node[0].input.append("x")
    model = loaded(proto, "m.onnx")
    assert model.outputs[0] not in model.types
    assert "m.onnx: some shapes cannot be inferred: " in caplog.text
    assert "Incompatible dimensions for matrix multiplication" in caplog.text


def test_outputs_without_or_with_a_wrong_type_are_inferred():
    proto = small()
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 77
    assert loaded(proto).types["y"].shape == (1, 4, 8, 8)
    proto.graph.output[0].ClearField("type")
    assert loaded(proto).types["y"] == TensorType("float", (1, 4, 8, 8))


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("domain", ["", "TRT"])
def test_unknown_operator_is_kept(domain, opset, caplog):
    g = GraphBuilder("plugin", opset=opset)
    x = g.op("Relu", g.input("x", (1, 8)))
    found = g.op("EfficientNMS_TRT", x, outputs=2, domain=domain, score=0.5, mode="fast")
    g.output(g.op("Relu", found[0]), (1, 4))
    g.output(found[1], (1, 2))
    proto = helper.make_model(g.graph(), opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    proto.graph.value_info.append(helper.make_tensor_value_info(found[0], onnx.TensorProto.FLOAT, (1, 4)))
    with caplog.at_level(logging.WARNING):
        model = loaded(proto, "m.onnx")
    plugin = model.nodes[1]
    assert (plugin.op, plugin.domain, plugin.opaque) == ("EfficientNMS_TRT", domain, True)
    assert plugin.attributes == {"score": 0.5, "mode": "fast"}
    assert not model.nodes[0].opaque
    assert model.types[found[0]].shape == (1, 4)  # as the file declares it
    named = f"{domain or 'ai.onnx'}.EfficientNMS_TRT"
    first, *others = caplog.messages
    assert first == f"m.onnx: operators that ONNX does not define stay float: {named}"
    assert all("not compared" in message and "EfficientNMS_TRT" in message for message in others)
    assert len(others) == (opset < 17)  # else preparation changes nothing


def test_tensors_behind_an_unknown_operator_are_untyped():
    g = GraphBuilder("plugin")
    y = g.op("Mystery", g.input("x", (1, 8)), domain="acme")
    z = g.op("Relu", y)
    g.output(g.op("Concat", z, z, axis=0), (2, 8))
    assert {y, z}.isdisjoint(loaded(g).types)


@pytest.mark.parametrize("shape", ["2x3x8x8", (2, 3, 8, 8)])
def test_given_shape_replaces_dynamic_dimensions(shape):
    model = checked(small(batch="N"), shapes={"x": shape})
    assert {name: model.types[name].shape for name in ("x", "y")} == {"x": (2, 3, 8, 8), "y": (2, 4, 8, 8)}


def test_question_mark_dimensions_are_unnamed(tmp_path):
    """paddle2onnx writes "?" for every size that it does not know (PP-OCR's classifier: ?x3x?x?)."""
    g = GraphBuilder("paddle")
    g.output(g.op("Relu", g.input("a", ("?", 3, "?", "?"))), name="y")
    g.output(g.op("Relu", g.input("b", ("?", 5))), name="z")
    model = loaded(g, shapes={"a": "1x3x48x192", "b": "2x5"})
    assert [model.types[name].shape for name in ("y", "z")] == [(1, 3, 48, 192), (2, 5)]
    assert loaded(g, shapes={"a": "4x3x48x192"}).types["z"].shape == (4, 5)
    with pytest.raises(UserError, match=r"input 'a' has the dynamic shape \?x3x\?x\?"):
        loaded(g, shapes={"b": "1x5"})
    with pytest.raises(UserError, match=r"no input has the name of the calibration data's 'images'"):
        load(g.save(tmp_path / "m.onnx"), source="m.onnx", samples={"images": (3, 48, 192)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"X1": "1x3x8x8"}, r"shapes\.X1: the model has no such input; known: x"),
        ({"x": "1x3x8"}, r"shapes\.x: the input has 4 dimensions \(Nx3x8x8\), but got 3: 1x3x8"),
        ({"x": "1x4x8x8"}, r"shapes\.x: the input is fixed to Nx3x8x8 in the model, but got 1x4x8x8"),
        *(({"x": text}, rf"a shape looks like 1x3x224x224, but got '{text}'") for text in ("1xhuge", "0x3x8x8", "")),
    ],
)
def test_mismatched_shapes_are_refused(shapes, message):
    with pytest.raises(UserError, match=message):
        loaded(small(batch="N"), shapes=shapes)


@settings(max_examples=20)
@given(start=st.integers(-4, 4), end=st.integers(-4, 4))
def test_shape_arithmetic_is_folded(start, end):
    g = GraphBuilder("shape")
    x = g.input("x", ("N", 3, 5, 7))
    size = g.op("ReduceProd", g.op("Shape", x, start=start, end=end), keepdims=0)
    g.output(g.op("Mul", g.op("Mul", size, g.op("Size", x)), g.const(2)), name="y")
    g.output(g.op("Reshape", x, g.op("Concat", g.const([-1]), g.const([7]), axis=0)))
    assert operators(checked(g, shapes={"x": "2x3x5x7"})) == ["Reshape"]


def test_integer_string_and_float_inputs_are_loaded():
    g = GraphBuilder("many")
    ids, mask, words = g.input("ids", ("B", 5), "int64"), g.input("mask", ("B", 5)), g.input("words", (2,), "string")
    table = g.const(np.eye(30, 7, dtype=np.float32))
    g.output(g.op("Mul", g.op("Gather", table, ids), g.op("Unsqueeze", mask, g.const([-1]))))
    g.output(g.op("Identity", words))
    model = checked(g, shapes={"ids": "3x5"})
    assert {name: model.types[name] for name in model.inputs} == {
        "ids": TensorType("int64", (3, 5)), "mask": TensorType("float", (3, 5)), "words": TensorType("string", (2,))
    }  # fmt: skip


def test_constant_nodes_become_initializers():
    g = GraphBuilder("constants")
    x = g.input("x", (2, 3))
    tensor = helper.make_tensor("t", onnx.TensorProto.FLOAT, (1,), [0.5])
    for value in ({"value_float": 2.0}, {"value_floats": [1.0, 2.0, 3.0]}, {"value": tensor}):
        x = g.op("Add", x, g.op("Constant", **value))
    g.output(g.op("Reshape", x, g.op("Constant", value_ints=[3, -1])))
    g.output(g.op("Constant", value_strings=["a", "b"]), name="words")
    model = checked(g)
    assert operators(model) == ["Add", "Add", "Add", "Reshape"]
    assert len(model.constants) == 5


def test_constant_expressions_are_folded():
    g = GraphBuilder("fold")
    weight = g.op("Transpose", g.op("Neg", g.const(np.ones((3, 4), np.float32))), perm=[1, 0])
    g.output(g.op("MatMul", g.input("x", (2, 4)), weight))
    model = checked(g)
    assert operators(model) == ["MatMul"]
    assert list(model.constants) == [weight]


def test_large_weights_are_processed_like_small_ones():
    g = GraphBuilder("large", opset=13)
    x = g.batch_norm(g.conv(g.input("x", (1, 32, 4, 4)), 32, 3))
    g.conv(x, 32, 3)
    rng = np.random.default_rng(0)
    table, _ = (g.const(rng.normal(size=(128, 64)).astype(np.float32)) for _ in range(2))
    turned = g.op("Transpose", g.op("Relu", table), perm=[1, 0])
    g.output(g.op("MatMul", g.op("Reshape", x, g.const([8, 64])), turned))
    model = checked(g)
    assert operators(model) == ["Conv", "Reshape", "MatMul"]
    assert model.inputs == ("x",)
    assert {model.types[name].shape for name in model.constants} == {(32, 32, 3, 3), (32,), (2,), (64, 128)}


def test_quantized_weights_and_random_numbers_are_not_folded():
    g = GraphBuilder("keep")
    weight = g.const(np.ones((2, 2), np.int8))
    real = g.op("DequantizeLinear", weight, g.const(0.5), g.const(np.int8(0)))
    noise = g.op("RandomNormal", shape=[1, 2])
    g.output(g.op("Add", g.op("MatMul", g.input("x", (1, 2)), real), noise))
    assert sorted(operators(loaded(g))) == ["Add", "DequantizeLinear", "MatMul", "RandomNormal"]


def test_dead_nodes_and_weights_are_removed_despite_omitted_names():
    g = GraphBuilder("dead")
    x = g.input("x", (1, 3, 8, 8))
    g.op("MaxPool", x, kernel_shape=[2, 2])
    g.conv(x, 9, 3)
    g.output(g.op("Clip", x, "", g.const(6.0)))
    proto = g.build()
    proto.graph.node[0].output.append("")
    model = loaded(proto)
    assert operators(model) == ["Clip"]
    assert len(model.constants) == 1


def test_node_order_is_changed_only_if_invalid():
    g = GraphBuilder("order")
    x = g.input("x", (2, 3))
    g.output(g.op("Add", g.op("Neg", g.op("Abs", g.op("Relu", x))), g.op("Exp", x)))
    proto = g.build()
    assert operators(loaded(proto)) == ["Relu", "Abs", "Neg", "Exp", "Add"]
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = loaded(proto)
    assert all(model.producer.get(name, -1) < node.index for node in model.nodes for name in node.inputs)
    assert_same(g.build(), model)


@given(names=st.lists(st.sampled_from(["", "a", "a_1", "Relu_0", "Relu_1"]), min_size=1, max_size=6))
@settings(max_examples=30)
def test_node_names_are_kept_and_made_unique(names):
    g = GraphBuilder("names")
    x = g.input("x", (2,))
    for _ in names:
        x = g.op("Relu", x)
    g.output(x)
    proto = g.build()
    for node, name in zip(proto.graph.node, names, strict=True):
        node.name = name
    found = [node.name for node in loaded(proto).nodes]
    assert len(set(found)) == len(names)
    assert all(found)
    assert all(new == old for new, old in zip(found, names, strict=True) if old and names.count(old) == 1)


def test_functions_are_inlined():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "my": 1]>
        twice (float[2,3] x) => (float[2,3] y) { t = my.silu(x)  y = my.silu(t) }
        <domain: "my", opset_import: ["": 17]> silu (x) => (y) { s = Sigmoid(x)  y = Mul(s, x) }"""
    )
    assert [(node.op, node.opaque) for node in checked(proto).nodes] == [("Sigmoid", False), ("Mul", False)] * 2


def test_initializers_among_the_inputs_are_constants_and_the_given_model_is_unchanged():
    proto = small(opset=11)
    proto.ir_version = 3
    proto.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer
    )
    before = proto.SerializeToString()
    assert [value.name for value in checked(proto).proto.graph.input] == ["x"]
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("places", [[0, 5], [[0, 0], [1, 1]]])
def test_sparse_weights_become_dense_ones(places):
    values = numpy_helper.from_array(np.array([1.0, 2.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places), "w_places"), [4, 4])
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[2,4] x) => (float[2,4] y) {y=MatMul(x, w)}'
    )
    proto.graph.sparse_initializer.append(sparse)
    (tensor,) = loaded(proto).proto.graph.initializer
    assert np.array_equal(numpy_helper.to_array(tensor), np.diag([1.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("seed", [0, 1])
def test_if_branches_read_outer_tensors(opset, seed):
    then, other = GraphBuilder("then", opset=opset), GraphBuilder("else", opset=opset)
    then.output(then.op("Add", then.op("Softmax", "r", axis=-1), "w", outputs="then_out"))
    other.output(other.op("Mul", "only_here", other.op("Mul", "w", "r"), outputs="else_out"))
    g = GraphBuilder("if", opset=opset)
    x, condition = g.input("x", (2, 3)), g.input("condition", (), "bool")
    weight = g.op("Neg", g.const([1.0, 2.0, 3.0]), outputs="w")
    g.const([4.0, 5.0, 6.0], "only_here")
    relu = g.op("Relu", x, outputs="r")
    g.output(g.op("If", condition, then_branch=then.graph(), else_branch=other.graph()), (2, 3))
    g.output(g.op("Add", relu, weight))
    model = checked(g, seed)
    node = next(node for node in model.nodes if node.op == "If")
    assert node.opaque
    assert node.attributes == {}
    assert node.captures == ("w", "r", "only_here")  # as they are read, and never by name
    assert model.captured == {"only_here", "r", "w"}


@pytest.mark.parametrize("opset", [7, 11, 13])
def test_older_opsets_are_upgraded(opset):
    g = GraphBuilder("old", opset=opset)
    x = g.op("Dropout", g.conv(g.input("x", ("N", 3, 4, 4)), 4, 3))
    g.output(g.op("Softmax", g.op("Flatten", x), axis=1))
    proto = g.build()
    proto.metadata_props.add(key="author", value="me")
    model = checked(proto, shapes={"x": "2x3x4x4"}, min_opset=21)
    assert {o.domain: o.version for o in model.proto.opset_import}[""] == 21
    assert model.proto.ir_version <= 10
    assert [p.key for p in model.proto.metadata_props] == ["author"]


def test_newer_opset_is_kept_up_to_that_of_onnx():
    proto = small(opset=20)
    assert loaded(proto).proto.opset_import[0].version == 20
    proto.opset_import[0].version = 99
    with pytest.raises(UserError, match=r"opset 99 is newer than the installed onnx .*export the model with opset"):
        loaded(proto)


def test_opset_without_upgrade_is_refused():
    proto = parser.parse_model(
        """<ir_version: 6, opset_import: ["": 7]> g (float[4,3,1,1] x, float[3] s) => (float[4,3,1,1] y)
        { y = BatchNormalization <spatial=0> (x, s, s, s, s) }"""
    )
    with pytest.raises(UserError, match=r"opset 7 cannot be upgraded to 17.*export the model with opset 17 or later"):
        loaded(proto)


def test_saved_model_is_loaded_unchanged(tmp_path):
    model = loaded(small())
    path = save_to_folder(model, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "model.onnx"
    assert load(path).proto == model.proto


def test_large_models_are_saved_with_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(write_module, "MAX_SINGLE_FILE_BYTES", 1000)
    g = GraphBuilder("large")
    g.output(g.conv(g.input("x", (1, 64, 4, 4)), 64, 3))
    model = checked(g)
    path, data = save_to_folder(model, tmp_path), tmp_path / "model.onnx.data"
    assert path.stat().st_size < 5000 < data.stat().st_size
    first = path.read_bytes(), data.read_bytes()
    write_model(model.proto, path)
    assert (path.read_bytes(), data.read_bytes()) == first
    assert_same(g.build(), load(path))


@settings(max_examples=15)
@given(seed=st.integers(0, 99), depth=st.integers(1, 4), opset=st.sampled_from([11, 13, 17]))
def test_loading_twice_gives_the_same_bytes(seed, depth, opset):
    g = GraphBuilder("random", seed=seed, opset=opset)
    x = g.input("x", (1, 3, 8, 8))
    for _ in range(depth):
        x = g.op("Relu", g.batch_norm(g.conv(x, 4, 3)))
    g.output(g.op("Softmax", g.op("Flatten", x), axis=-1))
    first, second = checked(g), loaded(g)
    assert first.proto.SerializeToString() == second.proto.SerializeToString()
    assert [node.name for node in loaded(first.proto).nodes] == [node.name for node in first.nodes]


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", sorted(REAL))
def test_real_models_compute_the_same_after_loading(name):
    path = ASSETS / f"{name}.onnx"
    model = load(path, shapes=REAL[name])
    assert {o.domain: o.version for o in model.proto.opset_import}[""] >= 17
    assert all(out in model.types for node in model.nodes for out in node.outputs if out)
    assert not {"BatchNormalization", "Constant", "Shape"}.intersection(operators(model))
    feeds = feeds_for(model, 0)
    for before, after in zip(run_onnxruntime(path, feeds), run_onnxruntime(model.proto, feeds), strict=True):
        assert np.abs(before - after).max() <= 1e-3 * np.ptp(before)


def test_types_behind_group_normalization_are_inferred():
    g = GraphBuilder("groups", opset=21)
    x = g.conv(g.input("x", (1, 3, 8, 8)), 8, 3)
    y = g.op("GroupNormalization", x, g.const([1.0] * 8), g.const([0.0] * 8), num_groups=2, outputs="normed")
    g.output(g.op("Relu", y), (1, 8, 8, 8), name="y")
    proto = g.build()
    del proto.graph.value_info[:]
    model = loaded(proto)
    assert model.types["normed"] == TensorType("float", (1, 8, 8, 8))
    assert operators(model) == ["Conv", "GroupNormalization", "Relu"]
    assert model.nodes[1].attributes["num_groups"] == 2
    assert len(model.nodes[1].inputs) == 3


@pytest.mark.parametrize("shape", [(1, 4), ("N", 4)])
def test_uninferable_output_keeps_its_declared_shape(shape):
    g = GraphBuilder("whirl")
    g.output(g.op("Relu", g.op("Whirl", g.input("x", (1, 4)), domain="com.example")), shape, name="y")
    model = loaded(g)
    dims = model.proto.graph.output[0].type.tensor_type.shape.dim
    assert tuple(dim.dim_param or dim.dim_value for dim in dims) == shape
    onnx.checker.check_model(model.proto)


def test_float16_model_is_upgraded_to_opset_19():
    g = GraphBuilder("half", opset=13)
    weight = g.const(np.ones((8, 3, 1, 1), np.float16))
    g.output(g.op("Conv", g.input("x", (1, 3, 8, 8), "float16"), weight))
    model = loaded(g)
    assert [opset.version for opset in model.proto.opset_import] == [19]
    inserter = Inserter(model, OPENVINO, {"x": (-1.0, 1.0)})
    onnx.checker.check_model(inserter.insert(everywhere(model, OPENVINO)), full_check=True)
