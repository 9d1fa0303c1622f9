"""`qdq quantize`: both backends, what they do alike, and what only ours does."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from typer.testing import CliRunner

from harness.cli.common import short_path
from harness.cli.main import app
from harness.compat.tao_specs.quantize import QuantizationResult, quantize
from harness.compat.tao_specs.spec import parse_spec, require_section
from harness.errors import UserError
from harness.graph.qdq.read_edges import read_qdq_edges

INT8 = "weights: {dtype: int8}, activations: {dtype: int8}"
E4M3 = "weights: {dtype: fp8_e4m3fn}, activations: {dtype: fp8_e4m3fn}"
E5M2 = "weights: {dtype: fp8_e5m2}, activations: {dtype: fp8_e5m2}"
NATIVE = "weights: {dtype: native}, activations: {dtype: native}"


def run(
    model: Path, folder: Path, layers: str, *, extra: str = "", data: Path | None = None, loader: Any = None
) -> QuantizationResult:
    text = f"quantize:\n  model_path: {model}\n  backend: qdq\n  layers: [{layers}]\n{extra}\n"
    if data is not None:
        text += f"dataset: {{calibration_data: {data}}}\n"
    spec = parse_spec(text, "spec.yaml")
    return quantize(
        require_section(spec.quantize, "quantize", "spec.yaml"), spec.dataset, folder, folder / "results", loader
    )


def stored(found: QuantizationResult) -> Mapping[str, str]:
    """Precision by node."""
    return {edge.consumer: precision for edge, precision in read_qdq_edges(onnx.load(found.path)).items()}


def layer(name: str, dtypes: str) -> str:
    return f"{{module_name: {name!r}, {dtypes}}}"


def test_each_layer_is_quantized_as_asked_and_the_file_runs(small: Path, noise: Path, tmp_path: Path) -> None:
    """INT8 here, FP8 there, native elsewhere: what the document calls a critical limitation."""
    layers = ", ".join([layer("/head*", E4M3), layer("/backbone/conv2/Conv", E5M2), layer("Conv", INT8)])
    found = run(small, tmp_path, layers, data=noise)
    assert found.path == tmp_path / "results/quantized_model.onnx"
    expected = {"/backbone/conv1/Conv": "int8", "/backbone/conv2/Conv": "fp8e5m2", "/head/fc/Gemm": "fp8"}
    assert expected.items() <= stored(found).items()
    assert "/backbone/add/Add" not in stored(found)
    kinds = {tensor.data_type for tensor in onnx.load(found.path).graph.initializer}
    assert {TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2} <= kinds
    feeds = {"images": np.load(noise)[:1]}
    reference, outputs = (outputs_of(path, feeds)["logits"] for path in (small, found.path))
    assert np.abs(outputs - reference).max() < 0.1 * np.abs(reference).max()


def test_one_word_of_the_documents_example_is_changed(small: Path, noise: Path, tmp_path: Path) -> None:
    """Section 9.5 as it stands, paths and backend apart; paths start from the folder of the spec file."""
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
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "spec.yaml")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:2] == ["Conv\t2 int8", "Gemm\t1 int8"]
    written = short_path(tmp_path / "quantized_output/quantized_model.onnx")
    assert f"{written}: calibrated on 4 samples of calib.npy" in done.output
    onnx.checker.check_model(tmp_path / "quantized_output/quantized_model.onnx", full_check=True)


def outputs_of(path: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3fn", 448.0), ("fp8_e5m2", 57344.0), ("int8", 127.0)])
def test_scales_map_the_largest_weight_to_the_largest_value(
    dtype: str, largest: float, small: Path, noise: Path, tmp_path: Path
) -> None:
    found = run(small, tmp_path, f"{{module_name: Gemm, weights: {{dtype: {dtype}}}}}", data=noise)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(found.path).graph.initializer}
    weight = next(t for t in onnx.load(small).graph.initializer if t.name == "/head/fc/Gemm_weight")
    scale = next(v for n, v in tensors.items() if n.startswith("/head/fc/Gemm_weight") and n.endswith(".scale"))
    assert scale == pytest.approx(np.abs(onnx.numpy_helper.to_array(weight)).max(axis=1) / largest)


def test_weights_alone_and_skipped_layers(small: Path, noise: Path, tmp_path: Path) -> None:
    found = run(
        small, tmp_path, "{module_name: '*', weights: {dtype: int8}}", extra="  skip_names: [/head]", data=noise
    )
    edges = read_qdq_edges(onnx.load(found.path))
    assert {(edge.consumer, edge.slot) for edge in edges} == {
        ("/backbone/conv1/Conv", 1), ("/backbone/conv2/Conv", 1)
    }  # fmt: skip
    assert found.layers == {"Conv": {"int8": 2}}


def test_native_entries_come_first_to_take_layers_out(small: Path, noise: Path, tmp_path: Path) -> None:
    found = run(small, tmp_path, f"{layer('/backbone/conv1*', NATIVE)}, {layer('*', INT8)}", data=noise)
    assert set(stored(found)) == {"/backbone/conv2/Conv", "/head/fc/Gemm"}


def test_the_dialect_is_a_word_of_the_spec(small: Path, noise: Path, tmp_path: Path) -> None:
    extra = "  backend_kwargs: {dialect: onnxruntime}"
    found = run(small, tmp_path, layer("*", INT8), extra=extra, data=noise)
    kinds = {tensor.data_type for tensor in onnx.load(found.path).graph.initializer}
    assert TensorProto.UINT8 in kinds
    with pytest.raises(UserError, match=r"dialect 'onnxruntime' has int8, but got fp8_e4m3fn"):
        run(small, tmp_path, layer("*", E4M3), extra=extra, data=noise)
    with pytest.raises(UserError, match=r"backend_kwargs.simplify: backend 'qdq' takes 'dialect' alone"):
        run(small, tmp_path, layer("*", INT8), extra="  backend_kwargs: {simplify: true}", data=noise)
    with pytest.raises(UserError, match=r"no dialect is called 'tensorflow'; did you mean 'tensorrt'"):
        run(small, tmp_path, layer("*", INT8), extra="  backend_kwargs: {dialect: tensorflow}", data=noise)


@pytest.mark.parametrize("method", ["minmax", "max", "entropy"])
def test_algorithms(method: str, small: Path, noise: Path, tmp_path: Path) -> None:
    assert run(small, tmp_path, layer("*", INT8), extra=f"  algorithm: {method}", data=noise).layers["Conv"] == {
        "int8": 2
    }


class Tensor:
    """What a framework's tensor has."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

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
def test_batches_of_a_loader(batch: Any, small: Path, tmp_path: Path) -> None:
    found = run(small, tmp_path, layer("Gemm", INT8), loader=[batch, batch])
    assert found.calibrated_on == "a data loader"
    assert found.layers == {"Gemm": {"int8": 1}}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"labels": IMAGES},
            "a mapping with the keys 'labels', but wanted are 'images', or for one input one of input",
        ),
        ((), "calibration batch 1: an empty tuple"),
        ("images.png", "an array of numbers is wanted, but got str"),
        (np.ones((1, 3, 9, 9), np.float32), "a sample of 'images' is 3 x 9 x 9, but the input takes 3 x 8 x 8"),
    ],
)
def test_batches_that_are_none(batch: Any, said: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(small, tmp_path, layer("Gemm", INT8), loader=[batch])


def test_left_and_right_images() -> None:
    from harness.compat.tao_specs.calibration_feeds import loader_feeds

    types = {"right_image": ("float", (1, 2)), "left_image": ("float", (1, 2))}
    batch = {"images_left": np.zeros((1, 2)), "images_right": np.ones((1, 2))}
    (feed,) = loader_feeds([batch], types)
    assert feed["left_image"].tolist() == [[0, 0]]
    assert feed["right_image"].tolist() == [[1, 1]]
    assert feed["right_image"].dtype == np.float32


def test_calibration_from_an_npz_and_from_a_folder_of_images(
    small: Path, detector: Path, coco: Path, noise: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "calib.npz", images=np.load(noise))
    assert run(small, tmp_path, layer("Gemm", INT8), data=tmp_path / "calib.npz").calibrated_on.startswith("4 samples")
    text = f"""
quantize: {{model_path: {detector}, backend: qdq, layers: [{layer("Conv", INT8)}]}}
dataset: {{calibration_data: {coco}/train2017, preprocess: shapes, samples: 2}}
"""
    spec = parse_spec(text, "s")
    assert quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path).calibrated_on.startswith(
        "2 of the 8 sam"
    )


def test_without_data_random_numbers_are_used_and_said(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(small, tmp_path, layer("Gemm", INT8)).calibrated_on == "random data"
    assert "random numbers are used (dummy data): do not trust any accuracy" in caplog.text


def test_the_images_of_the_evaluation_are_taken_and_said(
    detector: Path, coco: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"""
quantize: {{model_path: {detector}, backend: qdq, layers: [{layer("Conv", INT8)}]}}
dataset: {{test_data_sources: {{image_dir: {coco}/val2017}}, preprocess: shapes, samples: 2}}
"""
    spec = parse_spec(text, "s")
    assert quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path).calibrated_on.startswith(
        "2 of the 24 sam"
    )
    assert "the accuracy on them will look better than it is on others" in caplog.text


@pytest.mark.parametrize(
    "case",
    [
        (f"{layer('Convv', INT8)}, {layer('Gemm', INT8)}", "", "'Convv' matches no node; did you mean 'Conv'?"),
        (layer("Gemm", INT8), "  skip_names: [/had/*]", "skip_names: '/had/*' matches no node; did you mean '/head'"),
        (
            f"{layer('Gemm', INT8)}, {layer('/head/fc/*', E4M3)}",
            "",
            "all nodes of '/head/fc/*' belong to entries above",
        ),
        (f"{layer('Gemm', INT8)}, {layer('Relu', INT8)}", "", "none of the 2 nodes of 'Relu' may be quantized"),
        (layer("Gemm", INT8), "  default_layer_dtype: int8", "quantize.default_layer_dtype: int8 is ignored"),
        (layer("Gemm", INT8), "  default_activation_dtype: native", "default_activation_dtype: native is ignored"),
        (layer("Gemm", INT8), "  device: cuda", "quantize.device: cuda: backend qdq calibrates on the CPU"),
        (layer("Gemm", E5M2), "", "TensorRT takes FP8 as E4M3 alone"),
        (layer("*", INT8), "  preset: rtdetr", "'/encoder/*' matches no node"),
        (layer("Gemm", INT8), "", "its dynamic batch is 1 in the result"),
    ],
)
def test_warnings(case: tuple[str, str, str], small: Path, noise: Path, tmp_path: Path, caplog: Any) -> None:
    layers, extra, said = case
    caplog.set_level(logging.WARNING)
    run(small, tmp_path, layers, extra=extra, data=noise)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            "{module_name: Conv, weights: {dtype: int8}, activations: {dtype: fp8_e4m3fn}}",
            "no runtime multiplies the two",
        ),
        (layer("Conv", NATIVE), "every dtype is native, so there is nothing to quantize"),
        (layer("LSTM", INT8), "nothing is left to quantize"),
    ],
)
def test_layers_that_cannot_be(layers: str, said: str, small: Path, noise: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(small, tmp_path, layers, data=noise)


def test_files_that_are_no_float_onnx_model(small: Path, noise: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(b"PK\x03\x04")
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "torch.onnx").write_bytes(b"PK\x03\x04archive/data.pkl")
    (tmp_path / "pickled.onnx").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "text.onnx").write_text("not a model")
    told = {
        "model.pth": "quantize.model_path: .*model.pth is a PyTorch file, and this backend takes ONNX alone; export it",
        "model.bin": "the name of an ONNX file ends in .onnx, but got",
        "torch.onnx": "is called .onnx, but is a PyTorch file",
        "pickled.onnx": "is called .onnx, but is a PyTorch file",
        "text.onnx": "not an ONNX file",
        "none.onnx": "quantize.model_path: .*none.onnx: no such file or folder",
    }
    for name, said in told.items():
        with pytest.raises(UserError, match=said):
            run(tmp_path / name, tmp_path, layer("Conv", INT8), data=noise)
    done = run(small, tmp_path, layer("Conv", INT8), data=noise)
    with pytest.raises(UserError, match=r"has Q/DQ pairs already \(int8\); start from the float model"):
        run(done.path, tmp_path, layer("Conv", INT8), data=noise)


def test_data_that_do_not_fit(small: Path, detector: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "calib.txt").touch()
    np.save(tmp_path / "wrong.npy", np.ones((2, 3, 9, 9), np.float32))
    with pytest.raises(UserError, match=r"dataset.preprocess: .*empty holds images; say what turns one into an input"):
        run(small, tmp_path, layer("Conv", INT8), data=tmp_path / "empty")
    with pytest.raises(UserError, match=r"a folder of images, a .npy or an .npz file, but got calib.txt"):
        run(small, tmp_path, layer("Conv", INT8), data=tmp_path / "calib.txt")
    with pytest.raises(UserError, match=r"array 'images' is 3 x 9 x 9, but the input takes 1 x 3 x 8 x 8"):
        run(small, tmp_path, layer("Conv", INT8), data=tmp_path / "wrong.npy")
    text = f"""
quantize: {{model_path: {detector}, backend: qdq, layers: [{layer("Conv", INT8)}]}}
dataset: {{calibration_data: {tmp_path}/empty, preprocess: shapes}}
"""
    spec = parse_spec(text, "s")
    with pytest.raises(UserError, match=r"dataset.calibration_data: no images \(.*\) in"):
        quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path)


def test_an_input_with_more_than_its_batch_dynamic(tmp_path: Path, noise: Path) -> None:
    from harness.graph.builder import GraphBuilder

    g = GraphBuilder("wide", seed=1)
    g.output(g.conv(g.input("images", ("N", 3, "H", "W")), 32, 3), name="y")
    model = g.save(tmp_path / "wide.onnx")
    with pytest.raises(UserError, match=r"input 'images' is Nx3xHxW: say .* dataset.dims, .*\{H: 640, W: 640\}"):
        run(model, tmp_path, layer("Conv", INT8))
    assert run(model, tmp_path, layer("Conv", INT8), data=noise).layers["Conv"] == {"int8": 1}
    text = f"""
quantize: {{model_path: {model}, backend: qdq, layers: [{layer("Conv", INT8)}]}}
dataset: {{calibration_data: {noise}, shapes: {{images: 1x3x8x8}}}}
"""
    spec = parse_spec(text, "s")
    assert quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path).layers["Conv"] == {
        "int8": 1
    }
    spec = parse_spec(text.replace("shapes: {images: 1x3x8x8}", "dims: {H: 8, W: 8}"), "s")
    assert quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path).layers["Conv"] == {
        "int8": 1
    }
    spec = parse_spec(text.replace("shapes: {images", "shapes: {image"), "s")
    with pytest.raises(UserError, match=r"dataset.shapes.image: the model has no such input; did you mean 'images'"):
        quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("samples", "said"), [(2, "2 of the 4 samples"), (300, "of the 300 asked for"), (4, "4 samples")]
)
def test_what_a_limit_of_samples_did_is_said(small: Path, noise: Path, tmp_path: Path, samples: int, said: str) -> None:
    text = f"quantize: {{model_path: {small}, backend: qdq, layers: [{layer('Gemm', INT8)}]}}\n"
    spec = parse_spec(f"{text}dataset: {{calibration_data: {noise}, samples: {samples}}}", "s")
    found = quantize(require_section(spec.quantize, "", ""), spec.dataset, tmp_path, tmp_path)
    assert said in found.calibrated_on
