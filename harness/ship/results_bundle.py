"""Folders `ship/NAME` with a model to deploy: of each finished task of a results folder, or of one confirmed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.accuracy.data.batching import RANDOM_DATA
from harness.base.files import explain_write_errors, facts_digest
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.config.yaml_loader import read_experiment_yaml
from harness.graph.io.digests import IR_SUFFIX
from harness.measure.provenance import describe_environment, format_options
from harness.measure.turn_log import ConfirmationSummary, TurnEvent, summarize_parts
from harness.report.frames import valid_turns
from harness.report.next_steps import answer_row, best_row, format_answer, format_float, row_runtime
from harness.report.report_table import Row, is_missing
from harness.results.artifacts import FLOAT_ROW, read_dynamic_axes
from harness.results.deploy_folder import SHIP_FOLDER
from harness.results.folder import Results, TaskResults
from harness.results.output_check import wrong_float_remedies
from harness.results.stored_experiment import StoredExperiment
from harness.results.task_files import exported
from harness.run.early_answer import EarlyAnswer
from harness.run.verify.dynamic_check import DynamicModel, dynamic_model_path, write_dynamic_model
from harness.ship.bundle import find_target, remove_bundle, write_bundle

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
    """
    for task in results.tasks:
        row, folder = answer_row(task, main), results.folder / SHIP_FOLDER / task.name
        if row is None and task.complete:
            remove_bundle(folder)
        if row is None or find_target(task.facts["backend"]) is None or FLOAT_ROW not in task.rows:
            continue
        model, floating = (exported(task, task.rows[name]) for name in (row["row"], FLOAT_ROW))
        if not (model.exists() and floating.exists()) or model.suffix == IR_SUFFIX:
            continue  # an IR of another tool is taken from the folder of the exported models
        dynamic = dynamic_model_path(model)
        facts = _row_facts(task, row, results, main)
        write_bundle(folder, model, floating, facts, observer, dynamic_model=dynamic if dynamic.exists() else None)


def _row_facts(task: TaskResults, row: Row, results: Results, main: pd.DataFrame) -> dict[str, Any]:
    """Return the facts of a row for `ship.json`, as `ship_confirmed` does for a model without a results folder."""
    facts = task.facts
    drop = None if is_missing(row["drop"]) else [row["drop"], row["drop_low"], row["drop_high"]]
    kept = best_row(task, main) is None
    answer = f"the float model at {format_float(task, row, main)}" if kept else format_answer(task, row)
    remark = read_dynamic_axes(task.folder).get(row["row"], {}).get("remark") or ""
    return {
        "answer": f"{task.name}.onnx: {answer}",
        "method": row["method"],
        "decision": row["decision"],
        **confirmation_facts(task, task.events, row["row"], facts.get("shapes")),
        "metric": task.metric,
        "score": task.score(row["row"]),
        "float_score": task.score(FLOAT_ROW),
        "drop": None if drop is None else [None if is_missing(value) else value for value in drop],
        "bound": task.allowed,
        "runtime": row_runtime(task, row),
        "python": task.environment.get("python"),
        "packages": task.environment.get("packages", {}),
        "calibration": {
            "data": facts["calibrated_on"],
            "method": (facts.get("calibration") or {}).get("method", "minmax"),
            "ranges": facts.get("ranges"),
        },
        "model": {"source": facts["source"], "sha256": facts["model_sha256"]},
        "dynamic_remark": remark.partition(": ")[2],
        "experiment": experiment_excerpt(results.stored, task.name),
    }


def confirmation_facts(
    found: TimedResults,
    events: Sequence[TurnEvent],
    row: str,
    inputs: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Return the latencies in ms and the speedup of a row and of the float model in a confirmation, as JSON values.

    Speedups and latencies are lists of value, lower and upper 95 % limit; `p99_ms` is a 99th percentile.

    Args:
        found: Summary of the confirmation, which must contain both rows.
        events: Turns of the confirmation.
        row: Name of the row.
        inputs: Shape of each input by the label of the timed shape, for a task with several shapes.
    """
    samples: dict[str, list[float]] = {row: [], FLOAT_ROW: []}
    for turn in valid_turns(events):
        if turn.row in samples:
            samples[turn.row] += turn.samples_ms
    summaries = found.summaries if isinstance(found, TaskResults) else found.rows
    shapes = {
        shape: {
            "speedup": _limits(part.rows[row].speedup),
            "latency_ms": _limits(part.rows[row].latency_ms),
            "float_latency_ms": _limits(part.rows[FLOAT_ROW].latency_ms),
            **({"inputs": dict(inputs[shape])} if inputs and shape in inputs else {}),
        }
        for shape, part in summarize_parts(events, FLOAT_ROW).items()
    }
    return {
        "speedup": _limits(summaries[row].speedup),
        "latency_ms": _limits(summaries[row].latency_ms),
        "float_latency_ms": _limits(summaries[FLOAT_ROW].latency_ms),
        "p99_ms": float(np.percentile(samples[row], 99)),
        "float_p99_ms": float(np.percentile(samples[FLOAT_ROW], 99)),
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


def ship_answer(answer: EarlyAnswer, out: Path, observer: Observer) -> str:
    """Write the folder to deploy of an early answer to `ship` in `out`, and return the answer as one line."""
    task = answer.task
    with explain_write_errors(answer.file):
        shapes = list(answer.shapes.values())
        dynamic = write_dynamic_model(task.model, answer.file, task.spec.backend.use, shapes, task.feeds)
    if dynamic is not None and dynamic.file is None:
        observer.say(dynamic.remark.replace(answer.digest, task.spec.name))
    return ship_confirmed(answer, dynamic, out, observer)


def ship_confirmed(
    answer: EarlyAnswer,
    dynamic: DynamicModel | None,
    out: Path,
    observer: Observer,
    *,
    proven: bool = True,
    float_fault: str = "",
) -> str:
    """Write the folder `ship/TASK` of a model, or of the float model if no placement is faster; return the answer.

    For a runtime without a script no folder is written, and the answer names the file itself.

    Args:
        dynamic: File of the model with the dynamic axes of the original model; None: the original has none.
        out: Folder that contains `ship`.
        proven: Whether the model is the delivered one and faster than the float model beyond noise.
        float_fault: Check of the float model as text if the runtime computes it wrongly, else "".
    """
    task, runtime, summary, options = answer.task, answer.runtime, answer.summary, answer.runtime.get("options", {})
    name = task.spec.name
    folder, target = out / SHIP_FOLDER / name, find_target(runtime)
    kept = not proven or not answer.pairs
    row, model = (FLOAT_ROW, task.model_file) if kept else (answer.digest, answer.file)
    reason = ", because no placement of Q/DQ pairs proved faster in fresh builds"
    if kept and float_fault:
        remove_bundle(folder)
        cause = f"because {runtime['name']} computes it wrongly ({float_fault})"
        remedies = "; ".join(wrong_float_remedies(runtime))
        return f"deploy no file, not even the float model, {cause}; remedies: {remedies}"
    if kept and (target is None or row not in summary.rows):
        remove_bundle(folder)
        return f"keep the float model{reason}"
    accuracy = "not measured"
    if answer.metric is not None:
        accuracy = f"{answer.metric} within its bound on the data of the search"
    elif task.calibrated_on.startswith(RANDOM_DATA):
        accuracy = "unknown: ranges of random data, calibrate before use"
    speed, gain = summary.rows[row].speedup, f"the float model at {runtime.get('float_precision', 'float')}"
    if not kept:
        interval = f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"
        gain = f"{interval}, {answer.pairs} Q/DQ pairs (accuracy {accuracy})"
    gain += f"; on this processor, {format_options(options)}"
    if target is None:
        return f"take {answer.file}: {gain}"
    shipped_dynamic = None if kept else dynamic
    environment, spec = describe_environment(), task.spec
    shapes = {each: "x".join(map(str, task.model.types[each].shape)) for each in task.model.inputs}
    fixed = {"shapes": shapes if task.model.origin else {}} if spec.model.shape_set is None else {}
    facts = {
        "answer": f"{name}.onnx: {gain}",
        "method": FLOAT_ROW if kept else answer.method,
        "decision": summary.rows[row].verdict,
        **confirmation_facts(summary, answer.events, row, answer.shapes),
        **dict.fromkeys(("metric", "score", "float_score", "drop", "bound")),
        "runtime": runtime,
        "python": environment.get("python"),
        "packages": environment.get("packages", {}),
        "calibration": {
            "data": task.calibrated_on,
            "method": task.choices.activations,
            "ranges": facts_digest(task.ranges),
        },
        "model": {"source": task.model.source, "sha256": task.model.sha256},
        "dynamic_remark": "" if shipped_dynamic is None else shipped_dynamic.remark.partition(": ")[2],
        "experiment": {  # from which `qdq apply` continues
            "experiment": "autotune",
            "models": [{**spec.model.model_dump(mode="json"), **fixed}],
            "backends": [{"use": spec.backend.use, "params": dict(spec.backend.params)}],
            "precision": [spec.precision],
        },
    }
    dynamic_file = None if shipped_dynamic is None else shipped_dynamic.file
    write_bundle(folder, model, task.model_file, facts, observer, dynamic_model=dynamic_file)
    file = folder / f"{name}.onnx"
    return f"keep the float model ({file}){reason}" if kept else f"take {file}: {gain}"
