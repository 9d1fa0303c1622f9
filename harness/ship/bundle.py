"""Folder with one model to deploy: `NAME.onnx`, `deploy.py`, `report.md`, `ship.json` and a manifest."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pprint import pformat
from typing import Any, NamedTuple

from harness.base.errors import DoesNotHold, UserError
from harness.base.files import explain_write_errors, file_sha256, write_json, write_text
from harness.base.progress import Observer
from harness.base.random_inputs import numpy_type_name
from harness.base.text import printable, short_version
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model, model_files
from harness.graph.protos import dtype_name, input_values
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.measure.provenance import format_options, format_scenario
from harness.plugins.api import name_arrays
from harness.results.artifacts import DYNAMIC_MODEL_SUFFIX
from harness.results.deploy_folder import (
    FACTS_FILE,
    MANIFEST_FILE,
    REPORT_FILE,
    SCRIPT_FILE,
    is_bundle_file,
    read_bundle,
)
from harness.results.scores import metric_name
from harness.runtimes.onnxruntime import OPTIMIZATION_LEVEL_NAMES, PROVIDER_NAMES
from harness.runtimes.onnxruntime_web.benchmarker import PROGRAM, SESSION_OPTIONS
from harness.runtimes.onnxruntime_web.session import WebSession
from harness.runtimes.openvino import engine_properties
from harness.runtimes.tensorrt.library import TIMING_RUNS_PER_TACTIC, weak_typing_flags
from harness.ship import deploy_runtime
from harness.workers.helper_process import StepLimits
from harness.workers.locks import timing_lock
from harness.workers.process import wait_for_output

_IMPORTS = re.compile(r"^(?:import|from) (?!__future__|harness).*$", re.MULTILINE)
_PATH_IMPORTS = ("import os", "import sys")  # modules that Python has always imported when a script starts


class DeployTarget(NamedTuple):
    """Runtime that a model is deployed on.

    Attributes:
        title: Name of the runtime in texts.
        package: Package of the runtime's Python API.
        load: Function that loads a model, see `harness.ship.deploy_runtime`.
        settings: Function that returns the settings of the runtime from a benchmarker's description.
        helpers: Functions and classes that `load` calls.
        program: Source text of a child process, or "".
    """

    title: str
    package: str
    load: Callable[..., Any]
    settings: Callable[[Facts], dict[str, Any]]
    helpers: tuple[Callable[..., Any], ...] = ()
    program: str = ""


def _openvino_settings(facts: Facts) -> dict[str, Any]:
    options = facts["options"]
    return engine_properties(int(options["threads"]), str(options["precision"]), int(options.get("streams", 1)))


def _onnxruntime_settings(facts: Facts) -> dict[str, Any]:
    options = facts["options"]
    threads = int(options["threads"])
    half, provider = facts["float_precision"] == "f16", str(options["provider"])
    tensorrt = {"trt_fp16_enable": half, "trt_int8_enable": True}
    return {
        "threads": threads,
        "optimization": OPTIMIZATION_LEVEL_NAMES[str(options["optimization"])],
        "session_config": {"session.force_spinning_stop": "1"} if threads > 1 else {},
        "providers": next(list(names) for names in PROVIDER_NAMES.values() if names[0] == provider),
        "provider_options": {provider: tensorrt} if provider.startswith("Tensorrt") else {},
    }


def _tensorrt_settings(facts: Facts) -> dict[str, Any]:
    options, precision = facts["options"], str(facts["float_precision"])
    weak = options["typing"] == "weak"
    return {
        "typing": str(options["typing"]),
        "precision": precision,
        "workspace_bytes": options["workspace_bytes"],
        "optimization_level": options["optimization_level"],
        "avg_timing_iterations": TIMING_RUNS_PER_TACTIC,
        "weak_typing_flags": list(weak_typing_flags(precision, quantized=True)) if weak else [],
    }


def _onnxruntime_web_settings(facts: Facts) -> dict[str, Any]:
    # The facts may be untrusted, so they do not choose the browser: it is the one on PATH.
    in_browser = str(facts["options"]["engine"]).startswith("Chromium")
    return {"chromium": "chromium" if in_browser else None, "session": dict(SESSION_OPTIONS)}


_TENSORRT = DeployTarget(
    "TensorRT",
    "tensorrt",
    deploy_runtime.load_tensorrt,
    _tensorrt_settings,
    (deploy_runtime.build_tensorrt_engine, deploy_runtime.call_cuda),
)
#: Targets by the name in a benchmarker's description.
_TARGETS: Mapping[str, DeployTarget] = {
    "openvino": DeployTarget("OpenVINO", "openvino", deploy_runtime.load_openvino, _openvino_settings),
    "onnxruntime": DeployTarget("ONNX Runtime", "onnxruntime", deploy_runtime.load_onnxruntime, _onnxruntime_settings),
    "onnxruntime_web": DeployTarget(
        "ONNX Runtime Web",
        "onnxruntime-web of npm, in the folder that QDQ_ONNXRUNTIME_WEB names",
        deploy_runtime.load_onnxruntime_web,
        _onnxruntime_web_settings,
        (WebSession,),
        PROGRAM,
    ),
    "tensorrt": _TENSORRT,
    "trtexec": _TENSORRT,
}


def find_target(facts: Facts) -> DeployTarget | None:
    """Return the target of a benchmarker by its description, or None if there is no script for it."""
    return _TARGETS.get(str(facts.get("name")))


def deploy_script(
    model: Path,
    facts: Facts,
    target: DeployTarget,
    shapes: Mapping[str, Mapping[str, Any]] | None = None,
    dynamic: Path | None = None,
) -> str:
    """Return the text of a script that runs a model with the settings of its measurement.

    Args:
        model: ONNX file with static shapes, in the folder of the script.
        facts: Description of the benchmarker that timed the model.
        shapes: Shape of each input by the label of the timed shape, if there is a file with dynamic axes.
        dynamic: File with dynamic axes, or None.
    """
    graph = read_qdq_graph(model).proto.graph
    version = short_version(facts.get("version"))
    dynamic_inputs = [] if dynamic is None else input_values(read_qdq_graph(dynamic).proto.graph)

    def axes(value: Any) -> tuple[int | str | None, ...]:  # a size, the name of a dynamic axis, or None
        return tuple(size.dim_value or size.dim_param or None for size in value.type.tensor_type.shape.dim)

    reshapes = "shapes" in inspect.signature(target.load).parameters
    values = {
        "MODEL": model.name,
        "PACKAGE": target.package,
        "VERSION": version,
        "OPTIONS": target.settings(facts),
        "INPUTS": _describe_values(input_values(graph)),
        "OUTPUTS": _describe_values(graph.output),
        "SHAPES": {name: dict(inputs) for name, inputs in (shapes or {}).items()} if reshapes else {},
        "DYNAMIC": {value.name: axes(value) for value in dynamic_inputs},
    }
    at = ", OPTIONS, shapes" if reshapes else ""
    functions: tuple[Callable[..., Any], ...] = (
        deploy_runtime.is_shape_of,
        deploy_runtime.fit_inputs,
        *target.helpers,
        target.load,
        deploy_runtime.runtime_version,
        deploy_runtime.open_model,
        deploy_runtime.random_inputs,
        deploy_runtime.read_input,
        deploy_runtime.peak_memory_mb,
        deploy_runtime.time_runs,
        name_arrays,
        deploy_runtime.main,
    )
    modules = dict.fromkeys((deploy_runtime.__name__, *(helper.__module__ for helper in target.helpers)))
    sources = (inspect.getsource(sys.modules[module]) for module in modules)
    imports = dict.fromkeys(line for source in sources for line in _IMPORTS.findall(source))
    parts = [
        f'"""Run {model.name} in {target.title} {version} with the settings it was measured with.\n\n'
        f"Needs the packages numpy and {target.package}. In a program of your own:\n\n"
        "    from deploy import load\n"
        "    run = load()\n"
        "    outputs = run(inputs)  # arrays by the names in INPUTS, of the shapes and types there\n"
        '"""',
        "\n".join(_PATH_IMPORTS),
        *(
            f"\n{inspect.getsource(each).rstrip()}"
            for each in (deploy_runtime.script_folder, deploy_runtime.installed_path, deploy_runtime.remove_bytecode)
        ),
        "\nPROGRAM_PATH, sys.path[:] = sys.path[:], installed_path()  # before any other import\n"
        'remove_bytecode(globals().get("__spec__"))',
        "\n".join(line for line in imports if line not in _PATH_IMPORTS),
        "\n".join(f"{name} = {pformat(value, width=110, sort_dicts=False)}" for name, value in values.items()),
        *([f"PROGRAM = r'''\n{target.program}'''"] if target.program else []),
        *(f"\n{inspect.getsource(function).rstrip()}" for function in functions),
        f"\ndef load(model: object = None{', shapes: Any = None' * bool(at)}) -> "
        "Callable[[dict[str, Any]], dict[str, Any]]:\n"
        '    """Load a model, by default the one next to this file; return a function of input arrays by name."""\n'
        f"    file = Path(__file__).with_name(MODEL) if model is None else model\n"
        f"    return open_model({target.load.__name__}, file{at})",
        '\nif __name__ == "__main__":\n    main(load)\nelse:\n    sys.path[:] = PROGRAM_PATH\n',
    ]
    return "\n\n".join(parts)


def _describe_values(values: Any) -> dict[str, tuple[tuple[int, ...], str] | None]:
    """Return shape and NumPy type by name; None for a value that is no tensor."""
    return {
        value.name: (
            tuple(size.dim_value for size in value.type.tensor_type.shape.dim),
            numpy_type_name(dtype_name(value.type.tensor_type.elem_type)),
        )
        if value.type.HasField("tensor_type")
        else None
        for value in values
    }


SCHEMA = 1
FOOTPRINT_RUNS = 5
SCRIPT_LIMIT_S = 600.0


Facts = Mapping[str, Any]


def write_bundle(
    folder: Path,
    model: Path,
    float_model: Path,
    facts: Facts,
    observer: Observer,
    *,
    dynamic_model: Path | None = None,
) -> None:
    """Write a folder to deploy unless it exists unchanged; an earlier one there is replaced.

    Load time and peak memory are measured in a process that runs `deploy.py`; if it fails, the reason is stored.

    Args:
        folder: Folder to write, named MODEL-RUNTIME-PRECISION as the ONNX file.
        model: File that was timed and scored.
        float_model: File of the baseline, measured for comparison.
        facts: Content of `ship.json`, see `harness.ship.results_bundle`; its `runtime` has a script.
        dynamic_model: File with the same placement and the dynamic axes of the original model, or None.
    """
    target = find_target(facts["runtime"])
    assert target is not None
    name = folder.name
    facts = {
        "schema": SCHEMA,
        "name": name,
        "file": f"{name}.onnx",
        "sha256": digest_file(model),
        "dynamic_file": None if dynamic_model is None else f"{name}{DYNAMIC_MODEL_SUFFIX}",
        **json.loads(json.dumps(facts)),
    }
    with suppress(UserError):
        stored = read_bundle(folder)
        if {key: value for key, value in stored.items() if key != "footprint"} == facts:
            return
    remove_bundle(folder)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shipped = copy_model(model, folder, facts["file"])
        dynamic = None if dynamic_model is None else copy_model(dynamic_model, folder, facts["dynamic_file"])
    script = folder / SCRIPT_FILE
    write_text(script, deploy_script(shipped, facts["runtime"], target, _timed_inputs(facts), dynamic))
    footprints: dict[str, dict[str, Any]] = {}
    with observer.work(f"run {name}/{SCRIPT_FILE}", 2) as step, timing_lock():
        for row, file in (("model", shipped), ("float", float_model)):
            footprints[row] = {"file_mb": sum(path.stat().st_size for path in model_files(file)) / 1e6}
            try:
                ran = run_script(sys.executable, script, "--model", str(file), "--repeat", str(FOOTPRINT_RUNS))
                footprints[row] |= {key: ran[key] for key in ("load_ms", "peak_memory_mb")}
            except UserError as error:
                footprints[row]["reason"] = str(error).replace(str(script), script.name)
            step.advance()
    facts = {**facts, "footprint": footprints}
    write_text(folder / REPORT_FILE, report_text(facts, target.title))
    write_json(folder / FACTS_FILE, facts)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    write_text(folder / MANIFEST_FILE, "".join(f"{file_sha256(path)}  {path.name}\n" for path in files))


@contextmanager
def generated_script(folder: Path, facts: Facts) -> Iterator[Path]:
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


def _timed_inputs(facts: Facts) -> dict[str, Any]:
    """Return the shapes of the inputs at each timed shape; empty for a single shape or without dynamic axes."""
    shapes = facts.get("shapes", {}) if facts.get("dynamic_file") else {}
    return {str(name): each["inputs"] for name, each in shapes.items() if "inputs" in each}


def run_bundle(folder: Path, facts: Facts) -> dict[str, Any]:
    """Generate and run the script of a bundle in this environment, and return the JSON values that it prints.

    Args:
        folder: Folder of the bundle, with the model.
        facts: Content of `ship.json`, see `read_bundle`.
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
    """
    what, limits, pipe = f"{script} with {python}", StepLimits.read(), subprocess.PIPE  # its model may be untrusted
    command = [python, "-I", str(script), "--json", *arguments]
    try:
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                printed, errors = wait_for_output(process, SCRIPT_LIMIT_S, limits.memory_gb)
            finally:  # including its child processes
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    except TimeoutError as error:
        raise UserError(f"{what}: takes more than {SCRIPT_LIMIT_S:g} s") from error
    except MemoryError as error:
        raise UserError(f"{what}: {limits.memory_message}") from error
    except OSError as error:
        raise UserError(f"{what}: {error}") from error
    if process.returncode:
        last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        failure = UserError if "ModuleNotFoundError" in last else DoesNotHold
        raise failure(f"{what}: {last}")
    try:
        values = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{python}: cannot run a script: is it a Python program?")
    return values


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


def report_text(facts: Facts, runtime_title: str) -> str:
    """Return the report of a folder to deploy as Markdown: figures, settings, calibration and limits."""
    runtime, calibration, metric = facts["runtime"], facts["calibration"], facts["metric"]
    options = runtime.get("options", {})
    settings = {name: value for name, value in options.items() if name not in ("streams", "shapes")}
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    conditions = [
        f"{runtime_title} {runtime.get('version', '')} on {runtime.get('device', 'unknown')}",
        f"{format_scenario(options)}; {format_options(settings)}",
        f"{facts['builds']} fresh builds in turns with the float model, noise floor {100 * facts['noise_floor']:.1f} %",
        f"Python {facts['python']}; {packages}",
        f"calibration: {calibration['data']}, method {calibration['method']}, ranges {calibration['ranges']}",
    ]
    limits = ["The figures hold for this kind of processor, this version of the runtime, and these settings."]
    if metric is None:
        limits.append("Accuracy was not measured.")
    elif facts["bound"] is None:
        limits.append("No bound on accuracy was set.")
    else:
        limits.append(f"Bound on the loss of {metric_name(metric)}: {facts['bound']:g}.")
    if calibration["data"] == "random data":
        limits.append("The ranges are those of random data: calibrate with data of your own before use.")
    files = [f"`{facts['file']}`: the bytes that were timed and scored, SHA-256 of the model `{facts['sha256']}`"]
    if facts["dynamic_file"]:
        files.append(f"`{facts['dynamic_file']}`: the same Q/DQ pairs with dynamic axes; {facts['dynamic_remark']}")
    else:
        limits.append("The file accepts only the input shapes in deploy.py.")
    files += [
        "`deploy.py`: loads the file with the measured settings and runs one input; `python deploy.py --help`",
        "`SHA256SUMS`: digests, for `sha256sum -c SHA256SUMS` or for `qdq verify FOLDER`, which also runs the model",
    ]
    lines = [f"# {facts['name']}", "", f"{facts['answer']}.", "", *_figures(facts), ""]
    for title, items in (("Measured with", conditions), ("Limits", limits), ("Files", files)):
        lines += [f"## {title}", "", *(f"- {item}" for item in items), ""]
    return "\n".join(map(printable, lines))


def _figures(facts: Facts) -> Iterator[str]:
    """Yield the lines of the tables of figures."""

    def interval(values: Sequence[float], digits: int = 3) -> str:
        value, low, high = (f"{each:.{digits}f}" for each in values)
        return f"{value} [{low}, {high}]"

    def pair(name: str, before: float | None, after: float | None, digits: int = 3) -> str:
        cells = ("-" if value is None else f"{value:.{digits}f}" for value in (before, after))
        return f"| {name} | {' | '.join(cells)} |"

    own, base = facts["footprint"]["model"], facts["footprint"]["float"]
    yield from ("| | float | this file |", "|---|---|---|")
    yield f"| latency, ms, median [95 %] | {interval(facts['float_latency_ms'])} | {interval(facts['latency_ms'])} |"
    yield pair("latency, ms, 99th percentile", facts["float_p99_ms"], facts["p99_ms"])
    if facts["metric"] is not None:
        yield pair(metric_name(facts["metric"]), facts["float_score"], facts["score"], 4)
    yield pair("file, MB", base["file_mb"], own["file_mb"])
    yield pair("load and first run, ms", base.get("load_ms"), own.get("load_ms"), 0)
    yield pair("peak memory, MB", base.get("peak_memory_mb"), own.get("peak_memory_mb"), 0)
    if facts.get("shapes"):
        yield from ("", "| shape | float, ms | this file, ms | speedup [95 %] |", "|---|---|---|---|")
    for shape, each in (facts.get("shapes") or {}).items():
        cells = (interval(each["float_latency_ms"]), interval(each["latency_ms"]), interval(each["speedup"], 2))
        yield f"| {shape} | {' | '.join(cells)} |"
    for name in ("model", "float"):
        if reason := facts["footprint"][name].get("reason"):
            yield from ("", f"Not run ({name}): {reason}")
