"""Text of `deploy.py`: the functions of `deploy_runtime` with the values and measured settings of one model."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from harness.base.random_inputs import numpy_type_name
from harness.base.text import short_version
from harness.graph.protos import dtype_name, input_values
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.plugins.api import name_arrays
from harness.runtimes.onnxruntime import OPTIMIZATION_LEVEL_NAMES, PROVIDER_NAMES
from harness.runtimes.onnxruntime_web.benchmarker import PROGRAM, SESSION_OPTIONS
from harness.runtimes.onnxruntime_web.session import WebSession
from harness.runtimes.openvino import engine_properties
from harness.runtimes.tensorrt.library import TIMING_RUNS_PER_TACTIC, weak_typing_flags
from harness.ship import deploy_runtime

Facts = Mapping[str, Any]
_IMPORTS = re.compile(r"^(?:import|from) (?!__future__|harness).*$", re.MULTILINE)
_PATH_IMPORTS = ("import os", "import sys")  # modules that Python has always imported when a script starts


@dataclass(frozen=True, slots=True)
class DeployTarget:
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
