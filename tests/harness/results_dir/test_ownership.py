"""Whose results a folder holds: the same experiment is recognised whatever its numbers, and after an update."""

import math

import pytest
from small import qdq, save_small

from harness.errors import UserError
from harness.results_dir.ownership import owned_results_dir
from harness.results_dir.fingerprint import diff_leaves, json_equal
from harness.config.experiment import load_experiment, parse_experiment

TEXT = """
experiment: small
models: [net.onnx]
backends: [{use: simulated, params: {noise: .nan, drift: .inf, wanted: [1, .nan]}}]
"""


def test_an_experiment_with_nan_is_the_same_experiment_again(tmp_path):
    for _ in range(2):
        with owned_results_dir(tmp_path / "out", parse_experiment(TEXT, "small.yaml")):
            pass
    with (
        pytest.raises(UserError, match=r"results of another experiment \(different: backends\)"),
        owned_results_dir(tmp_path / "out", parse_experiment(TEXT.replace("[1, .nan]", "[2, .nan]"), "small.yaml")),
    ):
        pass


def test_results_from_before_a_key_had_its_default_then(tmp_path):
    experiment = parse_experiment(TEXT, "small.yaml")
    with owned_results_dir(tmp_path / "out", experiment):
        file = tmp_path / "out" / "experiment.yaml"
    old = file.read_text()
    file.write_text("".join(line for line in old.splitlines(keepends=True) if "memory_gb" not in line))
    assert file.read_text() != old
    with owned_results_dir(tmp_path / "out", experiment):
        pass
    changed = experiment.model_copy(update={"limits": experiment.limits.model_copy(update={"memory_gb": 2.0})})
    with pytest.raises(UserError, match=r"\(different: limits\)"), owned_results_dir(tmp_path / "out", changed):
        pass


def test_the_check_says_what_a_run_would_say_of_its_folder_and_writes_nothing(tmp_path, capsys):
    save_small(tmp_path / "net.onnx")
    file, out = tmp_path / "small.yaml", tmp_path / "out"
    text = "experiment: small\nmodels: [net.onnx]\nbackends: [{use: simulated, params: {drift: 0.5}}]\n"
    file.write_text(text)
    given = ("run", str(file), "--check", "--out", str(out))
    assert qdq(*given) == 0
    assert not out.exists()
    with owned_results_dir(out, parse_experiment(text, "small.yaml")):
        before = (out / "experiment.yaml").read_text()
    assert qdq(*given) == 0
    file.write_text(text + "budget: {evaluations: [500]}\n")
    capsys.readouterr()
    assert qdq(*given) == 0
    assert "budget 25, 50 -> 500: would go on with what is there" in capsys.readouterr().out
    file.write_text(text.replace("drift: 0.5", "drift: 0.0"))
    assert qdq(*given) == 2
    assert "results of another experiment (different: backends)" in capsys.readouterr().err
    assert (out / "experiment.yaml").read_text() == before
    assert [path.name for path in out.iterdir() if path.name != "experiment.yaml"] in ([], [".lock"], ["lock"])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (math.nan, math.nan, True),
        ([1, math.nan], [1, math.nan], True),
        ({"a": math.nan}, {"a": math.nan}, True),
        (1, 1.0, True),
        (math.nan, 1.0, False),
        ([math.nan], [math.inf], False),
    ],
)
def test_a_nan_equals_itself(one, other, equal):
    assert json_equal(one, other) is equal
    assert bool(list(diff_leaves({"x": one}, {"x": other}))) is not equal


ASKED = """
experiment: small
models: [net.onnx]
searchers: [random, tpe]
seeds: [0]
initial: [float]
baselines: [all]
budget: {evaluations: [10, 25], minutes: 5}
"""


def goes_on(folder, **changes):
    """What is said where `ASKED` was run before and now stands there with something else."""
    text = ASKED
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    with owned_results_dir(folder / "out", parse_experiment(ASKED, "small.yaml")):
        pass
    with owned_results_dir(folder / "out", parse_experiment(text, "small.yaml")) as grown:
        return grown


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("25]", "40]"), "budget 10, 25 -> 10, 40"),
        (("[10, 25]", "[40]"), "budget 10, 25 -> 40"),
        (("[10, 25]", "[10, 15, 25]"), "budget 10, 25 -> 10, 15, 25"),
        (("minutes: 5", "minutes: 7.5"), "minutes 5 -> 7.5"),
        ((", minutes: 5", ""), "minutes 5 -> any"),
        (("tpe]", "tpe, auto, {use: random, label: again}]"), "searchers: auto, again added"),
        (("[0]", "[0, 1, 2]"), "seeds: 1, 2 added"),
        (("[all]", "[all, linear]"), "baselines: linear added"),
        (("net.onnx", "net.onnx, other.onnx"), "models: other.onnx added"),
        (("random", "random"), ""),
    ],
)
def test_who_asks_for_more_goes_on_and_is_told_what_is_new(tmp_path, change, said):
    assert goes_on(tmp_path, change=change) == said
    assert parse_experiment(ASKED.replace(*change), "") == load_experiment(tmp_path / "out" / "experiment.yaml")
    kept = tmp_path / "out" / "experiment.1.yaml"
    assert kept.exists() == bool(said)
    assert not said or load_experiment(kept) == parse_experiment(ASKED, "")


def test_a_full_disk_while_more_is_asked_for_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    def full(path, text):
        if path.name == "experiment.yaml":
            raise UserError("no space left")
        path.write_text(text)

    with owned_results_dir(tmp_path / "out", parse_experiment(ASKED, "")):
        pass
    larger = parse_experiment(ASKED.replace("25]", "40]"), "")
    with monkeypatch.context() as context:
        context.setattr("harness.results_dir.ownership.write_text", full)
        with pytest.raises(UserError, match="no space left"), owned_results_dir(tmp_path / "out", larger):
            pass
    with owned_results_dir(tmp_path / "out", larger) as grown:
        assert grown == "budget 10, 25 -> 10, 40"


def test_several_things_may_grow_at_once(tmp_path):
    said = goes_on(tmp_path, seeds=("[0]", "[0, 1]"), budget=("25]", "40]"))
    assert said == "seeds: 1 added; budget 10, 25 -> 10, 40"


@pytest.mark.parametrize(
    ("change", "different"),
    [
        (("25]", "20]"), "budget"),
        (("[10, 25]", "[25]"), "budget"),
        (("[10, 25]", "[25, 10]"), "budget"),
        (("minutes: 5", "minutes: 4"), "budget"),
        (("25], minutes: 5", "40], minutes: 4"), "budget"),
        (("random, tpe", "tpe, random"), "searchers"),
        (("random, tpe", "auto, random, tpe"), "searchers"),
        (("random, tpe", "random"), "searchers"),
        (("tpe]", "{use: tpe, params: {n_startup_trials: 5}}, auto]"), "searchers"),
        (("[0]", "[1, 0]"), "seeds"),
        (("[all]", "[linear]"), "baselines"),
        (("[float]", "[float, all]"), "initial"),
    ],
)
def test_who_asks_for_less_or_for_something_else_is_asked_first(tmp_path, change, different):
    with pytest.raises(UserError, match=rf"\(different: {different}\); use another --out, or --accept-changes"):
        goes_on(tmp_path, change=change)
    assert load_experiment(tmp_path / "out" / "experiment.yaml") == parse_experiment(ASKED, "")


def test_more_of_one_thing_is_no_excuse_for_another(tmp_path):
    with pytest.raises(UserError, match=r"\(different: initial, budget\)"):
        goes_on(tmp_path, initial=("[float]", "[float, all]"), budget=("25]", "40]"))
