"""`qdq quantize` with backend `qdq`, and what both backends have in common."""

import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_models import run_onnxruntime
from small import qdq
from spec_runs import E4M3, E5M2, NATIVE, layer, quantize_model

from harness.base.errors import UserError
from harness.cli.common import short_path
from harness.compat.tao_specs.dataset import loader_feeds
from harness.compat.tao_specs.quantize import QuantizationResult
from harness.graph.builder import GraphBuilder
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.measure import provenance
from harness.results.output_check import not_checked


def stored(found: QuantizationResult) -> Mapping[str, str]:
    """Return the precision of each quantized node."""
    return {edge.consumer: precision for edge, precision in QDQGraph(onnx.load(found.path)).edges.items()}


def tensor_types(found: QuantizationResult) -> set[int]:
    return {tensor.data_type for tensor in onnx.load(found.path).graph.initializer}


@pytest.fixture
def data(noise):
    return f"calibration_data: {noise}"


def test_each_layer_is_quantized_as_asked_and_the_file_runs(small, noise, data, tmp_path):
    layers = ", ".join([layer("/head*", E4M3), layer("/backbone/conv2/Conv", E5M2), layer("Conv")])
    found = quantize_model(small, tmp_path, layers, dataset=data)
    assert found.path == tmp_path / "results/quantized_model.onnx"
    expected = {"/backbone/conv1/Conv": "int8", "/backbone/conv2/Conv": "fp8e5m2", "/head/fc/Gemm": "fp8"}
    assert expected.items() <= stored(found).items()
    assert "/backbone/add/Add" not in stored(found)
    assert {TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2} <= tensor_types(found)
    feeds = {"images": np.load(noise)[:1]}
    reference, outputs = (outputs_of(path, feeds)["logits"] for path in (small, found.path))
    assert np.abs(outputs - reference).max() < 0.1 * np.abs(reference).max()


def outputs_of(path: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    names = [value.name for value in onnx.load(path).graph.output]
    return dict(zip(names, run_onnxruntime(path, feeds, names, optimize=False), strict=True))


def test_example_of_the_spec_document_runs(small, noise, tmp_path, capsys, monkeypatch):
    """Section 9.5 without changes except for paths and backend; paths start from the folder of the spec file."""
    shutil.copy(small, tmp_path / "model.onnx")
    shutil.copy(noise, tmp_path / "calib.npy")
    (tmp_path / "spec.yaml").write_text("""
quantize:
  model_path: "model.onnx"
  results_dir: "quantized_output"
  backend: "qdq"
  mode: "static_ptq"
  algorithm: "minmax"
  layers:
    - module_name: "Conv"
      weights: { dtype: "int8" }
      activations: { dtype: "int8" }
    - module_name: "Gemm"
      weights: { dtype: "int8" }
      activations: { dtype: "int8" }
dataset:
  calibration_data: "calib.npy"
""")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setattr(provenance, "describe_environment", dict)  # no GPU
    assert qdq("quantize", str(tmp_path / "spec.yaml")) == 0
    written = short_path(tmp_path / "quantized_output/quantized_model.onnx")
    expected = ["Conv\t2 int8", "Gemm\t1 int8", f"{written}: calibrated on 4 samples of calib.npy"]
    *shown, not_checked, not_compiled, command = capsys.readouterr().out.splitlines()
    assert shown == expected
    assert not_checked.startswith("not checked: ")
    assert "qdq-bench[rtx]" in not_compiled
    assert command.endswith(f"trtexec --onnx={written} --stronglyTyped --saveEngine={written.with_suffix('.engine')}")
    onnx.checker.check_model(tmp_path / "quantized_output/quantized_model.onnx", full_check=True)


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3fn", 448.0), ("fp8_e5m2", 57344.0), ("int8", 127.0)])
def test_scales_map_the_largest_weight_to_the_largest_value(dtype, largest, small, data, tmp_path):
    found = quantize_model(small, tmp_path, layer("Gemm", f"weights: {{dtype: {dtype}}}"), dataset=data)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(found.path).graph.initializer}
    weight = next(t for t in onnx.load(small).graph.initializer if t.name == "/head/fc/Gemm_weight")
    scale = next(v for n, v in tensors.items() if n.startswith("/head/fc/Gemm_weight") and n.endswith(".scale"))
    assert scale == pytest.approx(np.abs(onnx.numpy_helper.to_array(weight)).max(axis=1) / largest)


def test_weight_only_quantization_and_skip_names(small, data, tmp_path):
    found = quantize_model(small, tmp_path, layer("*", "weights: {dtype: int8}"), "skip_names: [/head]", data)
    edges = QDQGraph(onnx.load(found.path)).edges
    assert {(e.consumer, e.slot) for e in edges} == {("/backbone/conv1/Conv", 1), ("/backbone/conv2/Conv", 1)}
    assert found.layers == {"Conv": {"int8": 2}}


def test_first_matching_native_entry_excludes_a_layer(small, data, tmp_path):
    found = quantize_model(small, tmp_path, f"{layer('/backbone/conv1*', NATIVE)}, {layer('*')}", dataset=data)
    assert set(stored(found)) == {"/backbone/conv2/Conv", "/head/fc/Gemm"}


def test_backend_kwargs_dialect_selects_the_dialect(small, data, tmp_path):
    dialect = "backend_kwargs: {dialect: onnxruntime}"
    assert TensorProto.UINT8 in tensor_types(quantize_model(small, tmp_path, layer("*"), dialect, data))
    for layers, extra, problem in (
        (layer("*", E4M3), dialect, r"dialect 'onnxruntime' has int8, but got fp8_e4m3fn"),
        (layer("*"), "backend_kwargs: {simplify: true}", r"backend_kwargs.simplify: .* takes only 'dialect'"),
        (layer("*"), "backend_kwargs: {dialect: tensorflow}", r"'tensorflow'; did you mean 'tensorrt'"),
    ):
        with pytest.raises(UserError, match=problem):
            quantize_model(small, tmp_path, layers, extra, data)


@pytest.mark.parametrize("method", ["minmax", "max", "entropy"])
def test_every_algorithm_is_accepted(method, small, data, tmp_path):
    found = quantize_model(small, tmp_path, layer("*"), f"algorithm: {method}", data)
    assert found.layers["Conv"] == {"int8": 2}


class Tensor:
    """Methods of a framework's tensor."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def detach(self) -> Any:
        return self

    cpu = detach

    def numpy(self) -> Any:
        return self._array


IMAGES = np.ones((3, 3, 8, 8), np.float32)


@pytest.mark.parametrize(
    "batch",
    [
        IMAGES, Tensor(IMAGES), (IMAGES, "labels"), [IMAGES, "labels"], ({"images": IMAGES}, 1), {"images": IMAGES},
        {"input": IMAGES, "label": 1}, {"data": IMAGES}, {"x": Tensor(IMAGES)},
    ],
)  # fmt: skip
def test_valid_batches_of_a_loader(batch, small, tmp_path):
    found = quantize_model(small, tmp_path, layer("Gemm"), loader=[batch, batch])
    assert found.calibrated_on == "a data loader"
    assert found.layers == {"Gemm": {"int8": 1}}


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"labels": IMAGES}, "a mapping with the keys 'labels', but expected are 'images', or .* one of input"),
        ((), "calibration batch 1: an empty tuple"),
        ("images.png", "an array of numbers .* got str"),
        (np.ones((1, 3, 9, 9), np.float32), "'images' is 3 x 9 x 9, but the input takes 1 x 3 x 8 x 8"),
    ],
)
def test_invalid_batches_of_a_loader(batch, problem, small, tmp_path):
    with pytest.raises(UserError, match=problem):
        quantize_model(small, tmp_path, layer("Gemm"), loader=[batch])


def test_stereo_images_feed_inputs_by_name():
    types = {"right_image": ("float", (1, 2)), "left_image": ("float", (1, 2))}
    batch = {"images_left": np.zeros((1, 2)), "images_right": np.ones((1, 2))}
    (feed,) = loader_feeds([batch], types)
    assert feed["left_image"].tolist() == [[0, 0]]
    assert feed["right_image"].tolist() == [[1, 1]]
    assert feed["right_image"].dtype == np.float32
    with pytest.raises(UserError, match="different numbers of samples"):
        list(loader_feeds([{**batch, "images_left": np.zeros((2, 2))}], types))


def test_calibration_from_npz_and_image_folder(small, detector, coco, noise, tmp_path):
    np.savez(tmp_path / "calib.npz", images=np.load(noise))
    found = quantize_model(small, tmp_path, layer("Gemm"), dataset=f"calibration_data: {tmp_path}/calib.npz")
    assert found.calibrated_on.startswith("4 samples")
    images = f"calibration_data: {coco}/train2017, preprocess: shapes, samples: 2"
    assert quantize_model(detector, tmp_path, layer("Conv"), dataset=images).calibrated_on.startswith("2 of the 8 sam")


def test_missing_data_uses_random_numbers_with_a_warning(small, tmp_path, caplog):
    assert quantize_model(small, tmp_path, layer("Gemm")).calibrated_on == "random data"
    assert "random numbers are used (dummy data): do not trust any accuracy" in caplog.text


def test_test_data_sources_replace_missing_calibration_data(detector, coco, tmp_path, caplog):
    dataset = f"test_data_sources: {{image_dir: {coco}/val2017}}, preprocess: shapes, samples: 2"
    found = quantize_model(detector, tmp_path, layer("Conv"), dataset=dataset)
    assert found.calibrated_on.startswith("2 of the 24 sam")
    assert "not given, so test_data_sources are used" in caplog.text


@pytest.mark.parametrize(
    "case",
    [
        (f"{layer('Convv')}, {layer('Gemm')}", "", "'Convv' matches no node; did you mean 'Conv'?"),
        (layer("Gemm"), "skip_names: [/had/*]", "skip_names: '/had/*' matches no node; did you mean '/head'"),
        (layer("Gemm"), "skip_names: [/nothing/*]", "'/nothing/*' matches no node; known: /backbone"),
        (f"{layer('Gemm')}, {layer('/head/fc/*', E4M3)}", "", "'/head/fc/*' belong to entries above"),
        (f"{layer('Gemm')}, {layer('Relu')}", "", "none of the 2 nodes of 'Relu' may be quantized"),
        (layer("Gemm"), "default_layer_dtype: int8", "quantize.default_layer_dtype: int8 is ignored"),
        (layer("Gemm"), "default_activation_dtype: native", "default_activation_dtype: native is ignored"),
        (layer("*"), "preset: rtdetr", "'/encoder/*' matches no node"),
        (layer("Gemm"), "device: cuda", "quantize.device: cuda: backend qdq calibrates on the CPU"),
        (layer("Gemm", E5M2), "", "TensorRT takes FP8 only as E4M3"),
        (layer("Gemm"), "", "its dynamic batch is 1 in the result"),
    ],
)
def test_unmatched_and_ignored_entries_are_warned_about(case, small, data, tmp_path, caplog):
    layers, extra, warning = case
    caplog.set_level(logging.WARNING)
    quantize_model(small, tmp_path, layers, extra, data)
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("{module_name: Conv, weights: {dtype: int8}, activations: {dtype: fp8_e4m3fn}}", "no runtime multiplies"),
        (layer("Conv", NATIVE), "every dtype is native, so there is nothing to quantize"),
        (layer("LSTM"), "nothing is left to quantize"),
    ],
)
def test_invalid_layers_are_refused(layers, problem, small, data, tmp_path):
    with pytest.raises(UserError, match=problem):
        quantize_model(small, tmp_path, layers, dataset=data)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.pth", b"PK\x03\x04", "quantize.model_path: .*model.pth is a PyTorch file.* export it"),
        ("model.bin", b"x", "the name of an ONNX file ends in .onnx, but got"),
        ("torch.onnx", b"PK\x03\x04archive/data.pkl", "is called .onnx, but is a PyTorch file"),
        ("pickled.onnx", b"\x80\x02}q\x00.", "is called .onnx, but is a PyTorch file"),
        ("text.onnx", b"not a model", "not an ONNX file"),
        ("none.onnx", b"", "quantize.model_path: .*none.onnx: no such file or folder"),
    ],
)
def test_other_files_than_float_onnx_models_are_refused(name, content, problem, tmp_path):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        quantize_model(tmp_path / name, tmp_path, layer("Conv"))


def test_a_quantized_model_is_refused(small, data, tmp_path):
    done = quantize_model(small, tmp_path, layer("Conv"), dataset=data)
    with pytest.raises(UserError, match=r"has Q/DQ pairs already \(int8\)"):
        quantize_model(done.path, tmp_path, layer("Conv"), dataset=data)


def test_mismatched_calibration_data_is_refused(small, detector, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "calib.txt").touch()
    np.save(tmp_path / "wrong.npy", np.ones((2, 3, 9, 9), np.float32))
    for model, dataset, problem in (
        (small, "empty", "dataset.preprocess: .*empty holds images"),
        (small, "calib.txt", "expected a folder of images, a .npy or an .npz file, but got calib.txt"),
        (small, "wrong.npy", "array 'images' is 3 x 9 x 9, but the input takes 1 x 3 x 8 x 8"),
        (detector, "empty, preprocess: shapes", r"dataset.calibration_data: no images \(.*\) in"),
    ):
        with pytest.raises(UserError, match=problem):
            quantize_model(model, tmp_path, layer("Conv"), dataset=f"calibration_data: {tmp_path}/{dataset}")


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ("", r"input 'images' is Nx3xHxW: .* dataset.dims, .*\{H: 640, W: 640\}"),
        ("calibration_data: {noise}", ""),
        ("calibration_data: {noise}, shapes: {{images: 1x3x8x8}}", ""),
        ("calibration_data: {noise}, dims: {{H: 8, W: 8}}", ""),
        ("calibration_data: {noise}, shapes: {{image: 1x3x8x8}}", "dataset.shapes.image: .*did you mean 'images'"),
    ],
)
def test_input_with_several_dynamic_dimensions(dataset, problem, tmp_path, noise):
    g = GraphBuilder("wide", seed=1)
    g.output(g.conv(g.input("images", ("N", 3, "H", "W")), 32, 3), name="y")
    model, dataset = g.save(tmp_path / "wide.onnx"), dataset.format(noise=noise)
    if problem:
        with pytest.raises(UserError, match=problem):
            quantize_model(model, tmp_path, layer("Conv"), dataset=dataset)
    else:
        assert quantize_model(model, tmp_path, layer("Conv"), dataset=dataset).layers["Conv"] == {"int8": 1}


def test_commands_print_counts_or_json(monkeypatch, tmp_path, capsys):
    done = QuantizationResult(
        path=tmp_path / "q.onnx", layers={"Conv": {"int8": 2}}, calibrated_on="8 samples", check=not_checked("no GPU")
    )
    monkeypatch.setattr("harness.compat.tao_specs.quantize.quantize", lambda *_, **__: done)
    monkeypatch.setattr("harness.compat.tao_specs.ptq.run_ptq", lambda given: ["a"] if "--defaults" in given else done)
    monkeypatch.chdir(tmp_path)
    layers = "[{module_name: Conv, weights: {dtype: int8}}]"
    (tmp_path / "s.yaml").write_text(f"quantize: {{model_path: m.onnx, layers: {layers}}}")
    for command in (("quantize", "s.yaml"), ("ptq",)):
        assert qdq(*command, "--json") == 0
        assert json.loads(capsys.readouterr().out)["layers"] == {"Conv": {"int8": 2}}
    assert qdq("ptq") == 0
    assert capsys.readouterr().out.splitlines()[0] == "Conv\t2 int8"
    assert qdq("ptq", "--defaults") == 0
    assert capsys.readouterr().out == "a\n"
