"""Messages about sizes of dynamic dimensions: missing ones, and those that were set to a default."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

import onnx
from onnx import shape_inference

from harness.errors import UserError
from harness.graph.io.helper_process import call_in_helper_process
from harness.graph.passes.dimension_sizes import (
    Axes,
    InputSizes,
    ResolvedShapes,
    axes_of,
    format_axes,
    format_shape,
    resolve_shapes,
    set_shape,
)

__all__ = [
    "describe_default_sizes",
    "describe_missing_sizes",
    "find_example_sizes",
    "format_size_options",
    "parse_dims",
]  # fmt: skip

_PLAIN_YAML_KEY = re.compile(r"[A-Za-z_][\w.]*")
# Sizes for examples, of which the first that the model accepts are used.
EXAMPLE_IMAGE_SIZES = (224, 32)
EXAMPLE_OTHER_SIZES = (128, 64, 16)
EXAMPLE_CHANNELS = (3, 1)
MAX_SHAPE_INITIALIZER_BYTES = 4096  # larger initializers are no shapes, so inference does not need their values
ExampleSizes = tuple[dict[str, int], dict[str, str]]
"""Sizes by symbol, and shapes by input."""


def describe_default_sizes(resolved: ResolvedShapes) -> str:
    """Return the sentence about batch dimensions that got the default size."""
    sizes = ", ".join(f"{name} is dynamic and set to {size}" for name, size in resolved.default_sizes.items())
    symbol = next((name.strip("'") for name in resolved.default_sizes if name.startswith("'")), "batch")
    return f"{sizes}; another size: {format_size_options({symbol: 8}, {})}"


def describe_missing_sizes(proto: onnx.ModelProto, resolved: ResolvedShapes, sizes: InputSizes) -> str:
    """Return the sentence that asks for missing sizes, with an example that passes ONNX's shape inference."""
    inputs = {v.name: axes_of(v) for v in proto.graph.input if v.type.HasField("tensor_type")}
    dynamic = "; ".join(
        f"input {name!r} has the dynamic shape {format_axes(axes)}"
        for name, axes in inputs.items()
        if name not in resolved.shapes
    )
    dims, shapes = find_example_sizes(proto, inputs, resolved, sizes)
    sections = (("dims", _format_mapping(dims)), ("shapes", _format_mapping(shapes)))
    yaml = ", ".join(f"{key}: {{{given}}}" for key, given in sections if given)
    what = "each symbol once" if dims else "it"
    return (
        f"{dynamic}; a placement is measured at one static shape: give {what} in the experiment as '{yaml}', or on the "
        f"command line as {format_size_options(dims, shapes)}"
    )


def format_size_options(dims: Mapping[str, int], shapes: Mapping[str, str]) -> str:
    """Return sizes as options of the command line."""
    flags = [f"--dim {_shell_quote(f'{name}={size}')}" for name, size in dims.items()]
    return " ".join([*flags, *(f"--shape {_shell_quote(f'{name}:{shape}')}" for name, shape in shapes.items())])


def parse_dims(texts: Iterable[str]) -> dict[str, int]:
    """Return sizes by symbol from options of the command line, each SYMBOL=SIZE."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not (name and size.strip().isdecimal() and int(size) > 0):
            raise UserError(f"--dim {text}: SYMBOL=SIZE with a size of at least 1, for instance --dim time=128")
        if dims.setdefault(name, int(size)) != int(size):
            raise UserError(f"--dim {name}={dims[name]} and --dim {text}: give one of them")
    return dims


def find_example_sizes(
    proto: onnx.ModelProto, inputs: Mapping[str, Axes | None], resolved: ResolvedShapes, sizes: InputSizes
) -> ExampleSizes:
    """Return the first example that passes shape inference, or the first of all."""
    examples = list(_iter_example_sizes(proto.graph, inputs, resolved))
    for dims, shapes in examples:
        if _passes_inference(proto, InputSizes(shapes={**sizes.shapes, **shapes}, dims={**sizes.dims, **dims})):
            return dims, shapes
    return examples[0]


def _iter_example_sizes(
    graph: onnx.GraphProto, inputs: Mapping[str, Axes | None], resolved: ResolvedShapes
) -> Iterator[ExampleSizes]:
    """Yield examples, the most common first."""
    image_axes = {a for axes in inputs.values() for a in (axes or ())[2:] if axes and len(axes) == 4}
    for image, other, channels in product(EXAMPLE_IMAGE_SIZES, EXAMPLE_OTHER_SIZES, EXAMPLE_CHANNELS):
        dims = {symbol: image if symbol in image_axes else other for symbol in resolved.missing.symbols}
        known = {**resolved.known, **dims}
        shapes = {}
        for name in resolved.missing.inputs:
            declared: Axes = (None,) * 4 if (axes := inputs[name]) is None else axes
            is_image = len(declared) == 4
            default = (
                (1, _conv_input_channels(graph, name) or channels, image, image) if is_image else (1, *[other] * 9)
            )
            shapes[name] = format_shape(
                tuple(
                    axis if isinstance(axis, int) and axis else known.get(str(axis)) or default[position]
                    for position, axis in enumerate(declared)
                )
            )
        yield dims, shapes


def _conv_input_channels(graph: onnx.GraphProto, name: str) -> int | None:
    """Return the channels that a Conv expects of an input."""
    weights = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Conv" and node.input[0] == name and node.input[1] in weights:
            group = next((a.i for a in node.attribute if a.name == "group"), 1)
            return int(weights[node.input[1]][1] * group)
    return None


def _passes_inference(proto: onnx.ModelProto, sizes: InputSizes) -> bool:
    """Return whether ONNX's shape inference accepts these sizes."""
    trial = onnx.ModelProto()
    trial.CopyFrom(proto)
    values = {v.name: v for v in trial.graph.input if v.type.HasField("tensor_type")}
    try:
        resolved = resolve_shapes({name: axes_of(value) for name, value in values.items()}, sizes, "example")
        for name, shape in resolved.shapes.items():
            set_shape(values[name], shape)
        del trial.graph.value_info[:]
        for tensor in trial.graph.initializer:
            if tensor.ByteSize() > MAX_SHAPE_INITIALIZER_BYTES:  # keeps the message below protobuf's 2 GiB
                tensor.ClearField("raw_data")
        return not resolved.missing and call_in_helper_process("the example", _try_inference, trial)
    except UserError:
        return False


def _try_inference(proto: onnx.ModelProto) -> bool:
    try:
        shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except Exception:  # any failure rules the example out
        return False
    return True


def _format_mapping(values: Mapping[str, int] | Mapping[str, str]) -> str:
    keys = {name: name if _PLAIN_YAML_KEY.fullmatch(name) else repr(name) for name in values}
    return ", ".join(f"{keys[name]}: {value}" for name, value in values.items())


def _shell_quote(text: str) -> str:
    return text if re.fullmatch(r"[\w.:=/,+-]+", text) else f"'{text}'"
