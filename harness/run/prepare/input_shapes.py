"""Shapes of the inputs of a model with dynamic axes, and variations of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product

import numpy as np

from harness.base.random_inputs import MAX_INPUT_ELEMENTS
from harness.graph.passes.dimension_sizes import Axes, evaluate_expression, expression_symbols, is_batch
from harness.plugins.api import Array

Shapes = Mapping[str, tuple[int, ...]]
SizeKey = str | tuple[str, int]
"""Symbol of a dynamic dimension, or its input and position if it has none."""
# Sizes to try: number of samples to add to the batch; factor and offset of other dimensions.
RESIZE_PLANS = (
    (1, 2.0, 0), (2, 1.0, -1), (1, 0.5, 0), (2, 1.0, 32), (1, 1.0, 0), (2, 1.0, 0), (0, 2.0, 0), (0, 1.0, -1),
    (0, 0.5, 0), (0, 1.0, 32), (0, 1.0, 1), (3, 1.5, 0), (0, 1.5, 0),
)  # fmt: skip

# Sizes to try if a model does not run at the given ones: multiples of the usual strides, and usual sizes.
DIVISORS = (2, 4, 8, 16, 32, 64, 128)
USUAL_SIZES = (16, 32, 48, 64, 96, 128, 224, 256, 320, 384, 416, 512, 640)
MAX_SIZE_RATIO = 4.0
MAX_JOINT_SIZES, MAX_COMBINATIONS = 12, 256  # sizes of each dimension, of which combinations are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicDimensions:
    """Dynamic dimensions of the inputs of a model.

    Attributes:
        declared: Declared dimensions by input.
        given: Shape of each input.
        sizes: Size of each dynamic dimension.
        batches: Dynamic dimensions that are a batch.
    """

    declared: Mapping[str, Axes]
    given: Shapes
    sizes: Mapping[SizeKey, int]
    batches: frozenset[SizeKey]

    @classmethod
    def of(cls, axes: Mapping[str, Axes | None], given: Shapes) -> DynamicDimensions:
        """Return the dynamic dimensions; all dimensions of an input without declared axes are dynamic."""
        declared = {name: axes.get(name) or (None,) * len(shape) for name, shape in given.items()}
        places = [(name, place, axis) for name, each in declared.items() for place, axis in enumerate(each)]
        dynamic = [(_size_key(name, place, axis), name, place) for name, place, axis in places
                   if not isinstance(axis, int)]  # fmt: skip
        return cls(
            declared=declared,
            given=given,
            sizes={key: given[name][place] for key, name, place in dynamic},
            batches=frozenset(key for key, name, place in dynamic if is_batch(declared[name][place], place)),
        )

    @property
    def free(self) -> Mapping[SizeKey, int]:
        """Return the sizes that are no batch and do not follow from those of other symbols."""
        return {key: size for key, size in self.sizes.items() if key not in self.batches and not self._parts(key)}

    def _parts(self, key: SizeKey) -> tuple[str, ...]:
        """Return the symbols of an expression such as "past + time" if the sizes of all are known, else ()."""
        names = () if not isinstance(key, str) or key.isidentifier() else expression_symbols(key)
        return names if self.sizes.keys() >= set(names) else ()

    def format_sizes(self, *variants: Shapes) -> list[str]:
        """Return the free sizes of each variant of the shapes as text; an input without symbols by its whole shape.

        The batch is included if it differs between the variants, or if no size is free.
        """
        sizes = [DynamicDimensions.of(self.declared, shapes).sizes for shapes in variants]
        free = self.free
        shown = [
            key for key in self.sizes
            if key in free or (key in self.batches and (not free or len({each[key] for each in sizes}) > 1))
        ]  # fmt: skip
        return [
            ", ".join(dict.fromkeys(_format_size(key, size[key], shapes) for key in shown))
            for size, shapes in zip(sizes, variants, strict=True)
        ]

    def shapes(self, changed: Mapping[SizeKey, int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input with other sizes of some dimensions; expressions follow from their symbols."""
        sizes = {**self.sizes, **changed}
        for key in sizes:
            if names := self._parts(key):
                value = evaluate_expression(str(key), {name: sizes[name] for name in names})
                sizes[key] = -1 if value is None else value
        return {
            name: tuple(
                axis if isinstance(axis, int) else sizes[_size_key(name, place, axis)]
                for place, axis in enumerate(declared)
            )
            for name, declared in self.declared.items()
        }


def _size_key(name: str, place: int, axis: str | None) -> SizeKey:
    return (name, place) if axis is None else axis


def _format_size(key: SizeKey, size: int, shapes: Shapes) -> str:
    return f"{key} {size}" if isinstance(key, str) else f"{key[0]} {'x'.join(map(str, shapes[key[0]]))}"


def other_shapes(axes: Mapping[str, Axes | None], searched: Shapes) -> Iterator[dict[str, tuple[int, ...]]]:
    """Return shapes of the inputs with other sizes of the dynamic axes, in the order of `RESIZE_PLANS`.

    Args:
        axes: Declared dimensions by input; all dimensions of an input without an entry are dynamic.
        searched: Shapes of the search by input, which are left out.
    """
    dimensions = DynamicDimensions.of(axes, searched)
    plans = (
        {
            key: size + samples if key in dimensions.batches else math.ceil(size * factor) + offset
            for key, size in dimensions.sizes.items()
        }
        for samples, factor, offset in RESIZE_PLANS
    )
    return _iter_distinct(dimensions, plans)


def nearby_shapes(dimensions: DynamicDimensions) -> Iterator[dict[str, tuple[int, ...]]]:
    """Return shapes of the inputs at which a model may run that does not run at the given ones, each once.

    The batch is set to 1. Then one dimension is changed at a time, the nearest sizes first, and then all of them: to
    multiples of the same number, to the same usual size, and to combinations of the nearest sizes.
    """
    return _iter_distinct(dimensions, chain([dict.fromkeys(dimensions.batches, 1)], _nearby_sizes(dimensions.free)))


def small_shapes(variants: Iterable[Shapes]) -> Iterator[Shapes]:
    """Return the shapes of which no input exceeds `MAX_INPUT_ELEMENTS`."""
    return (each for each in variants if all(math.prod(shape) <= MAX_INPUT_ELEMENTS for shape in each.values()))


def _iter_distinct(
    dimensions: DynamicDimensions, changes: Iterable[Mapping[SizeKey, int]]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes with changed sizes, each once, without the given ones and those with a new size below 1."""
    tried = [dict(dimensions.given)]
    for changed in changes:
        shapes = dimensions.shapes(changed)
        sizes = [pair for name in shapes for pair in zip(shapes[name], dimensions.given[name], strict=True)]
        if shapes not in tried and all(size > 0 or size == given for size, given in sizes):
            tried.append(shapes)
            yield shapes


def _nearby_sizes(free: Mapping[SizeKey, int]) -> Iterator[Mapping[SizeKey, int]]:
    near = {key: _sizes_near(size) for key, size in free.items()}
    yield from ({key: size} for key, sizes in near.items() for size in sizes)
    for divisor in DIVISORS:
        yield from _combinations({key: (*_multiples_near(size, divisor), size) for key, size in free.items()})
    yield from (dict.fromkeys(free, size) for size in USUAL_SIZES)
    yield from _combinations({key: sizes[:MAX_JOINT_SIZES] for key, sizes in near.items()})


def _combinations(sizes: Mapping[SizeKey, Sequence[int]]) -> Iterator[Mapping[SizeKey, int]]:
    combinations = islice(product(*sizes.values()), MAX_COMBINATIONS)
    return (dict(zip(sizes, each, strict=True)) for each in combinations)


def _sizes_near(size: int) -> list[int]:
    """Return sizes to try instead of a size, the nearest by ratio first."""
    if not size:
        return [*DIVISORS, *USUAL_SIZES]
    sizes = {*USUAL_SIZES, *(multiple for divisor in DIVISORS for multiple in _multiples_near(size, divisor))}
    ratios = {each: abs(math.log(each / size)) for each in sizes - {size}}
    return sorted((each for each, ratio in ratios.items() if ratio <= math.log(MAX_SIZE_RATIO)), key=ratios.__getitem__)


def _multiples_near(size: int, divisor: int) -> list[int]:
    """Return the largest smaller and the smallest larger multiple of a number."""
    below = (size - 1) // divisor * divisor
    return [multiple for multiple in (below, size // divisor * divisor + divisor) if multiple > 0]


def iter_sizes(axes: Mapping[str, Axes | None], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the size of each symbol in `axes`, and the shape of each input with a dynamic axis without a symbol."""
    for name, shape in shapes.items():
        declared = axes[name]
        if declared is None or None in declared:
            yield name, "x".join(map(str, shape))
        for axis, size in zip(declared or (), shape, strict=declared is not None):
            if isinstance(axis, str):
                yield axis, str(size)


def resize_array(array: Array, shape: Sequence[int]) -> Array:
    """Return an array of another shape, of the nearest values (nearest-neighbor interpolation along each axis).

    An empty array becomes one of zeros.
    """
    if not array.size:
        return np.zeros(shape, array.dtype)
    for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
        if old != new:
            array = np.take(array, np.arange(new) * old // new, axis)
    return array
