"""Static shapes: fix the sizes of the inputs or ask the user for them, and infer the types of all other tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import chain, product
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import shape_inference

from harness.base.errors import SizesMissing, UserError
from harness.graph.io.files import write_model
from harness.graph.io.model_reader import read_model
from harness.graph.model import TensorType
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
from harness.graph.protos import (
    attribute_value,
    copy_message,
    dtype_name,
    element_type,
    encoded_size_bytes,
    input_values,
    iter_graphs,
    iter_subgraphs,
    replace_field,
)
from harness.workers.helper_process import call_in_helper_process

logger = logging.getLogger(__name__)

_OPS_TYPED_LIKE_FIRST_INPUT = frozenset({"GroupNormalization"})  # onnx 1.21 infers no type for their result
_UNTYPED_OP = "qdq.untyped"  # unknown to onnx, in place of operators whose results get no type
_PLAIN_YAML_KEY = re.compile(r"[A-Za-z_][\w.]*")
# Sizes for the example in an error message; the first ones that the model accepts are used.
EXAMPLE_IMAGE_SIZES = (224, 32)
EXAMPLE_OTHER_SIZES = (128, 64, 16)
EXAMPLE_CHANNELS = (3, 1)
MAX_SHAPE_INITIALIZER_BYTES = 4096  # larger initializers are no shapes, so inference does not need their values
ExampleSizes = tuple[dict[str, int], dict[str, str]]
"""Sizes by symbol, and shapes by input."""


def fix_inputs(proto: onnx.ModelProto, sizes: InputSizes, source: str) -> None:
    """Make the shapes of all tensor inputs static, in place, and remove declared shapes of outputs that depend on them.

    Batch dimensions without a given size get 1, which is logged as a warning.

    Raises:
        UserError: A dimension stays dynamic, or a given size does not fit.
    """
    graph = proto.graph
    inputs = {value.name: value for value in graph.input if value.type.HasField("tensor_type")}
    resolved = resolve_shapes({name: axes_of(value) for name, value in inputs.items()}, sizes, source)
    if resolved.missing_symbols or resolved.missing_inputs:
        raise _missing_sizes(proto, resolved, sizes, source)
    if defaults := resolved.default_sizes:
        listed = ", ".join(f"{name} is dynamic and set to {size}" for name, size in defaults.items())
        symbol = next((name.strip("'") for name in defaults if name.startswith("'")), "batch")
        option = format_size_options({symbol: 8}, {})
        logger.warning("%s: %s; another size: %s, or dims: {%s: 8} of the model", source, listed, option, symbol)
    for name, value in inputs.items():
        set_shape(value, resolved.shapes[name])
    for value in graph.output:
        if _is_dynamic(value):
            _clear_shape(value)


def copy_with_static_inputs(path: Path, sizes: InputSizes, target: Path) -> Path:
    """Write a copy of a model file with static inputs and no other change; Q/DQ models keep their pairs.

    Returns:
        Path of the copy; `path` if its inputs are static and no size is given, or if it is no ONNX model.

    Raises:
        UserError: The file cannot be read, a dimension stays dynamic, or a given size does not fit.
    """
    if not (sizes.shapes or sizes.dims):
        try:
            if not has_dynamic_inputs(onnx.load(path, load_external_data=False).graph):
                return path
        except DecodeError:  # reported when the model is built
            return path
        except OSError:  # reported below
            pass
    proto, _ = read_model(path, str(path))
    fix_inputs(proto, sizes, str(path))
    return write_model(proto, target)


def has_dynamic_inputs(graph: onnx.GraphProto) -> bool:
    """Return whether an input, except for initializers, has a dimension without a fixed size."""
    declared = (axes_of(value) for value in input_values(graph) if value.type.HasField("tensor_type"))
    return any(axes is None or not all(isinstance(axis, int) for axis in axes) for axes in declared)


def infer_types(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Return the model with the types of all tensors that ONNX can infer, in `value_info` and in the outputs.

    Declared types of tensors that unknown operators compute are kept; all others are inferred. Declared shapes of
    outputs and in subgraphs that contradict an operator are dropped. If an operator contradicts its inputs all the
    same, this is logged, and its results stay untyped, like tensors whose type depends on them.

    Raises:
        UserError: An operator has inputs of wrong element types.
    """
    made_by_unknown = {
        name for node in proto.graph.node if not onnx.defs.has(node.op_type, node.domain) for name in node.output
    }
    kept = [value for value in proto.graph.value_info if value.name in made_by_unknown and not _is_dynamic(value)]
    replace_field(proto.graph.value_info, kept)
    shown, replaced = copy_message(proto), {}
    for index, node in enumerate(proto.graph.node):  # of those that onnx infers no or a wrong type for
        if node.op_type in _OPS_TYPED_LIKE_FIRST_INPUT and not node.domain:
            replaced[index] = node
            identity = onnx.NodeProto(op_type="Identity", name=node.name, input=node.input[:1], output=node.output)
            shown.graph.node[index].CopyFrom(identity)
        elif str(attribute_value(node, "auto_pad")).startswith("SAME"):
            # ONNX Runtime (1.24.4) ignores `ceil_mode` then, and onnx (1.21) does not; with an output padding, both
            # have formulas of their own.
            replaced[index], stand_in = node, shown.graph.node[index]
            replace_field(stand_in.attribute, [each for each in node.attribute if each.name != "ceil_mode"])
            if any(attribute_value(node, "output_padding", ())):
                stand_in.op_type = _UNTYPED_OP
    what = f"{source}: shape inference"
    inferred, problem = call_in_helper_process(what, _infer_shapes, shown, source, bool(made_by_unknown))
    if problem:
        logger.warning("%s: some shapes cannot be inferred: %s", source, problem)
    for index, node in replaced.items():
        inferred.graph.node[index].CopyFrom(node)
    return inferred


def _infer_shapes(proto: onnx.ModelProto, source: str, has_unknown: bool) -> tuple[onnx.ModelProto, str]:
    """Return the model with all types and "", or with those that can be inferred and the reason for the others.

    Args:
        has_unknown: Whether an operator is unknown; onnx (1.21) reports no contradiction behind one.
    """
    problem = ""
    # Runtimes only warn of wrong declarations. Those of subgraphs are kept if possible: a Scan may need them.
    declared: list[list[onnx.ValueInfoProto]] = [list(proto.graph.output), []]
    for node in (node for graph in iter_graphs(proto.graph) for node in graph.node):
        for inner in iter_subgraphs(node):  # ONNX Runtime requires shapes of a Loop's iteration and condition
            declared[1] += [*inner.input[2 if node.op_type == "Loop" else 0 :], *inner.output]
    for values in ([*chain(*declared)],) if has_unknown and any(declared[1]) else ([], *declared):
        for value in values:
            _clear_shape(value)
        try:
            return shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True), ""
        except shape_inference.InferenceError as error:
            problem = str(error)
    shown = copy_message(proto)
    for node in shown.graph.node:  # inference without strict mode gives some results of such nodes a wrong shape
        if f"node name: {node.name})" in problem:
            node.op_type, node.domain = _UNTYPED_OP, ""
    problem = " ".join(problem.split())
    try:
        inferred = shape_inference.infer_shapes(shown, data_prop=True)
    except shape_inference.InferenceError as error:  # wrong element types are always an error
        text = " ".join(str(error).split())
        raise UserError(f"{source}: no valid ONNX model: {text}; export the model again") from error
    replace_field(inferred.graph.node, proto.graph.node)
    return inferred, problem


def static_types(graph: onnx.GraphProto) -> dict[str, TensorType]:
    """Return the type by name of every tensor of the graph that has a known element type and a static shape."""
    types = {}
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type and not _is_dynamic(value):
            tensor = value.type.tensor_type
            types[value.name] = TensorType(dtype_name(tensor.elem_type), tuple(d.dim_value for d in tensor.shape.dim))
    for initializer in graph.initializer:
        types[initializer.name] = TensorType(dtype_name(initializer.data_type), tuple(initializer.dims))
    return types


def _clear_shape(value: onnx.ValueInfoProto) -> None:
    """Remove the shape of a tensor, or of the tensors in a sequence or an optional."""
    kind = element_type(value.type)
    if kind.HasField("tensor_type"):
        kind.tensor_type.ClearField("shape")


def _is_dynamic(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return not tensor.HasField("shape") or any(
        dim.dim_value < 0 or not dim.HasField("dim_value") for dim in tensor.shape.dim
    )


def _missing_sizes(proto: onnx.ModelProto, resolved: ResolvedShapes, sizes: InputSizes, source: str) -> SizesMissing:
    """Return an error that asks for missing sizes, with an example that passes ONNX's shape inference."""
    inputs = {v.name: axes_of(v) for v in proto.graph.input if v.type.HasField("tensor_type")}
    dynamic = "; ".join(
        f"input {name!r} has the dynamic shape {format_axes(axes)}"
        for name, axes in inputs.items()
        if name not in resolved.shapes
    )
    dims, shapes = _find_example_sizes(proto, inputs, resolved, sizes)
    yaml = []
    for key, values in (("dims", dims), ("shapes", shapes)):
        quoted = (f"{n if _PLAIN_YAML_KEY.fullmatch(n) else repr(n)}: {value}" for n, value in values.items())
        if values:
            yaml.append(f"{key}: {{{', '.join(quoted)}}}")
    what = "each symbol once" if dims else "it"
    foreign = [repr(name) for name in sizes.samples if name and name not in inputs]
    named = f" (no input has the name of the calibration data's {', '.join(foreign)})" if foreign else ""
    options = format_size_options(dims, shapes)
    return SizesMissing(
        f"{source}: {dynamic}{named}; a placement is measured at one static shape: give {what} ",
        f"in the experiment as '{', '.join(yaml)}', or for a command that takes a model as {options}",
        f"as {', '.join(f'{key}={values!r}' for key, values in (('dims', dims), ('shapes', shapes)) if values)}",
    )


def format_size_options(dims: Mapping[str, int], shapes: Mapping[str, str]) -> str:
    """Return sizes by symbol, and shapes by input, as command-line options: "--dim time=128 --shape x:1x3x8x8"."""
    options = [("--dim", f"{name}={size}") for name, size in dims.items()]
    options += [("--shape", f"{name}:{shape}") for name, shape in shapes.items()]
    quoted = ((flag, text if re.fullmatch(r"[\w.:=/,+-]+", text) else f"'{text}'") for flag, text in options)
    return " ".join(f"{flag} {text}" for flag, text in quoted)


def parse_named_shapes(option: str, texts: Iterable[str], example: str = "images:1x3x224x224") -> dict[str, str]:
    """Return shapes as text by input name from the values of an option, each NAME:SHAPE; shapes are not checked.

    Raises:
        UserError: A text does not have this form.
    """
    found = {}
    for text in texts:
        name, colon, shape = text.rpartition(":")
        if not colon:
            raise UserError(f"{option} {text}: NAME:SHAPE, for instance {option} {example}")
        found[name] = shape
    return found


def parse_dims(texts: Iterable[str]) -> dict[str, int]:
    """Return sizes by symbol from SYMBOL=SIZE texts; raise `UserError` for another form or two sizes of one symbol."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not (name and size.strip().isdecimal()):
            raise UserError(f"--dim {text}: SYMBOL=SIZE with a size of at least 0, for instance --dim time=128")
        if dims.setdefault(name, int(size)) != int(size):
            raise UserError(f"--dim {name}={dims[name]} and --dim {text}: give one of them")
    return dims


def _find_example_sizes(
    proto: onnx.ModelProto, inputs: Mapping[str, Axes | None], resolved: ResolvedShapes, sizes: InputSizes
) -> ExampleSizes:
    """Return example sizes of dynamic inputs for an error message, if possible ones that pass shape inference.

    Args:
        inputs: Declared dimensions by input name; None if the rank is unknown.
        resolved: Known and missing sizes.
        sizes: Sizes that the user gave, which the examples complete.
    """
    image_axes = {a for axes in inputs.values() for a in (axes or ())[2:] if axes and len(axes) == 4}
    weights = {tensor.name: tensor.dims for tensor in proto.graph.initializer}
    conv_channels = {
        node.input[0]: int(weights[node.input[1]][1] * attribute_value(node, "group", 1))
        for node in reversed(proto.graph.node)
        if node.op_type == "Conv" and node.input[1] in weights
    }
    examples: list[ExampleSizes] = []
    for image, other, channels in product(EXAMPLE_IMAGE_SIZES, EXAMPLE_OTHER_SIZES, EXAMPLE_CHANNELS):
        dims = {symbol: image if symbol in image_axes else other for symbol in resolved.missing_symbols}
        known = {**resolved.known, **dims}
        shapes = {}
        for name in resolved.missing_inputs:
            declared: Axes = (None,) * 4 if (axes := inputs[name]) is None else axes
            default = (1, conv_channels.get(name, channels), image, image) if len(declared) == 4 else (1, *[other] * 9)
            places = enumerate(declared)
            shape = (axis if isinstance(axis, int) else known.get(str(axis), default[i]) for i, axis in places)
            shapes[name] = format_shape(tuple(shape))
        examples.append((dims, shapes))
        if _passes_inference(proto, InputSizes(shapes={**sizes.shapes, **shapes}, dims={**sizes.dims, **dims})):
            return dims, shapes
    return examples[0]


def _passes_inference(proto: onnx.ModelProto, sizes: InputSizes) -> bool:
    trial = copy_message(proto)
    values = {v.name: v for v in trial.graph.input if v.type.HasField("tensor_type")}
    try:
        resolved = resolve_shapes({name: axes_of(value) for name, value in values.items()}, sizes, "example")
        for name, shape in resolved.shapes.items():
            set_shape(values[name], shape)
        del trial.graph.value_info[:]
        for tensor in trial.graph.initializer:
            if encoded_size_bytes(tensor) > MAX_SHAPE_INITIALIZER_BYTES:  # keeps the message below protobuf's 2 GiB
                tensor.ClearField("raw_data")
        is_complete = not (resolved.missing_symbols or resolved.missing_inputs)
        return is_complete and call_in_helper_process("the example", _try_inference, trial)
    except UserError:
        return False


def _try_inference(proto: onnx.ModelProto) -> bool:
    try:
        shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except Exception:  # any failure rules the example out
        return False
    return True
