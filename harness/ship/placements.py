"""Placements without a search: insertion into a model, and the experiment that applies a shipped placement."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.range_estimators import Ranges
from harness.accuracy.calibration.ranges import CalibrationBatches
from harness.accuracy.data.arrays import array_kind
from harness.accuracy.data.batching import RANDOM_DATA
from harness.base.errors import UserError, suggest_names
from harness.base.files import explain_write_errors
from harness.base.paths import resolve_path
from harness.base.progress import Observer
from harness.config.experiment import TENSORRT_GUIDE, TOOL_NAMES, Experiment, TaskSpec, parse_experiment, plan_tasks
from harness.config.sections import PluginSpec
from harness.config.yaml_loader import dump_yaml
from harness.graph.io.files import move_model, set_model_aside
from harness.graph.load import save_to_folder
from harness.graph.qdq.import_placement import (
    ImportDifference,
    ImportedPlacement,
    find_differences,
    read_placement,
    summarize_reasons,
    transfer_placement,
)
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect, dialect_name_for, load_dialect
from harness.graph.rules.points import explain_float_products, explain_no_points
from harness.plugins.registry import create_plugin, is_program_object, load_plugin
from harness.results.artifacts import FLOAT_ROW
from harness.results.deploy_folder import FACTS_FILE, holds_bundle, read_bundle
from harness.results.output_check import OutputCheck, not_checked
from harness.run.prepare.float_baseline import BackendProperties
from harness.run.prepare.initial_design import (
    InitialDesign,
    find_qdq_file,
    initial_file,
    is_exported,
    load_imported_models,
    load_imported_ranges,
)
from harness.run.prepare.model_loader import MIN_OPSET, input_types, open_model
from harness.run.prepare.study_task import model_label
from harness.run.prepare.task import Task, calibrate_task
from harness.run.verify.runtime_checker import check_file
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Resolved

logger = logging.getLogger(__name__)

ROW, RECOVERED_ROW = "applied", "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertedModel:
    """Model with the pairs of a placement.

    Attributes:
        path: The written ONNX file; NAME.wrong.onnx instead of NAME.onnx if the check failed.
        pairs: Number of Q/DQ pairs.
        edges: Number of quantized inputs.
        dialect: Name of the dialect of the pairs.
        calibrated_on: Source of the ranges, as text.
        check: Comparison of the file in its runtime with its own meaning; "not checked" if the runtime is missing.
        channels: Number of these with one scale for each channel of an activation.
        differences: Differences from another tool's file, each with its reason.
    """

    path: Path
    pairs: int
    edges: int
    dialect: str
    calibrated_on: str
    check: OutputCheck
    channels: int = 0
    differences: tuple[ImportDifference, ...] = ()


def calibration_config(
    data: Path | None, preprocess: str | None, samples: int | None, method: str | None, base_dir: Path
) -> dict[str, Any]:
    """Return the keys `calibration` and `preprocess` of a model in an experiment.

    Args:
        data: `.npy` or `.npz` file, a folder of them, or a folder of images; None: random data.
        preprocess: Name of the preprocessing of images, which is required for them.
        samples: Maximum number of samples; None leaves out the key.
        method: Range estimator; None leaves out the key.
        base_dir: Folder from which relative paths of the experiment start.
    """
    options = {key: value for key, value in (("method", method), ("samples", samples)) if value is not None}
    if data is None:
        return {"calibration": options} if options else {}
    path = os.path.relpath(data, base_dir)  # results have no absolute paths
    kind = array_kind(data)
    if data.is_dir() and not kind:
        if preprocess is None:
            raise UserError(
                f"--calibration {data}: images need --preprocess, the preprocessing of the model (qdq list)"
            )
        source: dict[str, Any] = {"use": "images", "images": path}
    else:
        source = {"use": kind or "npy", "path": path}
    found: dict[str, Any] = {"calibration": {"data": source, **options}}
    return found | ({"preprocess": preprocess} if preprocess is not None else {})


def apply_experiment(
    folder: Path, model: Path, changes: Mapping[str, Any], base_dir: Path, *, builds: int | None = None
) -> Experiment:
    """Return an experiment that measures only a shipped placement, in another model, as the row "applied".

    If a tool made the shipped file, the tool makes that of the other model, as the row of its name.

    Under a bound a search with only this placement gives the row "recovered": the faster of its files with and without
    recovery that keep the bound, see `harness.run.select.recovery`.

    Args:
        folder: Folder to deploy; see `harness.ship.bundle`.
        model: Float model with the structure of the one that was searched.
        changes: Keys of the model that differ from the stored ones, see `calibration_config`.
        base_dir: Folder from which relative paths of the stored experiment start.
        builds: Number of fresh builds of the confirmation; None: the number of the stored experiment.
    """
    facts = read_bundle(folder)
    stored, shipped = facts["experiment"], os.path.relpath(folder / facts["file"], base_dir)
    models = stored.get("models")
    stored_model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    stored_model = {key: value for key, value in stored_model.items() if key != "expect"}  # of the other weights
    stored_calibration = stored_model.get("calibration", {})
    if not stored_model or not isinstance(stored_calibration, dict):
        raise UserError(f"{folder / FACTS_FILE}: experiment: has no model, so the settings of the run are unknown")
    confirmation = stored.get("confirmation", {})
    if not isinstance(confirmation, dict):
        raise UserError(f"{folder / FACTS_FILE}: experiment.confirmation: a mapping of keys, but got {confirmation!r}")
    calibration = {**stored_calibration, **changes.get("calibration", {})}
    changes = {**changes, **({"calibration": calibration} if calibration else {})}
    if facts.get("method") == FLOAT_ROW:
        raise UserError(f"{folder}: holds the float model, so there is no placement to apply")
    made_by_tool = facts.get("method") in TOOL_NAMES
    changes = {**changes, **_replacement_evaluator(stored_model, calibration, folder, shipped)}
    described = {
        **stored,
        **({"objective": {}} if "evaluator" in changes else {}),
        "experiment": f"{ROW}-{model_label(str(model))}",
        "models": [
            {**stored_model, **changes, "use": os.path.relpath(model, base_dir), "label": model_label(str(model))}
        ],
        "initial": [] if made_by_tool else [{"use": "placement", "params": {"path": shipped}, "label": ROW}],
        "baselines": [facts["method"]] if made_by_tool else [ROW],
        "searchers": [],
        **({} if builds is None else {"confirmation": {**confirmation, "builds": builds}}),
    }
    source = str(folder / FACTS_FILE)
    experiment = parse_experiment(dump_yaml(described), source, base_dir)
    goal = experiment.objective
    if made_by_tool or goal.max_drop is None or goal.minimize != "latency" or not goal.recover:
        return experiment
    recovering = {
        "searchers": [{"use": "exhaustive", "label": RECOVERED_ROW}],  # its first proposal is the float model
        "budget": {"evaluations": [2]},
        "seeds": [0],
    }
    return parse_experiment(dump_yaml({**described, **recovering}), source, base_dir)


def _replacement_evaluator(
    stored: Mapping[str, Any], calibration: Mapping[str, Any], folder: Path, shipped: str
) -> dict[str, Any]:
    """Return the key `evaluator` with fidelity in place of a metric that only a Python program has, else nothing."""
    evaluator = stored.get("evaluator")
    parts: Mapping[str, Any] = evaluator if isinstance(evaluator, dict) else {"use": evaluator}
    params: Mapping[str, Any] = parts["params"] if isinstance(parts.get("params"), dict) else {}
    names = [name for name in (parts.get("use"), *params.values()) if isinstance(name, str) and is_program_object(name)]
    if not names:
        return {}
    logger.warning(
        "%s: its metric %s is part of a Python program, so that files are compared by SQNR, without a bound; for the "
        'metric, call qdq.autotune in that program with initial=[{"use": "placement", "params": {"path": "%s"}, '
        '"label": "%s"}], baselines=["%s"], searcher=[]',
        folder, names[0].partition(":")[2], shipped, ROW, ROW,
    )  # fmt: skip
    data = params.get("data", calibration.get("data"))
    return {"evaluator": {"use": "fidelity", "params": {"data": data} if isinstance(data, dict) else {}}}


def check_structure(experiment: Experiment) -> None:
    """Raise `UserError` if the model of `apply_experiment` has another structure than the shipped one.

    A run would report this too, but only after it has created a results folder.
    """
    if not experiment.initial:  # a tool makes the file
        return
    spec = plan_tasks(experiment)[0]
    dialect = _load_dialect_of(spec.backend)
    shipped = resolve_path(experiment.initial[0].params["path"], experiment.base_dir)
    with tempfile.TemporaryDirectory(prefix="qdq-apply-") as scratch:
        transfer_placement(
            shipped, open_model(spec.model, Path(scratch), max(MIN_OPSET, dialect.opset(spec.precisions)))
        )


def insert_placement(
    model: str,
    placement: str,
    out: Path,
    observer: Observer,
    *,
    backend: PluginSpec,
    run: bool = True,
    **described: Any,
) -> InsertedModel:
    """Write a model with the Q/DQ pairs of a placement, and compare it in its runtime with its own meaning.

    A file with a wrong result, or one that the runtime refuses, is written to NAME.wrong.onnx, and an older `out` is
    removed.

    Args:
        model: ONNX file, `zoo:NAME` or `assets:PATH`.
        placement: Name of a fixed placement, a folder to deploy, or a Q/DQ file made from a model of this structure.
        out: ONNX file to write; its folder is created, and an existing file is replaced.
        backend: Benchmarker that determines the dialect of the pairs; its device may be absent.
        run: Whether the file is run in the benchmarker's runtime, if that is installed.
        described: `precision`; `ranges`, whether those of a Q/DQ file are used; and keys of the model in an experiment.
    """
    precision, ranges = described.pop("precision"), described.pop("ranges", False)
    entry, dialect = _initial_entry(placement, ranges), _load_dialect_of(backend)
    foreign = Path(entry["params"]["path"]) if entry["use"] == "import" else None
    if foreign is not None and dialect.channel_activations and read_qdq_graph(foreign).has_channel_activations:
        described["calibration"] = {**described.get("calibration", {}), "depthwise": "channel"}
    experiment = parse_experiment(
        dump_yaml(
            {
                "experiment": "insert",
                "models": [{"use": model, "label": model_label(model), **described}],
                "backends": [{"use": backend.use, "params": dict(backend.params)}],
                "precision": [precision],
                "initial": [entry],
                "baselines": [entry["label"]] if entry["label"] != "float" else ["all"],
                "searchers": [],
            }
        ),
        "insert",
        Path.cwd(),
    )
    spec = plan_tasks(experiment)[0]
    with tempfile.TemporaryDirectory(prefix="qdq-insert-") as scratch:
        task, read = _calibrated(experiment, spec, dialect, Path(scratch), observer)
        design = InitialDesign(
            spec=spec,
            space=task.space,
            model=task.model,
            external_models=load_imported_models(experiment.initial),
            read=read,
            observer=observer,
            facts={"name": backend.use},
        )
        placed = design.placements(experiment.initial)[entry["label"]].get(entry["label"])
        if placed is None:
            raise UserError(f"--placement {placement}: its placement cannot be read back, as said above")
        resolved = task.space.resolve(placed)
        theirs = None if foreign is None else read(initial_file(experiment.initial[0]))
        if not resolved and placement != "float":
            if theirs is None:
                causes = explain_float_products(task.model, dialect, spec.precisions[0])
                facts = f": {causes}" if causes else ""
            else:
                facts = summarize_reasons(theirs, task.space, dialect)
            raise UserError(f"--placement {placement}: quantizes nothing of {model}, so no file is written{facts}")
        imported = load_imported_ranges(experiment.initial, read)
        calibrated_on = _report_ranges(task, resolved, imported, observer)
        result = task.inserter.export(resolved, Path(scratch) / out.name)
        check = not_checked("the run is switched off")
        if run:
            with observer.work(f"compare {out.name} in {backend.use} with its meaning", 1) as step:
                check = check_file(
                    result, task.float_file, task.feeds, backend, quantized=bool(resolved), sizes=task.sizes
                )
                step.advance()
        path = out
        written = read_qdq_graph(result)
        differences: tuple[ImportDifference, ...] = ()
        if theirs is not None:
            differences = find_differences(theirs, task.space, dialect, resolved, written, ranges=ranges)
        with explain_write_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            if check.is_usable:
                move_model(result, out)
            else:
                path = set_model_aside(result, out)
        return InsertedModel(
            path=path,
            pairs=task.inserter.count_pairs(resolved),
            edges=len(resolved),
            dialect=dialect.name,
            calibrated_on=calibrated_on,
            check=check,
            channels=sum(
                written.edge_form(edge).scale.size > 1
                for edge, _ in resolved
                if edge.tensor not in task.model.constants
            ),
            differences=differences,
        )


def _calibrated(
    experiment: Experiment, spec: TaskSpec, dialect: Dialect, work: Path, observer: Observer
) -> tuple[Task, Callable[[Path], ImportedPlacement]]:
    """Calibrate a model in a dialect, and return its task and the reader of files; the machine may lack the runtime."""
    model = open_model(spec.model, work, max(MIN_OPSET, dialect.opset(spec.precisions)))
    space = build_space(model, dialect, precisions=spec.precisions, sharing=experiment.sharing)
    if not len(space):
        raise UserError(explain_no_points(model, dialect, spec.precisions[0]))
    feeds = CalibrationBatches(spec.model, model, input_types(model, spec.backend.use))
    runtime = BackendProperties(dialect=dialect, emulated=frozenset(), facts={}, is_in_process=True)
    file, read = save_to_folder(model, work), cache(partial(read_placement, model=model))
    imported = load_imported_ranges(experiment.initial, read)
    task = calibrate_task(
        spec, model, file, space, runtime=runtime, feeds=feeds, observer=observer, known_ranges=imported
    )
    return task, read


def _report_ranges(task: Task, resolved: Resolved, imported: Ranges, observer: Observer) -> str:
    """Return the source of the ranges of a placement as text, and report ranges of random data."""
    tensors = {edge.tensor for edge, _ in resolved} & task.ranges.keys()
    random = sorted(tensors - imported.keys()) if task.calibrated_on.startswith(RANDOM_DATA) else []
    if random:
        shown = ", ".join(random[:3]) + (", ..." if len(random) > 3 else "")
        share = f"{len(random)} of {len(tensors)} tensors ({shown}) have no range in the file, so "
        observer.say(
            f"{task.model.source}: {share if imported else ''}no calibration data given, random data is used: do not "
            "trust any accuracy"
        )
    if not resolved:
        return "no data, because nothing is quantized"
    if not random and tensors <= imported.keys():
        return "the ranges of the file alone"
    return task.calibrated_on


def _initial_entry(placement: str, ranges: bool) -> dict[str, Any]:
    """Return the entry of an experiment's key `initial` for a fixed placement's name, a folder to deploy or a file."""
    path, names = Path(placement), (*FIXED_PLACEMENTS, TENSORRT_GUIDE)
    if path.is_file() or holds_bundle(path):
        return file_entry(path, ROW, ranges=ranges)
    if placement in TOOL_NAMES:
        problem = "a tool, not a fixed placement; run the tool, or `qdq ptq` for ModelOpt's"
    elif (path / "experiment.yaml").is_file():
        problem = "a results folder without a folder to deploy, so there is no placement"
    elif placement not in names:
        problem = f"no such fixed placement, folder to deploy or file; {suggest_names(placement, names)}"
    else:
        return {"use": placement, "label": placement}
    raise UserError(f"--placement {placement}: {problem}")


def file_entry(path: Path, label: str, *, ranges: bool) -> dict[str, Any]:
    """Return the entry of an experiment's key `initial` (use, params, label) for a Q/DQ file or a folder to deploy.

    Args:
        path: The file, which may be another tool's, a folder to deploy, or a results folder with exactly one.
        label: Name of the placement in tables.
        ranges: Whether the ranges of the file's Q/DQ pairs are used.
    """
    path = find_qdq_file(path)
    params = {"path": os.path.relpath(path), **({"ranges": True} if ranges else {})}
    return {"use": "placement" if is_exported(path) else "import", "params": params, "label": label}


def _load_dialect_of(backend: PluginSpec) -> Dialect:
    """Return the dialect of a benchmarker on this machine, or its default one if runtime or device is absent."""
    facts: Mapping[str, Any] = {}
    try:
        benchmarker = create_plugin("benchmarker", backend.use, backend.params)
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return load_dialect(dialect_name_for(load_plugin("benchmarker", backend.use), backend.use, facts), facts)
    with suppress(UserError):
        facts = benchmarker.describe()
    return load_dialect(dialect_name_for(benchmarker, backend.use, facts), facts)
