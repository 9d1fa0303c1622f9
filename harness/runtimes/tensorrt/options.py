"""Parameters of the TensorRT benchmarkers, and the preparation of model files according to them.

A strongly typed network runs every operator in the type of the ONNX file, so an FP16 engine needs a file with weights,
constants and scales of Q/DQ pairs in FP16 (TensorRT, "Strongly typed networks"; DequantizeLinear returns the type of
its scale).

The module does not postpone annotations, because the registry checks parameters of subclasses in other modules by them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper
from pydantic import BeforeValidator, Field

from harness.base.errors import BuildFailed, UserError, install_hint
from harness.base.paths import cache_dir
from harness.config.sections import normalize_float_precision
from harness.graph.io.digests import digest_file
from harness.graph.io.files import move_model, write_model
from harness.graph.passes.dimension_sizes import axes_of
from harness.graph.plugin_operators import find_plugin_nodes, remove_plugins, restore_plugins
from harness.graph.protos import constants_by_name
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.runtimes.cuda import Device
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

Structure: TypeAlias = onnx.ModelProto
"""A model without its external data."""
MAX_PROTOBUF_BYTES = 2**31 - 1
"""Protobuf reads no more; neither can a model be cast that has more weights."""
FP8_TYPES = frozenset((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2))
FLOAT_TYPE_NAMES = {TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16"}
LOW_PRECISION = {"f16": "fp16", "bf16": "bf16"}
CAST_METADATA_KEY = "qdq_bench.cast_to"
"""Metadata of a cast file and of Q/DQ files made from it; where all weights are INT8, no type shows the cast."""
Precision = Annotated[Literal["auto", "f32", "tf32", "f16", "bf16"], BeforeValidator(normalize_float_precision)]
CachePolicy = Literal["cold", "shared", "frozen"]
STRONG_TYPING_ONLY_MAJOR = 11
"""From this major on, every network is strongly typed."""
MIN_CAPABILITY_BY_PRECISION: Mapping[str, tuple[int, int]] = {
    "f32": (0, 0),
    "tf32": (8, 0),
    "f16": (5, 3),
    "bf16": (8, 0),
}
"""Smallest compute capability that runs a float precision (CUDA C++ programming guide, arithmetic instructions)."""
Shape = tuple[int, ...]
PROFILE_KEYS = ("min", "opt", "max")


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a model without its external data.

    Raises:
        BuildFailed: The file is missing, no ONNX model, or too large.
    """
    try:
        if path.stat().st_size > MAX_PROTOBUF_BYTES:
            raise BuildFailed(
                f"{path.name}: larger than 2 GiB, which protobuf cannot read; keep weights in external data"
            )
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise BuildFailed(f"{path.name}: cannot be read ({error.strerror or error})") from error
    except DecodeError as error:
        raise BuildFailed(f"{path.name}: no ONNX model, or cut short ({error})") from error


def has_qdq(proto: onnx.ModelProto) -> bool:
    """Return whether the main graph has a DequantizeLinear node."""
    return any(node.op_type == "DequantizeLinear" for node in proto.graph.node)


def has_fp8(proto: onnx.ModelProto) -> bool:
    """Return whether any constant of the main graph, zero points included, is FP8."""
    return any(tensor.data_type in FP8_TYPES for tensor in constants_by_name(proto.graph).values())


def read_input_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input by name, -1 for a dynamic size; initializers listed as inputs are excluded."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    return {
        value.name: tuple(axis if isinstance(axis, int) else -1 for axis in axes_of(value) or ())
        for value in proto.graph.input
        if value.name not in constants
    }


def read_io_dtypes(proto: onnx.ModelProto) -> tuple[dict[str, np.dtype[Any]], dict[str, np.dtype[Any]]]:
    """Return NumPy's element type of each input by name, and of each output by name."""

    def types(values: Any) -> dict[str, np.dtype[Any]]:
        kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        return {name: np.dtype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds.items()}

    own = read_input_shapes(proto)
    return types(v for v in proto.graph.input if v.name in own), types(proto.graph.output)


def dominant_float_type(proto: onnx.ModelProto) -> str:
    """Return the float type of most elements of the constants: "f32", "f16" or "bf16"; "f32" if nothing tells.

    Types may differ, because operators without FP16 stay FP32 in a cast model. The type in the metadata of a file that
    this project cast takes precedence; without float constants, the types of inner tensors count.
    """
    said = next((entry.value for entry in proto.metadata_props if entry.key == CAST_METADATA_KEY), None)
    if said in LOW_PRECISION:
        return str(said)
    sizes: Counter[str] = Counter()
    for tensor in constants_by_name(proto.graph).values():
        if tensor.data_type in FLOAT_TYPE_NAMES:
            sizes[FLOAT_TYPE_NAMES[tensor.data_type]] += int(np.prod(tensor.dims, dtype=np.int64))
    if not sizes:
        scales = (FLOAT_TYPE_NAMES.get(value.type.tensor_type.elem_type) for value in proto.graph.value_info)
        sizes.update(kind for kind in scales if kind is not None)
    return sizes.most_common(1)[0][0] if sizes else "f32"


def cast_model(path: Path, precision: str, folder: Path) -> Path:
    """Cast a model to FP16 or BF16 without its inputs and outputs, and return the path of the new file.

    ModelOpt's autocast casts every operator that supports it, except plug-ins, and the scales of Q/DQ pairs. The
    default operator set becomes 19 (FP16) or 22 (BF16). An existing cast of the same content in the folder is reused,
    because a cast takes seconds.

    Args:
        path: File of the model; it is returned if the precision is "f32" or the model has the type already.
        precision: "f32", "f16" or "bf16".
        folder: Folder of the new file.

    Raises:
        BuildFailed: The model is too large to be cast, or ModelOpt refuses it.
    """
    if precision not in LOW_PRECISION:
        return path
    structure = read_structure(path)
    if dominant_float_type(structure) == precision:
        return path
    target = folder / f"{path.stem}.{digest_file(path)[:16]}.{precision}.onnx"
    if target.exists():
        return target
    external = [entry for tensor in structure.graph.initializer for entry in tensor.external_data]
    weight_bytes = sum(int(entry.value) for entry in external if entry.key == "length")
    if path.stat().st_size + weight_bytes > MAX_PROTOBUF_BYTES:
        raise BuildFailed(
            f"{path.name}: more than 2 GB of weights cannot be cast to {precision} here; cast the model beforehand "
            f"(python -m modelopt.onnx.autocast --low_precision_type {LOW_PRECISION[precision]}), or use precision: f32"
        )
    what = f"{path.name}: the cast to {precision}"
    cast = call_in_helper_process(what, _convert_precision, path, precision, factor=RUNTIME_FACTOR)
    onnx.helper.set_model_props(cast, {**{p.key: p.value for p in cast.metadata_props}, CAST_METADATA_KEY: precision})
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:  # so that an interrupted call leaves no partial file
        move_model(write_model(cast, Path(scratch) / target.name), target)
    return target


def _convert_precision(path: Path, precision: str) -> onnx.ModelProto:
    """Return a model at FP16 or BF16, except for plug-in operators, which ModelOpt cannot cast without TensorRT."""
    try:
        from modelopt.onnx.autocast.convert import convert_to_f16
    except ImportError as error:
        raise UserError(
            f"{path.name}: {precision} needs ModelOpt ({error}): {install_hint('modelopt')}, or use precision: f32"
        ) from error

    model = onnx.load(path)
    plugins = find_plugin_nodes(model)
    try:
        known = remove_plugins(model, plugins, path.name) if plugins else model
    except BuildFailed as error:
        raise BuildFailed(f"{error}, or use precision: f32") from error
    try:
        cast = convert_to_f16(known, low_precision_type=LOW_PRECISION[precision], keep_io_types=True)
    except Exception as error:  # ModelOpt raises this very class too
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise BuildFailed(f"{path.name}: ModelOpt cannot cast it to {precision}: {words}") from error
    return restore_plugins(cast, model, plugins) if plugins else cast


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """Smallest, largest and optimal shape of a dynamic input, which is timed at `opt`."""

    min: Shape
    opt: Shape
    max: Shape

    def covers(self, shape: Shape) -> bool:
        """Return whether a shape has the rank of the profile and each size is within it."""
        return len(shape) == len(self.opt) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def check_declared(self, name: str, declared: Shape) -> None:
        """Raise an error if the profile does not fit an input.

        Args:
            name: Name of the input.
            declared: Shape of the input in the model, with -1 for dynamic sizes.

        Raises:
            BuildFailed: The rank or a fixed size differs, or the profile does not cover the shape of a static input.
        """
        if -1 not in declared:
            if not self.covers(declared):
                raise BuildFailed(
                    f"profile of {name!r}: {self} does not cover {format_shape(declared)}, the shape that the model "
                    "was calibrated at and is fixed to"
                )
            return
        fits = len(declared) == len(self.opt) and all(
            size in (-1, wanted)
            for shape in (self.min, self.opt, self.max)
            for size, wanted in zip(declared, shape, strict=True)
        )
        if not fits:
            raise BuildFailed(f"profile of {name!r}: {self} does not fit the model's shape {format_shape(declared)}")

    def __str__(self) -> str:
        return f"{format_shape(self.min)} to {format_shape(self.max)}"


@dataclass(frozen=True, slots=True)
class ParsedSource:
    """Model file that TensorRT parses.

    Attributes:
        path: Path of the file, which is a cast copy if the options require it.
        structure: Original model without its external data.
        profiles: Profiles of the dynamic inputs by name.
    """

    path: Path
    structure: Structure
    profiles: Mapping[str, ShapeProfile]


@dataclass(eq=False, kw_only=True)
class TensorRTParameters:
    """Parameters that the benchmarkers `tensorrt` and `trtexec` share.

    Args:
        precision: Precision of float operations. "f32": IEEE FP32; "tf32": FP32 with TF32 multiplications, TensorRT's
            default; "f16" and "bf16": the ONNX file is cast first (strong typing), or TensorRT may use them (weak
            typing). "auto": the harness times the precisions of the GPU and uses the fastest one.
        typing: "strong": operators run in the types of the file; "weak", for TensorRT 10 only: lower precisions are
            allowed.
        profiles: Shapes of dynamic inputs, `{NAME: {min: 1x3x224x224, opt: ..., max: ...}}`; timed at `opt`.
        workspace_gb: Scratch memory that kernels may use, in units of 10^9 bytes; None: all memory of the GPU.
        optimization_level: Effort of the builder, 0 to 5; None: TensorRT's default (3).
        timing_cache: "cold": not used; "shared": read and extended; "frozen": only read, and it must exist.
        timing_cache_file: File of the timing cache; None: one for each TensorRT and kind of GPU in the cache folder.
        cuda_graph: Whether the engine is timed as a CUDA graph, without the host's work between kernels.
        plugins: Libraries with plugins.
        device: Number of the GPU.
        profile: Whether layers are recorded in detail for `layers`; do not compare such engines.

    Raises:
        ValueError: A profile is invalid.
    """

    precision: Precision = "auto"
    typing: Literal["strong", "weak"] = "strong"
    profiles: Mapping[str, Any] | None = None
    workspace_gb: Annotated[float, Field(gt=0)] | None = None
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    timing_cache: CachePolicy = "shared"
    timing_cache_file: str | None = None
    cuda_graph: bool = True
    plugins: tuple[str, ...] | list[str] = ()
    device: int = 0
    profile: bool = False

    def __post_init__(self) -> None:
        self.precision = normalize_float_precision(self.precision)
        self._profiles = read_profiles(self.profiles or {})

    @property
    def float_precision(self) -> str:
        """Return the precision of float operations: "f32", "tf32", "f16" or "bf16"."""
        return "f32" if self.precision == "auto" else self.precision

    @property
    def workspace_bytes(self) -> int | None:
        """Return the scratch memory in bytes that kernels may use; None: all memory of the GPU."""
        return None if self.workspace_gb is None else int(self.workspace_gb * 1e9)

    @cached_property
    def plugin_paths(self) -> tuple[Path, ...]:
        """Return the paths of the plugin libraries; raise `UserError` if one is missing."""
        found = {name: Path(name).expanduser().resolve() for name in self.plugins}
        for name, path in found.items():
            if not path.is_file():
                raise UserError(f"plugins: {name}: no such file")
        return tuple(found.values())

    def timing_cache_path(self, version: str, device: Device) -> Path:
        """Return the file of the timing cache; by default one for each version of TensorRT and kind of GPU."""
        gpu = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-")
        default = cache_dir() / "tensorrt" / f"{version}-{gpu}.timing"
        return Path(self.timing_cache_file).expanduser() if self.timing_cache_file else default

    def check_runtime(self, runtime: str, major: int, device: Device) -> None:
        """Raise an error for options that a TensorRT or a GPU does not support.

        Args:
            runtime: Name and version of TensorRT, for messages.
            major: Major version of TensorRT.
            device: The GPU.

        Raises:
            UserError: Weak typing on 11 or later; a float precision beyond the GPU's compute capability.
        """
        if self.typing == "weak" and major >= STRONG_TYPING_ONLY_MAJOR:
            raise UserError(
                f"typing: weak: {runtime} has no weakly typed networks any more (11.0 removed them with the builder's "
                "precision flags); use typing: strong, where the ONNX file says what runs in which type"
            )
        least = MIN_CAPABILITY_BY_PRECISION[self.float_precision]
        if device.capability < least:
            need, have = (".".join(map(str, pair)) for pair in (least, device.capability))
            raise UserError(f"precision: {self.precision} needs compute capability {need}, {device.name} has {have}")

    def cast(self, path: Path, folder: Path) -> Path:
        """Return the file for a build: a cast copy in `folder` at FP16 and BF16 with strong typing, else `path`.

        Raises:
            BuildFailed: The model is too large to be cast, or ModelOpt refuses it.
        """
        return path if self.typing == "weak" else cast_model(path, self.float_precision, folder)

    def source(self, path: Path, folder: Path, device: Device) -> ParsedSource:
        """Check a candidate's file, and return the file that TensorRT parses for it.

        Q/DQ pairs are checked here, because a build with pairs that TensorRT does not accept would fail only after
        minutes.

        Raises:
            BuildFailed: TensorRT is known to refuse the file, the profiles do not fit, or it cannot be read or cast.
        """
        structure = read_structure(path)
        for problem in find_refused_qdq(QDQGraph(structure, path.parent), device.capability):
            raise BuildFailed(f"{path.name}: {problem}")
        if self.typing == "weak" and has_fp8(structure):
            raise BuildFailed(f"{path.name}: FP8 needs a strongly typed network; use typing: strong")
        profiles = select_dynamic_profiles(self._profiles, read_input_shapes(structure))
        return ParsedSource(self.cast(path, folder), structure, profiles)

    def describe_options(self, device: Device) -> dict[str, Any]:
        """Return the options as JSON values for the record."""
        return {
            "typing": self.typing,
            "precision": self.float_precision,
            "profiles": {name: str(profile) for name, profile in self._profiles.items()},
            "workspace_bytes": self.workspace_bytes,
            "optimization_level": self.optimization_level,
            "timing_cache": self.timing_cache,
            "compute_capability": ".".join(map(str, device.capability)),
            "cuda_driver": device.driver,
            **({"profile": True} if self.profile else {}),
        }

    def describe_float_precision(self, device: Device) -> dict[str, Any]:
        """Return `float_precision`, `float_open` and `float_params`, see `harness.plugins.api.Benchmarker`."""
        offered = [name for name, least in MIN_CAPABILITY_BY_PRECISION.items() if device.capability >= least]
        return {
            "float_precision": self.float_precision,
            "float_open": self.precision == "auto",
            "float_params": {name: {"precision": name} for name in offered},
        }


def read_profiles(spec: Mapping[str, Any]) -> dict[str, ShapeProfile]:
    """Read profiles by input, from `{"images": {"min": "1x3x224x224", "opt": "8x3x224x224", "max": "32x3x224x224"}}`.

    Raises:
        ValueError: A key or a shape is invalid, or min <= opt <= max is violated.
    """
    found = {}
    for name, shapes in spec.items():
        where = f"profiles.{name}"
        if not isinstance(shapes, Mapping) or sorted(map(str, shapes)) != sorted(PROFILE_KEYS):
            raise ValueError(f"{where}: the keys min, opt and max with a shape each, but got {shapes!r}")
        low, best, high = (_parse_shape(f"{where}.{key}", shapes[key]) for key in PROFILE_KEYS)
        if not len(low) == len(best) == len(high) or any(
            a > b or b > c for a, b, c in zip(low, best, high, strict=True)
        ):
            texts = ", ".join(map(format_shape, (low, best, high)))
            raise ValueError(f"{where}: min <= opt <= max in every dimension, but got {texts}")
        found[str(name)] = ShapeProfile(min=low, opt=best, max=high)
    return found


def _parse_shape(where: str, value: Any) -> Shape:
    parts = value.split("x") if isinstance(value, str) else value
    try:
        sizes = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 0 or not sizes[0]:  # the first is the batch
        raise ValueError(f"{where}: a shape such as 1x3x224x224, but got {value!r}")
    return sizes


def select_dynamic_profiles(
    profiles: Mapping[str, ShapeProfile], declared: Mapping[str, Shape]
) -> dict[str, ShapeProfile]:
    """Return the profiles that a model needs: those of its dynamic inputs.

    Args:
        profiles: Profiles of the experiment by input.
        declared: Shape of each input in the model, with -1 for dynamic sizes.

    Raises:
        BuildFailed: A profile names no input or does not fit it, or a dynamic input has no profile.
    """
    for name, profile in profiles.items():
        if name not in declared:
            raise BuildFailed(f"profile of {name!r}: the model's inputs are {', '.join(declared)}")
        profile.check_declared(name, declared[name])
    dynamic = {name: shape for name, shape in declared.items() if -1 in shape}
    for name, shape in dynamic.items():
        if name not in profiles:
            raise BuildFailed(
                f"input {name!r} has the dynamic shape {format_shape(shape)}; make it static, or give a profile"
            )
    return {name: profiles[name] for name in dynamic}


def format_shape(shape: Shape) -> str:
    """Format a shape as 1x3x224x224, or "scalar"."""
    return "x".join(map(str, shape)) or "scalar"
