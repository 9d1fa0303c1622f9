"""Every argument of ModelOpt's `quantize()` has a row in the compatibility page, and behaves as described there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.base.errors import UserError
from harness.compat.tao_specs import modelopt_arguments
from harness.compat.tao_specs.modelopt_arguments import INT4_ARGUMENTS, check_arguments, modelopt_parameters
from harness.compat.tao_specs.ptq import get_parser, run_ptq

PAGE = (Path(__file__).resolve().parents[4] / "docs/reference/compatibility.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## ModelOpt [^\n]*\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
ROWS = [row.split("|")[1:4] for row in SECTION[1].splitlines() if row.startswith("| `")]
NAMES = {name: (options, here) for options, here, _ in ROWS for name in re.findall(r"`(\w+)`", options)}


def named(test: str) -> list[str]:
    """The arguments of the rows that a test proves."""
    return [name for options, _, tests in ROWS if test in tests for name in re.findall(r"`(\w+)`", options)]


def test_every_argument_has_a_row():
    assert {*modelopt_parameters(), *INT4_ARGUMENTS} == NAMES.keys()


@pytest.mark.parametrize("name", named("test_arguments_set_by_other_keys_are_refused"))
def test_arguments_set_by_other_keys_are_refused(name):
    with pytest.raises(UserError, match=f"{name}: set by"):
        check_arguments({name: modelopt_parameters()[name]})


@pytest.mark.parametrize("name", named("test_passed_arguments_are_accepted"))
def test_passed_arguments_are_accepted(name):
    default = {**modelopt_parameters(), **dict.fromkeys(INT4_ARGUMENTS, 0.5)}[name]
    check_arguments({name: default})
    options = {option for action in get_parser()._actions for option in action.option_strings}
    assert (f"--{name}" in options) == ("*" in NAMES[name][0])
    if f"--{name}" not in options:
        with pytest.raises(UserError, match=f"--{name}: .*backend_kwargs"):
            run_ptq([f"--{name}"])


@pytest.mark.parametrize("name", named("test_refused_arguments_name_the_alternative"))
def test_refused_arguments_name_the_alternative(name):
    way = "qdq autotune" if name.startswith("autotune") else "python -m modelopt"
    with pytest.raises(UserError, match=way):
        check_arguments({name: modelopt_parameters()[name]})
    with pytest.raises(UserError, match=way):
        run_ptq([f"--{name}=1"])


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("--calibration_data_reader=x", "--calibration_data FILE, or batches in Python"), ("--frobnicate", "")],
)
def test_options_without_a_counterpart_have_a_remedy(option, remedy):
    assert modelopt_arguments.option_remedy(option).startswith(remedy)
    assert bool(modelopt_arguments.option_remedy(option)) is bool(remedy)


def test_a_missing_or_other_modelopt_is_named(tmp_path, monkeypatch):
    source = tmp_path / "onnx" / "quantization" / "quantize.py"
    source.parent.mkdir(parents=True)
    source.write_text("def other(): ...")
    for folders, message in (([], "ModelOpt is not installed; "), ([str(tmp_path)], "has another interface; use 0.43")):
        found = SimpleNamespace(submodule_search_locations=folders)
        monkeypatch.setattr(modelopt_arguments.importlib.util, "find_spec", lambda _, found=found: found)
        modelopt_parameters.cache_clear()
        with pytest.raises(UserError, match=f"{message}.*backend: qdq"):
            modelopt_parameters()
    monkeypatch.undo()
    modelopt_parameters.cache_clear()
    assert modelopt_parameters()
