"""Optimization profiles: which shapes of a dynamic input an engine takes, and for which it is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import BuildFailed, MeasureFailed

__all__ = ["Profile", "read_profiles"]

Shape = tuple[int, ...]
KEYS = ("min", "opt", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Shapes of one input; it is timed at `opt`."""

    min: Shape
    opt: Shape
    max: Shape

    def check(self, name: str, declared: Shape) -> None:
        """Refuse a profile that does not fit an input.

        Args:
            name: Of the input.
            declared: Its shape in the model, -1 where it is dynamic.

        Raises:
            BuildFailed: Another rank, or another size where the model has a fixed one.
        """
        fits = len(declared) == len(self.opt) and all(
            size in (-1, wanted)
            for shape in (self.min, self.opt, self.max)
            for size, wanted in zip(declared, shape, strict=True)
        )
        if not fits:
            raise BuildFailed(f"profile of {name!r}: {self} does not fit the model's shape {shown(declared)}")

    def admit(self, name: str, shape: Shape) -> None:
        """Refuse a shape outside of the profile.

        Raises:
            MeasureFailed: With both.
        """
        inside = len(shape) == len(self.opt) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )
        if not inside:
            raise MeasureFailed(f"input {name!r} is {shown(shape)}, the profile takes {self}")

    def __str__(self) -> str:
        return f"{shown(self.min)} to {shown(self.max)}"


def read_profiles(spec: Mapping[str, Any]) -> dict[str, Profile]:
    """Profiles by input, from `{"images": {"min": "1x3x224x224", "opt": "8x3x224x224", "max": "32x3x224x224"}}`.

    Raises:
        ValueError: A key or shape that is none, or min <= opt <= max does not hold.
    """
    return {name: _profile(name, shapes) for name, shapes in spec.items()}


def shown(shape: Shape) -> str:
    """1x3x224x224, or "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def _profile(name: str, shapes: Any) -> Profile:
    where = f"profiles.{name}"
    if not isinstance(shapes, Mapping) or sorted(shapes) != sorted(KEYS):
        raise ValueError(f"{where}: the keys min, opt and max with a shape each, but got {shapes!r}")
    low, best, high = (_shape(f"{where}.{key}", shapes[key]) for key in KEYS)
    if not len(low) == len(best) == len(high) or not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
        raise ValueError(
            f"{where}: min <= opt <= max in every dimension, but got {shown(low)}, {shown(best)}, {shown(high)}"
        )
    return Profile(min=low, opt=best, max=high)


def _shape(where: str, value: Any) -> Shape:
    parts = value.split("x") if isinstance(value, str) else value
    try:
        sizes = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{where}: a shape such as 1x3x224x224, but got {value!r}")
    return sizes
