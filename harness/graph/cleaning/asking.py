"""Messages about sizes of dynamic dimensions: which are missing, and which were set to a default."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

import onnx
from onnx import shape_inference

from harness.errors import UserError
from harness.graph.cleaning.guard import sturdy
from harness.graph.cleaning.sizes import Axes, Found, Sizes, axes_of, resolve, set_shape, shown, x

__all__ = ["asked", "command", "defaulted", "example", "parse_dims"]

_PLAIN = re.compile(r"[A-Za-z_][\w.]*")
IMAGE_SIZES = (224, 32)
OTHER_SIZES = (128, 64, 16)
"""Sizes for an example, the first that the model takes."""
CHANNELS = (3, 1)
SMALL_BYTES = 4096
"""Initializers up to this size may be shapes, which inference reads."""


def defaulted(found: Found) -> str:
    """Return the sentence about batch dimensions that got the default size."""
    said = ", ".join(f"{name} is dynamic and set to {size}" for name, size in found.defaulted.items())
    symbol = next((name.strip("'") for name in found.defaulted if name.startswith("'")), "batch")
    return f"{said}; another size: {command({symbol: 8}, {})}"


def asked(proto: onnx.ModelProto, found: Found, sizes: Sizes) -> str:
    """Return the sentence that asks for missing sizes, with an example that the model takes as far as ONNX can tell.

    Args:
        proto: The model.
        found: What is known and missing.
        sizes: What the user gave; the example holds it too.
    """
    inputs = {v.name: axes_of(v) for v in proto.graph.input if v.type.HasField("tensor_type")}
    told = "; ".join(
        f"input {name!r} has the dynamic shape {shown(axes)}"
        for name, axes in inputs.items()
        if name not in found.shapes
    )
    dims, shapes = example(proto, inputs, found, sizes)
    return f"{told}; a placement is measured at one static shape: give {remedy(dims, shapes)}"


def remedy(dims: Mapping[str, int], shapes: Mapping[str, str]) -> str:
    """Return how sizes are given in an experiment and on the command line."""
    yaml = ", ".join(
        f"{key}: {{{given}}}" for key, given in (("dims", _mapping(dims)), ("shapes", _mapping(shapes))) if given
    )
    what = "each symbol once" if dims else "it"
    return f"{what} in the experiment as '{yaml}', or on the command line as {command(dims, shapes)}"


def command(dims: Mapping[str, int], shapes: Mapping[str, str]) -> str:
    """Return sizes as options of the command line."""
    flags = [f"--dim {_quoted(f'{name}={size}')}" for name, size in dims.items()]
    return " ".join([*flags, *(f"--shape {_quoted(f'{name}:{shape}')}" for name, shape in shapes.items())])


def parse_dims(texts: Iterable[str]) -> dict[str, int]:
    """Return sizes by symbol from options of the command line, each SYMBOL=SIZE.

    Raises:
        UserError: One has another form, or a symbol has two sizes.
    """
    found: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not (name and size.strip().isdecimal() and int(size) > 0):
            raise UserError(f"--dim {text}: SYMBOL=SIZE with a size of at least 1, for instance --dim time=128")
        if found.setdefault(name, int(size)) != int(size):
            raise UserError(f"--dim {name}={found[name]} and --dim {text}: give one of them")
    return found


def example(
    proto: onnx.ModelProto, inputs: Mapping[str, Axes | None], found: Found, sizes: Sizes
) -> tuple[dict[str, int], dict[str, str]]:
    """Return sizes by symbol and shapes by input that make all inputs static."""
    tries = list(_tries(proto.graph, inputs, found))
    for dims, shapes in tries:
        if _fits(proto, Sizes(shapes={**sizes.shapes, **shapes}, dims={**sizes.dims, **dims})):
            break
    else:
        dims, shapes = tries[0]
    return dims, shapes


def _tries(
    graph: onnx.GraphProto, inputs: Mapping[str, Axes | None], found: Found
) -> Iterator[tuple[dict[str, int], dict[str, str]]]:
    """Yield examples, the usual one first."""
    images = {a for axes in inputs.values() for a in (axes or ())[2:] if axes and len(axes) == 4}
    for image, other, channels in product(IMAGE_SIZES, OTHER_SIZES, CHANNELS):
        dims = {symbol: image if symbol in images else other for symbol in found.missing.symbols}
        known = {**found.known, **dims}
        shapes = {}
        for name in found.missing.inputs:
            axes = inputs[name]
            usual = (1, _channels(graph, name) or channels, image, image) if axes is None or len(axes) == 4 else ()
            declared: Axes = (None,) * 4 if axes is None else axes
            filled = [
                axis if isinstance(axis, int) and axis else known.get(str(axis)) or (usual or (1, *[other] * 9))[place]
                for place, axis in enumerate(declared)
            ]
            shapes[name] = x(tuple(filled))
        yield dims, shapes


def _channels(graph: onnx.GraphProto, name: str) -> int | None:
    """Return the channels that a Conv expects of an input."""
    weights = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Conv" and node.input[0] == name and node.input[1] in weights:
            group = next((a.i for a in node.attribute if a.name == "group"), 1)
            return int(weights[node.input[1]][1] * group)
    return None


def _fits(proto: onnx.ModelProto, sizes: Sizes) -> bool:
    """Tell whether ONNX's shape inference finds nothing wrong with these sizes."""
    trial = onnx.ModelProto()
    trial.CopyFrom(proto)
    values = {v.name: v for v in trial.graph.input if v.type.HasField("tensor_type")}
    try:
        found = resolve({name: axes_of(value) for name, value in values.items()}, sizes, "example")
        for name, shape in found.shapes.items():
            set_shape(values[name], shape)
        del trial.graph.value_info[:]
        for tensor in trial.graph.initializer:
            if tensor.ByteSize() > SMALL_BYTES:  # only its shape counts, and protobuf ends at 2 GiB
                tensor.ClearField("raw_data")
        return not found.missing and sturdy("the example", _inferred, trial)
    except UserError:
        return False


def _inferred(proto: onnx.ModelProto) -> bool:
    try:
        shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except Exception:  # whatever it is: the example is another one then
        return False
    return True


def _mapping(given: Mapping[str, int] | Mapping[str, str]) -> str:
    return ", ".join(f"{name if _PLAIN.fullmatch(name) else repr(name)}: {value}" for name, value in given.items())


def _quoted(text: str) -> str:
    """Return an argument as a shell takes it."""
    return text if re.fullmatch(r"[\w.:=/,+-]+", text) else f"'{text}'"
