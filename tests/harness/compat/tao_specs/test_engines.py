"""`qdq gen-trt-engine` and `qdq evaluate`: engine files, accuracies, drops, and layers to leave native."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small import qdq
from spec_runs import build_spec, evaluate_spec, layer, quantize_model
from typer.testing import CliRunner

from harness import zoo
from harness.accuracy.data.decode import suggest_decoder
from harness.base.errors import BuildFailed, UserError
from harness.base.progress import NullProgress
from harness.cli.common import short_path
from harness.cli.main import app
from harness.compat.tao_specs import engine as engines
from harness.compat.tao_specs.engine import EngineFacts, read_facts
from harness.compat.tao_specs.evaluate import (
    EvaluationResult,
    EvaluationTarget,
    advise_native_layers,
    compare_evaluations,
)
from harness.compat.tao_specs.spec import parse_spec
from harness.graph.builder import GraphBuilder
from harness.insight import compiled
from harness.plugins import registry
from harness.plugins.api import Accuracy
from harness.runtimes.rtx_compile import Compilation

LABELLED = """
dataset:
  test_data_sources: {image_dir: images, json_file: labels.txt}
  batch_size: 2
  preprocess: array
"""
MOVERS = ", ".join(layer(name, "activations: {dtype: int8}") for name in ("[RST][el]*", "Concat"))


def engine(model: object, file: str, options: str = "", data_type: str = "FP32") -> str:
    tensorrt = f"{{data_type: {data_type}, {options}}}"
    return f"gen_trt_engine: {{onnx_file: {model}, trt_engine: {file}, tensorrt: {tensorrt}}}\n"


def target(extra: str = "", **keys: object) -> str:
    """Return a section `evaluate` and what follows it."""
    return f"evaluate: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}\n{extra}"


@pytest.fixture
def data(coco):
    return f"""
dataset:
  test_data_sources: {{image_dir: {coco}/val2017, json_file: {coco}/annotations/instances_val2017.json}}
  preprocess: shapes
results_dir: out
"""


@pytest.fixture
def labels(coco):
    found: dict[str, Any] = json.loads((coco / "annotations/instances_val2017.json").read_text())
    return found


@pytest.fixture
def labelled(tmp_path):
    """Write five images of noise with their classes, which `LABELLED` names."""
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / f"images/{i}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png {i}\n" for i in range(5)))


@pytest.fixture(scope="module")
def quantized(detector, calibration, tmp_path_factory):
    """The detector with value-moving operators in INT8: boxes and scores share a scale, which costs accuracy."""
    folder = tmp_path_factory.mktemp("quantized")
    return quantize_model(detector, folder, MOVERS, dataset=f"calibration_data: {calibration}").path


@pytest.fixture
def saved(monkeypatch):
    """Record engines instead of building them."""
    found: list[EngineFacts] = []
    monkeypatch.setattr(engines, "save_engine", lambda model, path, facts: found.append(facts) or facts)
    return found


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_engine_file_scores_like_its_model(backend, detector, data, tmp_path):
    facts = build_spec(engine(detector, "out/model.blob", "workspace_size: 64") + data, tmp_path, backend)
    assert facts.backend == backend
    assert read_facts(tmp_path / "out/model.blob") == facts
    found = evaluate_spec(target(data, trt_engine="out/model.blob"), tmp_path)
    model = evaluate_spec(target(data, onnx_file=detector, backend=backend), tmp_path)
    assert found.accuracy.metrics == pytest.approx(model.accuracy.metrics, abs=1e-3)
    assert found.accuracy.metrics["map"] > 0.8
    written = json.loads((tmp_path / "out/spec.evaluation.json").read_text())
    assert written["metrics"]["map"] == pytest.approx(model.accuracy.metrics["map"])


@pytest.mark.usefixtures("labelled")
def test_engine_of_another_runtime_gets_its_own_file_suffix(small, tmp_path, caplog, capsys):
    """Spec files for TensorRT work with the others too, and engines of different runtimes are never confused."""
    (tmp_path / "s.yaml").write_text(engine(small, "out/model.trt"))
    asked = target(LABELLED, trt_engine="out/model.trt")
    for backend in ("openvino", "onnxruntime"):
        assert qdq("gen-trt-engine", str(tmp_path / "s.yaml"), "--backend", backend) == 0
        built = tmp_path / f"out/model.{backend}"
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{short_path(built)}: {backend} ")
        assert second.startswith(f"written as model.{backend}")
        assert read_facts(built) is not None
        assert not (tmp_path / "out/model.trt").exists()
        if backend == "openvino":
            assert evaluate_spec(asked, tmp_path).target.what == "out/model.openvino"
            assert "there is no out/model.trt; model.openvino is used" in caplog.text
    with pytest.raises(UserError, match=r"there is no model.trt, but there are model.onnxruntime, model.openvino"):
        evaluate_spec(asked, tmp_path)
    (tmp_path / "out/model.trt").write_bytes(b"TensorRT")
    with pytest.raises(UserError, match=r"there is no model.trt.json"):
        evaluate_spec(asked, tmp_path)


def test_large_drop_names_layers_to_leave_native(detector, quantized, calibration, data, tmp_path):
    first = evaluate_spec(target(data, onnx_file=detector), tmp_path, "float")
    second = evaluate_spec(target(data, onnx_file=quantized), tmp_path, "int8")
    (_, row), (_, drop) = compare_evaluations([first, second])
    assert drop.low > 0.01
    assert re.fullmatch(r"\+0\.\d{4} \[\+0\.\d{4}, \+0\.\d{4}\]", row[4])
    lines = advise_native_layers(second, drop, parse_spec(data, "s").dataset, tmp_path, NullProgress())
    assert lines[0].startswith("int8: the drop, 0.")
    assert lines[1].startswith("skip_names:")
    skipped = f"skip_names: {json.dumps([entry.split(chr(34))[1] for entry in lines[2:]])}"
    better = quantize_model(detector, tmp_path, MOVERS, skipped, f"calibration_data: {calibration}").path
    third = evaluate_spec(target(data, onnx_file=better), tmp_path, "better")
    assert third.accuracy.metrics["map"] > second.accuracy.metrics["map"] + 0.05


def test_evaluate_compares_two_specs_in_one_table(detector, data, tmp_path, capsys):
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text(target(data, onnx_file=detector))
    assert qdq("evaluate", *map(str, files)) == 0
    heads, first, second = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert heads == ["spec", "engine or model", "precision", "metric [95 %]", "drop [95 %]", "note"]
    assert first[:3] == ["one", str(detector), "float"]
    assert (first[4], second[4]) == ("baseline", "+0.0000")


def test_engine_is_evaluated_without_its_model(detector, quantized, data, tmp_path, caplog):
    """The facts of the engine are enough to decode its outputs, but not to rank layers."""
    (tmp_path / "build").mkdir()
    shutil.copy(quantized, tmp_path / "build/int8.onnx")
    text = engine("int8.onnx", "../out/int8.blob")
    facts = build_spec(text, tmp_path / "build", "onnxruntime", optimization="disabled")
    assert facts.onnx_file == "../build/int8.onnx"
    text = target(data.replace("preprocess", "batch_size: 10\n  preprocess"), trt_engine="out/int8.blob")
    found = evaluate_spec(text, tmp_path)
    assert found.target.model == (tmp_path / "build/int8.onnx").resolve()
    assert "dataset.batch_size: 10 is ignored: out/int8.blob takes 1" in caplog.text
    (tmp_path / "build/int8.onnx").unlink()
    alone = evaluate_spec(text, tmp_path, "alone")
    assert alone.accuracy.metrics == found.accuracy.metrics
    first = evaluate_spec(target(data, onnx_file=detector), tmp_path, "float")
    _, drops = compare_evaluations([first, alone])
    lines = advise_native_layers(alone, drops[1], parse_spec(text, "s").dataset, tmp_path, NullProgress())
    assert "the ONNX file of out/int8.blob is missing" in lines[1]


def test_evaluations_that_cannot_be_compared():
    def scored(name: str, metric: str, items: tuple[float, ...]) -> EvaluationResult:
        accuracy = Accuracy(metrics={metric: 0.5}, per_item=items)
        facts = EngineFacts(backend="fake", params={}, inputs={}, onnx_file="", precisions=(), describe={})
        target = EvaluationTarget(what=name, file=Path(name), facts=facts, model=None)
        return EvaluationResult(name=name, target=target, metric=metric, higher_is_better=True, accuracy=accuracy)

    with pytest.raises(UserError, match=r"b: its metric is map, but that of a is top1"):
        compare_evaluations([scored("a", "top1", (1, 0)), scored("b", "map", ())])
    with pytest.raises(UserError, match=r"b and a cannot be compared: a paired interval needs the same images"):
        compare_evaluations([scored("a", "top1", (1, 0)), scored("b", "top1", (1, 0, 1))])
    rows, _ = compare_evaluations([scored("a", "mine", ()), scored("b", "mine", ())])
    assert [row[3:5] for row in rows] == [("mine 0.5000", "baseline"), ("mine 0.5000", "+0.0000")], (
        "without an interval"
    )


@pytest.mark.usefixtures("labelled")
def test_evaluate_scores_top1_in_batches(small, tmp_path):
    found = evaluate_spec(target(LABELLED, onnx_file=small), tmp_path)
    assert found.metric == "top1"
    assert len(found.accuracy.per_item) == 5


def test_mismatched_labels_and_missing_keys_are_refused(detector, data, tmp_path):
    (tmp_path / "empty").mkdir()
    empty = "dataset: {test_data_sources: {image_dir: empty}, preprocess: shapes}\n"
    for dataset, problem in (
        ("", r"dataset.test_data_sources: image_dir and json_file are needed"),
        (empty, r"image_dir and json_file are needed"),
        (data.replace("/val2017,", "/train2017,"), r"spec.yaml: dataset.test_data_sources.json_file: .* not in"),
        (data.replace("/val2017,", "/val,"), r"spec.yaml: dataset.test_data_sources.image_dir: .*/val: no such file"),
    ):
        with pytest.raises(UserError, match=problem):
            evaluate_spec(target(dataset, onnx_file=detector), tmp_path)
    for file, problem in ((detector, r"model.onnx is a model.*evaluate.onnx_file"), ("none.trt", r"no such file")):
        with pytest.raises(UserError, match=rf"evaluate.trt_engine: .*{problem}"):
            evaluate_spec(target(data, trt_engine=file), tmp_path)


def test_permuted_categories_are_refused(detector, coco, data, labels, tmp_path):
    for annotation in labels["annotations"]:
        annotation["category_id"] = annotation["category_id"] % 3 + 1
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    text = data.replace(f"{coco}/annotations/instances_val2017.json", "labels.json")
    with pytest.raises(UserError, match="categories are in another order than the model's classes"):
        evaluate_spec(target(text, onnx_file=detector), tmp_path)


def test_damaged_or_mismatched_engines_are_refused(detector, data, tmp_path):
    build_spec(engine(detector, "model.blob") + data, tmp_path, "openvino")
    blob, facts_file = tmp_path / "model.blob", tmp_path / "model.blob.json"
    facts = facts_file.read_text()
    asked = target(data, trt_engine="model.blob")
    for text in ("{}", facts.replace('"backend"', '"back"'), facts.replace('"schema": 1', '"schema": 2')):
        facts_file.write_text(text)
        with pytest.raises(UserError, match=r"model.blob.json: damaged .*qdq gen-trt-engine"):
            evaluate_spec(asked, tmp_path)
    facts_file.write_text(facts)
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"belongs to another engine than model.blob"):
        evaluate_spec(asked, tmp_path)
    facts_file.unlink()
    with pytest.raises(UserError, match=r"there is no model.blob.json.*TensorRT is assumed"):
        evaluate_spec(asked, tmp_path)
    shapes = data.replace("dataset:\n", "dataset:\n  shapes: {images: 1x3x128x128}\n")
    with pytest.raises(UserError, match=r"evaluate\.decode: .* decoder of this model; one of"):
        evaluate_spec(target(shapes, trt_engine="model.blob"), tmp_path)


def test_backends_without_engine_files_are_refused(small, tmp_path, monkeypatch):
    facts = EngineFacts(backend="fake", params={}, inputs={}, onnx_file="m", precisions=(), describe={})
    monkeypatch.setattr(registry, "create_plugin", lambda *_: object())
    with pytest.raises(UserError, match=r"backend 'fake' cannot write engines .* use openvino, onnxruntime"):
        engines.save_engine(small, tmp_path / "m.plan", facts)
    with pytest.raises(UserError, match=r"backend 'fake' cannot read engines"):
        engines.load_engine(small, facts)


def test_a_model_that_the_runtime_refuses_gives_no_engine(small, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise BuildFailed("no kernel")

    monkeypatch.setattr(engines, "call_in_helper_process", refuse)
    with pytest.raises(UserError, match=f"{small.name}: no engine: no kernel"):
        build_spec(engine(small, "m.blob"), tmp_path, "openvino")


SIZES = "min_batch_size: 1, opt_batch_size: 4, max_batch_size: 8"


def test_tensorrt_build_parameters_of_a_spec(small, tmp_path, saved, caplog):
    build_spec(engine(small, "m.trt", f"workspace_size: 1024, {SIZES}", "fp16"), tmp_path, "tensorrt")
    assert saved[0].params == {
        "precision": "f16",
        "workspace_gb": pytest.approx(1.073741824),
        "profiles": {"images": {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}},
    }
    registry.check_params("benchmarker", "tensorrt", saved[0].params)
    assert saved[0].inputs == {"images": ("float", (4, 3, 8, 8))}
    assert saved[0].precisions == ()
    builder = GraphBuilder("fixed", seed=1)
    builder.output(builder.conv(builder.input("images", (1, 3, 8, 8)), 4, 3), name="y")
    build_spec(engine(builder.save(tmp_path / "fixed.onnx"), "m.trt", SIZES), tmp_path, "tensorrt")
    assert "max_batch_size: ignored, because the batch of the model is fixed" in caplog.text
    with pytest.raises(UserError, match=r"trt_engine: a name that ends in .trt, .engine, .plan, but got m.onnx"):
        build_spec(engine(small, "m.onnx"), tmp_path, "tensorrt")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("shape", "options", "given", "profile"),
    [
        (("N", 3, "H", "W"), SIZES, "1x3x8x8", {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}),
        ((1, 3, "H", "W"), SIZES, "1x3x8x8", {"min": "1x3x8x8", "opt": "1x3x8x8", "max": "1x3x8x8"}),
        (("N", 3, "H", "W"), "", "2x3x8x8", {"min": "2x3x8x8", "opt": "2x3x8x8", "max": "2x3x8x8"}),
    ],
)
def test_batch_sizes_count_only_if_the_batch_is_dynamic(shape, options, given, profile, tmp_path):
    g = GraphBuilder("wide", seed=1)
    g.output(g.conv(g.input("images", shape), 32, 3), name="y")
    text = engine(g.save(tmp_path / "wide.onnx"), "m.trt", options)
    facts = build_spec(f"{text}dataset: {{shapes: {{images: {given}}}}}\n", tmp_path, "tensorrt")
    assert facts.params["profiles"] == {"images": profile}
    assert "x".join(map(str, facts.inputs["images"][1])) == profile["opt"]


def test_missing_tensorrt_is_named(small, tmp_path, monkeypatch):
    pytest.importorskip("harness.runtimes.tensorrt.benchmarker")
    monkeypatch.setattr(
        compiled, "compile_file", lambda path, target: Compilation(target=target, version="1", build_s=0)
    )
    (tmp_path / "s.yaml").write_text(engine(small, "m.trt"))
    done = CliRunner().invoke(app, ["gen-trt-engine", str(tmp_path / "s.yaml")])
    if done.exit_code == 0:
        pytest.skip("TensorRT is installed")
    assert isinstance(done.exception, UserError)
    assert any(word in str(done.exception) for word in ("driver", "GPU", "TensorRT is not", "cuda-python"))
    assert str(done.exception).endswith("or build without TensorRT: --backend openvino or --backend onnxruntime")
    assert f"On a machine with a GPU and TensorRT: qdq gen-trt-engine {tmp_path / 's.yaml'}" in done.output


def test_other_runtimes_use_opt_batch_size_only(small, tmp_path, caplog):
    options = "min_batch_size: 1, opt_batch_size: 2, max_batch_size: 8"
    facts = build_spec(engine(small, "m.blob", options, "FP16"), tmp_path, "openvino")
    assert facts.inputs["images"] == ("float", (2, 3, 8, 8))
    assert "opt_batch_size, 2, is used" in caplog.text
    assert "data_type FP16 is only for TensorRT" in caplog.text


@pytest.mark.parametrize(
    ("outputs", "decoder"),
    [
        ({"output0": (1, 84, 8400)}, "ultralytics"),
        ({"output0": (1, 300, 6)}, "ultralytics"),
        ({"output": (1, 8400, 85)}, "yolox"),
        ({"logits": (1, 300, 80), "boxes": (1, 300, 4)}, "rtdetr"),
        ({"labels": (1, 300), "boxes": (1, 300, 4), "scores": (1, 300)}, "rtdetr"),
        ({"logits": (1, 1000)}, None),
        ({"masks": (1, 21, 640, 640)}, None),
    ],
)
def test_suggest_decoder_by_output_shapes(outputs, decoder):
    assert suggest_decoder(outputs, (640, 640)) == decoder


def test_a_yolo_of_80_classes_goes_through_every_workflow(tmp_path, coco, data, labels, monkeypatch):
    """1 x 84 x cells, the output shape of Ultralytics' export, with random weights: its boxes are random too."""
    model = zoo.write_model("yolo_tiny_export", tmp_path / "yolo.onnx")
    labels["categories"] += [{"id": number, "name": f"class {number}"} for number in range(4, 81)]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    text = data.replace(f"{coco}/annotations/instances_val2017.json", "labels.json")
    text = text.replace("  preprocess: shapes\n", "  count: 2\n")
    messages: list[str] = []
    observer = NullProgress()
    monkeypatch.setattr(observer, "say", messages.append, raising=False)
    found = evaluate_spec(target(text, onnx_file=model, backend="openvino"), tmp_path, observer=observer)
    assert found.metric == "map"
    assert 0.0 <= found.accuracy.metrics["map"] < 0.01
    (message,) = messages
    assert message.startswith("spec: the float model itself has map 0.00")
    assert "decode (now 'ultralytics'" in message


@pytest.mark.parametrize(("layout", "axes", "size"), [("nchw", [2, 3], (3, 8)), ("nhwc", [1, 2], (8, 3))])
def test_layout_decides_where_two_axes_have_three_elements(layout, axes, size, tmp_path):
    """The class of an image is its largest channel."""
    g = GraphBuilder("square")
    g.output(g.op("ReduceMean", g.input("images", (1, 3, 8, 3)), axes=axes, keepdims=0), name="logits")
    (tmp_path / "images").mkdir()
    for i, colour in enumerate(("red", "lime", "blue")):
        Image.new("RGB", size, colour).save(tmp_path / f"images/{i}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png {i}\n" for i in range(3)))
    text = LABELLED.replace("preprocess: array", f"preprocess: {{use: array, layout: {layout}}}")
    text = target(text.replace("batch_size: 2", "batch_size: 1"), onnx_file=g.save(tmp_path / "net.onnx"))
    assert evaluate_spec(text, tmp_path).accuracy.metrics["top1"] == 1.0


def test_evaluate_scores_labelled_arrays(tmp_path):
    builder = GraphBuilder("net", seed=1)
    product = builder.op("Mul", builder.input("x", ("N", 8)), builder.input("m", ("N", 8)))
    builder.output(builder.gemm(product, 4), ("N", 4), name="logits")
    builder.save(tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(2, 50, 8)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, m=m, y=rng.integers(0, 4, 50))
    dataset = "dataset: {test_data_sources: {arrays: test.npz, labels: y}, batch_size: 8}\n"
    text = target(dataset, onnx_file="net.onnx")
    found = evaluate_spec(text, tmp_path)
    assert found.metric == "top1"
    assert len(found.accuracy.per_item) == 50
    with pytest.raises(UserError, match=r"dataset.test_data_sources.labels: .*'z'"):
        evaluate_spec(text.replace("labels: y", "labels: z"), tmp_path)
    with pytest.raises(
        UserError, match=r"dataset.test_data_sources.arrays: expected a .npz or .npy file, but got x.csv"
    ):
        evaluate_spec(text.replace("test.npz", "x.csv"), tmp_path)
    with pytest.raises(UserError, match="'fidelity' compares with the float model"):
        evaluate_spec(target(dataset, onnx_file="net.onnx", evaluator="fidelity"), tmp_path)
