"""`qdq gen-trt-engine` and `qdq evaluate`: engines in files, accuracies, drops, and what to leave native."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from harness import zoo
from harness.api import Accuracy
from harness.cli.common import short_path
from harness.cli.main import app
from harness.compat.tao_specs import engine as engines
from harness.compat.tao_specs import engine_file
from harness.compat.tao_specs.comparison import advise_native_layers, compare_evaluations
from harness.compat.tao_specs.engine import build_engine
from harness.compat.tao_specs.engine_file import EngineFacts, read_facts
from harness.compat.tao_specs.evaluate import EvaluationResult, evaluate
from harness.compat.tao_specs.layout import suggest_decoder
from harness.compat.tao_specs.quantize import quantize
from harness.compat.tao_specs.spec import parse_spec, require_section
from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.progress import NullProgress, Observer

ENGINE = "gen_trt_engine: {{onnx_file: {model}, trt_engine: {engine}, tensorrt: {{data_type: FP32, {options}}}}}\n"


def data(coco: Path, preprocess: str = "shapes") -> str:
    return f"""
dataset:
  test_data_sources: {{image_dir: {coco}/val2017, json_file: {coco}/annotations/instances_val2017.json}}
  preprocess: {preprocess}
results_dir: out
"""


LABELLED = """
dataset:
  test_data_sources: {image_dir: images, json_file: labels.txt}
  batch_size: 2
  preprocess: array
"""


def labelled(folder: Path) -> None:
    """Five images of noise with their classes, which `LABELLED` names."""
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"images/{i}.png")
    (folder / "labels.txt").write_text("".join(f"{i}.png {i}\n" for i in range(5)))


def score(text: str, folder: Path, name: str = "spec", observer: Observer | None = None) -> EvaluationResult:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return evaluate(parse_spec(text, str(path)), path, observer)


@pytest.fixture(scope="module")
def quantized(detector: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The detector with what moves values in INT8, boxes and scores in one scale, which costs it much."""
    text = f"""
quantize:
  model_path: {detector}
  backend: qdq
  layers:
    - {{module_name: "[RST][el]*", activations: {{dtype: int8}}}}
    - {{module_name: Concat, activations: {{dtype: int8}}}}
dataset: {{calibration_data: {calibration}}}
"""
    spec, folder = parse_spec(text, "s"), tmp_path_factory.mktemp("quantized")
    return quantize(require_section(spec.quantize, "", ""), spec.dataset, folder, folder).path


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_an_engine_is_written_and_scores_like_its_model(
    backend: str, detector: Path, coco: Path, tmp_path: Path
) -> None:
    text = ENGINE.format(model=detector, engine="out/model.blob", options="workspace_size: 64") + data(coco)
    spec = parse_spec(text, "s")
    facts = build_engine(require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use=backend))
    assert facts.backend == backend
    assert read_facts(tmp_path / "out/model.blob") == facts
    engine = score(f"evaluate: {{trt_engine: out/model.blob}}\n{data(coco)}", tmp_path)
    model = score(f"evaluate: {{onnx_file: {detector}, backend: {backend}}}\n{data(coco)}", tmp_path)
    assert engine.accuracy.metrics == pytest.approx(model.accuracy.metrics, abs=1e-3)
    assert engine.accuracy.metrics["map"] > 0.8
    kept = json.loads((tmp_path / "out/spec.evaluation.json").read_text())
    assert kept["metrics"]["map"] == pytest.approx(model.accuracy.metrics["map"])


def test_another_runtimes_engine_is_not_called_as_if_it_were_tensorrts(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The spec files of TensorRT's users serve for the others too, and nobody takes one engine for the other."""
    labelled(tmp_path)
    (tmp_path / "s.yaml").write_text(ENGINE.format(model=small, engine="out/model.trt", options=""))
    for backend in ("openvino", "onnxruntime"):
        done = CliRunner().invoke(app, ["gen-trt-engine", str(tmp_path / "s.yaml"), "--backend", backend])
        assert done.exit_code == 0, done.output
        built = tmp_path / f"out/model.{backend}"
        first, second = done.stdout.splitlines()
        assert first.startswith(f"{short_path(built)}: {backend} ")
        assert second.startswith(f"written as model.{backend}, because TensorRT cannot load it")
        assert read_facts(built) is not None
        assert not (tmp_path / "out/model.trt").exists()
        if backend == "openvino":
            found = score(f"evaluate: {{trt_engine: out/model.trt}}\n{LABELLED}", tmp_path)
            assert found.what == "out/model.openvino"
            assert "there is no out/model.trt; model.openvino is taken, which stands in its place" in caplog.text
    with pytest.raises(UserError, match=r"there is no model.trt, but model.onnxruntime, model.openvino: name one"):
        score(f"evaluate: {{trt_engine: out/model.trt}}\n{LABELLED}", tmp_path)
    (tmp_path / "out/model.trt").write_bytes(b"TensorRT")
    with pytest.raises(UserError, match=r"there is no model.trt.json beside it"):
        score(f"evaluate: {{trt_engine: out/model.trt}}\n{LABELLED}", tmp_path)


def test_a_large_drop_names_layers_and_leaving_them_native_helps(
    detector: Path, quantized: Path, calibration: Path, coco: Path, tmp_path: Path
) -> None:
    first = score(f"evaluate: {{onnx_file: {detector}}}\n{data(coco)}", tmp_path, "float")
    second = score(f"evaluate: {{onnx_file: {quantized}}}\n{data(coco)}", tmp_path, "int8")
    _, line = compare_evaluations([first, second])
    assert line.drop is not None
    assert line.drop.low > 0.01
    assert re.fullmatch(r"\+0\.\d{4} \[\+0\.\d{4}, \+0\.\d{4}\]", line.cells()[4])
    spec = parse_spec(f"evaluate: {{onnx_file: {quantized}}}\n{data(coco)}", "s")
    lines = advise_native_layers(line, spec.dataset, tmp_path, NullProgress())
    assert lines[0].startswith("int8: the drop, 0.")
    assert lines[1].startswith("skip_names:")
    names = [entry.split('"')[1] for entry in lines[2:]]
    text = f"""
quantize:
  model_path: {detector}
  backend: qdq
  layers:
    - {{module_name: "[RST][el]*", activations: {{dtype: int8}}}}
    - {{module_name: Concat, activations: {{dtype: int8}}}}
  skip_names: {json.dumps(names)}
dataset: {{calibration_data: {calibration}}}
"""
    again = parse_spec(text, "s")
    mended = quantize(require_section(again.quantize, "", ""), again.dataset, tmp_path, tmp_path / "mended").path
    third = score(f"evaluate: {{onnx_file: {mended}}}\n{data(coco)}", tmp_path, "mended")
    assert third.accuracy.metrics["map"] > second.accuracy.metrics["map"] + 0.05


def test_two_specs_in_one_table(detector: Path, coco: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"evaluate: {{onnx_file: {detector}}}\n{data(coco)}")
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")])
    assert done.exit_code == 0, done.output
    heads, first, second = (line.split("\t") for line in done.output.splitlines())
    assert heads == ["spec", "engine or model", "precision", "metric [95 %]", "drop [95 %]", "note"]
    assert first[:3] == ["one", str(detector), "float"]
    assert first[4] == "baseline"
    assert second[4] == "+0.0000"


def test_an_engine_stands_without_its_model(
    detector: Path, quantized: Path, coco: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What decodes it is known from the file beside it; which layers to leave native is not."""
    (tmp_path / "build").mkdir()
    shutil.copy(quantized, tmp_path / "build/int8.onnx")
    spec = parse_spec(ENGINE.format(model="int8.onnx", engine="../out/int8.blob", options=""), "s")
    use = PluginSpec(use="onnxruntime", params={"optimization": "disabled"})
    facts = build_engine(require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path / "build", use)
    assert facts.onnx_file == "../build/int8.onnx"
    text = data(coco).replace("preprocess", "batch_size: 10\n  preprocess")
    found = score(f"evaluate: {{trt_engine: out/int8.blob}}\n{text}", tmp_path)
    assert found.model == (tmp_path / "build/int8.onnx").resolve()
    assert "dataset.batch_size: 10 is left aside: out/int8.blob takes 1" in caplog.text
    (tmp_path / "build/int8.onnx").unlink()
    alone = score(f"evaluate: {{trt_engine: out/int8.blob}}\n{text}", tmp_path, "alone")
    assert alone.accuracy.metrics == found.accuracy.metrics
    first = score(f"evaluate: {{onnx_file: {detector}}}\n{data(coco)}", tmp_path, "float")
    said = advise_native_layers(compare_evaluations([first, alone])[1], spec.dataset, tmp_path, NullProgress())
    assert said[1:] == ["(which ones cannot be said: the ONNX file of out/int8.blob is not there)"]


def test_evaluations_that_cannot_be_compared() -> None:
    def scored(name: str, metric: str, items: tuple[float, ...]) -> EvaluationResult:
        accuracy = Accuracy(metrics={metric: 0.5}, per_item=items)
        return EvaluationResult(
            name=name, what=name, metric=metric, higher_is_better=True, accuracy=accuracy, precisions=(), model=None,
            evaluate_s=0.0,
        )  # fmt: skip

    with pytest.raises(UserError, match=r"b: its metric is map, that of a top1"):
        compare_evaluations([scored("a", "top1", (1, 0)), scored("b", "map", ())])
    with pytest.raises(UserError, match=r"b and a cannot be compared: a paired interval needs the same images"):
        compare_evaluations([scored("a", "top1", (1, 0)), scored("b", "top1", (1, 0, 1))])


def test_top1_of_a_classifier_in_batches(small: Path, tmp_path: Path) -> None:
    labelled(tmp_path)
    found = score(f"evaluate: {{onnx_file: {small}}}\n{LABELLED}", tmp_path)
    assert found.metric == "top1"
    assert len(found.accuracy.per_item) == 5


def test_labels_of_other_images_and_missing_parts(detector: Path, coco: Path, tmp_path: Path) -> None:
    text = f"evaluate: {{onnx_file: {detector}}}\n"
    with pytest.raises(UserError, match=r"dataset.test_data_sources: image_dir and json_file are needed"):
        score(text, tmp_path)
    with pytest.raises(
        UserError, match=r"spec.yaml: dataset.test_data_sources.json_file: .* names the image .* which is not in"
    ):
        score(
            text + data(coco).replace("image_dir: " + str(coco) + "/val2017", f"image_dir: {coco}/train2017"), tmp_path
        )
    (tmp_path / "empty").mkdir()
    empty = "dataset: {test_data_sources: {image_dir: empty}, preprocess: shapes}\n"
    with pytest.raises(UserError, match=r"image_dir and json_file are needed"):
        score(text + empty, tmp_path)
    with pytest.raises(
        UserError, match=r"spec.yaml: dataset.test_data_sources.image_dir: .*/val: no such file or folder"
    ):
        score(text + data(coco).replace("/val2017,", "/val,"), tmp_path)
    with pytest.raises(
        UserError, match=r"evaluate.trt_engine: .*model.onnx is a model, no engine; call it evaluate.onnx_f"
    ):
        score(f"evaluate: {{trt_engine: {detector}}}\n{data(coco)}", tmp_path)
    with pytest.raises(UserError, match=r"evaluate.trt_engine: none.trt: no such file"):
        score(f"evaluate: {{trt_engine: none.trt}}\n{data(coco)}", tmp_path)


def test_classes_in_another_order_are_found_out(detector: Path, coco: Path, tmp_path: Path) -> None:
    wrong = data(coco) + ""
    labels = json.loads((coco / "annotations/instances_val2017.json").read_text())
    for annotation in labels["annotations"]:
        annotation["category_id"] = {1: 2, 2: 3, 3: 1}[annotation["category_id"]]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    text = wrong.replace(f"{coco}/annotations/instances_val2017.json", str(tmp_path / "labels.json"))
    with pytest.raises(UserError, match=r"the labels' categories are in another order than the model's classes"):
        score(f"evaluate: {{onnx_file: {detector}}}\n{text}", tmp_path)


def test_engines_that_are_damaged_or_of_another_file(detector: Path, coco: Path, tmp_path: Path) -> None:
    text = ENGINE.format(model=detector, engine="model.blob", options="") + data(coco)
    spec = parse_spec(text, "s")
    build_engine(require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use="openvino"))
    engine, beside = tmp_path / "model.blob", tmp_path / "model.blob.json"
    facts = beside.read_text()
    asked = f"evaluate: {{trt_engine: model.blob}}\n{data(coco)}"
    beside.write_text("{}")
    with pytest.raises(UserError, match=r"model.blob.json: damaged .*build the engine again with qdq gen-trt-engine"):
        score(asked, tmp_path)
    beside.write_text(facts)
    content = engine.read_bytes()
    engine.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"belongs to another engine than model.blob"):
        score(asked, tmp_path)
    beside.unlink()
    with pytest.raises(UserError, match=r"there is no model.blob.json beside it.*TensorRT is assumed"):
        score(asked, tmp_path)


def test_backends_without_engine_files(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = EngineFacts(backend="fake", params={}, inputs={}, onnx_file="m", precisions=(), describe={})
    monkeypatch.setattr(engine_file, "_create_runtime", lambda use, params: object())
    with pytest.raises(UserError, match=r"backend 'fake' cannot write engines to a file; use openvino, onnxruntime"):
        engine_file.save_engine(small, tmp_path / "m.plan", facts)
    with pytest.raises(UserError, match=r"backend 'fake' cannot read engines from a file"):
        engine_file.load_engine(small, facts)


def test_what_tensorrt_is_told(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[EngineFacts] = []

    def record(model: Path, path: Path, facts: EngineFacts) -> EngineFacts:
        found.append(facts)
        return facts

    monkeypatch.setattr(engines, "save_engine", record)
    options = "workspace_size: 1024, min_batch_size: 1, opt_batch_size: 4, max_batch_size: 8"
    spec = parse_spec(ENGINE.format(model=small, engine="m.trt", options=options).replace("FP32", "fp16"), "s")
    build_engine(require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use="tensorrt"))
    assert found[0].params == {
        "precision": "f16",
        "workspace_gb": pytest.approx(1.073741824),
        "profiles": {"images": {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}},
    }
    assert found[0].inputs == {"images": ("float", (4, 3, 8, 8))}
    assert found[0].precisions == ()
    spec = parse_spec(ENGINE.format(model=small, engine="m.onnx", options=options), "s")
    with pytest.raises(UserError, match=r"trt_engine: a name that ends in .trt, .engine, .plan, but got m.onnx"):
        build_engine(require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use="tensorrt"))


SIZES = "min_batch_size: 1, opt_batch_size: 4, max_batch_size: 8"


@pytest.mark.parametrize(
    ("shape", "options", "given", "profile"),
    [
        (("N", 3, "H", "W"), SIZES, "1x3x8x8", {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}),
        ((1, 3, "H", "W"), SIZES, "1x3x8x8", {"min": "1x3x8x8", "opt": "1x3x8x8", "max": "1x3x8x8"}),
        (("N", 3, "H", "W"), "", "2x3x8x8", {"min": "2x3x8x8", "opt": "2x3x8x8", "max": "2x3x8x8"}),
    ],
)
def test_batch_sizes_count_where_the_batch_is_dynamic_alone(
    shape: tuple[int | str, ...],
    options: str,
    given: str,
    profile: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = GraphBuilder("wide", seed=1)
    g.output(g.conv(g.input("images", shape), 32, 3), name="y")
    model = g.save(tmp_path / "wide.onnx")
    monkeypatch.setattr(engines, "save_engine", lambda model, path, facts: facts)
    text = ENGINE.format(model=model, engine="m.trt", options=options)
    spec = parse_spec(f"{text}\ndataset: {{shapes: {{images: {given}}}}}\n", "s")
    facts = build_engine(
        require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use="tensorrt")
    )
    assert facts.params["profiles"] == {"images": profile}
    assert "x".join(map(str, facts.inputs["images"][1])) == profile["opt"]


def test_tensorrt_accepts_the_parameters_that_it_is_given() -> None:
    from harness.registry import check_params

    check_params("benchmarker", "tensorrt", {"precision": "f16", "workspace_gb": 1.0, "profiles": {}})


def test_without_tensorrt_it_is_said_what_is_missing(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("harness.runtimes.tensorrt.benchmarker")
    (tmp_path / "s.yaml").write_text(ENGINE.format(model=small, engine="m.trt", options=""))
    done = CliRunner().invoke(app, ["gen-trt-engine", str(tmp_path / "s.yaml")])
    if done.exit_code == 0:
        pytest.skip("TensorRT is here")
    assert isinstance(done.exception, UserError)
    assert any(word in str(done.exception) for word in ("driver", "GPU", "TensorRT is not", "cuda-python"))
    assert str(done.exception).endswith("or build without TensorRT: --backend openvino or --backend onnxruntime")


def test_other_runtimes_have_one_batch_size(small: Path, tmp_path: Path, caplog: Any) -> None:
    options = "min_batch_size: 1, opt_batch_size: 2, max_batch_size: 8"
    text = ENGINE.format(model=small, engine="m.blob", options=options).replace("FP32", "FP16")
    spec = parse_spec(text, "s")
    facts = build_engine(
        require_section(spec.gen_trt_engine, "", ""), spec.dataset, tmp_path, PluginSpec(use="openvino")
    )
    assert facts.inputs["images"] == ("float", (2, 3, 8, 8))
    assert "opt_batch_size, 2, is taken" in caplog.text
    assert "data_type FP16 is TensorRT's" in caplog.text


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
def test_decoders_by_the_shapes_of_outputs(outputs: dict[str, Any], decoder: str | None) -> None:
    assert suggest_decoder(outputs, (640, 640)) == decoder


def test_a_decoder_that_the_shapes_do_not_tell(coco: Path, tmp_path: Path) -> None:
    g = GraphBuilder("odd", seed=1)
    g.output(g.conv(g.input("images", (1, 3, 128, 128)), 4, 3), name="y")
    model = g.save(tmp_path / "odd.onnx")
    with pytest.raises(UserError, match=r"evaluate.decode: the outputs do not tell which decoder .* one of .*yolox"):
        score(f"evaluate: {{onnx_file: {model}}}\n{data(coco)}", tmp_path)


def test_a_yolo_of_80_classes_goes_through_every_workflow(tmp_path: Path, coco: Path) -> None:
    """1 x 84 x cells, as Ultralytics exports it, from random weights: what it finds is worth nothing."""
    model = zoo.write_model("yolo_tiny_export", tmp_path / "yolo.onnx")
    labels = json.loads((coco / "annotations/instances_val2017.json").read_text())
    labels["categories"] += [{"id": number, "name": f"class {number}"} for number in range(4, 81)]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    text = data(coco).replace(f"{coco}/annotations/instances_val2017.json", str(tmp_path / "labels.json"))
    text = text.replace("  preprocess: shapes\n", "  count: 2\n")
    told: list[str] = []
    observer = NullProgress()
    observer.say = told.append  # type: ignore[method-assign]
    found = score(f"evaluate: {{onnx_file: {model}, backend: openvino}}\n{text}", tmp_path, observer=observer)
    assert found.metric == "map"
    assert 0.0 <= found.accuracy.metrics["map"] < 0.01
    (said,) = told
    assert said.startswith("spec: the float model itself has map 0.00")
    assert "decode (now 'ultralytics'" in said


def test_arrays_with_labels_are_scored_and_held_against_the_baseline(tmp_path: Path) -> None:
    builder = GraphBuilder("net", seed=1)
    product = builder.op("Mul", builder.input("x", ("N", 8)), builder.input("m", ("N", 8)))
    builder.output(builder.gemm(product, 4), ("N", 4), name="logits")
    builder.save(tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(2, 50, 8)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, m=m, y=rng.integers(0, 4, 50))
    sources = "{arrays: test.npz, labels: y}"
    text = f"evaluate: {{onnx_file: net.onnx}}\ndataset: {{test_data_sources: {sources}, batch_size: 8}}\n"
    found = score(text, tmp_path)
    assert found.metric == "top1"
    assert len(found.accuracy.per_item) == 50
    with pytest.raises(UserError, match=r"dataset.test_data_sources.labels: .*'z'"):
        score(text.replace("labels: y", "labels: z"), tmp_path)
    with pytest.raises(UserError, match="'fidelity' compares with the float model"):
        score(text.replace("{onnx_file: net.onnx}", "{onnx_file: net.onnx, evaluator: {use: fidelity}}"), tmp_path)
