"""Source of the generated `deploy.py`: functions that need only NumPy and one runtime.

`harness.ship.bundle` copies these functions as text, so of this module they use only the constants, which
the generated file sets to the values of one model.
"""

import argparse
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from harness.plugins.api import name_arrays
from harness.runtimes.onnxruntime_web.session import WebSession

MODEL = "model.onnx"  # next to this file
PACKAGE = ""  # of the runtime
VERSION = ""  # of the runtime that the model was measured with
OPTIONS: dict[str, Any] = {}
INPUTS: dict[str, Any] = {}  # shape and NumPy type by name
OUTPUTS: dict[str, Any] = {}
PROGRAM = ""  # of a child process
SHAPES: dict[str, Any] = {}  # shape of each input, by the names of several timed shapes
DYNAMIC: dict[str, Any] = {}  # sizes of each input of the file with dynamic axes, which are names or None


def script_folder() -> str:
    """Return the folder of this script."""
    return os.path.dirname(os.path.realpath(__file__))


def installed_path() -> list[str]:
    """Return the import path without the folder of this script and "", so that no file there replaces a package."""
    return [path for path in sys.path if path and os.path.realpath(path) != script_folder()]


def remove_bytecode(spec: object) -> None:
    """Remove the copy of this script that an import stores next to it, because Python may run it instead."""
    stored = getattr(spec, "cached", None) or ""
    if os.path.realpath(os.path.dirname(os.path.dirname(stored))) == script_folder():
        try:
            os.remove(stored)
            os.rmdir(os.path.dirname(stored))
        except OSError:
            pass  # not stored, or other files are next to it


def is_shape_of(shape: Any, axes: Any) -> bool:
    """Return whether an array of a shape fits axes; one that is a name or None takes any size."""
    fixed = [(axis, size) for axis, size in zip(axes, shape, strict=False) if isinstance(axis, int)]
    return len(axes) == len(shape) and all(axis == size for axis, size in fixed)


def fit_inputs(feeds: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return arrays in the types of the inputs; raise `ValueError` if names, shapes or values do not fit.

    Args:
        sizes: Sizes of each input by name, see `is_shape_of`.
    """
    if set(feeds) != set(sizes):
        raise ValueError(f"the inputs are {', '.join(sizes)}, but the arrays are {', '.join(feeds) or 'none'}")
    fitted = {}
    for name, axes in sizes.items():
        array, dtype = np.asarray(feeds[name]), np.dtype(INPUTS[name][1])
        if not is_shape_of(array.shape, axes):
            raise ValueError(f"{name}: shape {array.shape}, but the model takes {tuple(axes)}")
        with np.errstate(invalid="ignore"):
            fitted[name] = array if array.dtype == dtype else array.astype(dtype)
        if array.dtype.kind not in "fiub" or (dtype.kind != "f" and not np.array_equal(fitted[name], array)):
            raise ValueError(f"{name}: an array of {array.dtype} has values that {dtype}, the model's type, has not")
    return fitted


def load_openvino(
    model: object, options: dict[str, Any] = OPTIONS, shapes: dict[str, Any] | None = None
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compile the model in OpenVINO; return a function from input arrays by name to output arrays by name."""
    import openvino

    core = openvino.Core()
    graph = core.read_model(str(model))
    if shapes is not None:  # fixes dynamic axes
        graph.reshape({name: list(shape) for name, shape in shapes.items()})
    compiled = core.compile_model(graph, "CPU", options)
    requests = threading.local()  # threads may call at the same time, each stream serves one of them
    sizes = {  # OpenVINO checks neither the fixed axes of a file with dynamic ones, nor that each input has an array
        name: [None if axis.is_dynamic else axis.get_length() for axis in port.partial_shape]
        for name in INPUTS
        for port in compiled.inputs
        if name in port.names
    }

    def run(feeds: dict[str, Any]) -> dict[str, Any]:
        fitted = fit_inputs(feeds, sizes)
        if not hasattr(requests, "own"):
            requests.own = compiled.create_infer_request()
        found = requests.own.infer(fitted)
        return {name: np.array(found[port]) for name, port in zip(OUTPUTS, compiled.outputs, strict=True)}

    return run


def load_onnxruntime(
    model: object, options: dict[str, Any] = OPTIONS, shapes: dict[str, Any] | None = None
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Open a session in ONNX Runtime; return a function from input arrays by name to output arrays by name."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options["threads"]
    settings.inter_op_num_threads = 1
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, options["optimization"])
    for key, value in options["session_config"].items():
        settings.add_session_config_entry(key, value)
    providers = [(name, options["provider_options"].get(name, {})) for name in options["providers"]]
    if shapes is not None:
        declared = onnxruntime.InferenceSession(str(model), settings, providers=providers).get_inputs()
        for axis, size in [pair for value in declared for pair in zip(value.shape, shapes[value.name], strict=True)]:
            if isinstance(axis, str):  # fixes a dynamic axis
                settings.add_free_dimension_override_by_name(axis, size)
    session = onnxruntime.InferenceSession(str(model), settings, providers=providers)
    sizes = shapes or {value.name: value.shape for value in session.get_inputs()}
    return lambda feeds: dict(zip(OUTPUTS, session.run(list(OUTPUTS), fit_inputs(feeds, sizes)), strict=True))


def load_onnxruntime_web(model: Any, options: dict[str, Any] = OPTIONS) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Open a session of npm's onnxruntime-web; return a function from input arrays by name to output arrays by name."""
    session = WebSession(PROGRAM, chromium=options["chromium"])
    session.load(Path(model).read_bytes(), options["session"])
    return session


def build_tensorrt_engine(model: object, options: dict[str, Any]) -> Any:
    """Build an engine in TensorRT with the measured settings of the builder."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strong if options["typing"] == "strong" else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise RuntimeError("; ".join(parser.get_error(index).desc() for index in range(parser.num_errors)))
    config = builder.create_builder_config()
    config.avg_timing_iterations = options["avg_timing_iterations"]
    if options["workspace_bytes"] is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace_bytes"])
    if options["optimization_level"] is not None:
        config.builder_optimization_level = options["optimization_level"]
    if options["precision"] != "tf32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    for flag in options["weak_typing_flags"]:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT built no engine; its messages are above")
    return trt.Runtime(logger).deserialize_cuda_engine(plan)


def call_cuda(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of cuda-python, which returns a status and perhaps a value; return the value."""
    status, *values = function(*arguments)
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None


def load_tensorrt(model: object, options: dict[str, Any] = OPTIONS) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Build an engine in TensorRT; return a function from input arrays by name to output arrays by name."""
    from cuda.bindings import runtime as cuda

    engine = build_tensorrt_engine(model, options)
    context, stream = engine.create_execution_context(), call_cuda(cuda.cudaStreamCreate)
    to_device, to_host = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in {**INPUTS, **OUTPUTS}.items()}
    buffers = {name: call_cuda(cuda.cudaMalloc, max(1, array.nbytes)) for name, array in arrays.items()}
    for name, buffer in buffers.items():
        context.set_tensor_address(name, int(buffer))
    for name, (shape, _) in INPUTS.items():
        context.set_input_shape(name, tuple(shape))

    def run(feeds: dict[str, Any]) -> dict[str, Any]:
        for name, value in fit_inputs(feeds, {name: shape for name, (shape, _) in INPUTS.items()}).items():
            array = np.ascontiguousarray(value)
            call_cuda(cuda.cudaMemcpy, buffers[name], array.ctypes.data, array.nbytes, to_device)
        if not context.execute_async_v3(int(stream)):
            raise RuntimeError("TensorRT could not start the inference; its messages are above")
        call_cuda(cuda.cudaStreamSynchronize, stream)
        for name in OUTPUTS:
            call_cuda(cuda.cudaMemcpy, arrays[name].ctypes.data, buffers[name], arrays[name].nbytes, to_host)
        return {name: arrays[name].copy() for name in OUTPUTS}

    return run


def runtime_version(run: object) -> str:
    """Return the version of the runtime, without the name of its commit, or "" if it is unknown."""
    found = getattr(run, "facts", {}).get("version") or getattr(sys.modules.get(PACKAGE), "__version__", "")
    return re.split("[-+]", str(found))[0]


def open_model(load: Callable[..., Any], *arguments: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a model with the installed packages, and print a warning if the version of the runtime is another one."""
    for name in ("numpy", PACKAGE):  # a program may have imported them already
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if os.path.realpath(file).startswith(os.path.join(script_folder(), "")):
            raise ImportError(f"{name} was imported from {file}, next to the script; move that file away")
    path, sys.path[:] = sys.path[:], installed_path()
    try:
        run: Callable[[dict[str, Any]], dict[str, Any]] = load(*arguments)
    finally:
        sys.path[:] = path
    found = runtime_version(run)
    if found and VERSION and found != VERSION:
        print(
            f"warning: {PACKAGE.partition(' ')[0]} {found} runs the model, but it was measured with {VERSION}, so "
            f"speed and outputs may differ; to compare both: qdq verify {script_folder()} --runtime-python PYTHON",
            file=sys.stderr,
        )
    return run


def random_inputs(inputs: dict[str, Any] = INPUTS, seed: int = 0) -> dict[str, Any]:
    """Return an array for each input: uniform in [0, 1), and zeros for integers."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.random(shape).astype(dtype) if np.dtype(dtype).kind == "f" else np.zeros(shape, dtype)
        for name, (shape, dtype) in inputs.items()
    }


def peak_memory_mb(process: object = "self") -> float | None:
    """Return the peak of a process's memory in 10^6 bytes, or None where the system does not report it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):
        return None


def time_runs(run: Callable[..., Any], feeds: dict[str, Any], repeat: int) -> list[float]:
    """Return the time of each run in ms: with several streams the time per run while each of them works."""
    streams, samples_ms = OPTIONS.get("NUM_STREAMS", 1), []
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(repeat):
            start = time.perf_counter()
            if streams == 1:
                run(feeds)
            else:
                list(pool.map(run, [feeds] * streams))
            samples_ms.append(getattr(run, "latency_ms", 1000 * (time.perf_counter() - start) / streams))
    return samples_ms


def read_input(name: str, file: str, shape: Any, *, fixed: bool) -> Any:
    """Return the array of an input; without its first axis it is a batch of one.

    Args:
        fixed: Whether the array has this shape; another file may have dynamic axes.

    Raises:
        ValueError: The array has another shape, or the file is damaged.
    """
    array = np.load(file, allow_pickle=False)
    array = array[None] if array.shape == tuple(shape[1:]) else array
    if fixed:
        try:
            fit_inputs({name: array}, {name: shape})
        except ValueError as error:
            fits = array.shape != tuple(shape) and is_shape_of(array.shape, DYNAMIC.get(name, ()))
            dynamic = MODEL.replace(".onnx", ".dynamic.onnx")
            raise ValueError(f"{error}; --model {dynamic} takes other sizes" if fits else str(error)) from error
    return array


def main(load: Callable[..., Any]) -> None:
    """Load the model, run it, and print the outputs' shapes and the latency."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    with_at = "; with --at the file with dynamic axes" if SHAPES else ""
    parser.add_argument("--model", type=Path, help=f"ONNX file [{MODEL}{with_at}]")
    if SHAPES:
        parser.add_argument("--at", choices=list(SHAPES), help="fix the dynamic axes to one of the measured shapes")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="random if not given")
    parser.add_argument("--output", type=Path, metavar="FILE.npz", help="write the outputs of the last run")
    parser.add_argument("--repeat", type=int, default=20, help="timed runs [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    at = SHAPES.get(getattr(given, "at", None) or "")
    dynamic = Path(__file__).with_name(MODEL.replace(".onnx", ".dynamic.onnx"))
    model = given.model or (Path(__file__).with_name(MODEL) if at is None else dynamic)
    if not model.exists() and not (model := Path(__file__).with_name(model.name)).exists():
        parser.error(f"--model {given.model}: no such file, in this folder or next to {Path(__file__).name}")
    if given.output is not None and not given.output.parent.is_dir():
        parser.error(f"--output {given.output}: the folder does not exist")
    inputs = INPUTS if at is None else {name: (at[name], dtype) for name, (_, dtype) in INPUTS.items()}
    feeds = random_inputs(inputs)
    for text in given.input:
        name, _, file = text.partition("=")
        if name not in feeds:
            parser.error(f"--input {text}: the inputs are {', '.join(feeds)}")
        try:
            feeds[name] = read_input(name, file, inputs[name][0], fixed=bool(at) or model.name == MODEL)
        except (OSError, ValueError) as error:
            parser.error(f"--input {text}: {error}")
    start = time.perf_counter()
    run = load(model) if at is None else load(model, at)
    try:
        run(feeds)  # the first run allocates memory
    except ValueError as error:
        parser.error(f"--input {error}")
    load_ms = 1000 * (time.perf_counter() - start)
    getattr(run, "warm_up", lambda _: None)(feeds)
    samples_ms = time_runs(run, feeds, max(1, given.repeat))
    outputs = name_arrays(run(feeds))
    if given.output is not None:
        np.savez(given.output, **outputs)
    facts: dict[str, Any] = {
        "version": runtime_version(run) or None,
        "load_ms": load_ms,
        "latency_ms": statistics.median(samples_ms),
        "samples_ms": samples_ms,
        "peak_memory_mb": peak_memory_mb(getattr(run, "pid", "self")),
        "outputs": {name: list(array.shape) for name, array in outputs.items()},
    }
    if given.json:
        print(json.dumps(facts))
        return
    for name, shape in facts["outputs"].items():
        print(f"{name}: {shape}")
    print(f"{facts['latency_ms']:.3f} ms, median of {len(samples_ms)} runs; loaded in {load_ms:.0f} ms")
