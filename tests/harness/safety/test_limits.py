"""Numbers that users give have an upper limit, and long lists are read in linear time."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import typer
from pydantic import BaseModel

from harness.accuracy.data.arrays import read_int_key
from harness.base.errors import UserError
from harness.cli.main import app
from harness.compat.modelopt_autotune.settings import AutotunerError, check_counts, get_parser
from harness.compat.tao_specs.spec import Spec
from harness.config.experiment import Experiment, parse_experiment
from harness.config.sections import require_distinct
from harness.plugins import registry
from harness.replay.budget_study import BudgetStudy
from harness.zoo.shapes import draw_split

UNLIMITED_OPTIONS = {"bench record --dimensions": "the command itself knows the limit"}


def numbers_without_limit(annotation: Any, metadata: tuple[Any, ...], path: str) -> Iterator[str]:
    """Yield the paths of the integers and floats below an annotation that have no upper limit."""
    if hasattr(annotation, "__metadata__"):
        metadata = (*metadata, *annotation.__metadata__)
        annotation = annotation.__origin__
    if annotation in (int, float):
        flat = [part for each in metadata for part in (each, *getattr(each, "metadata", ()))]
        if not any(isinstance(part, annotated_types.Le | annotated_types.Lt) for part in flat):
            yield path
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from numbers_without_limit(field.annotation, tuple(field.metadata), f"{path}.{name}")
    else:
        for part in typing.get_args(annotation):
            yield from numbers_without_limit(part, metadata, path)


@pytest.mark.parametrize("model", [Experiment, BudgetStudy, Spec])
def test_numbers_in_files_have_an_upper_limit(model):
    free = set(numbers_without_limit(model, (), ""))
    bounds = {".objective.max_drop", ".objective.max_latency"}  # numbers that results are compared with
    assert free <= bounds | {".seeds"}


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield prefix + name, command
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")


def test_numbers_on_the_command_line_have_an_upper_limit():
    free = {
        f"{name} {option.opts[0]}"
        for name, command in commands(typer.main.get_command(app))
        for option in command.params
        if re.search(r"\bint\b", str(option.type_descriptor.annotation)) and option.max is None
    }
    assert free == set(UNLIMITED_OPTIONS)


@pytest.mark.parametrize("flag", ["schemes_per_region", "warmup_runs", "timing_runs", "max_evals", "seed"])
def test_numbers_of_autotune_have_an_upper_limit(flag):
    options = get_parser().parse_args(["-m", "m.onnx", f"--{flag}", str(10**30)])
    with pytest.raises(AutotunerError, match=f"--{flag} is at most"):
        check_counts(options)


@pytest.mark.parametrize(
    "keys",
    [
        "confirmation: {rounds: 1000000000000}",
        "budget: {evaluations: [1000000000000]}",
        "sampling: {warmup_ms: .inf}",
        "limits: {build_s: 1e300}",
    ],
)
def test_a_huge_number_is_refused_with_the_limit(keys):
    with pytest.raises(UserError, match=r"less than or equal to [0-9]"):
        parse_experiment(f"experiment: e\nmodels: [m.onnx]\n{keys}\n", "e.yaml", Path())


@pytest.mark.parametrize(
    ("kind", "use", "params"),
    [
        ("searcher", "evolutionary", {"population": 10**6}),
        ("searcher", "random_mutation", {"maximum_generation_attempts": 10**9}),
        ("evaluator", "fidelity", {"samples": 10**12}),
        ("evaluator", "fidelity", {"data": {"use": "shapes", "count": 10**12}}),
        ("benchmarker", "openvino", {"threads": 10**12}),
    ],
)
def test_a_huge_number_of_a_plugin_is_refused_with_the_limit(kind, use, params):
    with pytest.raises(UserError, match=r"at most 1[0,]+, but got 10*$"):
        registry.check_params(kind, use, params, ("space", "seed", "reference", "inputs"))


def test_data_have_an_upper_limit():
    with pytest.raises(UserError, match=r"data\.count: at most"):
        read_int_key({"count": 10**12}, "count", 1)
    with pytest.raises(UserError, match="at most"):
        draw_split("evaluation", 10**7)


def test_repetitions_in_long_lists_are_found_by_hashes():
    class Value:
        compared = 0

        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return self.number

        def __eq__(self, other: object) -> bool:
            Value.compared += 1
            return isinstance(other, Value) and self.number == other.number

    assert len(require_distinct(tuple(map(Value, range(5_000))))) == 5_000
    assert Value.compared < 50_000
