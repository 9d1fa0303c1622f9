"""A flipped byte anywhere in a finished results folder is reported, and never changes a figure silently."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from socket import gethostname

import pytest
from small import qdq, save_chain

from harness.base.errors import UserError
from harness.base.files import add_checksum, read_json, write_json
from harness.base.paths import HOST_VARIABLE, hide_paths
from harness.config.experiment import parse_experiment
from harness.measure.records import Failed
from harness.report.next_steps import describe_answers
from harness.report.render import report_text, write_report
from harness.report.tables.catalog import build_tables
from harness.results import lines
from harness.results.artifacts import read_finalists
from harness.results.folder import load
from harness.results.journal import read_journal
from harness.results.manifest import MANIFEST_FILE, check_results, find_changed_files, read_manifest
from harness.results.ownership import check_ownership

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0, failure_rate: 0.3}}]
searchers: [random]
initial: [float, linear]
baselines: [linear]
budget: {evaluations: [8]}
seeds: [0]
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
TASK = "net-simulated-int8"
NOT_RESULTS = {".lock", "optuna.journal"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("integrity")
    save_chain(folder / "net.onnx", (8, 8, 12))
    (folder / "small.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(folder / "small.yaml"), "--out", str(folder / "out")) == 0
    return folder / "out"


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    return tmp_path / "out"


def shown(folder: Path) -> str:
    """What a reader of the report sees, or the error."""
    try:
        results = load(folder)
        tables = list(build_tables(results))
    except UserError as error:
        return f"refused: {error}"
    main = next(table.raw for table in tables if table.name == "main")
    return "\n".join([report_text(results, tables), *describe_answers(results, main)])


def test_an_undamaged_folder_is_complete(done, capsys):
    _, complete, problems = check_results(done)
    assert (complete, problems) == (True, [])
    assert qdq("verify", str(done)) == 0
    assert "none damaged; complete" in capsys.readouterr().out
    assert qdq("verify", str(done), "--json") == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_missing_file_is_reported(copy, capsys):
    path = copy / TASK / "noise_floor.json"
    path.unlink()
    assert str(path) in shown(copy)
    assert [text.split("; ")[0] for text in check_results(copy)[2]] == [f"{path}: missing"]
    assert qdq("verify", str(copy)) == 1
    assert f"{path.name}: missing" in capsys.readouterr().out
    assert qdq("verify", str(copy), "--json") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith(f"{path}: missing")


def test_numbers_of_many_digits_are_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(add_checksum('{"a": 7, "b": "' + "1" * 400 + '"}'))
    assert read_json(path)["a"] == 7
    path.write_text(add_checksum('{"a": 1' + "0" * 400 + "}"))
    with pytest.raises(UserError, match="a number of 401 digits"):
        read_json(path)


def test_a_damaged_model_is_not_recommended(copy):
    models = sorted((copy / TASK / "models").glob("*.onnx"))
    assert "take " in shown(copy)
    for path in models:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    text = shown(copy)
    assert "\ntake " not in text
    assert "damaged, do not ship it" in text


def test_run_names_damaged_task_file_and_repairs_after_removal(copy, capsys):
    path = copy / TASK / "confirmation.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    command = ["run", str(copy.parent / "small.yaml"), "--out", str(copy)]
    save_chain(copy.parent / "net.onnx", (8, 8, 12))
    (copy.parent / "small.yaml").write_text(EXPERIMENT)
    assert qdq(*command) == 2
    assert "confirmation.jsonl.gz: damaged" in capsys.readouterr().err.replace("\n", " ")
    path.unlink()
    assert qdq(*command) == 0
    manifest = read_manifest(copy)
    assert manifest is not None
    assert manifest["complete"]
    assert check_results(copy)[2] == []


def test_results_name_no_folder_and_no_host(done):
    private = [str(done.parent), str(Path.home()), sys.prefix, *filter(lambda name: len(name) > 3, [gethostname()])]
    for path in (path for path in done.rglob("*") if path.is_file() and path.suffix not in (".png", ".onnx")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert [name for name in private if name.encode() in text] == [], path


def test_stored_texts_have_placeholders_for_folders(monkeypatch):
    text = f'File "{Path.cwd()}/mine.py", {tempfile.gettempdir()}/x.onnx, {sys.prefix}/lib/a.py'
    assert hide_paths(text) == 'File "./mine.py", <tmp>/x.onnx, <python>/lib/a.py'
    assert Failed(stage="build", reason=text, log_tail=text).without_paths().log_tail == hide_paths(text)
    monkeypatch.setenv(HOST_VARIABLE, "1")
    assert hide_paths(text) == text


@pytest.mark.parametrize("name", ["/dev/zero", "../outside.json", "a/../../b"])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path, name):
    write_json(tmp_path / MANIFEST_FILE, {"complete": True, "tasks": {}, "files": {name: [0, ""]}})
    with pytest.raises(UserError, match=r"manifest\.json: .* no path within the folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"tasks": [1]}, {"tasks": {"a": 1}}, {"files": {"a": 5}}, {"files": {"a": []}}, {"files": None}]
)
def test_malformed_manifest_is_refused(tmp_path, changes):
    write_json(tmp_path / MANIFEST_FILE, {"complete": True, "tasks": {}, "files": {}, **changes})
    with pytest.raises(UserError, match=rf"manifest\.json: damaged \({next(iter(changes))}"):
        read_manifest(tmp_path)


def test_overlong_name_in_manifest_is_reported_missing(tmp_path):
    (found,) = find_changed_files(tmp_path, {"x" * 400: [0, ""]})
    assert found.problem == "missing"


def test_special_file_is_reported_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    (found,) = find_changed_files(tmp_path, {"a.json": [0, ""]})
    assert "no regular file" in found.problem


def test_log_above_decompressed_size_limit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"0" * 2**21))
    monkeypatch.setattr(lines, "MAX_UNPACKED_BYTES", 2**20)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: unpacks to more"):
        lines.restore_lines(tmp_path / "a.jsonl")


@pytest.mark.parametrize("stored", ["a.jsonl", "a.jsonl.gz"])
def test_line_above_size_limit_is_refused(tmp_path, monkeypatch, stored):
    raw = b"0" * 2**12
    (tmp_path / stored).write_bytes(gzip.compress(raw) if stored.endswith(".gz") else raw)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**10)
    for read in (lines.read_lines, read_journal):
        with pytest.raises(UserError, match=rf"{stored}: a line of more"):
            next(read(tmp_path / "a.jsonl"))


def test_number_beyond_float_range_is_refused(copy):
    write_json(copy / TASK / "phases.json", {"searches": 10**400})
    (copy / MANIFEST_FILE).unlink()
    with pytest.raises(UserError, match=r"phases\.json.*401 digits"):
        load(copy)


@pytest.mark.parametrize("name", ["report", f"{TASK}/env.json", ".lock", f"{TASK}/rows.tmp"])
def test_symbolic_link_out_of_folder_is_refused(copy, tmp_path, name):
    outside, path = tmp_path / "outside", copy / name
    outside.mkdir()
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(outside)
    experiment = parse_experiment(EXPERIMENT, "small.yaml")
    for use in (write_report, load, check_results, lambda folder: check_ownership(folder, experiment)):
        with pytest.raises(UserError, match=rf"{name}: a symbolic link out"):
            use(copy)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("label", ["../../stolen", "/stolen", '"a\\0"', "a" * 300, '"\\e[31m"'])
def test_task_name_outside_results_is_refused(copy, label):
    (copy / MANIFEST_FILE).unlink()
    (copy / "experiment.yaml").write_text(f"models: [{{use: net.onnx, label: {label}}}]\nbackends: [x]\n")
    with pytest.raises(UserError, match=r"experiment\.yaml: a task is called .* no folder name"):
        load(copy)


@pytest.mark.parametrize("key", ["file", "id"])
@pytest.mark.parametrize("name", ["/etc/passwd", "../other.onnx", "a/b.onnx"])
def test_row_with_path_outside_folder_is_refused(copy, key, name):
    rows = copy / TASK / "rows.json"
    body = read_json(rows)
    body["rows"][0][key] = name
    write_json(rows, body)
    with pytest.raises(UserError, match=rf"rows\.json.*{key}.*without a folder"):
        read_finalists(copy / TASK)
