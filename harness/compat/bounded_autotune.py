"""Autotuning as an experiment of one model, as `qdq run` runs it, from a command line with a bound or from Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.compat.modelopt_autotune.settings import AutotunerError, get_parser, parse_shapes
from harness.config.experiment import Experiment, parse_experiment
from harness.config.yaml_loader import dump_yaml
from harness.graph.passes.static_shapes import parse_dims
from harness.task_setup.study_task import model_label

__all__ = ["DEFAULT_EVALUATIONS", "autotune_experiment", "bounded_experiment", "drop_objective", "ignored_flags"]

DEFAULT_EVALUATIONS = 50
PROXY_SAMPLES = 8
USED_FLAGS = frozenset({
    "onnx_path", "output_dir", "max_drop", "test_data", "test_labels", "metric", "calibration_data",
    "calibration_samples", "calibration_method", "weight_method", "depthwise", "symmetric", "input_shapes", "dim",
    "backend", "quant_type", "searcher", "seed", "max_evals", "verbose", "wait",
})  # fmt: skip


def ignored_flags(options: argparse.Namespace) -> Iterator[str]:
    """Yield a remark for each flag that was given and has no effect under a bound."""
    parser = get_parser()
    for name, value in vars(options).items():
        if name not in USED_FLAGS and value != parser.get_default(name):
            yield f"without effect under --max_drop: --{name} {value}; an experiment for qdq run has all settings"


def bounded_experiment(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a command line with `--max_drop`.

    The search and its recovery see one half of the test data, the figures are of the other half.

    Args:
        options: Parsed arguments; `max_drop` in points, hundredths of the metric.

    Raises:
        AutotunerError: There are no test data.
        UserError: An argument cannot be used.
    """
    if options.test_data is None:
        raise AutotunerError("--max_drop needs labelled data: --test_data test.npz (inputs and an array 'labels')")
    test = {"use": "npz", "path": options.test_data, "labels": options.test_labels}
    calibration: dict[str, Any] = {"method": options.calibration_method, "weights": options.weight_method,
                                   "depthwise": options.depthwise, "symmetric": options.symmetric}  # fmt: skip
    if options.calibration_data is not None:
        suffix = Path(options.calibration_data).suffix.lstrip(".")
        calibration["data"] = {"use": suffix, "path": options.calibration_data}
    if options.calibration_samples is not None:
        calibration["samples"] = options.calibration_samples
    model = {
        "use": options.onnx_path,
        "shapes": parse_shapes(options),
        "dims": parse_dims(options.dim or ()),
        "calibration": calibration,
        "evaluator": {"use": options.metric, "params": {"data": test}},
    }
    return autotune_experiment(
        model,
        "qdq autotune",
        backends=[options.backend or "openvino"],
        precision=[options.quant_type],
        objective=drop_objective(options.max_drop),
        searchers=[options.searcher or "auto"],
        seeds=[options.seed],
        budget={"evaluations": [options.max_evals or DEFAULT_EVALUATIONS]},
    )


def drop_objective(max_drop: float) -> dict[str, Any]:
    """Return the objective of a bound in points, hundredths of the metric, on data of which one half is held back."""
    return {"max_drop": max_drop / 100, "halves": True, "proxy": PROXY_SAMPLES}


def autotune_experiment(model: Mapping[str, Any], source: str, **keys: Any) -> Experiment:
    """Return the experiment of one model, which is compared with rules.

    Args:
        model: Its keys; the label is made from `use`.
        source: Name of the experiment in messages.
        keys: Further keys of the experiment, which replace the defaults.

    Raises:
        UserError: A value cannot be used.
    """
    described = {
        "experiment": "autotune",
        "models": [{"label": model_label(model["use"]), **model}],
        "initial": ["float", "all", "linear", "linear_add", "movers"],
        "baselines": ["all", "linear"],
        **keys,
    }
    return parse_experiment(dump_yaml(described), source, Path.cwd())
