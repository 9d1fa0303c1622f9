"""Folder with one model to deploy: `NAME.onnx`, `deploy.py`, `report.md`, `ship.json` and a manifest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.errors import DoesNotHold, UserError
from harness.base.files import explain_write_errors, file_sha256, write_json, write_text
from harness.base.progress import Observer
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model, model_files
from harness.results.artifacts import DYNAMIC_MODEL_SUFFIX
from harness.results.deploy_folder import (
    FACTS_FILE,
    MANIFEST_FILE,
    REPORT_FILE,
    SCRIPT_FILE,
    is_bundle_file,
    read_bundle,
)
from harness.ship.deploy_script import DeployTarget, deploy_script, find_target
from harness.ship.report_text import report_text
from harness.workers.helper_process import StepLimits
from harness.workers.locks import timing_lock
from harness.workers.process import wait_for_output

SCHEMA = 1
FOOTPRINT_RUNS = 5
SCRIPT_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Model to deploy.

    Attributes:
        name: MODEL-RUNTIME-PRECISION, the name of the folder and of the ONNX file.
        model: File that was timed and scored.
        dynamic_model: File with the same placement and the dynamic axes of the original model, or None.
        float_model: File of the baseline; its load time and memory are measured for comparison.
        target: Runtime that `deploy.py` uses.
        facts: Content of `ship.json`, see `shipment_facts`.
    """

    name: str
    model: Path
    float_model: Path
    target: DeployTarget
    facts: Mapping[str, Any]
    dynamic_model: Path | None = None


def shipment_facts(
    *,
    answer: str,
    method: str,
    decision: str,
    timing: Mapping[str, Any],
    runtime: Mapping[str, Any],
    environment: Mapping[str, Any],
    calibration: Mapping[str, Any],
    model: Mapping[str, Any],
    dynamic_remark: str,
    experiment: Mapping[str, Any],
    accuracy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the facts of a shipment as JSON values.

    Args:
        answer: Line with file, speedup, loss of accuracy and settings.
        method: Name of the searcher that chose the placement, or of the fixed placement.
        decision: Verdict of the confirmation, such as "faster" or "tie".
        timing: Speedup and latencies in ms; see `harness.ship.results_bundle.confirmation_facts`.
        runtime: Description of the benchmarker.
        environment: See `harness.measure.provenance.describe_environment`.
        calibration: `data` and `method` as text, and the digest of the `ranges`.
        model: `source` and `sha256` of the float model.
        dynamic_remark: Result of the check of the file with dynamic axes, "NAME: TEXT".
        experiment: Keys of an experiment with only this task and without searches.
        accuracy: `metric`, `score`, `float_score`, `drop` with its limits, `bound`; None if accuracy was not measured.
    """
    unknown = dict.fromkeys(("metric", "score", "float_score", "drop", "bound"))
    return {
        "answer": answer,
        "method": method,
        "decision": decision,
        **timing,
        **unknown,
        **(accuracy or {}),
        "runtime": dict(runtime),
        "python": environment.get("python"),
        "packages": environment.get("packages", {}),
        "calibration": dict(calibration),
        "model": dict(model),
        "dynamic_remark": dynamic_remark.partition(": ")[2],
        "experiment": dict(experiment),
    }


def write_bundle(folder: Path, shipment: Shipment, observer: Observer) -> Path:
    """Write the folder of a model below `folder` unless it exists unchanged, and return its path.

    An earlier bundle there is replaced. Load time and peak memory are measured in a process that runs `deploy.py`; if
    it fails, the reason is stored instead.

    Raises:
        UserError: A file cannot be written, or the folder has files that do not belong to a bundle.
    """
    target = folder / shipment.name
    facts = {
        "schema": SCHEMA,
        "name": shipment.name,
        "file": f"{shipment.name}.onnx",
        "sha256": digest_file(shipment.model),
        "dynamic_file": None if shipment.dynamic_model is None else f"{shipment.name}{DYNAMIC_MODEL_SUFFIX}",
        **json.loads(json.dumps(shipment.facts)),
    }
    if _is_current(target, facts):
        return target
    remove_bundle(target)
    with explain_write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        model = copy_model(shipment.model, target, facts["file"])
        if shipment.dynamic_model is not None:
            copy_model(shipment.dynamic_model, target, facts["dynamic_file"])
    script = target / SCRIPT_FILE
    dynamic = target / facts["dynamic_file"] if facts["dynamic_file"] else None
    write_text(script, deploy_script(model, facts["runtime"], shipment.target, _timed_inputs(facts), dynamic))
    with observer.work(f"run {shipment.name}/{SCRIPT_FILE}", 2) as step, timing_lock():
        footprints = {}
        for name, file in (("model", model), ("float", shipment.float_model)):
            footprints[name] = _measure_footprint(script, file)
            step.advance()
    facts["footprint"] = footprints
    write_text(target / REPORT_FILE, report_text(facts, shipment.target.title))
    write_json(target / FACTS_FILE, facts)
    write_text(target / MANIFEST_FILE, "".join(f"{file_sha256(path)}  {path.name}\n" for path in _bundle_files(target)))
    return target


@contextmanager
def generated_script(folder: Path, facts: Mapping[str, Any]) -> Iterator[Path]:
    """Generate the script of a bundle again in a scratch folder, and yield its path.

    No command runs the stored `deploy.py`, because it may come from an untrusted source.

    Args:
        facts: Content of `ship.json`, see `read_bundle`.

    Raises:
        DoesNotHold: The facts name no runtime with a script, or lack one of its settings.
    """
    target = find_target(facts["runtime"])
    if target is None:
        raise DoesNotHold(f"{folder / FACTS_FILE}: no script runs models of {facts['runtime'].get('name')!r}")
    try:
        text = deploy_script(folder / facts["file"], facts["runtime"], target, _timed_inputs(facts))
    except (KeyError, TypeError, ValueError, OverflowError, StopIteration) as error:
        raise DoesNotHold(f"{folder / FACTS_FILE}: runtime: {type(error).__name__}: {error}") from error
    with tempfile.TemporaryDirectory(prefix="qdq-deploy-") as scratch:
        script = Path(scratch) / SCRIPT_FILE
        script.write_text(text, encoding="utf-8")
        yield script


def _timed_inputs(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the inputs at each timed shape; empty for a single shape or without dynamic axes."""
    shapes = facts.get("shapes", {}) if facts.get("dynamic_file") else {}
    return {str(name): each["inputs"] for name, each in shapes.items() if "inputs" in each}


def run_bundle(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Generate and run the script of a bundle in this environment, and return the JSON values that it prints.

    Args:
        folder: Folder of the bundle, with the model.
        facts: Content of `ship.json`, see `read_bundle`.

    Raises:
        UserError: The script cannot be generated, or fails, see `run_script`.
    """
    with generated_script(folder, facts) as script:
        return run_script(sys.executable, script, "--model", str(folder / facts["file"]))


def run_script(python: str, script: Path, *arguments: str) -> dict[str, Any]:
    """Run a generated `deploy.py` with `--json` in a Python environment, and return the values that it prints.

    Among them are `load_ms`, `latency_ms` (median), `peak_memory_mb` and `version` of the runtime.

    Args:
        python: Python program.
        arguments: Further options of the script.

    Raises:
        DoesNotHold: The script fails; the message has its last line.
        UserError: The script cannot be started, lacks a module or exceeds a limit.
    """
    status, printed, errors = _run_limited([python, "-I", str(script), "--json", *arguments], f"{script} with {python}")
    if status:
        last = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
        failure = UserError if "ModuleNotFoundError" in last else DoesNotHold
        raise failure(f"{script} with {python}: {last}")
    try:
        values = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{python}: cannot run a script: is it a Python program?")
    return values


def _run_limited(command: list[str], what: str) -> tuple[int, str, str]:
    """Run a program, whose model may be untrusted, within limits; return exit status, stdout and stderr."""
    limits = StepLimits.read()
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                printed, errors = wait_for_output(process, SCRIPT_LIMIT_S, limits.memory_gb)
            finally:  # including its child processes
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed, errors
    except TimeoutError as error:
        raise UserError(f"{what}: takes more than {SCRIPT_LIMIT_S:g} s") from error
    except MemoryError as error:
        raise UserError(f"{what}: {limits.memory_message}") from error
    except OSError as error:
        raise UserError(f"{what}: {error}") from error


def _measure_footprint(script: Path, model: Path) -> dict[str, Any]:
    """Measure file size, load time and peak memory of a model, or return the reason why it does not run."""
    size_mb = sum(path.stat().st_size for path in model_files(model)) / 1e6
    try:
        found = run_script(sys.executable, script, "--model", str(model), "--repeat", str(FOOTPRINT_RUNS))
    except UserError as error:
        return {"file_mb": size_mb, "reason": str(error).replace(str(script), script.name)}
    return {"file_mb": size_mb, "load_ms": found["load_ms"], "peak_memory_mb": found["peak_memory_mb"]}


def _is_current(folder: Path, facts: Mapping[str, Any]) -> bool:
    with suppress(UserError):
        stored = read_bundle(folder)
        return {name: value for name, value in stored.items() if name != "footprint"} == facts
    return False


def remove_bundle(folder: Path) -> None:
    """Remove a bundle if there is one; raise `UserError` if the folder is a link or has other files."""
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link, but a folder to deploy is written here; move it away")
    if not folder.exists():
        return
    for path in folder.iterdir():
        left_over = path.suffix == ".part" or path.name == "__pycache__"  # of an interrupted run, or of an import
        if not (left_over or is_bundle_file(path.name, folder.name)):
            raise UserError(f"{path}: is no file of a folder to deploy; move it away")
    shutil.rmtree(folder)


def _bundle_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
