"""Experiment of one model, as `qdq run` runs it, from the flags of `qdq autotune` or from Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.accuracy.data.arrays import array_kind, array_names
from harness.base.errors import MAX_COUNT, UserError, suggest_names
from harness.compat.modelopt_autotune.settings import REGION_FLAGS, AutotunerError
from harness.config.experiment import DEFAULT_INITIAL, Experiment, parse_experiment
from harness.config.sections import validate_bound
from harness.config.yaml_loader import dump_yaml, parse_params
from harness.graph.passes.static_shapes import parse_dims, parse_named_shapes
from harness.run.prepare.study_task import model_label
from harness.ship.placements import file_entry
from search.fixed_placements import FIXED_PLACEMENTS

DEFAULT_EVALUATIONS = 50
PROXY_SAMPLES = 8
STOP_AT = 0.9
INITIAL_NAMES = tuple(name for name in DEFAULT_INITIAL if name in FIXED_PLACEMENTS)
KEYS_SET_BY_PARAMETERS = frozenset({"experiment", "models", "backends", "searchers", "seeds"})
CONFIRMATION = {"builds": 4, "rounds": 12, "samples": 3}


def region_flags(arguments: Iterable[str]) -> list[str]:
    """Return the names of the flags in a command line that only ModelOpt's procedure has, without values.

    Raises:
        AutotunerError: One of them occurs together with `--max_drop`.
    """
    names = [argument.partition("=")[0] for argument in arguments]
    region_names = [name for name in dict.fromkeys(names) if name in REGION_FLAGS]
    if region_names and not {"--max_drop", "--max-drop"}.isdisjoint(names):
        raise AutotunerError(
            f"{', '.join(region_names)}: not with --max_drop; an experiment file for qdq run has such settings"
        )
    return region_names


def command_experiment(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a command line without flags of ModelOpt's procedure.

    With a bound, search and recovery use one half of the test data, and the reported figures come from the other half.

    Args:
        options: Parsed arguments; `max_drop` in points, hundredths of the metric, or None.

    Raises:
        AutotunerError: A bound is given without test data, or test data without a bound.
    """
    calibration: dict[str, Any] = {"method": options.calibration_method, "weights": options.weight_method,
                                   "depthwise": options.depthwise, "symmetric": options.symmetric}  # fmt: skip
    if options.calibration_data is not None:
        kind = array_kind(Path(options.calibration_data))
        calibration["data"] = {"use": kind, "path": options.calibration_data, "spread": True}
        if kind == "npz" and options.test_labels in array_names(Path(options.calibration_data)):
            calibration["data"]["labels"] = options.test_labels  # the calibration data are the labelled test data
        calibration["samples"] = options.calibration_samples or MAX_COUNT
    model: dict[str, Any] = {
        "use": options.onnx_path,
        "shapes": parse_named_shapes("--shape", options.shape or ()),
        "dims": parse_dims(options.dim or ()),
        "calibration": calibration,
    }
    if options.at:
        model["shape_set"] = {
            "shapes": [*map(_parse_entry, options.at)],
            "objective": options.at_objective or "weighted",
        }
    elif options.at_objective:
        raise AutotunerError("--at_objective: only with --at, twice or more")
    starts = _start_entries(options.start or (), ranges=options.calibration_data is None)
    if options.max_drop is not None:
        model["evaluator"] = _evaluator_of(options)
    elif options.test_data is not None:
        raise AutotunerError("--test_data: the labels are for a bound on accuracy; give --max_drop too")
    keys = {
        "backends": [{"use": options.backend or "openvino", "params": parse_params(options.param)}],
        "precision": [options.quant_type],
        "searchers": [options.searcher or "auto"],
        "seeds": [options.seed],
        "initial": [*INITIAL_NAMES, *starts],
        "baselines": [*(start["label"] for start in starts), *(options.baseline or ())],
        "budget": make_budget(options.max_evals, options.max_minutes),
        "confirmation": CONFIRMATION,
        **({} if options.max_drop is None else {"objective": drop_objective(options.max_drop, "--max_drop")}),
    }
    flags = {"budget.evaluations": "--max_evals", "budget.task_minutes": "--max_minutes", "baselines": "--baseline"}
    return autotune_experiment(model, "qdq autotune", flags, **keys)


def _evaluator_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the evaluator on the test data; only the metric agreement needs no labels."""
    if options.test_data is None:
        raise AutotunerError(
            "--max_drop needs data: --test_data test.npz (inputs and an array 'labels', or --metric agreement)"
        )
    data = {"use": "npz", "path": options.test_data, "labels": options.test_labels}
    if options.metric == "agreement" and options.test_labels not in array_names(Path(options.test_data)):
        del data["labels"]
    return {"use": options.metric, "params": {"data": data}}


def _start_entries(files: Iterable[str], *, ranges: bool) -> list[dict[str, Any]]:
    """Return the entries of an experiment's key `initial` for the options --start, labelled with the files' names."""
    entries: list[dict[str, Any]] = []
    for file in files:
        label, used = model_label(file), {*INITIAL_NAMES, *(entry["label"] for entry in entries)}
        label = f"start{len(entries) + 1}-{label}" if label in used else label
        try:
            entries.append(file_entry(Path(file), label, ranges=ranges))
        except UserError as error:
            raise AutotunerError(f"--start {file}: {error}") from error
    return entries


def _parse_entry(text: str) -> dict[str, Any]:
    """Return an entry of `shape_set.shapes` from an option --at, "batch=8,time=128:0.3"."""
    sizes, colon, weight = text.partition(":")
    try:
        return {"dims": parse_dims(sizes.split(",")), **({"weight": float(weight)} if colon else {})}
    except (UserError, ValueError) as error:
        raise AutotunerError(f"--at {text}: expected SYMBOL=SIZE[,SYMBOL=SIZE][:WEIGHT]") from error


def make_budget(evaluations: int | None, minutes: float | None = None) -> dict[str, Any]:
    """Return the section `budget` of a search that also stops when no further gain is likely.

    Args:
        evaluations: Largest number of evaluations; None: the default.
        minutes: Limit of the whole task; None: there is none.
    """
    count = DEFAULT_EVALUATIONS if evaluations is None else evaluations
    return {"evaluations": [count], "stop_at": STOP_AT, "task_minutes": minutes}


def drop_objective(max_drop: float | str, name: str = "max_drop") -> dict[str, Any]:
    """Return the section `objective` for a bound, scored on held-out data.

    Args:
        max_drop: Points (hundredths of the metric), or a percentage of the float model's metric.
        name: Name of the argument, for messages.
    """
    try:
        bound = validate_bound(max_drop)
    except ValueError:
        raise UserError(
            f"{name}: points from 0, such as 0.5, or a percentage of the float model's metric, such as '1%', but got "
            f"{max_drop!r}"
        ) from None
    return {"max_drop": bound if isinstance(bound, str) else bound / 100, "halves": True, "proxy": PROXY_SAMPLES}


def check_argument_names(given: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise `UserError` if an argument is neither a parameter nor a key of an experiment file.

    Args:
        given: Names of the arguments that are no parameters.
        parameters: Names of the parameters, which are suggested too.
    """
    keys = {*Experiment.model_fields, "matrix"}
    for name in given:
        if name not in keys:
            known = {*parameters} | keys - KEYS_SET_BY_PARAMETERS
            raise UserError(f"{name}: unknown argument; {suggest_names(name, known)}")


def autotune_experiment(model: Mapping[str, Any], source: str, arguments: Mapping[str, str], **keys: Any) -> Experiment:
    """Return the experiment of one model, with rules as baselines.

    Args:
        model: Keys of the entry in `models`; its label is made from `use`.
        source: Name of the origin of the values in error messages.
        arguments: Argument by the key that it sets, for messages.
        keys: Other keys of the experiment, which replace the defaults.
    """
    described = {
        "experiment": "autotune",
        "models": [{"label": model_label(model["use"]), **model}],
        "initial": list(INITIAL_NAMES),
        "baselines": ["all", "linear"],
        **keys,
    }
    return parse_experiment(dump_yaml(described), source, Path.cwd(), arguments)
