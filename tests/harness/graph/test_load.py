"""Loading: a loaded model equals its file, and errors name the damage of a file."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper, parser
from onnx_models import run_onnxruntime

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.io import files as write_module
from harness.graph.io.files import write_model
from harness.graph.load import load, load_proto, save_to_folder
from harness.graph.model import Model, TensorType
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO

ASSETS = Path(os.environ.get("QDQ_ASSETS", "")) / "models"
REAL = {
    "yolox_nano": {}, "nanodet_m_320": {}, "deeplabv3_mnv2_voc_513": {}, "squeezenet1.1": {"data": "1x3x224x224"},
    "mobilenet_v1_0.75_224": {"input": "1x3x224x224"}, "deit_tiny_patch16_224": {"input": (1, 3, 224, 224)},
}  # fmt: skip


def feeds_for(model: Model, seed: int = 0) -> dict[str, npt.NDArray[np.generic]]:
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


def assert_same(original: onnx.ModelProto, model: Model, tolerance: float = 1e-4, seed: int = 0) -> None:
    feeds = feeds_for(model, seed)
    for before, after in zip(run_onnxruntime(original, feeds), run_onnxruntime(model.proto, feeds), strict=True):
        assert before.dtype == after.dtype
        if before.dtype == object:
            assert (before == after).all()
        else:
            np.testing.assert_allclose(after, before, rtol=0, atol=tolerance)


def ready(proto: onnx.ModelProto, shapes: Mapping[str, str | tuple[int, ...]] | None = None) -> Model:
    return load_proto(proto, source="m.onnx", sha256="0", shapes=shapes or {})


def small(opset: int = 17, batch: int | str = 1) -> onnx.ModelProto:
    builder = GraphBuilder("small", opset=opset)
    x = builder.input("x", (batch, 3, 8, 8))
    builder.output(builder.op("Relu", builder.conv(x, 4, 3)), name="y")
    return builder.build()


def with_external_data(folder: Path, location: str = "weights.bin") -> Path:
    path = folder / "model.onnx"
    onnx.save_model(small(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(proto.SerializeToString())
    return path


class TestReading:
    def test_file_is_loaded_with_nodes_and_types(self, tmp_path):
        path = tmp_path / "m.onnx"
        path.write_bytes(small().SerializeToString())
        model = load(path)
        assert model.source == str(path)
        assert (model.inputs, model.outputs) == (("x",), ("y",))
        assert [node.op for node in model.nodes] == ["Conv", "Relu"]
        assert model.types["y"] == TensorType("float", (1, 4, 8, 8))
        assert_same(small(), model)

    @pytest.mark.parametrize(
        "content", [b"\x89PNG\r\n\x1a\n and more", b"PK\x03\x04model", b"just text\n", b"\x00" * 64]
    )
    def test_non_onnx_file_is_refused(self, tmp_path, content):
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cat: not an ONNX file \(it starts with .*export the model to ONNX"):
            load(path, source="cat")

    def test_empty_file_is_refused(self, tmp_path):
        (tmp_path / "m.onnx").touch()
        with pytest.raises(UserError, match="the file is empty; fetch or export the model again"):
            load(tmp_path / "m.onnx")

    def test_missing_file_and_folder_are_refused(self, tmp_path):
        with pytest.raises(UserError, match="no such file"):
            load(tmp_path / "m.onnx")
        with pytest.raises(UserError, match=r"this is a folder; name the .onnx file in it"):
            load(tmp_path)
        os.mkfifo(tmp_path / "pipe.onnx")
        with pytest.raises(UserError, match="this is no file, but a pipe or a device"):
            load(tmp_path / "pipe.onnx")

    def test_git_lfs_pointer_is_refused(self, tmp_path):
        (tmp_path / "m.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
        with pytest.raises(UserError, match=r"Git LFS pointer.*run 'git lfs pull'"):
            load(tmp_path / "m.onnx")

    @settings(max_examples=40)
    @given(share=st.floats(0.02, 0.999))
    def test_truncated_file_is_refused(self, tmp_path_factory, share):
        raw = small().SerializeToString()
        path = tmp_path_factory.mktemp("cut") / "m.onnx"
        path.write_bytes(raw[: max(3, int(share * len(raw)))])
        with pytest.raises(UserError, match=r"truncated or damaged .*\(\d+ bytes\)"):
            load(path)

    def test_external_data_is_read_and_hashed(self, tmp_path):
        path = with_external_data(tmp_path)
        first = load(path)
        assert_same(small(), first)
        data = bytearray((tmp_path / "weights.bin").read_bytes())
        data[0] ^= 1
        (tmp_path / "weights.bin").write_bytes(data)
        assert load(path).sha256 != first.sha256

    @pytest.mark.parametrize("location", ["weights.bin", "..\\weights.bin"])
    def test_missing_external_data_is_named(self, tmp_path, location):
        path = with_external_data(tmp_path, location)
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(UserError, match=r"data '.*weights.bin' with the weights 'Conv_\w+' is missing; put"):
            load(path)

    def test_weight_size_must_match_its_shape(self, tmp_path):
        builder = GraphBuilder("tiny")
        builder.output(builder.gemm(builder.input("x", (1, 4)), 3), name="y")
        proto = builder.build()
        weight = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2)
        weight.raw_data = weight.raw_data[:-8]
        (tmp_path / "short.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(UserError, match=r"tensor 'Gemm_weight' of shape \[3, 4\] has 40 bytes, but needs 48"):
            load(tmp_path / "short.onnx")

    def test_truncated_external_data_is_refused(self, tmp_path):
        path = with_external_data(tmp_path)
        (tmp_path / "weights.bin").write_bytes(b"\x00" * 10)
        with pytest.raises(UserError, match=r"external data of 'Conv_.*' is truncated or damaged"):
            load(path)

    @pytest.mark.parametrize("location", ["../outside.bin", "sub/../../outside.bin", "/etc/hostname", "C:\\w.bin", ""])
    def test_external_data_outside_the_folder_is_refused(self, tmp_path, location):
        (tmp_path / "outside.bin").write_bytes(b"\x00" * 10_000)
        folder = tmp_path / "model"
        folder.mkdir()
        with pytest.raises(UserError, match="outside of the model's folder, which is refused"):
            load(with_external_data(folder, location))

    def test_external_data_behind_a_symlink_is_refused(self, tmp_path):
        (tmp_path / "outside.bin").write_bytes(b"\x00" * 10_000)
        folder = tmp_path / "model"
        folder.mkdir()
        path = with_external_data(folder, "link.bin")
        (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
        with pytest.raises(UserError, match="outside of the model's folder"):
            load(path)


class TestChecking:
    def test_undefined_tensor_is_refused(self):
        proto = small()
        proto.graph.node[1].input[0] = "nowhere"
        with pytest.raises(UserError, match=r"m\.onnx: no valid ONNX model: .*'nowhere'.*export the model again"):
            ready(proto)

    def test_cycle_is_refused(self, capsys):
        builder = GraphBuilder("cycle")
        y = builder.op("Neg", builder.op("Relu", builder.input("x", (2, 3))))
        builder.output(y)
        proto = builder.build()
        proto.graph.node[0].input[0] = y
        with pytest.raises(UserError, match=r"its nodes cannot be put in order: .* cycle"):
            ready(proto)
        assert capsys.readouterr().out == ""

    def test_shapes_that_contradict_each_other(self, caplog):
        builder = GraphBuilder("wrong")
        x = builder.input("x", (2, 3))
        builder.output(builder.op("Relu", x), (2, 3))
        proto = builder.build()
        proto.graph.node[0].op_type = "MatMul"
        proto.graph.node[0].input.append("x")
        model = ready(proto)
        assert model.outputs[0] not in model.types
        assert "m.onnx: some shapes cannot be inferred: " in caplog.text
        assert "Incompatible dimensions for matrix multiplication" in caplog.text

    def test_outputs_declared_wrongly_are_inferred_anew(self):
        proto = small()
        proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 77
        assert ready(proto).types["y"].shape == (1, 4, 8, 8)

    def test_outputs_without_a_type_are_inferred(self):
        proto = small()
        proto.graph.output[0].ClearField("type")
        assert ready(proto).types["y"] == TensorType("float", (1, 4, 8, 8))

    @pytest.mark.parametrize("opset", [11, 17])
    @pytest.mark.parametrize("domain", ["", "TRT"])
    def test_unknown_operator_is_kept(self, domain, opset, caplog):
        builder = GraphBuilder("plugin", opset=opset)
        x = builder.op("Relu", builder.input("x", (1, 8)))
        found = builder.op("EfficientNMS_TRT", x, outputs=2, domain=domain, score=0.5, mode="fast")
        builder.output(builder.op("Relu", found[0]), (1, 4))
        builder.output(found[1], (1, 2))
        proto = helper.make_model(builder.graph(), opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        proto.graph.value_info.append(helper.make_tensor_value_info(found[0], onnx.TensorProto.FLOAT, (1, 4)))
        with caplog.at_level(logging.WARNING):
            model = ready(proto)
        plugin = model.nodes[1]
        assert (plugin.op, plugin.domain, plugin.opaque) == ("EfficientNMS_TRT", domain, True)
        assert plugin.attributes == {"score": 0.5, "mode": "fast"}
        assert not model.nodes[0].opaque
        assert model.types[found[0]].shape == (1, 4)  # as the file declares it
        named = f"{domain or 'ai.onnx'}.EfficientNMS_TRT"
        first, *others = [r.getMessage() for r in caplog.records]
        assert first == f"m.onnx: operators that ONNX does not define stay float: {named}"
        assert all("not compared" in message and "EfficientNMS_TRT" in message for message in others)
        assert len(others) == (opset < 17)  # else preparation changes nothing

    def test_tensors_behind_an_unknown_operator_are_untyped(self):
        builder = GraphBuilder("plugin")
        y = builder.op("Mystery", builder.input("x", (1, 8)), domain="acme")
        z = builder.op("Relu", y)
        builder.output(builder.op("Concat", z, z, axis=0), (2, 8))
        model = ready(builder.build())
        assert y not in model.types
        assert z not in model.types


class TestShapes:
    def test_dynamic_batch_is_set_to_1_with_one_warning(self, caplog):
        with caplog.at_level(logging.WARNING):
            model = ready(small(batch="N"))
        assert model.types["x"].shape == (1, 3, 8, 8)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "'N' is dynamic and set to 1" in line
        assert "--dim N=8" in line
        assert "dims: {N: 8}" in line

    def test_every_dynamic_input_is_named(self):
        builder = GraphBuilder("two")
        a, b = builder.input("input:0", (1, 3, "h", "w")), builder.input("tokens", (None, None))
        builder.output(builder.op("Relu", a))
        builder.output(builder.op("Relu", b))
        with pytest.raises(UserError, match=r"'input:0'.*1x3xhxw; input 'tokens'.*\?x\?") as caught:
            ready(builder.build())
        assert "'dims: {h: 224, w: 224}, shapes: {tokens: 1x128}'" in str(caught.value)
        assert "--dim h=224 --dim w=224 --shape tokens:1x128" in str(caught.value)

    @pytest.mark.parametrize("given_shape", ["2x3x8x8", (2, 3, 8, 8)])
    def test_given_shape_replaces_dynamic_dimensions(self, given_shape):
        model = ready(small(batch="N"), {"x": given_shape})
        assert {name: model.types[name].shape for name in ("x", "y")} == {"x": (2, 3, 8, 8), "y": (2, 4, 8, 8)}
        assert_same(small(batch="N"), model)

    def test_a_named_dimension_holds_for_every_input(self):
        builder = GraphBuilder("two")
        x = builder.op("Add", builder.input("a", ("N", 4)), builder.input("b", ("N", 4)))
        builder.output(x)
        assert ready(builder.build(), {"a": "3x4"}).types["b"].shape == (3, 4)

    def test_question_mark_dimensions_are_unnamed(self, tmp_path):
        """paddle2onnx writes "?" for every size that it does not know (PP-OCR's classifier: ?x3x?x?)."""
        builder = GraphBuilder("paddle")
        builder.output(builder.op("Relu", builder.input("a", ("?", 3, "?", "?"))), name="y")
        builder.output(builder.op("Relu", builder.input("b", ("?", 5))), name="z")
        model = ready(builder.build(), {"a": "1x3x48x192", "b": "2x5"})
        assert [model.types[name].shape for name in ("y", "z")] == [(1, 3, 48, 192), (2, 5)]
        assert ready(builder.build(), {"a": "4x3x48x192"}).types["z"].shape == (4, 5)
        with pytest.raises(UserError, match=r"input 'a' has the dynamic shape \?x3x\?x\?"):
            ready(builder.build(), {"b": "1x5"})
        with pytest.raises(UserError, match=r"no input has the name of the calibration data's 'images'"):
            load(builder.save(tmp_path / "m.onnx"), source="m.onnx", samples={"images": (3, 48, 192)})

    def test_different_sizes_of_one_dimension_are_refused(self):
        builder = GraphBuilder("square")
        builder.output(builder.op("Relu", builder.input("a", ("N", "side", "side"))))
        with pytest.raises(UserError, match=r"dimension 'side' of Nxsidexside has one size .* but got 4 and 5: 1x4x5"):
            ready(builder.build(), {"a": "1x4x5"})

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ({"X1": "1x3x8x8"}, r"shapes\.X1: the model has no such input; known: x"),
            ({"x": "1x3x8"}, r"shapes\.x: the input has 4 dimensions \(Nx3x8x8\), but got 3: 1x3x8"),
            ({"x": "1x4x8x8"}, r"shapes\.x: the input is fixed to Nx3x8x8 in the model, but got 1x4x8x8"),
            ({"x": "1x3x8xhuge"}, r"shapes\.x: a shape looks like 1x3x224x224, but got '1x3x8xhuge'"),
            ({"x": "0x3x8x8"}, r"shapes\.x: a shape looks like 1x3x224x224, but got '0x3x8x8'"),
            ({"x": ""}, r"shapes\.x: a shape looks like 1x3x224x224, but got ''"),
        ],
    )
    def test_mismatched_shapes_are_refused(self, shapes, message):
        with pytest.raises(UserError, match=message):
            ready(small(batch="N"), shapes)

    @settings(max_examples=20)
    @given(start=st.integers(-4, 4), end=st.integers(-4, 4))
    def test_shape_arithmetic_is_folded(self, start, end):
        builder = GraphBuilder("shape")
        x = builder.input("x", ("N", 3, 5, 7))
        size = builder.op("ReduceProd", builder.op("Shape", x, start=start, end=end), keepdims=0)
        builder.output(builder.op("Mul", builder.op("Mul", size, builder.op("Size", x)), builder.const(2)), name="y")
        builder.output(builder.op("Reshape", x, builder.op("Concat", builder.const([-1]), builder.const([7]), axis=0)))
        model = ready(builder.build(), {"x": "2x3x5x7"})
        assert [node.op for node in model.nodes] == ["Reshape"]
        assert_same(builder.build(), model)

    def test_integer_string_and_float_inputs_are_loaded(self):
        builder = GraphBuilder("many")
        ids, mask = builder.input("ids", ("B", 5), "int64"), builder.input("mask", ("B", 5), "float")
        words = builder.input("words", (2,), "string")
        table = builder.const(np.eye(30, 7, dtype=np.float32))
        scaled = builder.op("Mul", builder.op("Gather", table, ids), builder.op("Unsqueeze", mask, builder.const([-1])))
        builder.output(scaled)
        builder.output(builder.op("Identity", words))
        model = ready(builder.build(), {"ids": "3x5"})
        assert model.inputs == ("ids", "mask", "words")
        assert [model.types[name] for name in model.inputs] == [
            TensorType("int64", (3, 5)), TensorType("float", (3, 5)), TensorType("string", (2,))
        ]  # fmt: skip
        assert_same(builder.build(), model)


class TestCleaning:
    def test_constant_nodes_become_initializers(self):
        builder = GraphBuilder("constants")
        x = builder.input("x", (2, 3))
        for value in (
            builder.op("Constant", value_float=2.0),
            builder.op("Constant", value_floats=[1.0, 2.0, 3.0]),
            builder.op("Constant", value=helper.make_tensor("t", onnx.TensorProto.FLOAT, (1,), [0.5])),
        ):
            x = builder.op("Add", x, value)
        builder.output(builder.op("Reshape", x, builder.op("Constant", value_ints=[3, -1])))
        builder.output(builder.op("Constant", value_strings=["a", "b"]), name="words")
        model = ready(builder.build())
        assert [node.op for node in model.nodes] == ["Add", "Add", "Add", "Reshape"]
        assert len(model.constants) == 5
        assert_same(builder.build(), model)

    def test_constant_expressions_are_folded(self):
        builder = GraphBuilder("fold")
        x = builder.input("x", (2, 4))
        weight = builder.op("Transpose", builder.op("Neg", builder.const(np.ones((3, 4), np.float32))), perm=[1, 0])
        builder.output(builder.op("MatMul", x, weight))
        model = ready(builder.build())
        assert [node.op for node in model.nodes] == ["MatMul"]
        assert list(model.constants) == [weight]
        assert_same(builder.build(), model)

    def test_large_weights_are_processed_like_small_ones(self):
        builder = GraphBuilder("large", opset=13)
        x = builder.batch_norm(builder.conv(builder.input("x", (1, 32, 4, 4)), 32, 3))
        builder.conv(x, 32, 3)
        rng = np.random.default_rng(0)
        table, _ = (builder.const(rng.normal(size=(128, 64)).astype(np.float32)) for _ in range(2))
        turned = builder.op("Transpose", builder.op("Relu", table), perm=[1, 0])
        flat = builder.op("Reshape", x, builder.const([8, 64]))
        builder.output(builder.op("MatMul", flat, turned))
        model = ready(builder.build())
        assert [node.op for node in model.nodes] == ["Conv", "Reshape", "MatMul"]
        assert model.inputs == ("x",)
        assert {model.types[name].shape for name in model.constants} == {(32, 32, 3, 3), (32,), (2,), (64, 128)}
        assert_same(builder.build(), model)

    def test_quantized_weights_and_random_numbers_are_not_folded(self):
        builder = GraphBuilder("keep")
        x = builder.input("x", (1, 2))
        weight = builder.const(np.ones((2, 2), np.int8))
        real = builder.op("DequantizeLinear", weight, builder.const(0.5), builder.const(np.int8(0)))
        noise = builder.op("RandomNormal", shape=[1, 2])
        builder.output(builder.op("Add", builder.op("MatMul", x, real), noise))
        ops = [node.op for node in ready(builder.build()).nodes]
        assert sorted(ops) == ["Add", "DequantizeLinear", "MatMul", "RandomNormal"]

    def test_dead_nodes_and_weights_are_removed(self):
        builder = GraphBuilder("dead")
        x = builder.input("x", (1, 3, 8, 8))
        builder.conv(x, 9, 3)
        builder.output(builder.op("Relu", x))
        model = ready(builder.build())
        assert [node.op for node in model.nodes] == ["Relu"]
        assert not model.constants

    def test_dead_nodes_are_removed_despite_omitted_names(self):
        builder = GraphBuilder("dead")
        x = builder.input("x", (1, 3, 8, 8))
        builder.op("MaxPool", x, kernel_shape=[2, 2])
        builder.output(builder.op("Clip", x, "", builder.const(6.0)))
        proto = builder.build()
        proto.graph.node[0].output.append("")
        assert [node.op for node in ready(proto).nodes] == ["Clip"]

    def test_node_order_is_changed_only_if_invalid(self):
        builder = GraphBuilder("order")
        x = builder.input("x", (2, 3))
        deep = builder.op("Neg", builder.op("Abs", builder.op("Relu", x)))
        builder.output(builder.op("Add", deep, builder.op("Exp", x)))
        proto = builder.build()
        assert [node.op for node in ready(proto).nodes] == ["Relu", "Abs", "Neg", "Exp", "Add"]
        nodes = list(proto.graph.node)[::-1]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        model = ready(proto)
        assert all(model.producer.get(name, -1) < node.index for node in model.nodes for name in node.inputs)
        assert_same(builder.build(), model)

    @given(names=st.lists(st.sampled_from(["", "a", "a_1", "Relu_0", "Relu_1"]), min_size=1, max_size=6))
    @settings(max_examples=30)
    def test_node_names_are_kept_and_made_unique(self, names):
        builder = GraphBuilder("names")
        x = builder.input("x", (2,))
        for _ in names:
            x = builder.op("Relu", x)
        builder.output(x)
        proto = builder.build()
        for node, name in zip(proto.graph.node, names, strict=True):
            node.name = name
        given_names = [node.name for node in ready(proto).nodes]
        assert len(set(given_names)) == len(names)
        assert all(given_names)
        assert all(new == old for new, old in zip(given_names, names, strict=True) if old and names.count(old) == 1)

    def test_functions_are_inlined(self):
        proto = parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "my": 1]>
            twice (float[2,3] x) => (float[2,3] y) { t = my.silu(x)  y = my.silu(t) }
            <domain: "my", opset_import: ["": 17]> silu (x) => (y) { s = Sigmoid(x)  y = Mul(s, x) }"""
        )
        model = ready(proto)
        assert [(node.op, node.opaque) for node in model.nodes] == [("Sigmoid", False), ("Mul", False)] * 2
        assert_same(proto, model)

    def test_initializers_among_the_inputs_are_constants(self):
        proto = small()
        proto.ir_version = 3
        proto.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer
        )
        model = ready(proto)
        assert [value.name for value in model.proto.graph.input] == ["x"]
        assert_same(proto, model)

    def test_given_model_is_not_modified(self):
        proto = small(opset=11)
        before = proto.SerializeToString()
        ready(proto)
        assert proto.SerializeToString() == before


@pytest.mark.parametrize("places", [[0, 5], [[0, 0], [1, 1]]])
def test_sparse_weights_become_dense_ones(places):
    values = numpy_helper.from_array(np.array([1.0, 2.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places), "w_places"), [4, 4])
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[2,4] x) => (float[2,4] y) {y=MatMul(x, w)}'
    )
    proto.graph.sparse_initializer.append(sparse)
    (tensor,) = ready(proto).proto.graph.initializer
    expected = np.zeros((4, 4), np.float32)
    expected[0, 0], expected[1, 1] = 1.0, 2.0
    assert np.array_equal(numpy_helper.to_array(tensor), expected)


class TestSubgraphs:
    @pytest.mark.parametrize("opset", [11, 17])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_if_branches_read_outer_tensors(self, opset, seed):
        then, other = GraphBuilder("then", opset=opset), GraphBuilder("else", opset=opset)
        then.output(then.op("Add", then.op("Softmax", "r", axis=-1), "w", outputs=("then_out",))[0])
        other.output(other.op("Mul", "only_here", other.op("Mul", "w", "r"), outputs=("else_out",))[0])
        builder = GraphBuilder("if", opset=opset)
        x, condition = builder.input("x", (2, 3)), builder.input("condition", (), "bool")
        weight = builder.op("Neg", builder.const([1.0, 2.0, 3.0]), outputs=("w",))[0]
        builder.const([4.0, 5.0, 6.0], "only_here")
        relu = builder.op("Relu", x, outputs=("r",))[0]
        branch = builder.op("If", condition, then_branch=then.graph(), else_branch=other.graph())
        builder.output(branch, (2, 3))
        builder.output(builder.op("Add", relu, weight))
        model = ready(builder.build())
        node = next(node for node in model.nodes if node.op == "If")
        assert node.opaque
        assert node.attributes == {}
        assert node.captures == ("w", "r", "only_here")  # as they are read, and never by name
        assert model.captured == {"only_here", "r", "w"}
        assert_same(builder.build(), model, seed=seed)

    @pytest.mark.parametrize("opset", [11, 17])
    def test_loop_body_reads_outer_tensors(self, opset):
        body = parser.parse_graph(
            """body (int64 i, bool go, float[2,3] sum) => (bool still, float[2,3] next, float[2,3] row) {
            still = Identity(go)  next = Add(sum, step)  row = Mul(next, half) }"""
        )
        builder = GraphBuilder("loop", opset=opset)
        start = builder.op("Relu", builder.input("x", (2, 3)))
        builder.const([[1.0, 2.0, 3.0]] * 2, "step")
        builder.const(0.5, "half")
        last, rows = builder.op("Loop", builder.const(3), builder.const(True), start, outputs=2, body=body)
        builder.output(last, (2, 3))
        builder.output(rows, (3, 2, 3))
        model = ready(builder.build())
        assert [(node.op, node.opaque) for node in model.nodes] == [("Relu", False), ("Loop", True)]
        assert_same(builder.build(), model)

    def test_scan_is_loaded_as_an_opaque_node(self):
        body = parser.parse_graph(
            "body (float[3] sum, float[3] x) => (float[3] next, float[3] y) { next = Add(sum, x)  y = Neg(next) }"
        )
        builder = GraphBuilder("scan")
        x = builder.input("x", (4, 3))
        rows = builder.op("Scan", builder.const([0.0] * 3), x, outputs=2, body=body, num_scan_inputs=1)[1]
        builder.output(builder.op("Relu", rows))
        model = ready(builder.build())
        assert [(node.op, node.opaque) for node in model.nodes] == [("Scan", True), ("Relu", False)]
        assert_same(builder.build(), model)


class TestUpgrade:
    @pytest.mark.parametrize("opset", [7, 11, 13])
    def test_older_opsets_are_upgraded(self, opset):
        builder = GraphBuilder("old", opset=opset)
        x = builder.op("Dropout", builder.conv(builder.input("x", ("N", 3, 4, 4)), 4, 3))
        builder.output(builder.op("Softmax", builder.op("Flatten", x), axis=1))
        proto = builder.build()
        proto.metadata_props.add(key="author", value="me")
        model = load_proto(proto, source="m", sha256="0", shapes={"x": "2x3x4x4"}, min_opset=21)
        assert {o.domain: o.version for o in model.proto.opset_import}[""] == 21
        assert model.proto.ir_version <= 10
        assert [p.key for p in model.proto.metadata_props] == ["author"]
        assert_same(builder.build(), model)

    def test_newer_opset_is_kept(self):
        assert ready(small(opset=20)).proto.opset_import[0].version == 20

    def test_opset_without_upgrade_is_refused(self):
        proto = parser.parse_model(
            """<ir_version: 6, opset_import: ["": 7]> g (float[4,3,1,1] x, float[3] s) => (float[4,3,1,1] y)
            { y = BatchNormalization <spatial=0> (x, s, s, s, s) }"""
        )
        with pytest.raises(
            UserError, match=r"opset 7 cannot be upgraded to 17.*export the model with opset 17 or later"
        ):
            ready(proto)

    def test_opset_newer_than_onnx_is_refused(self):
        proto = small()
        proto.opset_import[0].version = 99
        with pytest.raises(UserError, match=r"opset 99 is newer than the installed onnx .*export the model with opset"):
            ready(proto)


class TestSaving:
    def test_saved_model_is_loaded_unchanged(self, tmp_path):
        model = ready(small())
        path = save_to_folder(model, tmp_path / "new" / "folder")
        assert path == tmp_path / "new" / "folder" / "model.onnx"
        assert load(path).proto == model.proto

    def test_large_models_are_saved_with_external_data(self, tmp_path, monkeypatch):
        monkeypatch.setattr(write_module, "MAX_SINGLE_FILE_BYTES", 1000)
        builder = GraphBuilder("large")
        builder.output(builder.conv(builder.input("x", (1, 64, 4, 4)), 64, 3))
        model = ready(builder.build())
        path = save_to_folder(model, tmp_path)
        assert path.stat().st_size < 5000 < (tmp_path / "model.onnx.data").stat().st_size
        first = (path.read_bytes(), (tmp_path / "model.onnx.data").read_bytes())
        write_model(model.proto, path)
        assert (path.read_bytes(), (tmp_path / "model.onnx.data").read_bytes()) == first
        assert_same(builder.build(), load(path))
        assert_same(builder.build(), model)

    @settings(max_examples=15)
    @given(seed=st.integers(0, 99), depth=st.integers(1, 4), opset=st.sampled_from([11, 13, 17]))
    def test_loading_twice_gives_the_same_bytes(self, seed, depth, opset):
        builder = GraphBuilder("random", seed=seed, opset=opset)
        x = builder.input("x", (1, 3, 8, 8))
        for _ in range(depth):
            x = builder.op("Relu", builder.batch_norm(builder.conv(x, 4, 3)))
        builder.output(builder.op("Softmax", builder.op("Flatten", x), axis=-1))
        proto = builder.build()
        first, second = ready(proto), ready(proto)
        assert first.proto.SerializeToString() == second.proto.SerializeToString()
        again = ready(first.proto)
        assert [node.name for node in again.nodes] == [node.name for node in first.nodes]
        assert_same(proto, first)


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("name", sorted(REAL))
def test_real_models_compute_the_same_after_loading(name):
    path = ASSETS / f"{name}.onnx"
    model = load(path, shapes=REAL[name])
    assert {o.domain: o.version for o in model.proto.opset_import}[""] >= 17
    assert all(out in model.types for node in model.nodes for out in node.outputs if out)
    assert not any(node.op in ("BatchNormalization", "Constant", "Shape") for node in model.nodes)
    feeds = feeds_for(model)
    for before, after in zip(run_onnxruntime(path, feeds), run_onnxruntime(model.proto, feeds), strict=True):
        assert np.abs(before - after).max() <= 1e-3 * np.ptp(before)


def test_types_behind_group_normalization_are_inferred():
    g = GraphBuilder("groups", opset=21)
    x = g.conv(g.input("x", (1, 3, 8, 8)), 8, 3)
    parameters = [g.const(np.full(8, value, np.float32)) for value in (1.0, 0.0)]
    (y,) = g.op("GroupNormalization", x, *parameters, num_groups=2, outputs=["normed"])
    g.output(g.op("Relu", y), (1, 8, 8, 8), name="y")
    proto = g.build()
    del proto.graph.value_info[:]
    model = load_proto(proto, source="groups", sha256="0")
    assert model.types["normed"] == TensorType("float", (1, 8, 8, 8))
    assert [node.op for node in model.nodes] == ["Conv", "GroupNormalization", "Relu"]
    assert model.nodes[1].attributes["num_groups"] == 2
    assert len(model.nodes[1].inputs) == 3


@pytest.mark.parametrize("shape", [(1, 4), ("N", 4)])
def test_uninferable_output_keeps_its_declared_shape(shape):
    g = GraphBuilder("whirl")
    g.output(g.op("Relu", g.op("Whirl", g.input("x", (1, 4)), domain="com.example")), shape, name="y")
    model = load_proto(g.build(), source="whirl", sha256="0")
    dims = model.proto.graph.output[0].type.tensor_type.shape.dim
    assert tuple(dim.dim_param or dim.dim_value for dim in dims) == shape
    onnx.checker.check_model(model.proto)


def test_float16_model_is_upgraded_to_opset_19():
    g = GraphBuilder("half", opset=13)
    weight = g.const(np.ones((8, 3, 1, 1), np.float16))
    g.output(g.op("Conv", g.input("x", (1, 3, 8, 8), "float16"), weight))
    model = load_proto(g.build(), source="half", sha256="0")
    assert [opset.version for opset in model.proto.opset_import] == [19]
    asked = build_space(model, OPENVINO)
    inserter = Inserter(model, OPENVINO, {"x": (-1.0, 1.0)})
    onnx.checker.check_model(inserter.insert(asked.resolve(asked.quantize_all())), full_check=True)
