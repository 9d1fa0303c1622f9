"""A value of a megabyte in a file: the message has its start, the file and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations import AUTOTUNE_STATE, EXPERIMENT_YAML, PATTERN_CACHE
from small_results import TASK, write_folder
from stored import JOURNAL_HEADER, write_lines

from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.base.text import MAX_LINE_CHARS, MAX_VALUE_CHARS
from harness.compat.modelopt_autotune.session import read_state
from harness.compat.tao_specs.spec import read_spec
from harness.config.experiment import load_experiment
from harness.graph.pattern_cache import read_cache
from harness.results.deploy_folder import read_bundle
from harness.results.folder import load
from harness.results.journal import read_journal
from harness.results.manifest import read_manifest
from harness.results.turns import read_comparison

LONG = "x" * 2**20
PROPOSAL = {"kind": "proposal", "number": 0, "choices": [0], "digest": "d", "origin": "searcher"}
TURN = {"kind": "turn", "build": 0, "group": 0, "round": 0, "row": "float", "samples_ms": [1.0]}
MANIFEST = {
    "complete": False,
    "tasks": {TASK: {"config": "", "complete": False, "files": {"a": [1, "b"]}}},
    "files": {},
}
SPEC = "quantize: {model_path: a.onnx, mode: static_ptq, layers: [{module_name: a}]}"
YAML_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "experiment": (EXPERIMENT_YAML, load_experiment),
    "spec": (SPEC, read_spec),
    "cache": (PATTERN_CACHE, read_cache),
    "state": (AUTOTUNE_STATE, lambda path: read_state(path, {"model_sha256": "ab"})),
}


def with_long_values(body: Any) -> Iterator[Any]:
    """Yield copies of a value in which each part, or each key, is replaced by a long text or a list of them."""
    yield from (LONG, [LONG, "x " * 2**19])
    if isinstance(body, dict):
        for key, value in body.items():
            yield from ({**body, key: changed} for changed in with_long_values(value))
        yield {**body, LONG: 1}
    elif isinstance(body, list) and body:
        yield from ([changed, *body[1:]] for changed in with_long_values(body[0]))


def check_messages(read: Callable[[], object], path: Path) -> bool:
    """Read a file; return whether it is refused, with short values."""
    try:
        read()
    except UserError as error:
        text = str(error)
        assert path.name in text, text[:300]
        assert "x" * (MAX_VALUE_CHARS + 60) not in text
        assert max(map(len, text.split("\n"))) <= MAX_LINE_CHARS
        return True
    return False


@pytest.mark.parametrize("kind", YAML_FILES)
def test_long_values_of_yaml_files_are_cut(tmp_path, kind):
    text, read = YAML_FILES[kind]
    path = tmp_path / "file.yaml"
    refused = 0
    for body in with_long_values(yaml.safe_load(text)):
        path.write_text(yaml.dump(body, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), width=2**21))
        refused += check_messages(lambda: read(path), path)
    assert refused


@pytest.mark.parametrize(("line", "read"), [(PROPOSAL, read_journal), (TURN, read_comparison)])
def test_long_values_of_logs_are_cut(tmp_path, line, read):
    path, refused = tmp_path / "log.jsonl", 0
    for body in with_long_values(line):
        write_lines(path, [JOURNAL_HEADER, json.dumps(body)])
        refused += check_messages(lambda: list(read(path)), path)
    assert refused


@pytest.mark.parametrize("name", ["task.json", "rows.json", "accuracy.json"])
def test_long_values_of_records_are_cut(tmp_path, name):
    path = write_folder(tmp_path) / TASK / name
    before, refused = read_json(path), 0
    for body in with_long_values(shortened(before)):
        write_json(path, body if isinstance(body, dict) else {"a": body})
        refused += check_messages(lambda: load(tmp_path), path)
    assert refused


def shortened(body: Any) -> Any:
    """Return a value with one entry of each list and two of each mapping below the first level."""
    return {key: value[:1] if isinstance(value, list) else value for key, value in body.items()}


def test_long_values_of_manifests_and_ship_facts_are_cut(tmp_path):
    refused = 0
    (tmp_path / "ship.json").touch()
    for body in with_long_values(MANIFEST):
        write_json(tmp_path / "manifest.json", body if isinstance(body, dict) else {"files": body})
        refused += check_messages(lambda: read_manifest(tmp_path), tmp_path / "manifest.json")
    (tmp_path / "SHA256SUMS").write_text(f"{LONG}  {LONG}\n")
    assert check_messages(lambda: read_bundle(tmp_path), tmp_path)
    assert refused
