"""No key of an experiment loads code or connects to another machine without trust, and the check says so."""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from qdq import autotune
from small import qdq, save_small

from harness.base.errors import UserError
from harness.base.paths import TRUST_VARIABLE
from harness.config.experiment import Experiment, parse_experiment
from harness.plugins.registry import load_plugin
from harness.run.prepare.preflight import CODE_KEYS, check_experiment

ADDRESS = "executor.address"
PARAMS = {
    "searchers.*.params.*", "backends.*.params.*", "initial.*.params.*", "models.*.preprocess.params.*",
    "models.*.evaluator.params.*", "models.*.calibration.data.*",
}  # fmt: skip
#: Names of files, rows, tensors, dimensions, metrics and rules, which cannot be code.
TEXTS = {
    "experiment", "description", "models.*.use", "models.*.label", "models.*.shapes.*",
    "models.*.shape_set.shapes.*.shapes.*", "models.*.preprocess.label", "models.*.evaluator.label",
    "backends.*.label", "searchers.*.label", "initial.*.use", "initial.*.label", "baselines.*",
    "objective.max_drop", "objective.max_latency", "objective.metric",
}  # fmt: skip


def text_keys(annotation: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a configuration that accept any text."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            yield from text_keys(arguments[0], path)
        case typing.Union | types.UnionType:
            for each in arguments:
                yield from text_keys(each, path)
        case origin if origin in (tuple, list, dict):
            yield from text_keys(arguments[origin is dict], f"{path}.*")
        case _ if annotation in (str, Any):
            yield path
        case _ if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            for name, field in annotation.model_fields.items():
                yield from text_keys(field.annotation, f"{path}.{name}".lstrip("."))


def test_each_text_key_is_known_to_name_code_or_not():
    assert {*text_keys(Experiment)} == {*CODE_KEYS, ADDRESS, *PARAMS, *TEXTS}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder on the import path with a model, data and a module that leaves a mark when it is imported."""
    save_small(tmp_path / "net.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.zeros((2, 3, 16, 16), np.float32), y=np.zeros(2, np.int64))
    (tmp_path / "planted.py").write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    yield tmp_path
    assert not (tmp_path / "imported").exists()
    assert "planted" not in sys.modules


DATA = {"use": "npz", "path": "feeds.npz"}


def described(**changes: Any) -> dict[str, Any]:
    model = {"use": "net.onnx", "calibration": {"data": DATA}}
    return {
        "experiment": "e",
        "models": [model],
        "backends": [{"use": "simulated"}],
        "searchers": [{"use": "random"}],
        **changes,
    }


def with_value(key: str, value: str) -> dict[str, Any]:
    """Return an experiment with a value at a key."""
    if key == ADDRESS:
        return described(executor={"use": "ray", "address": value})
    first, *rest = (f"{key[:-1]}x" if key.endswith("shapes.*") else key).split(".")
    made: Any = value
    for name in reversed(rest):
        made = [made] if name == "*" else {name: made}
    body = described()
    if isinstance(made, list) and isinstance(made[0], dict):
        return body | {first: [*({**entry, **made[0]} for entry in body.get(first, [{"use": "float"}]))]}
    return body | {first: made}


@pytest.mark.parametrize("key", sorted({*CODE_KEYS, ADDRESS, *TEXTS}))
def test_no_key_runs_code_without_trust(folder, key):
    body = with_value(key, "planted:Thing")
    refused = None
    try:
        check_experiment(parse_experiment(json.dumps(body), "e.yaml", folder))
    except UserError as error:
        refused = str(error)
    if key not in TEXTS:
        assert key.replace("*", "0") in str(refused)
        assert "planted:Thing" in str(refused)
        assert "--trust-plugins" in str(refused)


def evaluator(use: str, *, labels: bool = False, **params: Any) -> dict[str, Any]:
    """Return the model with an evaluator of the images of the test data."""
    data = {**DATA, "labels": "y"} if labels else DATA
    return {"models": [{"use": "net.onnx", "evaluator": {"use": use, "params": {"data": data, **params}}}]}


@pytest.mark.parametrize(
    "changes",
    [
        evaluator("metric", function="planted:thing", labels=True),
        evaluator("loss", function="planted:thing", labels=True),
        evaluator("top1", preprocess="planted:Thing", labels=True),
        evaluator("agreement", decode="planted:thing"),
        evaluator("agreement", decode={"use": "planted:thing", "params": {}}),
        {"searchers": [{"use": "portfolio", "params": {"members": ["random", "planted:Thing"]}}]},
        {"searchers": [{"use": "per_pattern", "params": {"searcher": "planted:Thing"}}]},
        {"backends": [{"use": "trtexec", "params": {"path": "./planted.py"}}]},
        {"backends": [{"use": "trtexec", "params": {"plugins": ["planted.so"]}}]},
        {"backends": [{"use": "trtexec", "params": {"extra": ["--loadEngine=x"]}}]},
        {"backends": [{"use": "trtexec", "params": {"timing_cache_file": "file"}}]},
        {"backends": [{"use": "tensorrt", "params": {"plugins": ["planted.so"]}}]},
        {"backends": [{"use": "tensorrt", "params": {"timing_cache_file": "file"}}]},
        {"backends": [{"use": "onnxruntime_web", "params": {"module_dir": "."}}]},
        {"backends": [{"use": "onnxruntime_web", "params": {"node": "./planted.py"}}]},
        {"backends": [{"use": "onnxruntime_web", "params": {"chromium": "./planted.py"}}]},
    ],
)
def test_parameters_that_name_code_are_refused_by_the_check(folder, changes):
    with pytest.raises(UserError, match="--trust-plugins"):
        check_experiment(parse_experiment(json.dumps(described(**changes)), "e.yaml", folder))


#: Text parameters of built-in plug-ins: those above, and names that a library or a data set looks up.
TEXT_PARAMS = {
    "benchmarker": {
        "module_dir", "node", "chromium", "timing_cache_file", "plugins", "path", "extra", "profiles", "table", "base",
        "target",
    },
    "evaluator": {
        "data", "preprocess", "decode", "function", "reference", "inputs", "output", "base", "input_name",
        "random_outputs", "axes",
    },
    "searcher": {"members", "searcher", "params", "strategy", "optimizer", "sampler", "method"},
    "external searcher": {"qdq_baseline"},
    "decoder": {"outputs"},
    **{kind: set[str]() for kind in ("preprocessing", "range estimator", "recovery step")},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(TEXT_PARAMS))
def test_each_text_parameter_of_a_plugin_is_known(kind):
    found = set()
    for point in entry_points(group=f"qdq.{kind.replace(' ', '_')}s"):
        parameters = signature(load_plugin(kind, point.name)).parameters.values()
        found |= {each.name for each in parameters if re.search(r"\b(str|Path|Any)\b", str(each.annotation))}
    assert found == TEXT_PARAMS[kind]


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("models.0.calibration.method", {"models": [{"use": "net.onnx", "calibration": {"method": "planted:Thing"}}]}),
        (ADDRESS, {"executor": {"use": "ray", "address": "ray://stranger:10001"}}),
    ],
)
def test_check_run_and_python_refuse_the_same_keys(folder, monkeypatch, capsys, key, changes):
    monkeypatch.chdir(folder)
    Path("e.yaml").write_text(json.dumps(described(**changes)))
    for command in (("run", "e.yaml", "--check"), ("run", "e.yaml"), ("inspect", "sensitivity", "e.yaml")):
        assert qdq(*command) == 2
        text = capsys.readouterr().err
        assert key in text
        assert "--trust-plugins" in text
    if "executor" in changes:
        with pytest.raises(UserError, match=f"{key}.*--trust-plugins"):
            autotune("net.onnx", backend="simulated", out="out", **changes)


def test_the_check_loads_trusted_estimators(folder, monkeypatch):
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    for key, value in (("method", "json:JSONDecoder"), ("weights", "json:loads"), ("method", "no_module:Thing")):
        body = with_value(f"models.*.calibration.{key}", value)
        with pytest.raises(UserError, match=f"models.0.calibration.*{value}"):
            check_experiment(parse_experiment(json.dumps(body), "e.yaml", folder))
