"""Optimization profiles: which shapes of a dynamic input an engine takes, and for which it is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import BuildFailed, MeasureFailed

__all__ = ["Shape", "ShapeProfile", "format_shape", "read_profiles", "select_dynamic_profiles"]

Shape = tuple[int, ...]
PROFILE_KEYS = ("min", "opt", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """Shapes of one input; it is timed at `opt`."""

    min: Shape
    opt: Shape
    max: Shape

    def covers(self, shape: Shape) -> bool:
        """Return whether a shape lies within the profile."""
        return len(shape) == len(self.opt) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def check_declared(self, name: str, declared: Shape) -> None:
        """Refuse a profile that is of no use for an input.

        Args:
            name: Of the input.
            declared: Its shape in the model, -1 where it is dynamic.

        Raises:
            BuildFailed: Another rank, another size where the model has a fixed one, or, for an input that is static,
                not the shape that it was calibrated and is timed at.
        """
        if -1 not in declared:
            if not self.covers(declared):
                raise BuildFailed(
                    f"profile of {name!r}: {self} does not cover {format_shape(declared)}, the shape that the "
                    "model was "
                    "calibrated at and is fixed to"
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
        """Refuse a shape outside of the profile.

        Raises:
            MeasureFailed: With both.
        """
        if not self.covers(shape):
            raise MeasureFailed(f"input {name!r} is {format_shape(shape)}, the profile takes {self}")

    def __str__(self) -> str:
        return f"{format_shape(self.min)} to {format_shape(self.max)}"


def read_profiles(spec: Mapping[str, Any]) -> dict[str, ShapeProfile]:
    """Read profiles by input, from `{"images": {"min": "1x3x224x224", "opt": "8x3x224x224", "max": "32x3x224x224"}}`.

    Raises:
        ValueError: A key or shape that is none, or min <= opt <= max does not hold.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"profiles: {{INPUT: {{min: 1x3x224x224, opt: ..., max: ...}}}}, but got {spec!r}")
    return {str(name): _parse_profile(str(name), shapes) for name, shapes in spec.items()}


def select_dynamic_profiles(
    profiles: Mapping[str, ShapeProfile], declared: Mapping[str, Shape]
) -> dict[str, ShapeProfile]:
    """Return the profiles that a model needs: those of its dynamic inputs.

    Args:
        profiles: As they were given.
        declared: Shape of each input in the model, -1 where it is dynamic.

    Raises:
        BuildFailed: One is of no input or does not fit it; a dynamic input has none.
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
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{where}: a shape such as 1x3x224x224, but got {value!r}")
    return sizes
