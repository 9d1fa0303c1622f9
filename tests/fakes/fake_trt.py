"""TensorRT 10 and 11 without a GPU: every public name of the major and no other; engines run on ONNX Runtime's CPU.

`trt_api_10.json.gz` and `trt_api_11.json.gz` list the public names of the Python bindings of 10.16.1 and 11.1 (class to
names, `__module__` for the module itself), taken from NVIDIA's Apache-2.0 binding sources.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
from fake_cuda import FakeCuda

HERE = Path(__file__).parent
VERSIONS = {10: "10.16.1.11", 11: "11.1.0.106"}
# Integers as the headers have them; elsewhere they are given in the order of the names, and no test may rely on them.
NETWORK_FLAGS = {
    10: {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1, "PREFER_JIT_PYTHON_PLUGINS": 2, "PREFER_AOT_PYTHON_PLUGINS": 3},
    11: {"STRONGLY_TYPED": 0, "PREFER_JIT_PYTHON_PLUGINS": 1, "PREFER_AOT_PYTHON_PLUGINS": 2},
}
KERNEL_MS = 0.25


def api(major: int) -> dict[str, list[str]]:
    """The public names of a major."""
    found: dict[str, list[str]] = json.loads(gzip.decompress((HERE / f"trt_api_{major}.json.gz").read_bytes()))
    return found


class Strict:
    """An object that has the attributes of its class in this major, and nothing else."""

    _of: ClassVar[str]
    _names: ClassVar[frozenset[str]]
    _major: ClassVar[int]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"TensorRT {self._major}: {self._of} has no {name!r}")
        raise NotImplementedError(f"the fake lacks {self._of}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._names:
            raise AttributeError(f"TensorRT {self._major}: {self._of} has no {name!r}")
        object.__setattr__(self, name, value)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeTensorRT:
    """Stands for the module tensorrt.

    Args:
        major: 10 or 11.
        cuda: What engines run on.

    Attributes:
        calls: What was called, "Class.method", in order, with its arguments.
        refuse: Words that the builder refuses every network with; "" for none.
        layers: What the engine inspector answers.
        on_host: Inputs and outputs that hold shapes.
        formats: Layouts of inputs and outputs that are not linear.
        no_builder: A builder or a runtime cannot be made; the bindings say so by a TypeError.
    """

    def __init__(self, major: int, cuda: FakeCuda) -> None:
        self._names = api(major)
        self._major, self.cuda = major, cuda
        self.__version__ = VERSIONS[major]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refuse = ""
        self.layers = json.dumps({"Layers": [], "Bindings": []})
        self.plugins: dict[str, bool] = {}
        self.gpu_memory_full = False
        self.on_host: set[str] = set()
        self.formats: dict[str, str] = {}
        self.no_builder = False
        self.registered: set[str] = set()
        for name in self._names["__module__"]:
            members = [m for m in self._names.get(name, ()) if m.isupper()]
            if name in BEHAVIOUR:
                setattr(self, name, self._strict(name, BEHAVIOUR[name]))
            elif members and "__members__" in self._names[name]:
                numbers = NETWORK_FLAGS[major] if name == "NetworkDefinitionCreationFlag" else None
                setattr(self, name, IntEnum(name, numbers or {m: i for i, m in enumerate(members)}))
        for logger in (self.ILogger, self.Logger):
            for number, severity in enumerate(("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")):
                setattr(logger, severity, number)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names["__module__"]:
            raise AttributeError(f"TensorRT {self._major} has no {name!r}")
        raise NotImplementedError(f"the fake lacks {name}")

    def _strict(self, name: str, behaviour: type) -> type:
        """A class with this behaviour and exactly the names that the major has."""
        names = frozenset(self._names[name])
        for attribute in vars(behaviour):
            if not attribute.startswith("_"):
                assert attribute in names, f"{name}.{attribute}"
        fake = self
        return type(name, (behaviour, Strict), {"_of": name, "_names": names, "_major": self._major, "_fake": fake})

    def note(self, what: str, *args: Any) -> None:
        """Record a call."""
        self.calls.append((what, args))

    def started(self) -> None:
        """Fail as pybind11 does where a factory gives a null pointer."""
        if self.no_builder:
            self.said("CUDA initialization failure with error: 2")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> bool:
        self.logger = logger
        return True

    def get_plugin_registry(self) -> Any:
        return self.IPluginRegistry()


class _Logger:
    def __init__(self, *_: Any) -> None:
        pass


class _PlainLogger(_Logger):
    def log(self, severity: Any, text: str) -> None:
        raise AssertionError(text)


class _Registry:
    def load_library(self, path: str) -> Any:
        if path in self._fake.registered:
            self._fake.said("Cannot register plugin: it is already registered")
            return None
        if not self._fake.plugins.get(Path(path).name, False):
            self._fake.said("undefined symbol: missing")
            return None
        self._fake.registered.add(path)
        return object()


class _Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._fake.logger = logger
        self._fake.started()

    def create_network(self, flags: int) -> Any:
        self._fake.note("create_network", flags)
        members = self._fake.NetworkDefinitionCreationFlag
        on = {member.name for member in members if flags & 1 << int(member)}
        network = self._fake.INetworkDefinition()
        network._strong = self._major >= 11 or "STRONGLY_TYPED" in on
        network._flags_on = on
        return network

    def create_builder_config(self) -> Any:
        return self._fake.IBuilderConfig()

    def create_optimization_profile(self) -> Any:
        return self._fake.IOptimizationProfile()

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        fake = self._fake
        fake.note("build", network, config)
        if fake.refuse:
            fake.said(fake.refuse)
            return None
        if any(-1 in shape for shape in network._shapes.values()) and not config._profiles:
            fake.said("Network has dynamic or shape inputs, but no optimization profile has been defined.")
            return None
        memory = fake.IHostMemory()
        body = {"version": fake.__version__, "model": network._model.SerializeToString().hex()}
        memory._content = json.dumps({**body, "profiles": [p._shapes for p in config._profiles]}).encode()
        return memory


class _Network:
    _model: Any = None
    _shapes: Mapping[str, tuple[int, ...]] = {}

    @property
    def num_inputs(self) -> int:
        return len(self._shapes)

    def get_input(self, index: int) -> Any:
        name = list(self._shapes)[index]
        tensor = self._fake.ITensor()
        tensor.name, tensor.shape = name, self._shapes[name]
        return tensor


class _Tensor:
    pass


class _Parser:
    def __init__(self, network: Any, logger: Any) -> None:
        self._network, self._errors = network, []

    def parse_from_file(self, path: str) -> bool:
        try:
            return self._take(onnx.load(path))
        except Exception as error:
            return self._fail(str(error), "", "")

    def parse(self, content: bytes) -> bool:
        return self._take(onnx.load_from_string(content))

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def _take(self, model: onnx.ModelProto) -> bool:
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx"):
                return self._fail(
                    "Plugin not found, are the plugin name, version, and namespace correct?", node.name, node.op_type
                )
        self._network._model = model
        self._network._shapes = {
            value.name: tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)
            for value in model.graph.input
        }
        return True

    def _fail(self, text: str, node: str, operator: str) -> bool:
        error = self._fake.ParserError()
        error._text, error._node, error._operator = text, node, operator
        self._errors.append(error)
        return False


class _ParserError:
    def desc(self) -> str:
        return self._text

    def node_name(self) -> str:
        return self._node

    def node_operator(self) -> str:
        return self._operator


class _Config:
    def __init__(self) -> None:
        self._flags = {"TF32"}
        self._profiles: list[Any] = []
        self._cache: Any = None
        self._limits: dict[Any, int] = {}

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag.name)

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self._limits[pool.name] = size

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, content: bytes) -> Any:
        if content == b"damaged":
            self._fake.said("the magic tag does not match")
            return None
        cache = self._fake.ITimingCache()
        cache._content = content
        return cache

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        self._fake.note("set_timing_cache", cache._content, ignore_mismatch)
        if cache._content and not cache._content.startswith(self._fake.__version__.encode()):
            self._fake.said("Verification failed: the timing cache is from another version.")
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache


class _TimingCache:
    _content = b""

    def combine(self, other: Any, ignore_mismatch: bool) -> bool:
        self._content = max(self._content, other._content, key=len)
        return True

    def serialize(self) -> Any:
        memory = self._fake.IHostMemory()
        memory._content = (self._content or self._fake.__version__.encode()) + b"+"
        return memory


class _Profile:
    def __init__(self) -> None:
        self._shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, best: Any, high: Any) -> None:
        self._shapes[name] = [list(low), list(best), list(high)]


class _HostMemory:
    _content = b""

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._content)

    def __bytes__(self) -> bytes:  # Python < 3.12 asks for no __buffer__ of a Python class
        return self._content

    @property
    def nbytes(self) -> int:
        return len(self._content)


class _Runtime:
    def __init__(self, logger: Any) -> None:
        self._fake.logger = logger

    def deserialize_cuda_engine(self, content: Any) -> Any:
        try:
            body = json.loads(bytes(content))
        except ValueError:
            self._fake.said("Magic tag does not match")
            return None
        if body["version"] != self._fake.__version__:
            self._fake.said(
                f"The engine plan file is not compatible, expecting library version {self._fake.__version__}"
            )
            return None
        engine = self._fake.ICudaEngine()
        engine._load(bytes.fromhex(body["model"]), body["profiles"], bytes(content))
        return engine


class _Engine:
    def _load(self, model: bytes, profiles: Any, content: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._inputs = {v.name: v for v in self._session.get_inputs()}
        self._outputs = {v.name: v for v in self._session.get_outputs()}
        self._profiles, self._content = profiles, content
        self._graph = onnx.load_from_string(model).graph

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def num_layers(self) -> int:
        return len(self._graph.node)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._fake.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        kind = {**self._inputs, **self._outputs}[name].type.removeprefix("tensor(").removesuffix(")")
        return self._fake.DataType[{"float": "FLOAT", "float16": "HALF"}.get(kind, kind.upper())]

    def get_tensor_location(self, name: str) -> Any:
        places = self._fake.TensorLocation
        return places.HOST if name in self._fake.on_host else places.DEVICE

    def get_tensor_format(self, name: str) -> Any:
        return self._fake.TensorFormat[self._fake.formats.get(name, "LINEAR")]

    def get_tensor_format_desc(self, name: str) -> str:
        return f"Row major linear of {self.get_tensor_format(name).name}"

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        found: list[list[int]] = self._profiles[profile_index][name]
        return found

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        shape = {**self._inputs, **self._outputs}[name].shape
        return tuple(size if isinstance(size, int) else -1 for size in shape)

    def serialize(self) -> Any:
        memory = self._fake.IHostMemory()
        memory._content = self._content
        return memory

    def create_execution_context(self) -> Any:
        if self._fake.gpu_memory_full:
            self._fake.said("Error Code 2: OutOfMemory (Requested size was 1234 bytes.)")
            return None
        context = self._fake.IExecutionContext()
        context._begin(self)
        return context

    def create_engine_inspector(self) -> Any:
        return self._fake.EngineInspector()


class _Context:
    profiler: Any = None

    def _begin(self, engine: Any) -> None:
        self._engine, self._set, self._addresses = engine, {}, {}
        self._results: dict[str, Any] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._set[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._set:
            return self._set[name]
        declared = self._engine.get_tensor_shape(name)
        batch = next(iter(self._set.values()))[0]
        return tuple(batch if size < 0 else size for size in declared)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address in self._fake.cuda.memory
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        engine, memory = self._engine, self._fake.cuda.memory
        if self._fake.cuda.last:
            self._fake.said(f"Error Code 1: Cuda Runtime ({self._fake.cuda.last.name})")
            return False
        if set(self._addresses) != {*engine._inputs, *engine._outputs}:
            self._fake.said("Error Code 3: API Usage Error: address not set")
            return False

        def work() -> None:
            feeds = {}
            for name in engine._inputs:
                dtype = DTYPES[engine.get_tensor_dtype(name).name]
                count = int(np.prod(self._set[name])) * np.dtype(dtype).itemsize
                feeds[name] = memory[self._addresses[name]][:count].view(dtype).reshape(self._set[name])
            for name, array in zip(engine._outputs, engine._session.run(list(engine._outputs), feeds), strict=True):
                raw = np.ascontiguousarray(array).view(np.uint8).ravel()
                memory[self._addresses[name]][: raw.size] = raw
            if self.profiler is not None:
                for node in engine._graph.node:
                    self.profiler.report_layer_time(node.name, 0.125)

        self._fake.cuda.launch(stream, KERNEL_MS, work)
        return True


class _Inspector:
    execution_context: Any = None

    def get_engine_information(self, format: Any) -> str:
        assert format.name == "JSON"
        assert self.execution_context is not None, "without it dynamic shapes are not told"
        return self._fake.layers


class _ProfilerBase:
    def __init__(self) -> None:
        pass


def _said(self: FakeTensorRT, text: str) -> None:
    """What TensorRT tells its logger of an error."""
    self.logger.log(self.ILogger.ERROR, text)


FakeTensorRT.said = _said  # type: ignore[attr-defined]
DTYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT64": np.int64,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
BEHAVIOUR: dict[str, type] = {
    "ILogger": _Logger, "Logger": _PlainLogger, "IPluginRegistry": _Registry, "Builder": _Builder,
    "INetworkDefinition": _Network,
    "ITensor": _Tensor, "OnnxParser": _Parser, "ParserError": _ParserError, "IBuilderConfig": _Config,
    "ITimingCache": _TimingCache, "IOptimizationProfile": _Profile, "IHostMemory": _HostMemory, "Runtime": _Runtime,
    "ICudaEngine": _Engine, "IExecutionContext": _Context, "EngineInspector": _Inspector, "IProfiler": _ProfilerBase,
}  # fmt: skip
