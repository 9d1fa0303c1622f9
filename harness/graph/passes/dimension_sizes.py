"""Static sizes for the dynamic dimensions of a model's inputs.

A size comes from the shape that the user gives for an input, from the value for a symbol (ONNX `dim_param`), from an
expression of known symbols ("past + 1"), or from the default batch of 1. A symbol has the same size in all inputs.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx

from harness.base.errors import UserError, suggest_names

Axis = int | str | None
Axes = tuple[Axis, ...]
"""Declared shape: a size, a symbol, or None for a dimension without either."""
Shapes = Mapping[str, str | tuple[int, ...]]

# Symbols that exporters write for any unknown size (paddle2onnx: "?"), so equal symbols may have different sizes.
UNNAMED_SYMBOLS = frozenset({"", "?", "-1", "None"})
BATCH_SYMBOL = re.compile(r"(?:num_?|n_?|dyn_?)?batch(?:es|_?(?:size|dim|axis|num|n))?(?:_?\d+)?|bs|bsz", re.IGNORECASE)
# Symbols that mean the batch only as the first dimension of an input.
LEADING_BATCH_SYMBOL = re.compile(r"[nb]|unk__\d+|.*_dynamic_axes_\d+|(?:p2o\.)?DynamicDimension\.\d+", re.IGNORECASE)
MAX_SOLVED_SIZE = 32_769  # largest size that is tried for a symbol of an expression with known size
MAX_EXPRESSION_CHARS = 200  # longer texts are names, not expressions
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def iter_sizes(axes: Mapping[str, Axes | None], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the size of each symbol in `axes`, and the shape of each input with a dynamic axis without a symbol."""
    for name, shape in shapes.items():
        declared = axes[name]
        if declared is None or None in declared:
            yield name, "x".join(map(str, shape))
        for axis, size in zip(declared or (), shape, strict=declared is not None):
            if isinstance(axis, str):
                yield axis, str(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizes:
    """Sizes that a user gives for dynamic inputs.

    Attributes:
        shapes: Static shape by input name, as "1x3x224x224" or as numbers.
        dims: Size by symbol, for instance {"time": 128}.
        samples: Shape of one sample of the calibration data by input name ("" for the only input), for symbols whose
            size is not given otherwise.
        keep_dynamic: Whether inputs stay dynamic, so that no size is needed.
    """

    shapes: Shapes = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keep_dynamic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedShapes:
    """Static shapes of the inputs.

    Attributes:
        shapes: Shape of each input without unknown dimensions.
        default_sizes: Sizes from the default batch or from samples, by the name of the dimension in messages.
        missing_symbols: Symbols without a size.
        missing_inputs: Names of inputs of unknown rank, or with a dimension without size and symbol.
        known: Size by symbol.
    """

    shapes: Mapping[str, tuple[int, ...]]
    default_sizes: Mapping[str, int]
    missing_symbols: tuple[str, ...]
    missing_inputs: tuple[str, ...]
    known: Mapping[str, int]


def parse_shape(given: str | tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return a shape from "1x3x224x224" or numbers; raise `UserError`, with `where` in front, for any other value.

    A size of 0 is valid, for instance that of an empty cache of keys and values.
    """
    parts = given.strip().lower().split("x") if isinstance(given, str) else [str(size) for size in given]
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"{where}: a shape looks like 1x3x224x224, but got {given!r}")
    return tuple(int(part) for part in parts)


def axes_of(value: onnx.ValueInfoProto) -> Axes | None:
    """Return the declared dimensions of an input or output, or None if its rank is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        int(dim.dim_value)
        if dim.HasField("dim_value") and dim.dim_value >= 0
        else (None if dim.dim_param in UNNAMED_SYMBOLS else str(dim.dim_param))
        for dim in tensor.shape.dim
    )


def set_shape(value: onnx.ValueInfoProto, shape: tuple[int, ...]) -> None:
    """Make an input static with `shape`, in place; raise `ValueError` if the numbers of dimensions differ."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        tensor.shape.CopyFrom(onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension() for _ in shape]))
    for dim, size in zip(tensor.shape.dim, shape, strict=True):
        dim.dim_value = size


def is_batch(axis: Axis, position: int) -> bool:
    """Return whether a declared dimension is a dynamic batch: by its symbol and position, or the first without one."""
    if axis is None:
        return position == 0
    is_leading = position == 0 and LEADING_BATCH_SYMBOL.fullmatch(str(axis))
    return isinstance(axis, str) and bool(BATCH_SYMBOL.fullmatch(axis) or is_leading)


def format_axes(axes: Axes | None) -> str:
    """Return a declared shape as text: "Nx3x?x?", or "of unknown rank" for None."""
    return "of unknown rank" if axes is None else "x".join("?" if axis is None else str(axis) for axis in axes)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a static shape as text: "1x3x224x224"."""
    return "x".join(map(str, shape))


def resolve_shapes(
    inputs: Mapping[str, Axes | None], sizes: InputSizes, source: str, *, batch: int = 1
) -> ResolvedShapes:
    """Determine a static shape for each input from its declared dimensions, the given sizes and the default `batch`.

    Raises:
        UserError: A given size does not fit the model or contradicts another one; the message starts with `source`.
    """
    resolver = _SizeResolver(inputs, source)
    for symbol, size in sizes.dims.items():
        resolver.set_symbol(symbol, size)
    for name, given in sizes.shapes.items():
        resolver.set_input_shape(name, parse_shape(given, f"{source}: shapes.{name}"))
    resolver.solve_expressions()
    sampled = dict(resolver.apply_samples(sizes.samples))
    defaulted = {**dict(resolver.apply_default_batch(batch)), **sampled}
    resolver.check_expressions()
    shapes = {name: resolver.input_shape(name) for name in inputs}
    missing: dict[str, None] = {}
    unnamed = [name for name, axes in inputs.items() if axes is None and name not in sizes.shapes]
    for name, position, axis in resolver.axes:
        if isinstance(axis, str) and resolver.axis_size(axis) is None:
            missing.update(dict.fromkeys(resolver.parts.get(axis, (axis,))))
        elif axis is None and position and name not in sizes.shapes:
            unnamed.append(name)
    return ResolvedShapes(
        shapes={name: shape for name, shape in shapes.items() if shape is not None},
        default_sizes=defaulted,
        missing_symbols=tuple(symbol for symbol in missing if symbol not in resolver.sizes),
        missing_inputs=tuple(dict.fromkeys(unnamed)),
        known={symbol: size for symbol, (size, _) in resolver.sizes.items()},
    )


class _SizeResolver:
    """Resolver of the sizes of symbols.

    Attributes:
        axes: Input, position and declared dimension of each dimension.
        parts: Symbols in each expression; each of them is also a dimension of its own.
        sizes: Size and its origin ("dims.N", "shapes.x" or "" for a default) by symbol.
    """

    def __init__(self, inputs: Mapping[str, Axes | None], source: str) -> None:
        self._inputs, self._source = inputs, source
        self.sizes: dict[str, tuple[int, str]] = {}
        self._given_shapes: dict[str, tuple[int, ...]] = {}
        self._unnamed_batch: int | None = None
        self.axes = [(name, i, axis) for name, axes in inputs.items() for i, axis in enumerate(axes or ())]
        self._symbols = tuple(dict.fromkeys(axis for _, _, axis in self.axes if isinstance(axis, str)))
        plain = frozenset(symbol for symbol in self._symbols if symbol.isidentifier())
        parts = {symbol: expression_symbols(symbol) for symbol in self._symbols if symbol not in plain}
        self.parts = {symbol: names for symbol, names in parts.items() if names and plain.issuperset(names)}

    def set_symbol(self, symbol: str, size: int) -> None:
        """Set the size of a symbol."""
        where = f"{self._source}: dims.{symbol}"
        least = 1 if BATCH_SYMBOL.fullmatch(symbol) else 0
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise UserError(f"{where}: a size is an integer of at least {least}, but got {size!r}")
        if symbol in self._symbols:
            self.sizes[symbol] = (size, f"dims.{symbol}")
        elif BATCH_SYMBOL.fullmatch(symbol) and any(axis is None and not i for _, i, axis in self.axes):
            self._unnamed_batch = size
        else:
            declared = ", ".join(f"{name} {format_axes(axes)}" for name, axes in self._inputs.items())
            raise UserError(
                f"{where}: no input has such a dimension; {suggest_names(symbol, self._symbols)}; inputs: {declared}"
            )

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Set the shape of an input."""
        where = f"{self._source}: shapes.{name}"
        if name not in self._inputs:
            raise UserError(f"{where}: the model has no such input; {suggest_names(name, self._inputs)}")
        axes = self._inputs[name]
        if axes is not None and len(axes) != len(shape):
            raise UserError(
                f"{where}: the input has {len(axes)} dimensions ({format_axes(axes)}), but got {len(shape)}: "
                f"{format_shape(shape)}"
            )
        declared, text = format_axes(axes), format_shape(shape)
        for place, (axis, size) in enumerate(zip(axes or (), shape, strict=bool(axes))):
            if not size and is_batch(axis, place):
                wanted = "a shape looks like 1x3x224x224"
                raise UserError(f"{where}: {wanted}, but got {text!r}: a batch has at least 1 sample")
            if isinstance(axis, int) and axis not in (0, size):
                raise UserError(f"{where}: the input is fixed to {declared} in the model, but got {text}")
            if isinstance(axis, str):
                known, origin = self.sizes.setdefault(axis, (size, f"shapes.{name}"))
                if known != size:
                    raise UserError(
                        f"{where}: dimension {axis!r} of {declared} has one size in all inputs, but got {known} and "
                        f"{size}: {text} ({known} is from {origin}); give it once"
                    )
        self._given_shapes[name] = shape
        if axes and axes[0] is None and self._unnamed_batch is None:
            self._unnamed_batch = shape[0]

    def apply_samples(self, samples: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
        """Set symbols of unknown size to those of samples, which have no batch; yield their names and sizes."""
        only = next(iter(self._inputs), "") if len(self._inputs) == 1 else ""
        for name, shape in samples.items():
            axes = self._inputs.get(name or only) or ()
            for axis, size in zip(axes[1:], shape, strict=False) if len(axes) == len(shape) + 1 else ():
                if isinstance(axis, str) and axis not in self.parts and axis not in self.sizes:
                    self.sizes[axis] = (size, "the calibration data")
                    yield repr(axis), size

    def solve_expressions(self) -> None:
        """Determine symbols from the given size of an expression with one unknown symbol."""
        for symbol, names in self.parts.items():
            unknown = [name for name in names if name not in self.sizes]
            if symbol in self.sizes and len(unknown) == 1:
                size, origin = self.sizes[symbol]
                values = {name: self.sizes[name][0] for name in names if name in self.sizes}
                candidates = range(MAX_SOLVED_SIZE)
                solutions = (v for v in candidates if evaluate_expression(symbol, {**values, unknown[0]: v}) == size)
                if (solution := next(solutions, None)) is not None:
                    self.sizes[unknown[0]] = (solution, origin)

    def check_expressions(self) -> None:
        """Raise `UserError` if the given size of an expression differs from its value."""
        for symbol, names in self.parts.items():
            if symbol in self.sizes and self._expression_size(symbol) != self.sizes[symbol][0]:
                size, origin = self.sizes[symbol]
                known = {name: self.sizes.get(name, ("unknown", "")) for name in names}
                parts = ", ".join(f"{name} = {value} ({where or 'default'})" for name, (value, where) in known.items())
                raise UserError(f"{self._source}: dimension {symbol!r} is {size} ({origin}), but {parts}; give it once")

    def apply_default_batch(self, batch: int) -> Iterator[tuple[str, int]]:
        """Set batch dimensions of unknown size to the default; yield their names and sizes."""
        given = {size for symbol, (size, _) in self.sizes.items() if BATCH_SYMBOL.fullmatch(symbol)}
        unnamed = self._unnamed_batch or (given.pop() if len(given) == 1 else batch)
        for name, position, axis in self.axes:
            if name in self._given_shapes or not is_batch(axis, position):
                continue
            if axis is None:
                yield f"the first dimension of {name!r}", unnamed
            elif self.axis_size(axis) is None:
                self.sizes[str(axis)] = (batch, "")
                yield repr(axis), batch
        self._unnamed_batch = unnamed

    def axis_size(self, axis: Axis) -> int | None:
        """Return the size of a symbol or expression; None: unknown."""
        if not isinstance(axis, str):
            return axis
        return self.sizes[axis][0] if axis in self.sizes else self._expression_size(axis)

    def input_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the static shape of an input; None: a dimension is unknown."""
        axes = self._inputs[name]
        if name in self._given_shapes or axes is None:
            return self._given_shapes.get(name)
        batch = self._unnamed_batch
        sizes = [batch if axis is None and not i else self.axis_size(axis) for i, axis in enumerate(axes)]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None

    def _expression_size(self, symbol: str) -> int | None:
        """Return the value of an expression, or None for other texts and if a symbol is unknown."""
        names = self.parts.get(symbol)
        if names is None or any(name not in self.sizes for name in names):
            return None
        return evaluate_expression(symbol, {name: self.sizes[name][0] for name in names})


def expression_symbols(text: str) -> tuple[str, ...]:
    """Return the symbols of an expression of integers and symbols with +, -, * and //; () for any other text."""
    if len(text) > MAX_EXPRESSION_CHARS:
        return ()
    try:
        tree = ast.parse(text, mode="eval").body
        _evaluate_tree(tree, None)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def evaluate_expression(text: str, values: Mapping[str, int]) -> int | None:
    """Return the value of an expression that `expression_symbols` accepts, with the sizes `values` of its symbols.

    The result is None for a negative value, and for x // 0.
    """
    try:
        size = _evaluate_tree(ast.parse(text, mode="eval").body, values)
    except ZeroDivisionError:
        return None
    return size if size >= 0 else None


def _evaluate_tree(node: ast.expr, values: Mapping[str, int] | None) -> int:
    """Return the value of a syntax tree; raise `ValueError` for other nodes; `values=None` only checks the nodes."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return 1 if values is None else values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate_tree(node.left, values), _evaluate_tree(node.right, values)
        return 1 if values is None else int(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"no dimension: {ast.dump(node)}")
