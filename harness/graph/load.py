"""From an ONNX file to a `Model` that is ready for placement, and back to a file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import checker, helper, inliner, version_converter

from harness.errors import UserError
from harness.graph.build import MAX_IR_VERSION
from harness.graph.cleaning.batch import rebatched
from harness.graph.cleaning.clean import (
    Weights,
    attach,
    densify,
    detach,
    is_known,
    lower_constants,
    mask_unknown,
    name_nodes,
    tidy,
    unmask,
)
from harness.graph.cleaning.fold import fold_batch_norms
from harness.graph.cleaning.guard import sturdy
from harness.graph.cleaning.read import read_model
from harness.graph.cleaning.shapes import fix_inputs, has_dynamic_inputs, infer, shapes_to_constants, types_of
from harness.graph.cleaning.sizes import Sizes
from harness.graph.cleaning.valid import check_valid
from harness.graph.model import Model, Origin, graphs, subgraphs
from harness.graph.nodes import nodes_of

__all__ = ["from_proto", "load", "prepared", "save", "write"]

logger = logging.getLogger(__name__)

EXTERNAL_OVER_BYTES = 1_900_000_000
"""A file with more weights than this keeps them beside it; protobuf itself ends at 2 GiB."""

_HALVES_OPSET = 19
"""QuantizeLinear takes float16 from here on (ONNX operator schemas)."""

_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
Shapes = Mapping[str, str | tuple[int, ...]]
_NO_SIZES = Sizes()


def load(
    path: Path,
    *,
    source: str | None = None,
    shapes: Shapes = _NO_SIZES.shapes,
    dims: Mapping[str, int] = _NO_SIZES.dims,
    min_opset: int = 17,
) -> Model:
    """Read an ONNX file and make it ready for placement.

    Args:
        path: The file; external data lies in its folder or below.
        source: What messages and tables call it; the path by default.
        shapes: Static shapes by input name, "1x3x224x224" or numbers, for inputs that are dynamic or fixed to 1 sample.
        dims: Sizes of dynamic dimensions by symbol, such as {"time": 128}; the batch is 1 by default.
        min_opset: Models of an older default operator set are upgraded to this one.

    Raises:
        UserError: The file cannot be read, is no valid ONNX, stays dynamic, or cannot be upgraded.
    """
    source = source or str(path)
    proto, sha256 = read_model(path, source)
    origin = Origin(model=path, min_opset=min_opset) if has_dynamic_inputs(proto.graph) else None
    found = prepared(proto, source, sha256, Sizes(shapes=shapes, dims=dims), min_opset)
    return replace(found, origin=origin)


def prepared(proto: onnx.ModelProto, source: str, sha256: str, sizes: Sizes, min_opset: int) -> Model:
    """Prepare a model; turn what a damaged file causes into a message."""
    try:
        return _prepare(proto, source, sha256, sizes, min_opset)
    except _DAMAGE as error:  # the file is somebody else's, and there are more ways to lie than checks
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{source}: damaged, or of a kind that nobody has met before ({text}); fetch or export the model again"
        ) from error


def from_proto(
    proto: onnx.ModelProto,
    *,
    source: str,
    sha256: str,
    shapes: Shapes = _NO_SIZES.shapes,
    dims: Mapping[str, int] = _NO_SIZES.dims,
    min_opset: int = 17,
) -> Model:
    """Make a model in memory ready for placement; `proto` itself is left alone. See `load`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    origin = Origin(model=proto, min_opset=min_opset) if has_dynamic_inputs(proto.graph) else None
    return replace(_prepare(copy, source, sha256, Sizes(shapes=shapes, dims=dims), min_opset), origin=origin)


def save(model: Model, folder: Path) -> Path:
    """Write the model to `model.onnx` in a folder, which is made where missing. See `write`."""
    return write(model.proto, folder / "model.onnx")


def write(proto: onnx.ModelProto, path: Path) -> Path:
    """Write a model to one file, or above 1.9 GB to the file and `<name>.data` beside it; same model, same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if sum(tensor.ByteSize() for tensor in proto.graph.initializer) <= EXTERNAL_OVER_BYTES:
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return path
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx appends to a file that is there
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    onnx.save_model(copy, path, save_as_external_data=True, location=data.name)
    return path


def _prepare(proto: onnx.ModelProto, source: str, sha256: str, sizes: Sizes, min_opset: int) -> Model:
    densify(proto.graph)
    _drop_constant_inputs(proto.graph)
    proto = rebatched(proto, sizes.shapes, source)
    declared = _types_of_outputs(proto.graph)
    if not sizes.keep_dynamic:
        fix_inputs(proto, sizes, source)
    lower_constants(proto.graph)
    weights = detach(proto.graph)
    proto = _normalize(proto)
    unknown = mask_unknown(proto)
    if unknown:
        logger.warning("%s: operators that ONNX does not define stay float: %s", source, ", ".join(unknown))
    nested = sorted({node.op_type for node in proto.graph.node if any(subgraphs(node))})
    if nested:
        logger.warning("%s: what is inside of %s stays float", source, ", ".join(nested))
    _clean(proto, weights, source)
    _check(proto, source)
    halves = _HALVES_OPSET if _has_halves(proto.graph, weights) else 0
    proto = _upgrade(proto, weights, max(min_opset, halves), source)
    unmask(proto)
    _check_again(proto, unknown, source)
    proto = infer(proto, source)
    while shapes_to_constants(proto.graph):
        _clean(proto, weights, source)
        proto = infer(proto, source)
    attach(proto.graph, weights)
    fold_batch_norms(proto.graph)
    types = types_of(proto.graph)
    for value in proto.graph.output:
        undeclared = not value.type.tensor_type.HasField("shape")
        if value.name in declared and (undeclared or sizes.keep_dynamic):
            value.type.CopyFrom(declared[value.name])
    return Model(proto=proto, source=source, sha256=sha256, nodes=nodes_of(proto), types=types)


def _types_of_outputs(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """What the file says of its outputs: where nothing can be inferred, that makes the result valid ONNX."""
    found = {value.name: onnx.TypeProto() for value in graph.output}
    for value in graph.output:
        found[value.name].CopyFrom(value.type)
    return found


def _has_halves(graph: onnx.GraphProto, weights: Weights) -> bool:
    tensors = (*graph.initializer, *weights.values())
    inputs = (value.type.tensor_type.elem_type for value in graph.input)
    return onnx.TensorProto.FLOAT16 in {*(tensor.data_type for tensor in tensors), *inputs}


def _drop_constant_inputs(graph: onnx.GraphProto) -> None:
    """Initializers are no inputs here, though ONNX before version 4 of its format lists them as such."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)


def _normalize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """No functions, one spelling of the default domain, a version that runtimes read."""
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    opsets: dict[str, int] = {}
    for opset in proto.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        opsets[domain] = max(opset.version, opsets.get(domain, 0))
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
    for graph in graphs(proto.graph):
        for node in graph.node:
            if node.domain == "ai.onnx":
                node.domain = ""
    _set_ir_version(proto)
    return proto


def _set_ir_version(proto: onnx.ModelProto) -> None:
    needed = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = min(MAX_IR_VERSION, max(proto.ir_version, needed, 4))  # 4: initializers need not be inputs


def _clean(proto: onnx.ModelProto, weights: Weights, source: str) -> None:
    lower_constants(proto.graph)
    name_nodes(proto.graph)
    weights.update(detach(proto.graph))
    tidy(proto.graph, _opsets(proto), weights, source)
    weights.update(detach(proto.graph))


def _check(proto: onnx.ModelProto, source: str) -> None:
    try:
        check_valid(proto)
    except checker.ValidationError as error:
        text = " ".join(str(error).split())
        raise UserError(f"{source}: no valid ONNX model: {text}; export the model again") from error


def _check_again(proto: onnx.ModelProto, unknown: Collection[str], source: str) -> None:
    """Check operators that were unknown and that the newer opset defines: shape inference (onnx 1.21) believes them."""
    opsets = _opsets(proto)
    context = checker.DEFAULT_CONTEXT.__class__()
    context.ir_version, context.opset_imports = proto.ir_version, opsets
    for graph in graphs(proto.graph):
        for node in graph.node:
            if f"{node.domain or 'ai.onnx'}.{node.op_type}" in unknown and is_known(node, opsets):
                try:
                    checker.check_node(node, context)
                except checker.ValidationError as error:
                    text = " ".join(str(error).split())
                    raise UserError(f"{source}: no valid ONNX model: {text}; export the model again") from error


def _upgrade(proto: onnx.ModelProto, weights: Weights, min_opset: int, source: str) -> onnx.ModelProto:
    version = _opsets(proto).get("")
    if version is None:
        proto.opset_import.append(helper.make_opsetid("", min_opset))
        _set_ir_version(proto)
        return proto
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise UserError(
            f"{source}: opset {version} is newer than the installed onnx {onnx.__version__} knows ({newest}); "
            f"export the model with opset {newest} or earlier, or install a newer onnx"
        )
    if version >= min_opset:
        return proto
    proto = infer(proto, source)  # the converter needs fewer detours where it knows the shapes
    metadata, declared = list(proto.metadata_props), list(proto.graph.value_info)
    try:
        what = f"{source}: the upgrade from opset {version} to {min_opset}"
        proto = sturdy(what, version_converter.convert_version, proto, min_opset)
    except (version_converter.ConvertError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{source}: opset {version} cannot be upgraded to {min_opset}, which Q/DQ needs here ({text}); "
            f"export the model with opset {min_opset} or later"
        ) from error
    del proto.metadata_props[:]
    proto.metadata_props.extend(metadata)
    for graph in graphs(proto.graph):
        # The converter writes shapes of its own that are not always right (onnx 1.21: rank 0 behind Softmax).
        del graph.value_info[:]
    proto.graph.value_info.extend(declared)
    _set_ir_version(proto)
    _clean(proto, weights, source)
    _check(proto, source)
    return proto


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {opset.domain: opset.version for opset in proto.opset_import}
