"""Folder `ship` of a results folder: the best model of each finished task, ready to deploy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.config.yaml_loader import read_experiment_yaml
from harness.graph.io.digests import IR_SUFFIX
from harness.measure.turn_log import ConfirmationSummary, TurnEvent, summarize_parts
from harness.report.frames import valid_turns
from harness.report.next_steps import answer_row, best_row, format_answer, format_float, row_runtime
from harness.report.report_table import Row, is_missing
from harness.results.artifacts import FLOAT_ROW, read_dynamic_axes
from harness.results.deploy_folder import SHIP_FOLDER
from harness.results.folder import Results, TaskResults
from harness.results.stored_experiment import StoredExperiment
from harness.results.task_files import exported
from harness.run.verify.dynamic_delivery import dynamic_model_path
from harness.ship.bundle import Shipment, remove_bundle, shipment_facts, write_bundle
from harness.ship.deploy_script import find_target

if TYPE_CHECKING:
    import pandas as pd

TimedResults = TaskResults | ConfirmationSummary
KEPT_KEYS = ("experiment", "sharing", "objective", "sampling", "confirmation", "limits")


def ship_results(results: Results, main: pd.DataFrame, observer: Observer) -> None:
    """Write a folder `ship/TASK` for each finished task: the row that may be shipped, or the float model.

    Tasks on runtimes without a generated script (simulated runtimes, plug-ins) and tasks whose models are missing have
    no folder. If a task has no answer, a folder of an earlier run is removed.

    Args:
        main: Main table, see `harness.report.frames.main_frame`.

    Raises:
        UserError: A file cannot be written.
    """
    for task in results.tasks:
        row = answer_row(task, main)
        target = find_target(task.facts["backend"])
        if row is None and task.complete:
            remove_bundle(results.folder / SHIP_FOLDER / task.name)
        if row is None or target is None or FLOAT_ROW not in task.rows:
            continue
        model, floating = (exported(task, task.rows[name]) for name in (row["row"], FLOAT_ROW))
        if not (model.exists() and floating.exists()) or model.suffix == IR_SUFFIX:
            continue  # an IR of another tool is taken from the folder of the exported models
        dynamic = dynamic_model_path(model)
        shipment = Shipment(
            name=task.name,
            model=model,
            dynamic_model=dynamic if dynamic.exists() else None,
            float_model=floating,
            target=target,
            facts=_row_facts(task, row, results, main),
        )
        write_bundle(results.folder / SHIP_FOLDER, shipment, observer)


def _row_facts(task: TaskResults, row: Row, results: Results, main: pd.DataFrame) -> dict[str, Any]:
    facts = task.facts
    calibration = facts.get("calibration") or {}
    drop = None if is_missing(row["drop"]) else [row["drop"], row["drop_low"], row["drop_high"]]
    kept = best_row(task, main) is None
    answer = f"the float model at {format_float(task, row, main)}" if kept else format_answer(task, row)
    return shipment_facts(
        answer=f"{task.name}.onnx: {answer}",
        method=row["method"],
        decision=row["decision"],
        timing=confirmation_facts(task, task.events, row["row"], FLOAT_ROW, facts.get("shapes")),
        accuracy={
            "metric": task.metric,
            "score": task.score(row["row"]),
            "float_score": task.score(FLOAT_ROW),
            "drop": None if drop is None else [None if is_missing(value) else value for value in drop],
            "bound": task.allowed,
        },
        runtime=row_runtime(task, row),
        environment=task.environment,
        calibration={
            "data": facts["calibrated_on"],
            "method": calibration.get("method", "minmax"),
            "ranges": facts.get("ranges"),
        },
        model={"source": facts["source"], "sha256": facts["model_sha256"]},
        dynamic_remark=read_dynamic_axes(task.folder).get(row["row"], {}).get("remark") or "",
        experiment=experiment_excerpt(results.stored, task.name),
    )


def confirmation_facts(
    found: TimedResults,
    events: Sequence[TurnEvent],
    row: str,
    base: str,
    inputs: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Return the latencies in ms and the speedup of a row and of the float model in a confirmation, as JSON values.

    Speedups and latencies are lists of value, lower and upper 95 % limit; `p99_ms` is a 99th percentile.

    Args:
        found: Summary of the confirmation, which must contain both rows.
        events: Turns of the confirmation.
        row: Name of the row.
        base: Name of the float model's row.
        inputs: Shape of each input by the label of the timed shape, for a task with several shapes.
    """
    samples: dict[str, list[float]] = {row: [], base: []}
    for turn in valid_turns(events):
        if turn.row in samples:
            samples[turn.row] += turn.samples_ms
    summaries = found.summaries if isinstance(found, TaskResults) else found.rows
    shapes = {
        shape: {
            "speedup": _limits(part.rows[row].speedup),
            "latency_ms": _limits(part.rows[row].latency_ms),
            "float_latency_ms": _limits(part.rows[base].latency_ms),
            **({"inputs": dict(inputs[shape])} if inputs and shape in inputs else {}),
        }
        for shape, part in summarize_parts(events, base).items()
    }
    return {
        "speedup": _limits(summaries[row].speedup),
        "latency_ms": _limits(summaries[row].latency_ms),
        "float_latency_ms": _limits(summaries[base].latency_ms),
        "p99_ms": float(np.percentile(samples[row], 99)),
        "float_p99_ms": float(np.percentile(samples[base], 99)),
        "builds": summaries[row].builds,
        "noise_floor": found.noise_floor or 0.0,
        **({"shapes": shapes} if shapes else {}),
    }


def experiment_excerpt(stored: StoredExperiment, task: str) -> dict[str, Any]:
    """Return the keys of an experiment that define one task, without searches; empty if the task does not exist."""
    body = read_experiment_yaml(stored.text, "experiment.yaml")
    backends, precisions = body["backends"], body["precision"]
    names = [spec.name for spec in stored.tasks]
    if task not in names:
        return {}
    model, rest = divmod(names.index(task), len(backends) * len(precisions))
    backend, precision = divmod(rest, len(precisions))
    return {
        **{key: body[key] for key in KEPT_KEYS if key in body},
        "models": [body["models"][model]],
        "backends": [backends[backend]],
        "precision": [precisions[precision]],
    }


def _limits(interval: Interval) -> list[float]:
    return [float(interval.value), float(interval.low), float(interval.high)]
