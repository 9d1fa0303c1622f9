"""Metrics on labels: classes of images and arrays, boxes, masks, and functions of the user."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluators import make_evaluator
from PIL import Image

from harness.accuracy.data import batching
from harness.accuracy.data.arrays import half_of
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.decode import Detections
from harness.accuracy.data.preprocess import Shapes
from harness.accuracy.metrics import base
from harness.accuracy.metrics.average_precision import map_figures, match_boxes
from harness.accuracy.metrics.base import image_input_params, low_reference_warning
from harness.accuracy.metrics.intervals import metric_estimate
from harness.accuracy.metrics.labelled import CocoMAP, Top5
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins.api import Evaluator, Infer

CLASSES, ROWS = 4, 30
TWO = {"x": ("float", (1, CLASSES)), "mask": ("bool", (1, CLASSES))}
METRIC = "harness.accuracy.metrics.labelled:Metric"
DOCS = Path(__file__).resolve().parents[4] / "docs/reference/accuracy.md"
SPLIT = {"use": "shapes", "split": "evaluation", "count": 6}
DETECTOR = {"data": SPLIT, "preprocess": "shapes", "decode": "shapes"}
BOXES = {"input_name": "images", "input_shape": (1, 3, 128, 128), "reference": "unused.npz"}
NOTHING = {"boxes": np.zeros((1, 8, 7), np.float32)}
MASKED = {"use": "images", "images": "images", "masks": "masks"}


def scored(evaluator: Any, found: Any) -> Any:
    return evaluator.score(found if callable(found) else lambda _: found)


# Classes of images


@pytest.fixture
def images(tmp_path):
    """Ten images; image i is filled with i, and its class is i."""
    (tmp_path / "images").mkdir()
    for i in range(10):
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "labels.txt").write_text("".join(f"{i}.png {i}\n" for i in range(10)))
    return tmp_path


def top(folder: Path, use: str = "top1", batch: int = 1, labels: str | None = "labels.txt", **params: Any) -> Any:
    data = {"use": "images", "images": "images", "labels": labels}
    shape = (batch, 3, 4, 4)
    return make_evaluator(
        use, {"data": data, "preprocess": "shapes", **params}, input_name="x", input_shape=shape, base=folder
    )


def logits(feeds: Any) -> dict[str, np.ndarray]:
    """Right below 4; below 8 the right class comes fifth; else last but one of twelve."""
    rows = np.zeros((len(feeds["x"]), 12), np.float32)
    for row, tensor in zip(rows, feeds["x"], strict=True):
        i = round(float(tensor[0, 0, 0]) * 255)
        order = [k for k in range(12) if k != i]
        order.insert(0 if i < 4 else 4 if i < 8 else 10, i)
        row[order] = np.arange(12, 0, -1)
    return {"logits": rows}


def one_hot(classes: int, answer: Any) -> Infer:
    return lambda feeds: {"logits": np.eye(classes)[[int(answer(round(float(feeds["x"][0, 0, 0, 0]) * 255)))]]}


@pytest.mark.parametrize("batch", [1, 4])
def test_top1_and_top5_of_known_logits(images, batch):
    evaluator = top(images, batch=batch)
    assert (len(evaluator), evaluator.inferences) == (10, -(-10 // batch))
    accuracy = evaluator.score(logits)
    assert accuracy.metrics == {"top1": 0.4, "top5": 0.8}
    assert accuracy.per_item == (1.0,) * 4 + (0.0,) * 6
    for metric in ("top1", "top5"):
        estimate = metric_estimate(accuracy, metric)
        assert estimate.interval.low < estimate.interval.value == accuracy.metrics[metric] < estimate.interval.high
        assert estimate.caveat.startswith("only 10 samples")
    assert top(images, "top5", batch).score(logits).per_item == (1.0,) * 8 + (0.0,) * 2
    assert (Top5.metric, Top5.higher_is_better) == ("top5", True)


def test_ties_are_resolved_to_the_lower_class(images):
    assert scored(top(images), {"logits": np.zeros((1, 12, 1, 1))}).metrics == {"top1": 0.1, "top5": 0.5}


def test_labels_with_shifted_classes_are_refused(images):
    right = top(images).score(one_hot(10, lambda i: i))
    assert right.metrics["top1"] == 1.0
    with pytest.raises(UserError, match=r"10 of 10 answers are the label \+1"):
        top(images).score(one_hot(11, lambda i: i + 1))
    stuck = top(images).score(one_hot(10, lambda _: 9))
    assert stuck.metrics["top1"] == 0.1
    assert "class 9" in low_reference_warning(stuck, "top1", higher_is_better=True, params={})
    assert not low_reference_warning(right, "top1", higher_is_better=True, params={})
    # Of two classes a degraded candidate may answer with one nearly always: for most images the label and one more.
    (images / "labels.txt").write_text("".join(f"{i}.png {int(i >= 7)}\n" for i in range(10)))
    assert top(images).score(one_hot(2, lambda i: i >= 1)).metrics["top1"] == 0.4


def test_output_parameter_selects_the_logits(images):
    def two(feeds: Any) -> dict[str, np.ndarray]:
        return {"other": np.zeros((1, 3)), **logits(feeds)}

    assert top(images, output="logits").score(two).metrics["top1"] == 0.4
    top(images, output="logits").check_outputs({"other": (1, 3), "logits": (1, 10)})
    for output, message in ((None, "say which of logits, other"), ("logit", "no output 'logit', only logits, other"),
                            ("other", "class 9 .*, but the model has 3 outputs")):  # fmt: skip
        evaluator = top(images, output=output)
        with pytest.raises(UserError, match=message):
            evaluator.score(two)
        with pytest.raises(UserError, match=message):
            evaluator.check_outputs({"other": (1, 3), "logits": (1, 10)})


def test_mismatched_labels_and_outputs_are_refused(images):
    with pytest.raises(UserError, match=r"top5: data.labels: classes are needed, from a \.txt file"):
        top(images, "top5", labels=None)
    with pytest.raises(EvaluationFailed, match=r"no row of logits: its shape is \(1, 3, 4\)"):
        scored(top(images), {"logits": np.zeros((1, 3, 4))})
    with pytest.raises(EvaluationFailed, match=r"output 'logits' has NaN or infinite values on image '0.png'"):
        scored(top(images), {"logits": np.full((1, 12), np.nan)})


# Classes of arrays, and functions


def made(use: str, data: Any, folder: Path, inputs: Any = None, **params: Any) -> Any:
    types = TWO if inputs is None else inputs
    return make_evaluator(use, {"data": data, **params}, **image_input_params(data, types), inputs=types, base=folder)


@pytest.fixture
def rows(tmp_path):
    """Rows whose largest value that the mask leaves is their class, for three of four rows."""
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(ROWS, CLASSES)).astype(np.float32), rng.integers(0, 2, (ROWS, CLASSES)).astype(bool)
    mask[:, 0] = True
    y = np.where(mask, x, -9).argmax(axis=1)
    y[::4] = (y[::4] + 1) % CLASSES
    np.savez(tmp_path / "two.npz", x=x, mask=mask, y=y)
    np.savez(tmp_path / "inputs.npz", x=x, mask=mask)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "y.npz", anything=y[:, None])
    (tmp_path / "y.csv").write_text("class\n" + "".join(f"{value}\n" for value in y))
    (tmp_path / "y.txt").write_text("".join(f"{value}.0\n" for value in y))
    return tmp_path


def engine(feeds: Any) -> dict[str, np.ndarray]:
    return {"logits": np.where(feeds["mask"], feeds["x"], -9)}


def two(labels: str | None = "y", path: str = "two.npz", **cut: Any) -> dict[str, Any]:
    return {"use": path[-3:], "path": path, "labels": labels, **cut}


@pytest.mark.parametrize(
    "data", [two(), *(two(f"y.{kind}", "inputs.npz") for kind in ("npy", "npz", "csv", "txt"))], ids=str
)
def test_labels_come_from_an_array_or_a_separate_file(data, rows):
    evaluator = made("top1", data, rows)
    found = evaluator.score(engine)
    assert len(evaluator) == len(found.per_item) == ROWS
    assert found.metrics["top1"] == pytest.approx(22 / ROWS)
    eights = made("top1", data, rows, {name: (kind, (8, CLASSES)) for name, (kind, _) in TWO.items()})
    assert (eights.inferences, eights.score(engine).metrics) == (4, found.metrics)


def test_halves_have_their_own_labels(rows):
    scores = [made("top1", two(half=half), rows).score(engine).per_item for half in ("search", "report")]
    whole = made("top1", two(), rows).score(engine).per_item
    for half, found in zip(("search", "report"), scores, strict=True):
        assert found == tuple(hit for i, hit in enumerate(whole) if half_of(f"row {i}") == half)
    assert made("top1", two("y.csv", "inputs.npz", half="report"), rows).score(engine).per_item == scores[1]


def test_labels_that_count_from_1_are_refused(rows):
    np.save(rows / "y.npy", np.load(rows / "y.npy") + 1)
    with pytest.raises(UserError, match="count from 1"):
        made("top1", two("y.npy", "inputs.npz"), rows).score(engine)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("two.npz", "data: a mapping"),
        ({"use": "npz", "path": "inputs.npz"}, "from an array of the .npz file"),
        ({"use": "npz", "path": "two.npz"}, "no input 'y'"),
        (two("y.csv"), "leave it out"),
        (two("z"), "no array 'z', only 'x', 'mask', 'y'"),
        (two("short.csv", "inputs.npz"), "has 2 rows, but inputs.npz has 30 samples"),
        (two("words.csv", "inputs.npz"), "line 3: numbers are needed, but got 'cat'"),
        (two("x.npy", "inputs.npz"), "one class a sample"),
        (two("halves.csv", "inputs.npz"), "whole numbers from 0"),
        (two("labels.json", "inputs.npz"), "a .npy, .npz, .csv or .txt file"),
        (two("binary.csv", "inputs.npz"), "binary.csv: this is not text"),
        (two("two.npz", "inputs.npz"), "holds x, mask, y"),
        (two("ragged.txt", "inputs.npz"), "they have [1, 2] numbers"),
        (two("empty.csv", "inputs.npz"), "they have no numbers"),
        (two(path="damaged.npz"), "damaged.npz"),
    ],
)
def test_mismatched_labels_are_refused(data, words, rows):
    files = {"short.csv": "1\n2\n", "words.csv": "class\n1\ncat\n", "halves.csv": "0.5\n" * ROWS}
    files |= {"ragged.txt": "1\n\n1 2\n", "labels.json": "", "empty.csv": "", "damaged.npz": "no"}
    for name, text in files.items():
        (rows / name).write_text(text)
    (rows / "binary.csv").write_bytes(b"\xff")
    with pytest.raises(UserError, match=re.escape(words)):
        made("top1", data, rows)


def test_parameters_that_do_not_fit_arrays_are_refused(rows):
    with pytest.raises(UserError, match="labels belong to the data"):
        made("top1", two(), rows, labels="y")
    with pytest.raises(UserError, match="images are needed here"):
        made("coco_map", two(), rows, preprocess="yolox", decode="yolox")


FUNCTIONS = """
import numpy as np

def hits(outputs, labels):
    return outputs.argmax(axis=1) == labels

def error(outputs, labels):
    return float(np.abs(outputs["a"] - outputs["b"]).max())

def broken(outputs, labels):
    raise KeyError("no")

def wide(outputs, labels):
    return outputs
"""


@pytest.fixture
def functions(rows, monkeypatch):
    name = f"metrics_{rows.name.replace('-', '_')}"
    (rows / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(rows))
    return name


def test_user_function_is_a_metric(rows, functions):
    found = made(METRIC, two(), rows, function=f"{functions}:hits").score(engine)
    assert found.metrics["metric"] == pytest.approx(22 / ROWS)
    assert metric_estimate(found, "metric") is not None
    loss = made(METRIC.replace("Metric", "Loss"), two(), rows, function=f"{functions}:error")
    assert (loss.metric, loss.higher_is_better) == ("loss", False)
    found = loss.score(lambda feeds: {"a": feeds["x"], "b": feeds["x"] + 2})
    assert found.metrics["loss"] == pytest.approx(2)
    assert found.per_item == ()


def test_failing_user_metric_is_named(rows, functions):
    for name, words in (("broken", "KeyError"), ("wide", r"shape \(30, 4\)")):
        with pytest.raises(EvaluationFailed, match=f"{functions}:{name}.*{words}"):
            made(METRIC, two(), rows, function=f"{functions}:{name}").score(engine)
    with pytest.raises(UserError, match="module:function, but got 'hits'"):
        made(METRIC, two(), rows, function="hits")
    with pytest.raises(UserError, match="labels are needed"):
        made(METRIC, two(None, "inputs.npz"), rows, function=f"{functions}:hits")


def test_custom_metric_examples_of_the_docs_run(rows, monkeypatch):
    page = DOCS.read_text(encoding="utf-8").partition("## A metric of your own")[2].partition("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        file = re.match(r"# (\w+\.py)", block)
        (rows / file[1]).write_text(block)
        sys.modules.pop(file[1][:-3], None)
    monkeypatch.syspath_prepend(str(rows))
    np.savez(rows / "test.npz", x=np.load(rows / "x.npy"), y=np.load(rows / "x.npy").sum(axis=1) + 0.5)
    data, one = two("y", "test.npz"), {"x": TWO["x"]}

    def total(feeds: Any) -> dict[str, np.ndarray]:
        return {"out": feeds["x"].sum(axis=1, keepdims=True)}

    assert made(METRIC, data, rows, one, function="my_metrics:within_one").score(total).metrics["metric"] == 1
    own = made("my_evaluator:MeanError", data, rows, one).score(total)
    assert own.metrics["mean_error"] == pytest.approx(0.5, abs=1e-6)


# Boxes


def detector(params: Any = (), **supplied: Any) -> Any:
    return make_evaluator("coco_map", {**DETECTOR, **dict(params)}, **{**BOXES, **supplied})


def oracle(coco: Any, *, shift: float = 0.0) -> Infer:
    """An engine that knows the labels: finds the image by its pixels and answers in the zoo detector's layout."""
    data: Any = open_data(SPLIT)
    known = [Shapes().prepare(data.image(i), (128, 128)).tensor for i in range(len(data))]

    def infer(feeds: Any) -> dict[str, np.ndarray]:
        answers = np.zeros((len(feeds["images"]), 8, 7), np.float32)
        for rows, tensor in zip(answers, feeds["images"], strict=True):
            image = next(i for i, other in enumerate(known) if np.array_equal(other, tensor))
            boxes = [a for a in coco["annotations"] if a["image_id"] == coco["images"][image]["id"]]
            for row, box in zip(rows, boxes, strict=False):
                left, top, width, height = box["bbox"]
                row[:4] = left + width / 2 + shift, top + height / 2, width, height
                row[3 + box["category_id"]] = 0.9
        return {"boxes": answers}

    return infer


@pytest.fixture(scope="module")
def coco():
    return open_data(SPLIT).coco  # type: ignore[union-attr]


@pytest.mark.parametrize("batch", [1, 4])
def test_map_of_perfect_shifted_and_no_boxes(coco, batch, capsys):
    evaluator = detector(input_shape=(batch, 3, 128, 128))
    assert isinstance(evaluator, Evaluator)
    metrics = evaluator.score(oracle(coco)).metrics
    assert (metrics["map"], metrics["map50"]) == pytest.approx((1.0, 1.0))
    shifted = evaluator.score(oracle(coco, shift=3.0))
    assert 0 < shifted.metrics["map"] < 0.9
    estimate = metric_estimate(shifted, "map")
    assert estimate.interval.low <= shifted.metrics["map"] <= estimate.interval.high
    assert estimate.caveat.startswith("only 6 samples")
    assert scored(evaluator, {"boxes": np.zeros((batch, 8, 7), np.float32)}).metrics["map"] == 0.0
    assert capsys.readouterr().out == ""


def test_float_model_with_permuted_classes_is_refused(coco):
    detector().prepare(oracle(coco))
    turned = {**coco, "annotations": [{**a, "category_id": a["category_id"] % 3 + 1} for a in coco["annotations"]]}
    with pytest.raises(UserError, match=r"finds the boxes \(AP50 1.000 .*data.classes"):
        detector().prepare(oracle(turned))
    detector().prepare(lambda _: NOTHING)


def test_images_are_preprocessed_once(monkeypatch):
    calls: list[int] = []
    original = Shapes.prepare
    monkeypatch.setattr(Shapes, "prepare", lambda *args: (calls.append(1), original(*args))[1])
    first, second, caches = detector(), detector({"data": {**SPLIT, "every": 2}}), dict[object, Any]()
    for evaluator in (first, first, second):
        evaluator.share_inputs(caches)
        scored(evaluator, NOTHING)
    assert len(calls) == 6
    # Room for two images of 3 x 128 x 128 float32: the others are made each time.
    monkeypatch.setattr(base, "MAX_CACHE_BYTES", 2 * 3 * 128 * 128 * 4)
    evaluator = detector()
    calls.clear()
    for _ in range(2):
        scored(evaluator, NOTHING)
    assert len(calls) == 6 + 4


def found(index: int) -> list[Detections]:
    return [Detections(boxes=np.array([[10.0, 10, 30, 30]]), scores=np.ones(1), classes=np.array([index]))]


def test_classes_are_the_category_ids_in_ascending_order():
    box = {"id": 1, "image_id": 1, "category_id": 30, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0}
    labels = {"images": [{"id": 1}], "annotations": [box], "categories": [{"id": 30}, {"id": 4}]}
    before = json.dumps(labels)
    figures = map_figures(match_boxes(labels, found(1)))
    assert figures["map"] == pytest.approx(1.0)
    assert set(figures) == {"map", "map50", "map75", "maps"}, "no box is medium or large"
    assert map_figures(match_boxes(labels, found(0)))["map"] == 0.0
    assert json.dumps(labels) == before
    with pytest.raises(UserError, match="finds class 2, but the labels have 2 categories"):
        match_boxes(labels, found(2))


def test_outputs_that_are_not_finite_fail_the_candidate():
    with pytest.raises(EvaluationFailed, match=r"output 'boxes' has NaN or infinite values on image 'evaluation_00000"):
        scored(detector(), {"boxes": np.full((1, 8, 7), np.inf, np.float32)})


def test_labels_without_boxes_are_explained(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    image = {"id": 1, "file_name": "a.png"}
    (tmp_path / "l.json").write_text(json.dumps({"images": [image], "annotations": [], "categories": []}))
    for labels, message in ((None, r"from a \.json file"), ("l.json", "no box on any")):
        with pytest.raises(UserError, match=message):
            detector({"data": {"use": "images", "images": ".", "labels": labels}}, base=tmp_path)


@pytest.mark.parametrize(
    ("params", "supplied", "message"),
    [
        ({"decode": {"use": "yolox", "params": {"scores": 1}}}, {}, "'yolox' has no parameter 'scores'"),
        ({"batch": 3}, {}, "'coco_map' has no parameter 'batch'"),
        ({"input_name": "x"}, {}, "'input_name' is set by the harness"),
        ({}, {"input_shape": (1, 1, 8, 8)}, "'images' is 1 x 1 x 8 x 8"),
    ],
)
def test_invalid_parameters_are_refused(params, supplied, message):
    with pytest.raises(UserError, match=message):
        detector(params, **supplied)


class Grey:
    """A preprocessing that breaks its promise."""

    def prepare(self, image: np.ndarray, size: tuple[int, int]) -> Any:
        good = Shapes().prepare(image, size)
        return type(good)(tensor=good.tensor[:1], scale=1.0, offset=(0, 0), original=size)


def test_preprocessed_tensor_of_wrong_shape_is_refused(monkeypatch):
    monkeypatch.setattr(batching.registry, "create_plugin", lambda *_: Grey())
    evaluator = CocoMAP(SPLIT, "shapes", "shapes", "images", (1, 3, 128, 128))
    with pytest.raises(UserError, match=r"gives float32 \(1, 128, 128\) .* wants float32 \(3, 128"):
        scored(evaluator, {})


# Masks


def miou(folder: Path, data: Any = (), size: int = 8, **params: Any) -> Any:
    given = {"data": {**MASKED, **dict(data)}, "preprocess": "array", **params}
    return make_evaluator("miou", given, input_name="x", input_shape=(1, 3, size, size), base=folder)


@pytest.fixture
def masks(tmp_path):
    """Two images of 8 x 8; the left half of their masks is 0, the right half 1 and 2; the last row has no class."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in (1, 2):
        Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "images" / f"{i}.png")
        Image.fromarray(truth(i).astype(np.uint8)).save(tmp_path / "masks" / f"{i}.png")
    return tmp_path


def truth(i: int) -> np.ndarray:
    mask = np.zeros((8, 8), np.int64)
    mask[:, 4:] = i
    mask[7] = 255
    return mask


def answer(feeds: Any) -> np.ndarray:
    """The classes of the image, with 0 in the lower half of the pixels that are not 0."""
    mask = truth(int(feeds["x"][0, 0, 0, 0]))
    mask[4:] = 0
    return mask


def pixels(feeds: Any) -> dict[str, np.ndarray]:
    return {"logits": np.eye(5, dtype=np.float32)[answer(feeds)].transpose(2, 0, 1)[None]}


def test_miou_of_known_masks_ignores_void_pixels(masks):
    # Class 0: 56 rightly, 24 wrongly. Classes 1 and 2: 16 of 28 each. Classes 3 and 4 have no label.
    expected = np.mean([56 / 80, 16 / 28, 16 / 28])
    accuracy = miou(masks).score(pixels)
    assert accuracy.metrics == {"miou": pytest.approx(expected)}
    estimate = metric_estimate(accuracy, "miou")
    one = np.mean([28 / 40, 16 / 28])  # of a draw with one of the images twice
    assert (estimate.interval.low, estimate.interval.high) == pytest.approx((min(one, expected), max(one, expected)))


@pytest.mark.parametrize(
    "form",
    [
        lambda feeds: answer(feeds)[None],
        lambda feeds: answer(feeds)[None, None].astype(np.float32),
        lambda feeds: pixels(feeds)["logits"][:, :, ::2, ::2],
    ],
)
def test_classes_and_outputs_of_half_size_score_alike(masks, form):
    assert miou(masks).score(lambda feeds: {"y": form(feeds)}).metrics == miou(masks).score(pixels).metrics


def test_a_model_with_the_channels_last_has_the_same_score(masks):
    params = {"data": MASKED, "preprocess": "array"}
    made = make_evaluator("miou", params, input_name="x", input_shape=(1, 8, 8, 3), base=masks)

    def channels_last(feeds: Any) -> dict[str, np.ndarray]:
        return {"logits": pixels({"x": feeds["x"].transpose(0, 3, 1, 2)})["logits"].transpose(0, 2, 3, 1)}

    assert made.score(channels_last).metrics == miou(masks).score(pixels).metrics


@pytest.mark.parametrize("use", ["yolox", "ultralytics", "rtdetr"])
def test_letterbox_is_removed_from_outputs(masks, use):
    mask = np.zeros((20, 40), np.uint8)
    mask[5:15, 10:30] = 1
    for i in (1, 2):
        Image.fromarray(np.repeat(mask[:, :, None] * 255, 3, axis=2)).save(masks / "images" / f"{i}.png")
        Image.fromarray(mask).save(masks / "masks" / f"{i}.png")

    def bright(feeds: Any) -> dict[str, np.ndarray]:
        return {"classes": (feeds["x"][:, 0] > 0.6 * float(feeds["x"].max())).astype(np.int64)}

    assert miou(masks, size=80, preprocess=use).score(bright).metrics["miou"] > 0.9
    with pytest.raises(UserError, match=r"cuts off a part of the image.*resize: stretch"):
        scored(miou(masks, preprocess="tf_imagenet"), {"logits": np.zeros((1, 2, 8, 8))})


@pytest.fixture
def panoptic(masks):
    """The same masks in COCO's panoptic form: cat is 1, dog is 2, the rest is grass or nothing."""
    ids = {0: (0, 0, 0), 1: (7, 1, 0), 2: (9, 0, 2), 255: (3, 0, 0)}
    for i in (1, 2):
        coloured = np.array([[ids[int(k)] for k in row] for row in truth(i)], np.uint8)
        Image.fromarray(coloured).save(masks / "masks" / f"{i}.png")
    segments = [{"id": number, "category_id": c} for number, c in ((7 + 256, 17), (9 + 2 * 65536, 18), (3, 4))]
    labels = {
        "images": [{"id": i, "file_name": f"{i}.png"} for i in (1, 2)],
        "annotations": [{"image_id": i, "file_name": f"{i}.png", "segments_info": segments} for i in (2, 1)],
        "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}, {"id": 4, "name": "grass"}],
    }
    (masks / "panoptic.json").write_text(json.dumps(labels))
    return masks


@pytest.mark.parametrize(
    ("classes", "found"),
    [
        # Unlabelled pixels and grass are background, so the last row of 8 pixels, found as 0, is right.
        (["background", "cat", "dog"], [72 / 96, 16 / 28, 16 / 28]),
        # Without a class for the rest it counts for nothing.
        (["grass", "cat", "dog"], [16 / 40, 16 / 28, 16 / 28]),
        (["background", "cats"], "no category 'cats'; did you mean 'cat'"),
        (None, "data.classes: .* got None"),
    ],
)
def test_panoptic_masks_are_mapped_by_class_names(panoptic, classes, found):
    data = {"labels": "panoptic.json", "classes": classes}
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            miou(panoptic, data)
    else:
        assert miou(panoptic, data).score(pixels).metrics["miou"] == pytest.approx(np.mean(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file_name": "../1.png"}, "'../1.png', outside of the folder"),
        ({"segments_info": [{"id": 1, "category_id": 99}]}, "segment 1: no category with id 99"),
        ({"segments_info": [{"id": 1}]}, "segments_info: every entry has 'category_id'"),
        ({"image_id": 5}, "'1.png' has no mask"),
        ({"file_name": "lost.png"}, "data.masks: lost.png is not in"),
    ],
)
def test_malformed_panoptic_labels_are_explained(panoptic, change, message):
    path = panoptic / "panoptic.json"
    labels = json.loads(path.read_text())
    labels["annotations"][1].update(change)
    path.write_text(json.dumps(labels))
    with pytest.raises(UserError, match=message):
        miou(panoptic, {"labels": "panoptic.json", "classes": ["background", "cat", "dog"]})


def test_unusable_masks_are_refused(masks):
    path = masks / "masks" / "1.png"
    for image, message in (
        (Image.new("L", (8, 4)), r"1\.png: is 4x8, but its image is 8x8"),
        (Image.new("RGB", (8, 8)), r"1\.png: is coloured"),
        (Image.new("L", (8, 8), 5), r"class 5 on '1\.png', but the model has 5 outputs"),
    ):
        image.save(path)
        with pytest.raises(UserError, match=message):
            miou(masks).score(pixels)
    path.write_bytes(b"hello")
    with pytest.raises(UserError, match=r"1\.png: cannot be read as a mask"):
        miou(masks).score(pixels)
    path.unlink()
    with pytest.raises(UserError, match=r"data.masks: 1\.png is not in"):
        miou(masks)
    with pytest.raises(UserError, match="masks are needed, a folder of PNG files"):
        miou(masks, {"masks": None})


def test_outputs_that_are_no_map_of_classes_fail_the_candidate(masks):
    with pytest.raises(EvaluationFailed, match=r"the output's shape is \(1, 5\)"):
        scored(miou(masks), {"logits": np.zeros((1, 5))})
    with pytest.raises(UserError, match="say which of a, b"):
        scored(miou(masks), {"a": np.zeros(1), "b": np.zeros(1)})
    for i in (1, 2):
        Image.new("L", (8, 8), 255).save(masks / "masks" / f"{i}.png")
    with pytest.raises(UserError, match=r"no pixel .*has a class"):
        miou(masks).score(pixels)
