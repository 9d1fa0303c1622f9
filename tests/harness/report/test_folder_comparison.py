"""Comparison of two results folders."""

import shutil

import pandas as pd
import pytest
import yaml
from small_results import TASK, edit_json, write_confirmation, write_task
from typer.testing import CliRunner

from harness.base.errors import UserError
from harness.base.files import write_json
from harness.cli.main import app
from harness.report.folder_comparison import compare_frame, describe_differences, differing_rows
from harness.results.folder import load


@pytest.fixture
def other(folder, tmp_path_factory):
    """The same run on a machine that is twice as fast except for one row, with another library."""
    copy = tmp_path_factory.mktemp("other") / "out"
    shutil.copytree(folder, copy)
    write_confirmation(copy / TASK, {"A/A twin": 4.0, "float": 4.0, "float-bf16": 5.0, "all": 2.0, "bb": 2.5})
    for path, version in ((folder, "2026.3"), (copy, "2026.4")):
        facts = {"packages": {"openvino": version}, "cpu": {"model": "A CPU"}, "load_average": [len(version) * 0.1]}
        edit_json(path / TASK / "env.json", **facts)
    return copy


def compare(one, two) -> pd.DataFrame:
    return compare_frame(load(one), load(two)).set_index("method")


def differences(one, two) -> list[str]:
    return list(describe_differences(load(one), load(two)))


def printed(one, two) -> str:
    return CliRunner().invoke(app, ["report", str(one), "--compare", str(two)]).stdout


def test_rows_are_matched_with_a_ratio_and_missing_ones_named(folder, other):
    frame = compare(folder, other)
    assert frame.loc["float f32", ["ratio", "ratio_low", "ratio_high"]].tolist() == pytest.approx([2.0, 2.0, 2.0])
    assert frame["verdict"].to_dict() == {
        "float f32": "faster",
        "float bf16": "faster",
        "all": "tie",
        "linear": "missing in 1 and 2",
        "ort_static": "missing in 1 and 2",
        "random": "missing in 2",
        "tpe": "missing in 1 and 2",
    }
    assert frame.loc["all", "speedup_2"] == pytest.approx(2.0)
    assert frame.loc["random", "same_file"]
    assert pd.isna(compare(folder, folder).loc["tpe", "ratio"])


def test_differences_are_named(folder, other):
    line = "environment.packages.openvino: '2026.3' -> '2026.4'"
    assert differences(folder, other) == [line]
    text = printed(folder, other)
    assert line in text
    assert "| 2.00 [2.00, 2.00]" in text
    assert "Environment, model and settings are the same." in printed(folder, folder)


def test_keys_of_the_experiment_are_compared_entry_by_entry(folder, other):
    path = other / "experiment.yaml"
    document = yaml.safe_load(path.read_text())
    document["searchers"] = [s for s in document["searchers"] if s["use"] != "tpe"]
    document["confirmation"]["builds"] = 9
    document["description"] = "other words"
    path.write_text(yaml.safe_dump(document))
    builds, searcher = differences(folder, other)[1:]
    assert builds == "experiment.confirmation.builds: 3 -> 9"
    assert searcher.startswith("experiment.searchers.tpe: {")
    assert searcher.endswith(" -> None")


@pytest.mark.parametrize(("one", "two", "busier"), [(8.1, 1.06, "first"), (0.2, 2.4, "second"), (1.0, 1.9, None)])
def test_a_higher_load_is_named_as_cause_if_its_folder_is_slower(folder, other, one, two, busier):
    for path, load_average in ((folder, one), (other, two)):
        write_json(path / TASK / "env.json", {"load_average": [load_average, 0.5, 0.5]})
    named = [(busier in line, "likely cause" in line) for line in differences(folder, other)]
    assert named == ([(True, busier == "first")] if busier else [])


def test_noise_of_either_folder_is_a_warning(folder, other):
    edit_json(folder / TASK / "noise_floor.json", noise_floor=0.337)
    latency_ms = {"A/A twin": 8.0, "float": 8.0, "all": 2.0, "aa": 4.0, "bb": 5.0}
    write_confirmation(other / TASK, latency_ms, disturbed="waited for a core 50% of the time")
    text = printed(folder, other)
    assert f"the noise floor of {TASK} is 33.7% in the first and 0.0% in the second" in text
    assert f"Noisy machine, {TASK} in the second: 100% of the turns were disturbed" in text
    assert "in the first: " not in text


def test_tasks_of_one_folder_are_named_and_none_in_common_is_an_error(folder, other):
    write_task(folder, "net-openvino-fp8", precision="fp8")
    assert f"only in {folder}: net-openvino-fp8" in differences(folder, other)
    (other / TASK).rename(other / "mine-openvino-int8")
    with pytest.raises(UserError, match=r"no task in common \(tasks: net-openvino-int8, net.*; mine-openvino-int8\)"):
        compare(folder, other)


@pytest.mark.parametrize(
    ("one", "two", "differs"),
    [
        ({"verdict": "faster"}, {"verdict": "tie"}, False),
        ({"verdict": "faster"}, {"verdict": "slower"}, True),
        ({"score": 41.2371}, {"score": 41.2379}, False),
        ({"score": 0.78}, {"score": 0.77}, True),
        ({"score": 0.78}, {"score": None}, True),
    ],
)
def test_a_row_differs_beyond_noise_and_rounding(folder, one, two, differs):
    results = load(folder)
    frame = compare_frame(results, results).head(1)
    for side, changes in ((1, one), (2, two)):
        for key, value in changes.items():
            frame[f"{key}_{side}"] = [value]
    assert bool(differing_rows(results, results, frame)) == differs
