"""Accuracy on arrays with labels: classes and own metrics, of models with one input and with several."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.accuracy.data.arrays import half_of
from harness.accuracy.data.datasets import open_data
from harness.accuracy.metrics.base import evaluator_params, image_input_params
from harness.accuracy.metrics.intervals import metric_estimate
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry

CLASSES = 4
ROWS = 30
TWO: Mapping[str, tuple[str, tuple[int, ...]]] = {"x": ("float", (1, CLASSES)), "mask": ("bool", (1, CLASSES))}
ONE: Mapping[str, tuple[str, tuple[int, ...]]] = {"x": ("float", (1, CLASSES))}
METRIC = "harness.accuracy.metrics.labelled:Metric"
LOSS = "harness.accuracy.metrics.labelled:Loss"
DOCS = Path(__file__).resolve().parents[3] / "docs/reference/accuracy.md"


def made(use: str, data: Any, folder: Path, inputs: Any = None, **params: Any) -> Any:
    """The evaluator as the harness makes it."""
    types = TWO if inputs is None else inputs
    supplied = {**image_input_params(data, types), "inputs": types, "base": folder}
    return registry.create_plugin("evaluator", use, evaluator_params(use, {"data": data, **params}, supplied))


@pytest.fixture
def folder(tmp_path):
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
def test_labels_come_from_an_array_or_a_separate_file(data, folder):
    evaluator = made("top1", data, folder)
    found = evaluator.score(engine)
    assert len(evaluator) == len(found.per_item) == ROWS
    assert found.metrics["top1"] == pytest.approx(22 / ROWS)
    assert metric_estimate(found, "top1") is not None


def test_batches_are_scored_per_sample(folder):
    eights = {name: (kind, (8, CLASSES)) for name, (kind, _) in TWO.items()}
    evaluator = made("top1", two(), folder, eights)
    assert evaluator.inferences == 4
    assert evaluator.score(engine).metrics["top1"] == pytest.approx(22 / ROWS)


def test_halves_have_their_own_labels(folder):
    scores = [made("top1", two(half=half), folder).score(engine).per_item for half in ("search", "report")]
    whole = made("top1", two(), folder).score(engine).per_item
    for half, found in zip(("search", "report"), scores, strict=True):
        assert found == tuple(hit for i, hit in enumerate(whole) if half_of(f"row {i}") == half)
    from_file = made("top1", two("y.csv", "inputs.npz", half="report"), folder)
    assert from_file.score(engine).per_item == scores[1]


def test_labels_are_no_input_of_the_model(folder):
    opened = open_data(two(), folder)
    assert set(opened.arrays) == {"x", "mask"}  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"no input 'y'.*labels: y"):
        made("top1", {"use": "npz", "path": "two.npz"}, folder)
    with pytest.raises(UserError, match=r"no input 'y'.*leave it out"):
        made("top1", two("y.csv"), folder)


def test_labels_that_count_from_1_are_refused(folder):
    np.save(folder / "y.npy", np.load(folder / "y.npy") + 1)
    with pytest.raises(UserError, match="count from 1"):
        made("top1", two("y.npy", "inputs.npz"), folder).score(engine)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("two.npz", "data: a mapping"),
        ({"use": "npz", "path": "inputs.npz"}, "classes are needed, from an array of the .npz file"),
        (two("z"), "no array 'z', only 'x', 'mask', 'y', and z: no such file"),
        (two("short.csv", "inputs.npz"), "has 2 rows, but inputs.npz has 30 samples"),
        (two("words.csv", "inputs.npz"), "line 3: numbers are needed, but got 'cat'"),
        (two("x", "inputs.npz"), "one class a sample"),
        (two("halves.csv", "inputs.npz"), "whole numbers from 0"),
        (two("labels.json", "inputs.npz"), "a .npy, .npz, .csv or .txt file"),
        (two("binary.csv", "inputs.npz"), "binary.csv: this is not text"),
        (two("two.npz", "inputs.npz"), "holds x, mask, y; labels are a file with one array"),
        (two("ragged.txt", "inputs.npz"), "rows of one length are needed, but they have [1, 2] numbers"),
        (two("empty.csv", "inputs.npz"), "but they have no numbers"),
        (two(path="damaged.npz"), "damaged.npz"),
    ],
)
def test_mismatched_labels_are_refused(data, words, folder):
    (folder / "short.csv").write_text("1\n2\n")
    (folder / "words.csv").write_text("class\n1\ncat\n")
    (folder / "halves.csv").write_text("0.5\n" * ROWS)
    (folder / "ragged.txt").write_text("1\n\n1 2\n")
    (folder / "labels.json").touch()
    (folder / "empty.csv").touch()
    (folder / "damaged.npz").write_text("no archive")
    (folder / "binary.csv").write_bytes(b"\xff")
    np.savez(folder / "inputs.npz", x=np.zeros((ROWS, CLASSES), np.float32), mask=np.zeros((ROWS, CLASSES), bool))
    inputs = {"mask": TWO["mask"]} if words == "one class a sample" else None
    with pytest.raises(UserError, match=re.escape(words)):
        made("top1", data, folder, inputs)


def test_labels_outside_the_data_section_are_refused(folder):
    with pytest.raises(UserError, match="labels belong to the data"):
        made("top1", two(), folder, labels="y")


def test_box_metric_on_arrays_is_refused(folder):
    with pytest.raises(UserError, match="images are needed here"):
        made("coco_map", two(), folder, preprocess="yolox", decode="yolox")


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
def functions(folder, monkeypatch):
    name = f"metrics_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_user_function_is_a_metric(folder, functions):
    evaluator = made(METRIC, two(), folder, function=f"{functions}:hits")
    found = evaluator.score(engine)
    assert found.metrics["metric"] == pytest.approx(22 / ROWS)
    assert metric_estimate(found, "metric") is not None
    loss = made(LOSS, two(), folder, function=f"{functions}:error")
    assert (loss.metric, loss.higher_is_better) == ("loss", False)
    found = loss.score(lambda feeds: {"a": feeds["x"], "b": feeds["x"] + 2})
    assert found.metrics["loss"] == pytest.approx(2)
    assert found.per_item == ()


@pytest.mark.parametrize(("name", "words"), [("broken", "KeyError"), ("wide", r"shape \(30, 4\)")])
def test_failing_user_metric_is_named(name, words, folder, functions):
    evaluator = made(METRIC, two(), folder, function=f"{functions}:{name}")
    with pytest.raises(EvaluationFailed, match=f"{functions}:{name}.*{words}"):
        evaluator.score(engine)


@pytest.mark.parametrize(
    ("function", "data", "words"),
    [("hits", two(), "a name of the form module:function, but got 'hits'"), ("", two(None), "labels are needed")],
)
def test_metrics_without_function_or_labels_are_refused(function, data, words, folder, functions):
    with pytest.raises(UserError, match=words):
        made(METRIC, {**data, "path": "inputs.npz"}, folder, function=function or f"{functions}:hits")


def test_custom_metric_examples_of_the_docs_run(folder, monkeypatch):
    page = DOCS.read_text(encoding="utf-8").partition("## A metric of your own")[2].partition("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        file = re.match(r"# (\w+\.py)", block)
        (folder / file[1]).write_text(block)
        sys.modules.pop(file[1][:-3], None)
    monkeypatch.syspath_prepend(str(folder))
    np.savez(folder / "test.npz", x=np.load(folder / "x.npy"), y=np.load(folder / "x.npy").sum(axis=1) + 0.5)
    data = two("y", "test.npz")

    def total(feeds: Any) -> dict[str, np.ndarray]:
        return {"out": feeds["x"].sum(axis=1, keepdims=True)}

    within = made(METRIC, data, folder, ONE, function="my_metrics:within_one").score(total)
    assert within.metrics["metric"] == 1
    own = made("my_evaluator:MeanError", data, folder, ONE).score(total)
    assert own.metrics["mean_error"] == pytest.approx(0.5, abs=1e-6)
