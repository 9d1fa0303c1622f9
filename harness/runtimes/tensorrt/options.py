"""Options of the TensorRT benchmarkers, and the preparation of model files according to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.config.precision_names import normalize_float_precision
from harness.runtimes.cuda.device import Device
from harness.runtimes.tensorrt.library import POLICIES, STRONG_TYPING_ONLY_MAJOR, CachePolicy
from harness.runtimes.tensorrt.model_checks import (
    Structure,
    cast_model,
    check_tensorrt_qdq,
    has_fp8,
    has_qdq,
    read_input_shapes,
    read_structure,
)

Precision = Annotated[Literal["auto", "f32", "tf32", "f16", "bf16"], BeforeValidator(normalize_float_precision)]
Typing = Literal["strong", "weak"]
MIN_CAPABILITY_BY_PRECISION: Mapping[str, tuple[int, int]] = {
    "f32": (0, 0),
    "tf32": (8, 0),
    "f16": (5, 3),
    "bf16": (8, 0),
}
"""Smallest compute capability that runs a float precision (CUDA C++ programming guide, arithmetic instructions)."""
OPTIMIZATION_LEVELS = (None, *range(6))


@dataclass(frozen=True, slots=True)
class ParsedSource:
    """Model file that TensorRT parses.

    Attributes:
        path: Path of the file, which is a cast copy if the options require it.
        structure: Original model without its external data.
        options: Options of the build, with the profiles of dynamic inputs only.
    """

    path: Path
    structure: Structure
    options: BuildOptions

    @property
    def has_qdq(self) -> bool:
        """Return whether the model has Q/DQ pairs."""
        return has_qdq(self.structure)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Build options that all candidates share.

    Attributes:
        precision: Precision of float operations: "f32", "tf32", "f16" or "bf16".
        float_open: Whether the harness may select another precision.
        typing: "strong": operators run in the types of the file. "weak" (10.x): TensorRT may use lower precisions.
        workspace_bytes: Scratch memory in bytes that kernels may use; None: all memory of the device.
        optimization_level: Effort of the builder, 0 to 5; None: TensorRT's default (3).
        profiles: Shapes of the dynamic inputs by name.
        timing_cache: "cold", "shared" or "frozen", see `TimingCache`.
        detailed: Whether layers are recorded for inspection; not for engines that are timed.
    """

    precision: str
    float_open: bool = False
    typing: Typing = "strong"
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    profiles: Mapping[str, ShapeProfile] = field(default_factory=dict)
    timing_cache: CachePolicy = "shared"
    detailed: bool = False

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
        if device.capability < MIN_CAPABILITY_BY_PRECISION[self.precision]:
            need, have = (
                ".".join(map(str, pair)) for pair in (MIN_CAPABILITY_BY_PRECISION[self.precision], device.capability)
            )
            raise UserError(f"precision: {self.precision} needs compute capability {need}, {device.name} has {have}")

    def write_cast_model(self, path: Path, folder: Path) -> Path:
        """Return the file for a build: a cast copy in `folder` at FP16 and BF16 with strong typing, else `path`.

        Raises:
            BuildFailed: The model is too large to be cast, or ModelOpt refuses it.
        """
        return path if self.typing == "weak" else cast_model(path, self.precision, folder)

    def source(self, path: Path, folder: Path, device: Device) -> ParsedSource:
        """Check a candidate's file, and return the file that TensorRT parses for it.

        Raises:
            BuildFailed: TensorRT is known to refuse the file, the profiles do not fit, or it cannot be read or cast.
        """
        structure = read_structure(path)
        check_tensorrt_qdq(structure, path, device.capability)
        if self.typing == "weak" and has_fp8(structure):
            raise BuildFailed(f"{path.name}: FP8 needs a strongly typed network; use typing: strong")
        profiles = select_dynamic_profiles(self.profiles, read_input_shapes(structure))
        return ParsedSource(self.write_cast_model(path, folder), structure, replace(self, profiles=profiles))

    def describe(self, device: Device) -> dict[str, Any]:
        """Return the options as JSON values for the record."""
        return {
            "typing": self.typing,
            "precision": self.precision,
            "profiles": {name: str(profile) for name, profile in self.profiles.items()},
            "workspace_bytes": self.workspace_bytes,
            "optimization_level": self.optimization_level,
            "timing_cache": self.timing_cache,
            "compute_capability": ".".join(map(str, device.capability)),
            "cuda_driver": device.driver,
            **({"profile": True} if self.detailed else {}),
        }

    def describe_float_precision(self, device: Device) -> dict[str, Any]:
        """Return `float_precision`, `float_open` and `float_params`, see `harness.plugins.api.Benchmarker`."""
        offered = [name for name, least in MIN_CAPABILITY_BY_PRECISION.items() if device.capability >= least]
        return {
            "float_precision": self.precision,
            "float_open": self.float_open,
            "float_params": {name: {"precision": name} for name in offered},
        }


def read_options(
    precision: str,
    typing: Typing,
    profiles: Mapping[str, Any] | None,
    workspace_gb: float | None,
    optimization_level: int | None,
    timing_cache: CachePolicy,
    profile: bool,
) -> BuildOptions:
    """Validate options, which are parameters of `harness.runtimes.tensorrt.benchmarker.TensorRTBenchmarker`.

    The precision "auto" becomes "f32" with `float_open`.

    Raises:
        ValueError: An option has an unknown value, or a profile is invalid.
    """
    precision = normalize_float_precision(precision)
    check_choice("precision", precision, ("auto", *MIN_CAPABILITY_BY_PRECISION))
    check_choice("typing", typing, ("strong", "weak"))
    check_choice("timing_cache", timing_cache, POLICIES)
    check_choice("optimization_level", optimization_level, OPTIMIZATION_LEVELS)
    if workspace_gb is not None and not workspace_gb > 0:
        raise ValueError(f"workspace_gb: a positive number, but got {workspace_gb!r}")
    return BuildOptions(
        precision="f32" if precision == "auto" else precision,
        float_open=precision == "auto",
        typing=typing,
        workspace_bytes=None if workspace_gb is None else int(workspace_gb * 1e9),
        optimization_level=optimization_level,
        profiles=read_profiles(profiles or {}),
        timing_cache=timing_cache,
        detailed=profile,
    )


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise an error if a value is not one of the choices.

    Raises:
        ValueError: The value is unknown; the message lists all choices.
    """
    if value not in allowed:
        raise ValueError(f"{name}: one of {', '.join(map(str, allowed))}, but got {value!r}")


Shape = tuple[int, ...]
PROFILE_KEYS = ("min", "opt", "max")


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

    def check_shape(self, name: str, shape: Shape) -> None:
        """Raise an error for a shape outside of the profile.

        Raises:
            MeasureFailed: The shape is outside; the message has the shape and the profile.
        """
        if not self.covers(shape):
            raise MeasureFailed(f"input {name!r} is {format_shape(shape)}, the profile takes {self}")

    def __str__(self) -> str:
        return f"{format_shape(self.min)} to {format_shape(self.max)}"


def read_profiles(spec: Mapping[str, Any]) -> dict[str, ShapeProfile]:
    """Read profiles by input, from `{"images": {"min": "1x3x224x224", "opt": "8x3x224x224", "max": "32x3x224x224"}}`.

    Raises:
        ValueError: A key or a shape is invalid, or min <= opt <= max is violated.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"profiles: {{INPUT: {{min: 1x3x224x224, opt: ..., max: ...}}}}, but got {spec!r}")
    return {str(name): _parse_profile(str(name), shapes) for name, shapes in spec.items()}


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


def _parse_profile(name: str, shapes: Any) -> ShapeProfile:
    where = f"profiles.{name}"
    if not isinstance(shapes, Mapping) or sorted(map(str, shapes)) != sorted(PROFILE_KEYS):
        raise ValueError(f"{where}: the keys min, opt and max with a shape each, but got {shapes!r}")
    low, best, high = (_parse_shape(f"{where}.{key}", shapes[key]) for key in PROFILE_KEYS)
    if not len(low) == len(best) == len(high) or not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
        raise ValueError(
            f"{where}: min <= opt <= max in every dimension, but got {format_shape(low)}, {format_shape(best)}, "
            f"{format_shape(high)}"
        )
    return ShapeProfile(min=low, opt=best, max=high)


def _parse_shape(where: str, value: Any) -> Shape:
    parts = value.split("x") if isinstance(value, str) else value
    try:
        sizes = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 0 or not sizes[0]:  # the first is the batch
        raise ValueError(f"{where}: a shape such as 1x3x224x224, but got {value!r}")
    return sizes
