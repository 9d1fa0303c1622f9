"""From an ONNX file to a `Model` that is ready for placement, and back to a file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import checker, helper, inliner

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
from harness.graph.cleaning.equivalence import Original, check_equivalent
from harness.graph.cleaning.fold import fold_batch_norms
from harness.graph.cleaning.interface import Interface
from harness.graph.cleaning.noop import drop_noops
from harness.graph.cleaning.read import read_model
from harness.graph.cleaning.shapes import fix_inputs, has_dynamic_inputs, infer, shapes_to_constants, types_of
from harness.graph.cleaning.sizes import Sizes
from harness.graph.cleaning.upgrade import EXPLICIT_RESIZE, upgraded
from harness.graph.cleaning.valid import check_valid
from harness.graph.cleaning.write import write
from harness.graph.model import Model, Origin, TensorType, graphs, subgraphs
from harness.graph.nodes import nodes_of

__all__ = ["from_proto", "load", "prepared", "save", "write"]

logger = logging.getLogger(__name__)

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

    The result computes what the file computes: both are run once on random inputs and compared, see
    `harness.graph.cleaning.equivalence`.

    Args:
        path: The file; external data lies in its folder or below.
        source: What messages and tables call it; the path by default.
        shapes: Static shapes by input name, "1x3x224x224" or numbers, for inputs that are dynamic or fixed to 1 sample.
        dims: Sizes of dynamic dimensions by symbol, such as {"time": 128}; the batch is 1 by default.
        min_opset: Models of an older default operator set are upgraded to this one.

    Raises:
        UserError: The file cannot be read, is no valid ONNX, stays dynamic, cannot be upgraded, or would not compute
            the same afterwards.
    """
    source = source or str(path)
    proto, sha256 = read_model(path, source)
    origin = Origin(model=path, min_opset=min_opset) if has_dynamic_inputs(proto.graph) else None
    found = prepared(proto, path.absolute(), source, sha256, Sizes(shapes=shapes, dims=dims), min_opset)
    return replace(found, origin=origin)


def prepared(
    proto: onnx.ModelProto, file: Path | onnx.ModelProto, source: str, sha256: str, sizes: Sizes, min_opset: int
) -> Model:
    """Prepare a model; turn what a damaged file causes into a message."""
    try:
        key = f"{sha256} {sorted(sizes.shapes.items())} {sorted(sizes.dims.items())} {min_opset}"
        original = Original.of(proto, file, key if isinstance(file, Path) else "")
        return _prepare(original, proto, source, sha256, sizes, min_opset)
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
    sizes = Sizes(shapes=shapes, dims=dims)
    return replace(_prepare(Original.of(proto, proto), copy, source, sha256, sizes, min_opset), origin=origin)


def save(model: Model, folder: Path) -> Path:
    """Write the model to `model.onnx` in a folder, which is made where missing. See `write`."""
    return write(model.proto, folder / "model.onnx")


def _prepare(
    original: Original, proto: onnx.ModelProto, source: str, sha256: str, sizes: Sizes, min_opset: int
) -> Model:
    densify(proto.graph)
    _drop_constant_inputs(proto.graph)
    proto = rebatched(proto, sizes.shapes, source)
    declared = _types_of_outputs(proto.graph)
    if not sizes.keep_dynamic:
        fix_inputs(proto, sizes, source)
    interface = Interface.of(proto.graph)
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
    proto, before = _upgrade(proto, weights, max(min_opset, halves), source)
    unmask(proto)
    _check_again(proto, unknown, source)
    proto = infer(proto, source)
    while shapes_to_constants(proto.graph) | drop_noops(proto.graph):
        _clean(proto, weights, source)
        proto = infer(proto, source)
    attach(proto.graph, weights)
    fold_batch_norms(proto.graph)
    types = types_of(proto.graph)
    for value in proto.graph.output:
        if value.name in declared:
            _redeclare(value.type, declared[value.name], whole=sizes.keep_dynamic)
    interface.check(proto.graph, {}, source)
    model = Model(proto=proto, source=source, sha256=sha256, nodes=nodes_of(proto), types=types)
    # The comparison looks at shapes of results, and not at what is declared; dynamic models are compared elsewhere.
    if not sizes.keep_dynamic and not check_equivalent(original, model):
        interface.check(proto.graph, before, source)
    return model


def _types_of_outputs(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """What the file says of its outputs: where nothing can be inferred, that makes the result valid ONNX."""
    found = {value.name: onnx.TypeProto() for value in graph.output}
    for value in graph.output:
        found[value.name].CopyFrom(value.type)
    return found


def _redeclare(kind: onnx.TypeProto, declared: onnx.TypeProto, *, whole: bool) -> None:
    """Take from the file what could not be inferred of an output, its shape or names of dimensions, or the whole."""
    if whole or not kind.tensor_type.HasField("shape"):
        kind.CopyFrom(declared)
    sizes, named = kind.tensor_type.shape.dim, declared.tensor_type.shape.dim
    for size, name in zip(sizes, named, strict=False) if len(sizes) == len(named) else ():
        if not size.HasField("dim_value") and name.dim_param:
            size.dim_param = name.dim_param


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


def _upgrade(
    proto: onnx.ModelProto, weights: Weights, min_opset: int, source: str
) -> tuple[onnx.ModelProto, Mapping[str, TensorType]]:
    """Return the model in a sufficient opset, and the types that were known before its upgrade."""
    version = _opsets(proto).get("")
    if version is None:
        proto.opset_import.append(helper.make_opsetid("", min_opset))
        _set_ir_version(proto)
        return proto, {}
    newest = onnx.defs.onnx_opset_version()
    if version > newest:
        raise UserError(
            f"{source}: opset {version} is newer than the installed onnx {onnx.__version__} knows ({newest}); "
            f"export the model with opset {newest} or earlier, or install a newer onnx"
        )
    if version >= min_opset:
        return proto, {}
    proto = infer(proto, source)  # the converter needs fewer detours where it knows the shapes
    while version < EXPLICIT_RESIZE and shapes_to_constants(proto.graph):  # old Resizes need constant scales
        _clean(proto, weights, source)
        proto = infer(proto, source)
    types = types_of(proto.graph)
    proto = upgraded(proto, version, min_opset, source)
    _set_ir_version(proto)
    _clean(proto, weights, source)
    _check(proto, source)
    return proto, types


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {opset.domain: opset.version for opset in proto.opset_import}
