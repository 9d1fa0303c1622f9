"""Mistakes in models, data and evaluators are reported before anything runs, and so are doubts."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from numpy.random import Generator
from PIL import Image

from harness.accuracy.metrics.closeness import MAX_SQNR_DB
from harness.base.errors import UserError
from harness.config.experiment import parse_experiment
from harness.config.sections import Objective
from harness.graph.builder import GraphBuilder
from harness.run.prepare.accuracy import bound_lines, bound_resolution_note
from harness.run.prepare.model_loader import describe_workload, evaluator_spec, open_model
from harness.run.prepare.preflight import check_experiment, check_models
from search.space import Space

COUNT = 24


def models(folder: Path, **changes: Any) -> Any:
    """An experiment with the model of the folder alone."""
    body = {"experiment": "e", "models": [{"use": "net.onnx"}], "backends": ["simulated"], **changes}
    return parse_experiment(json.dumps(body), "e.yaml", folder)


@pytest.fixture
def folder(tmp_path):
    builder = GraphBuilder("net")
    x = builder.op("GlobalAveragePool", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3))
    builder.output(builder.op("Flatten", x), name="logits")
    builder.save(tmp_path / "net.onnx")
    for name in ("images", "others"):
        (tmp_path / name).mkdir()
        for i in range(COUNT):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png 0\n" for i in range(COUNT)))
    return tmp_path


def checked(folder: Path, evaluator: Any = None, calibration: Any = None, **objective: Any) -> tuple[str, ...]:
    model = {"use": "net.onnx", "preprocess": "array", "evaluator": evaluator, "calibration": calibration or {}}
    return check_experiment(models(folder, models=[model], objective=objective))


def top1(**data: Any) -> dict[str, Any]:
    return {"use": "top1", "params": {"data": {"use": "images", "images": "images", "labels": "labels.txt", **data}}}


IMAGES = {"data": {"use": "images", "images": "others"}}


def test_calibration_images_that_are_scored_too_are_noted(folder):
    scored = {"data": {"use": "images", "images": "images"}}
    assert [line.split(":")[1][:3] for line in checked(folder, top1(), {**scored, "samples": 5})] == [" 5 "]
    assert not any("also scored" in line for line in checked(folder, top1(start=5), {**scored, "samples": 2}))


def test_all_invalid_settings_are_named_together(folder):
    absent = {"models": ["zoo:absent", "zoo:missing"], "backends": ["absent"], "searchers": ["absent"]}
    with pytest.raises(UserError) as caught:
        check_experiment(models(folder, **absent))
    keys = [line.partition(" ")[0].rstrip(":") for line in str(caught.value).splitlines()]
    assert keys == ["searchers.0", "backends.0", "models.0", "models.1"]


def test_few_images_and_random_calibration_data_are_said(folder):
    random, few = checked(folder, top1(count=12))
    assert random == "model 'net': no calibration data given, random data is used: do not trust any accuracy"
    assert any("modelopt_ptq" in line for line in checked(folder, None, {"method": "mse"}))
    assert few == "model 'net': evaluator: only 12 samples: the interval is too wide to say much; score more of them"


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        (top1(labels=None), r"models\.0\.evaluator \(model 'net'\): top1: data.labels: classes are needed"),
        ({"use": "miou", "params": IMAGES}, r"evaluator .*: miou: data.masks: masks are needed"),
        (
            {"use": "coco_map", "params": {**IMAGES, "decode": "yolox"}},
            "evaluator .*: coco_map: data.labels: boxes are",
        ),
        ({"use": "top2", "params": IMAGES}, "no evaluator is called 'top2'; did you mean 'top5' or 'top1'"),
        ({"use": "fidelity", "params": {"samples": 0}}, "evaluator .*: fidelity: samples: a whole number from 1"),
        (top1(half="both"), r"evaluator .*: data.half: one of search, report, but got 'both'"),
    ],
)
def test_invalid_evaluators_are_refused(folder, evaluator, message):
    with pytest.raises(UserError, match=message):
        checked(folder, evaluator)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"top1_drop": 1}, "objective.top1_drop: 1 lets top-1 of model 'net' drop to 0, so it has no effect; 0.01 is "),
        ({"max_drop": 5}, "objective.max_drop: 5 lets top-1"),
        ({"max_drop": "100%"}, "objective.max_drop: 100% lets top-1"),
    ],
)
def test_ineffective_bound_is_refused(folder, objective, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        checked(folder, top1(), IMAGES, **objective)


def test_bound_in_decibels_is_accepted(folder):
    assert checked(folder, {"use": "fidelity", "params": {"samples": 30}}, IMAGES, max_drop=1) == ()


@pytest.mark.parametrize(("bound", "shown"), [(0.01, "0.01"), ("4%", "4%"), (1 / COUNT, None), ("5%", None), (0, None)])
def test_bound_below_one_image_is_noted(folder, bound, shown):
    """Also of a share of the float model's figure, which is 1 at most."""
    said = (
        f"model 'net': evaluator: one sample of 24 is 0.0417, more than the bound {shown}: a row that loses one "
        "exceeds it; use more samples, or a looser bound"
    )
    assert checked(folder, top1(), IMAGES, top1_drop=bound) == (() if shown is None else (said,))


@pytest.mark.parametrize(
    ("bound", "words"), [(0.5, ["objective.top1_drop", "50 points", "0.005"]), (0.1, None), ("50%", None)]
)
def test_bound_of_many_points_is_questioned(folder, bound, words):
    found = checked(folder, top1(), IMAGES, top1_drop=bound)
    assert found == () if words is None else all(word in found[0] for word in words)


def test_each_half_has_its_own_number_of_images(folder):
    said = checked(folder, top1(), IMAGES, top1_drop=0.01, halves=True)
    counts = [
        int(found[2]) for line in said if (found := re.search(r"(search|report) half: one sample of (\d+)", line))
    ]
    assert sum(counts) == COUNT


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ((0, 3), None),
        ((1, 3), None),
        (
            (1, 4),
            "class 4 of .*, but the model has 4 outputs, for the classes 0 to 3: they count from 1: take 1 off each",
        ),
        ((0, 4), "class 4 of .*, but the model has 4 outputs, for the classes 0 to 3: they are those of another model"),
        (
            (1, 999),
            "class 999 of .*, but the model has 4 outputs, for the classes 0 to 3: they are those of another model",
        ),
    ],
)
def test_labels_outside_model_outputs_are_refused(folder, classes, said):
    (folder / "labels.txt").write_text("".join(f"{i}.png {classes[i % 2]}\n" for i in range(COUNT)))
    with nullcontext() if said is None else pytest.raises(UserError, match=f"evaluator .*: top1: data.labels: {said}"):
        assert checked(folder, top1(), IMAGES) == ()


def test_calibration_data_of_wrong_shape_are_refused(folder):
    np.save(folder / "a.npy", np.zeros((3, 3, 8, 9), np.float32))
    with pytest.raises(
        UserError, match=r"models\.0\.calibration \(model 'net'\): .*a\.npy: a sample of array 'x' is 3 x 8 x 9"
    ):
        checked(folder, None, {"data": {"use": "npy", "path": "a.npy"}})


def test_a_model_that_no_run_could_use_is_refused_by_the_check(folder):
    both = models(folder, models=[{"use": "net.onnx"}, {"use": "zoo:resnet18"}])
    check_models(both)
    quantized = GraphBuilder("net")
    x = quantized.input("x", (1, 3, 8, 8))
    scale, zero = quantized.const(np.float32(0.1)), quantized.const(np.uint8(0))
    quantized.output(quantized.op("DequantizeLinear", quantized.op("QuantizeLinear", x, scale, zero), scale, zero))
    quantized.save(folder / "net.onnx")
    with pytest.raises(UserError, match=r"net\.onnx: QuantizeLinear '.*' shows that this model is already quantized"):
        check_models(both)
    (folder / "net.onnx").write_bytes(b"hello")
    assert checked(folder) == (), "a run continues with the rest"
    with pytest.raises(UserError, match=r"models\.0 \(model 'net'\): net\.onnx: "):
        checked(folder, top1())
    with pytest.raises(UserError, match=r"models\.0 \(model 'net'\): net\.onnx: not an ONNX file"):
        check_models(both)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"x": "1x4x8x8"},
            r"models\.0 \(model 'net'\): net\.onnx: shapes\.x: the input is fixed to 1x3x8x8 in the model, but got",
        ),
        ({"y": "1x3x8x8"}, r"models\.0 \(model 'net'\): net\.onnx: shapes\.y: the model has no such input; known: x"),
    ],
)
def test_mismatched_input_shapes_are_refused(folder, shapes, message):
    with pytest.raises(UserError, match=message):
        check_experiment(models(folder, models=[{"use": "net.onnx", "shapes": shapes}]))


def test_wrong_channel_count_is_refused(folder):
    free = onnx.load(folder / "net.onnx")
    for size, name in zip(free.graph.input[0].type.tensor_type.shape.dim, "nchw", strict=True):
        size.dim_param = name
    onnx.save(free, folder / "free.onnx")
    for given, said in (("1x3x16x16", None), ("1x4x16x16", r"Conv '.*' takes 3 channels, but would get 1x4x16x16")):
        with nullcontext() if said is None else pytest.raises(UserError, match=rf"free\.onnx: shapes: {said}"):
            check_experiment(models(folder, models=[{"use": "free.onnx", "shapes": {"x": given}}]))


def test_missing_model_is_reported_before_missing_evaluator(folder):
    with pytest.raises(UserError, match=r"zoo:resnet19: no such model; did you mean 'resnet18'"):
        check_experiment(models(folder, models=["zoo:resnet19"], objective={"max_drop": 0.1}))


class Keeping:
    """A searcher that keeps whatever it is given."""

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rate: float = 0.1,
        parts: tuple[str, ...] = (),
        odd: Generator | None = None,
        free=None,  # type: ignore[no-untyped-def]
    ) -> None:
        self.space, self.rate = space, rate

    def ask(self, n: int) -> list[Any]:
        return []

    def tell(self, observation: Any) -> None:
        pass


KEEPING = f"{__name__}:{Keeping.__name__}"


@pytest.mark.parametrize(
    ("use", "params", "message"),
    [
        (KEEPING, {"rate": "high"}, rf"^searchers.0: searcher '{KEEPING}': rate: a valid number, but got 'high'$"),
        (KEEPING, {"rate": True}, "rate: a valid number, but got True"),
        (KEEPING, {"parts": "a"}, "parts: a list, but got 'a'"),
        ("evolutionary", {"crossover": "high"}, "searcher 'evolutionary': crossover: a valid number, but got 'high'"),
        ("tpe", {"n_startup_trials": 2.5}, "n_startup_trials: a valid integer"),
        ("random", {"density": "some"}, "density: 'stratified'.*, but got 'some'"),
    ],
)
def test_searcher_parameters_of_wrong_type_are_refused(folder, use, params, message):
    with pytest.raises(UserError, match=message):
        with_searcher(folder, use, params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"base_ms": "nan"}, "^backends.0: benchmarker 'simulated': base_ms: a valid number, but got 'nan'$"),
        ({"base_ms": math.nan}, "^backends.0: benchmarker 'simulated': base_ms: a finite number, but got nan$"),
        ({"seed": 0.5}, "benchmarker 'simulated': seed: a valid integer"),
    ],
)
def test_backend_parameters_of_wrong_type_are_refused(folder, params, message):
    """YAML reads nan as text and .nan as a number; neither is one."""
    text = yaml.safe_dump({
        "experiment": "e", "models": ["net.onnx"], "backends": [{"use": "simulated", "params": params, "label": "it"}]
    })  # fmt: skip
    with pytest.raises(UserError, match=message):
        check_experiment(parse_experiment(text, "e.yaml", folder))


@pytest.mark.parametrize(("body", "missing"), [("pass", "ask"), ("ask = print", "tell")])
def test_searcher_without_ask_or_tell_is_refused(folder, body, missing, monkeypatch):
    (folder / f"no_{missing}.py").write_text(
        f"class Odd:\n    {body}\n    def __init__(self, space, *, seed):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(UserError, match=rf"searcher 'no_{missing}:Odd': has no {missing}\(\)"):
        check_experiment(models(folder, searchers=[f"no_{missing}:Odd"]))


def test_missing_class_error_names_module_file(folder):
    """Installed modules come before modules next to the experiment."""
    with pytest.raises(UserError, match=r"has no attribute 'Mine' \(.*colorsys\.py\)"):
        check_experiment(models(folder, searchers=["colorsys:Mine"]))


def test_parameters_that_fit_or_cannot_be_checked_pass(folder):
    assert with_searcher(folder, KEEPING, {"rate": 1, "parts": ["a"], "odd": 3, "free": {3: "x"}}) == ()
    members = {"members": ["random", "local"], "params": {"local": {"perturbation": 0.2}}}
    assert with_searcher(folder, "portfolio", members) == ()


def with_searcher(folder: Path, use: str, params: Any) -> tuple[str, ...]:
    return check_experiment(models(folder, searchers=[{"use": use, "params": params, "label": "it"}]))


def test_an_evaluator_can_be_made_for_each_half(folder):
    model = {"use": "net.onnx", "preprocess": "array", "evaluator": top1()}
    spec = parse_experiment(json.dumps({"experiment": "e", "models": [model]}), "e.yaml", folder).models[0]
    loaded = open_model(spec, folder)
    halves = {half: evaluator_spec(spec, loaded, folder, half) for half in ("search", "report")}
    assert {half: use and use.params["data"]["half"] for half, use in halves.items()} == {k: k for k in halves}
    without = spec.model_copy(update={"evaluator": spec.evaluator.model_copy(update={"use": "fidelity", "params": {}})})
    with pytest.raises(UserError, match=r"evaluator 'fidelity' has no 'data' of which one half could be set aside"):
        evaluator_spec(without, loaded, folder, "search")


OF_THE_CAP = f"for the float model's own counts as {MAX_SQNR_DB:g}; INT8 has 20 to 50 dB as a rule"


@pytest.mark.parametrize(
    ("objective", "evaluator", "said"),
    [
        ("{top1_drop: 0.005}", "top1", "bound: top-1 may drop by at most 0.005 (0.5 points)"),
        ("{map_drop: 0.01}", "coco_map", "bound: mAP may drop by at most 0.01 (1 point)"),
        ("{max_drop: 0.07}", "miou", "bound: miou may drop by at most 0.07 (7 points)"),
        ("{top5_drop: 1%}", "top5", "bound: top5 may drop by at most 1% of the float model's own"),
        ("{max_drop: 85}", "fidelity", f"bound: SQNR has to be 35 dB or more, {OF_THE_CAP}"),
        ("{}", "top1", "bound: none; top-1 is scored without a bound"),
    ],
)
def test_bound_line_shows_interpreted_bound(objective, evaluator, said):
    text = f"experiment: e\nmodels: [plain.onnx, {{use: net.onnx, evaluator: {evaluator}}}]\nobjective: {objective}"
    assert list(bound_lines(parse_experiment(text, "e.yaml"))) == [said]


@pytest.mark.parametrize(
    ("metric", "bound", "images", "is_named"),
    [
        ("map", 0.005, 64, True),
        ("map", 0.01, 80, False),
        ("miou", 0.005, 100, True),
        ("agreement", "1%", 64, True),
        ("top1", 0.005, 500, True),
        ("top1", 0.01, 5_000, False),
        ("top1", 0.0, 10, False),
        ("sqnr_db", 10.0, 8, False),
    ],
)
def test_a_bound_that_the_images_cannot_resolve_is_named(metric, bound, images, is_named):
    objective = Objective.model_validate({"max_drop": bound})
    note = bound_resolution_note(objective, metric, images)
    assert bool(note) == is_named
    assert not note or str(images) in note


def test_bound_lines_group_models_by_metric():
    assert list(bound_lines(parse_experiment("{experiment: e, models: [net.onnx]}", "e.yaml"))) == []
    models = "[{use: a.onnx, evaluator: top1}, {use: b.onnx, evaluator: coco_map}, {use: c.onnx, evaluator: top1}]"
    text = f"experiment: e\nmodels: {models}\nobjective: {{max_drop: 0.02}}"
    assert list(bound_lines(parse_experiment(text, "e.yaml"))) == [
        "bound of a, c: top-1 may drop by at most 0.02 (2 points)",
        "bound of b: mAP may drop by at most 0.02 (2 points)",
    ]


def test_model_unsupported_by_onnx_runtime_is_noted(folder):
    assert check_models(models(folder)) == ()
    proto = onnx.load(folder / "net.onnx")
    proto.graph.node.append(onnx.helper.make_node("Mystery", ["logits"], ["more"], domain="plug.in"))
    proto.opset_import.append(onnx.helper.make_opsetid("plug.in", 1))
    proto.graph.output[0].name = "more"
    onnx.save(proto, folder / "net.onnx")
    (remark,) = check_models(models(folder))
    assert "ort_static" in remark
    assert "Mystery" in remark


@pytest.mark.parametrize(("samples", "said"), [
    (300, "calibration.samples: 300 are requested, but the data have 24"),
    (24, None),
    (4, None),
])  # fmt: skip
def test_more_samples_than_available_are_noted(folder, samples, said):
    found = checked(folder, top1(), {**IMAGES, "samples": samples})
    assert found == (() if said is None else (f"model 'net': {said}",))
    assert checked(folder, top1(), IMAGES) == ()


def test_samples_omitted_by_default_are_noted(folder):
    np.save(folder / "many.npy", np.zeros((60, 3, 8, 8), np.float32))
    (said,) = checked(folder, None, {"data": {"use": "npy", "path": "many.npy"}})
    assert "the first 48 of 60 samples" in said


def test_missing_evaluator_and_proxy_samples_are_noted(folder):
    np.save(folder / "few.npy", np.zeros((30, 3, 8, 8), np.float32))
    data = {"use": "npy", "path": "few.npy"}
    fidelity = {"use": "fidelity", "params": {"data": data, "samples": 99}}
    found = checked(folder, fidelity, {"data": data}, max_drop=80, proxy=40)
    assert [line.partition(": ")[2].partition(":")[0] for line in found] == [
        "objective.proxy",
        "evaluator.params.samples",
    ]


def test_workload_estimate_counts_tasks_searches_and_evaluations():
    text = "experiment: e\nmodels: [a.onnx, b.onnx]\nsearchers: [random, tpe]\nseeds: [0, 1]\n"
    text += "budget: {evaluations: [20, 40]}\n"
    said = describe_workload(parse_experiment(text, "e"), {})
    assert said.startswith("ok: 2 tasks, 8 searches, 320 evaluations at most; roughly ")
    assert re.search(r"\d+ to \d+ minutes$", said)
    slow = describe_workload(parse_experiment(text + "backends: [tensorrt]\n", "e"), {})
    assert "hours" in slow
    assert "(5 minutes a search at most)" in describe_workload(
        parse_experiment(text.replace("40]", "40], minutes: 5"), "e"), {}
    )
    limited = describe_workload(parse_experiment(text.replace("40]", "40], task_minutes: 3"), "e"), {})
    assert "to 6 minutes (" in limited, "two tasks"
    assert "limit of a task: 3 minutes" in limited
    assert "roughly a minute" in describe_workload(
        parse_experiment("experiment: e\nmodels: [a.onnx]\nbackends: [simulated]", "e"), {}
    )
