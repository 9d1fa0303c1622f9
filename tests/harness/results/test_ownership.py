"""Ownership of results folders: the same experiment is recognised, with NaN, after an update and when it grows."""

import math

import pytest
from small import qdq, save_small

from harness.base.errors import UserError
from harness.base.files import diff_leaves, json_equal
from harness.config.experiment import load_experiment, parse_experiment
from harness.results.manifest import close_results, read_manifest
from harness.results.ownership import owned_results_dir

NAN = """
experiment: small
models: [net.onnx]
backends: [{use: simulated, params: {noise: .nan, drift: .inf, wanted: [1, .nan]}}]
"""
TEXT = """
experiment: small
models: [net.onnx]
searchers: [random, tpe]
seeds: [0]
initial: [float]
baselines: [all]
budget: {evaluations: [10, 25], minutes: 5}
"""


def own(folder, text):
    """Return the work that is added to the results folder."""
    experiment = text if not isinstance(text, str) else parse_experiment(text, "small.yaml")
    with owned_results_dir(folder / "out", experiment) as added:
        return added


def test_an_experiment_with_nan_is_recognised(tmp_path):
    for _ in range(2):
        own(tmp_path, NAN)
    with pytest.raises(UserError, match=r"another experiment \(different: backends\)"):
        own(tmp_path, NAN.replace("[1, .nan]", "[2, .nan]"))


def test_results_from_before_a_key_existed_have_its_default(tmp_path):
    experiment = parse_experiment(NAN, "small.yaml")
    own(tmp_path, experiment)
    file = tmp_path / "out" / "experiment.yaml"
    old = file.read_text()
    (tmp_path / "out" / "manifest.json").unlink()
    file.write_text("".join(line for line in old.splitlines(keepends=True) if "memory_gb" not in line))
    assert file.read_text() != old
    own(tmp_path, experiment)
    changed = experiment.model_copy(update={"limits": experiment.limits.model_copy(update={"memory_gb": 2.0})})
    with pytest.raises(UserError, match=r"\(different: limits\)"):
        own(tmp_path, changed)


def test_run_check_reports_ownership_and_writes_nothing(tmp_path, capsys):
    save_small(tmp_path / "net.onnx")
    file, out = tmp_path / "small.yaml", tmp_path / "out"
    text = "experiment: small\nmodels: [net.onnx]\nbackends: [{use: simulated, params: {drift: 0.5}}]\n"
    file.write_text(text)
    command = ("run", str(file), "--check", "--out", str(out))
    assert qdq(*command) == 0
    assert not out.exists()
    own(tmp_path, text)
    before = (out / "experiment.yaml").read_text()
    file.write_text(text + "budget: {evaluations: [500]}\n")
    assert qdq(*command) == 0
    assert "budget 25, 50 -> 500" in capsys.readouterr().out
    file.write_text(text.replace("drift: 0.5", "drift: 0.0"))
    assert qdq(*command) == 2
    assert "(different: backends)" in capsys.readouterr().err
    assert (out / "experiment.yaml").read_text() == before
    assert {path.name for path in out.iterdir()} <= {"experiment.yaml", "manifest.json", ".lock"}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (math.nan, math.nan, True),
        ({"a": [1, math.nan]}, {"a": [1, math.nan]}, True),
        (1, 1.0, True),
        (math.nan, 1.0, False),
        ([math.nan], [math.inf], False),
    ],
)
def test_nan_equals_nan(one, other, equal):
    assert json_equal(one, other) is equal
    assert bool(list(diff_leaves({"x": one}, {"x": other}))) is not equal


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ([("25]", "40]")], "budget 10, 25 -> 10, 40"),
        ([("[10, 25]", "[40]")], "budget 10, 25 -> 40"),
        ([("[10, 25]", "[10, 15, 25]")], "budget 10, 25 -> 10, 15, 25"),
        ([("minutes: 5", "minutes: 7.5")], "minutes 5 -> 7.5"),
        ([(", minutes: 5", "")], "minutes 5 -> any"),
        ([("minutes: 5", "minutes: 6, task_minutes: null")], "minutes 5 -> 6"),
        ([("tpe]", "tpe, auto, {use: random, label: again}]")], "searchers: auto, again added"),
        ([("[0]", "[0, 1, 2]")], "seeds: 1, 2 added"),
        ([("[all]", "[all, linear]")], "baselines: linear added"),
        ([("net.onnx", "net.onnx, other.onnx")], "models: other.onnx added"),
        ([("[0]", "[0, 1]"), ("25]", "40]")], "seeds: 1 added; budget 10, 25 -> 10, 40"),
        ([], ""),
    ],
)
def test_extensions_are_reported_and_the_old_file_archived(tmp_path, changes, added):
    text = TEXT
    for old, new in changes:
        text = text.replace(old, new)
    own(tmp_path, TEXT)
    assert own(tmp_path, text) == added
    assert parse_experiment(text, "") == load_experiment(tmp_path / "out" / "experiment.yaml")
    backup = tmp_path / "out" / "experiment.1.yaml"
    assert backup.exists() == bool(added)
    assert not added or load_experiment(backup) == parse_experiment(TEXT, "")


@pytest.mark.parametrize(
    ("old", "new", "different"),
    [
        ("25]", "20]", "budget"),
        ("[10, 25]", "[25]", "budget"),
        ("[10, 25]", "[25, 10]", "budget"),
        ("minutes: 5", "minutes: 4", "budget"),
        ("25], minutes: 5", "40], minutes: 4", "budget"),
        ("minutes: 5", "minutes: 5, task_minutes: 9", "budget"),
        ("random, tpe", "tpe, random", "searchers"),
        ("random, tpe", "auto, random, tpe", "searchers"),
        ("random, tpe", "random", "searchers"),
        ("tpe]", "{use: tpe, params: {n_startup_trials: 5}}, auto]", "searchers"),
        ("[0]", "[1, 0]", "seeds"),
        ("[all]", "[linear]", "baselines"),
        ("[float]", "[float, all]", "initial"),
        (
            "[float]\nbaselines: [all]\nbudget: {evaluations: [10, 25",
            "[all]\nbudget: {evaluations: [10, 40",
            "initial, ",
        ),
    ],
)
def test_other_changes_are_rejected(tmp_path, old, new, different):
    own(tmp_path, TEXT)
    with pytest.raises(UserError, match=rf"\(different: {different}.*; use another --out, or --accept-changes"):
        own(tmp_path, TEXT.replace(old, new))
    assert load_experiment(tmp_path / "out" / "experiment.yaml") == parse_experiment(TEXT, "")


def test_refused_experiment_keeps_manifest(tmp_path):
    own(tmp_path, TEXT)
    close_results(tmp_path / "out", [])
    before = read_manifest(tmp_path / "out")
    with pytest.raises(UserError, match="another experiment"):
        own(tmp_path, TEXT.replace("initial: [float]", "initial: [float, linear]"))
    assert read_manifest(tmp_path / "out") == before
    assert before["files"].keys() == {"experiment.yaml"}


def test_a_full_disk_during_an_extension_leaves_the_folder_unchanged(tmp_path, monkeypatch):
    def full(path, text):
        if path.name == "experiment.yaml":
            raise UserError("no space left")
        path.write_text(text)

    own(tmp_path, TEXT)
    larger = TEXT.replace("25]", "40]")
    with monkeypatch.context() as context:
        context.setattr("harness.results.ownership.write_text", full)
        with pytest.raises(UserError, match="no space left"):
            own(tmp_path, larger)
    assert own(tmp_path, larger) == "budget 10, 25 -> 10, 40"
