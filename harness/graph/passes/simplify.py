"""Simplification of a graph: constant folding, static shapes, removal of nodes that no output needs or that do nothing.

Constants are computed by ONNX Runtime, in the helper process.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from harness.base.errors import UserError
from harness.graph.passes.normalize import MAX_FOLDED_BYTES, MAX_SHOWN_BYTES, Weights
from harness.graph.passes.static_shapes import static_types
from harness.graph.protos import (
    attribute_value,
    copy_message,
    encoded_size_bytes,
    find_captures,
    is_random,
    is_standard_op,
    iter_graphs,
    iter_subgraphs,
    iter_with_inner,
    replace_field,
    tensors_read,
)
from harness.workers.helper_process import call_in_helper_process

MAX_COMPUTED_BYTES = 1 << 31  # largest intermediate constant, which ONNX Runtime would also compute at each start

TensorValues = dict[str, np.ndarray[Any, Any]]

# ONNX Runtime returns results of other types, such as FLOAT8 and sequences, without their type.
_FOLDABLE_DTYPES = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL STRING").split()  # noqa: SIM905
)
_UNFOLDABLE_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
# If the result has the shape of the first input, it equals that input.
_ORDER_PRESERVING_OPS = frozenset(
    {"DepthToSpace", "Expand", "Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Tile", "Unsqueeze"}
)


class _ConstantTooLarge(Exception):
    """A constant that would exceed `MAX_COMPUTED_BYTES`."""


def fold_and_prune(graph: onnx.GraphProto, opsets: dict[str, int], weights: Weights, source: str) -> None:
    """Sort nodes topologically, compute constants, and remove unused nodes and initializers, in place.

    Unknown and random operators are not folded, nor are nodes with them in a subgraph. Attributes, types and weights
    are not changed. Node names must be unique. `opsets` has the imported version of each domain.

    Raises:
        UserError: The graph has a cycle, or computes a constant of more than `MAX_COMPUTED_BYTES`.
    """
    nodes = list(graph.node)
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:  # a valid order is kept, because it is the author's
        if not later.isdisjoint(tensors_read(node)):
            import onnx_ir as ir  # takes 1 s and 46 MiB, with SymPy

            ordered = ir.from_proto(graph)
            try:
                ordered.sort()
            except ValueError as error:
                text = f"{source}: its nodes cannot be put in order: {error}; export the model again"
                raise UserError(text) from error
            order = {node.name: position for position, node in enumerate(ordered)}
            nodes.sort(key=lambda node: order[node.name])
            break
        later.difference_update(node.output)
    constants = {tensor.name: tensor for tensor in graph.initializer} | weights
    outputs = [value.name for value in graph.output]
    computed, values = _fold_constants(nodes, constants, outputs, opsets, source)
    used, kept = set(outputs), []
    for node in reversed(nodes):
        if node.name not in computed and not used.isdisjoint(node.output):
            used.update(tensors_read(node))
            kept.append(node)
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    initializers += [numpy_helper.from_array(value, name) for name, value in values.items() if name in used]
    replace_field(graph.node, kept[::-1])
    replace_field(graph.initializer, initializers)


def inline_branches(graph: onnx.GraphProto) -> bool:
    """Replace each If with a constant condition by the branch that runs, in place; return whether there was any.

    Tensors and nodes of a branch get the unique name of the If in front. Types in the branch are removed.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    taken = _all_names(graph)
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in graph.node:
        chosen = _constant_input_values(node, 0, constants) if node.op_type == "If" and not node.domain else None
        if chosen is None:
            nodes.append(node)
        else:
            branch = attribute_value(node, "then_branch" if chosen[0] else "else_branch")
            nodes += _inlined_nodes(graph, node, branch, taken)
            changed = True
    if changed:
        replace_field(graph.node, nodes)
    return changed


def _inlined_nodes(
    graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto, taken: set[str]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a branch of an If with new names, and add its initializers to the graph."""
    made = {name for inner in branch.node for name in inner.output if name}
    results = [(value.name, name) for value, name in zip(branch.output, node.output, strict=True) if name]
    names = {inner: name for inner, name in reversed(results) if inner in made}
    for name in _defined_names(branch):
        if name not in names:
            names[name] = _unused_name(f"{node.name}.{name}", taken)
            taken.add(names[name])
    for inner in branch.node:
        renamed = copy_message(inner)
        renamed.name = f"{node.name}.{inner.name}" if inner.name else ""
        _rename_tensors(renamed, names)
        yield renamed
    for tensor in (*branch.initializer, *(sparse.values for sparse in branch.sparse_initializer)):
        tensor.name = names[tensor.name]
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    for inner_name, name in results:
        source = names.get(inner_name, inner_name)
        if source != name:  # a tensor from outside, a constant, or a tensor that is a result twice
            yield helper.make_node("Identity", [source], [name], name=f"{node.name}.{name}")


def _all_names(graph: onnx.GraphProto) -> set[str]:
    return {name for inner in iter_graphs(graph) for name in _defined_names(inner)}


def _unused_name(name: str, taken: Container[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _defined_names(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the tensors that a graph defines, without those of its subgraphs."""
    tensors = (*graph.input, *graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    made = (name for node in graph.node for name in node.output if name)
    return list(dict.fromkeys([*(tensor.name for tensor in tensors), *made]))


def _rename_tensors(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Replace names of tensors in a node and its subgraphs, in place."""
    for field in (node.input, node.output):
        field[:] = [names.get(name, name) for name in field]
    for inner in iter_subgraphs(node):
        free = {name: new for name, new in names.items() if name not in _defined_names(inner)}
        for value in inner.output:
            value.name = free.get(value.name, value.name)
        for each in inner.node:
            _rename_tensors(each, free)


def fold_shape_ops(graph: onnx.GraphProto) -> bool:
    """Replace Shape and Size of tensors with a static shape by initializers, in place; return whether any was.

    A node that computes an output of the model is kept for the output.
    """
    names = {node.name for node in graph.node if node.op_type in ("Shape", "Size") and not node.domain}
    types, outputs = static_types(graph) if names else {}, {value.name for value in graph.output}
    rest, changed = [], False
    for node in graph.node:
        known, result = types.get(node.input[0]) if node.name in names else None, next(iter(node.output), "")
        readers = [each for each in graph.node if result in tensors_read(each)] if known and result in outputs else []
        if known is None or result in outputs:
            rest.append(node)
        if known is None or (result in outputs and not readers):
            continue
        if readers:
            renamed = {result: _unused_name(f"{result}.value", _all_names(graph))}
            result = renamed[result]
            for reader in readers:
                _rename_tensors(reader, renamed)
        bounds = {a.name: a.i for a in node.attribute}
        sizes = np.array(known.shape[bounds.get("start", 0) : bounds.get("end")], dtype=np.int64)
        value = sizes if node.op_type == "Shape" else np.prod(sizes, dtype=np.int64)
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), result))
        changed = True
    if len(rest) < len(graph.node):
        replace_field(graph.node, rest)
    return changed


def remove_noops(graph: onnx.GraphProto) -> bool:
    """Remove nodes that return their input, in place, and return whether there were any.

    Nodes that compute an output of the model, or a tensor that a subgraph reads, are kept.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    types = static_types(graph)
    pinned = {value.name for value in graph.output}.union(*map(find_captures, graph.node))
    replacements: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = replacements.get(name, name)
        known = types.get(node.input[0]) if node.input else None
        same = known is not None and known == types.get(node.output[0]) and node.output[0] not in pinned
        if same and not node.domain and _is_noop(node, constants):
            replacements[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    if replacements:
        replace_field(graph.node, kept)
    return bool(replacements)


def _is_noop(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node returns its first input, given that the result has the same type and shape."""
    if node.op_type in ("Concat", "Split"):
        return len(node.input if node.op_type == "Concat" else node.output) == 1
    if node.op_type == "Gather":  # of all indices in order: their number is that of the axis
        indices = _constant_input_values(node, 1, constants)
        return indices is not None and indices == list(range(len(indices))) and len(constants[node.input[1]].dims) == 1
    if node.op_type in _ORDER_PRESERVING_OPS:
        return True
    if node.op_type == "Slice":
        steps = _constant_input_values(node, 4, constants)
        return len(node.input) < 5 or not node.input[4] or (steps is not None and min(steps, default=1) > 0)
    if node.op_type == "Pad":
        pads = _constant_input_values(node, 1, constants)
        return pads is not None and not any(pads)
    if node.op_type == "Transpose":
        order = attribute_value(node, "perm")
        return order is not None and list(order) == sorted(order)
    return False


def _constant_input_values(
    node: onnx.NodeProto, slot: int, constants: Mapping[str, onnx.TensorProto]
) -> list[Any] | None:
    tensor = constants.get(node.input[slot]) if len(node.input) > slot else None
    return None if tensor is None else numpy_helper.to_array(tensor).ravel().tolist()


def _fold_constants(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, onnx.TensorProto],
    outputs: list[str],
    opsets: Mapping[str, int],
    source: str,
) -> tuple[set[str], TensorValues]:
    """Compute the nodes that depend only on constants.

    Nodes must be in topological order and have unique names.

    Returns:
        Names of the computed nodes, and the values of their results that other nodes need.
    """
    foldable, needed = _foldable_nodes(nodes, constants, opsets)
    if sum(map(encoded_size_bytes, needed.values())) > MAX_COMPUTED_BYTES:  # they are parts of one message
        small = {name: each for name, each in constants.items() if encoded_size_bytes(each) <= MAX_FOLDED_BYTES}
        foldable, needed = _foldable_nodes(nodes, small, opsets)
    if not foldable:
        return set(), {}
    computed = {node.name for node in foldable}
    read = [*(name for node in nodes if node.name not in computed for name in tensors_read(node)), *outputs]
    what = f"{source}: the computation of constants"
    try:
        return call_in_helper_process(what, _evaluate_nodes, foldable, read, opsets, needed)
    except _ConstantTooLarge as error:
        raise UserError(
            f"{source}: {error}, and at most {MAX_COMPUTED_BYTES / 1e9:.1f} GB are computed; export the model again "
            "with smaller shapes"
        ) from error


def _foldable_nodes(
    nodes: Iterable[onnx.NodeProto], constants: Mapping[str, onnx.TensorProto], opsets: Mapping[str, int]
) -> tuple[list[onnx.NodeProto], Weights]:
    """Return the nodes that depend only on constants, and the constants that they read."""
    known = set(constants)
    foldable = []
    for node in nodes:
        if known.issuperset(tensors_read(node)) and all(
            is_standard_op(each, opsets) and each.op_type not in _UNFOLDABLE_OPS and not is_random(each, constants)
            for each in iter_with_inner(node)
        ):
            known.update(node.output)
            foldable.append(node)
    return foldable, {name: constants[name] for node in foldable for name in tensors_read(node) if name in constants}


def _evaluate_nodes(
    foldable: list[onnx.NodeProto], read: list[str], opsets: Mapping[str, int], constants: Weights
) -> tuple[set[str], TensorValues]:
    import onnxruntime

    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.ModelProto(graph=onnx.GraphProto(name="constants"), ir_version=10, opset_import=imports)
    types = _result_types(model, foldable, constants)
    sizes = {name: _size_bytes(kind) for name, kind in types.items()}
    if not all(sizes.values()) and sum(sizes.values()) < 1 << 20:  # takes long for large tensors
        propagated = _result_types(model, foldable, constants, data_prop=True)
        sizes |= {name: _size_bytes(kind) for name, kind in propagated.items()}
    for name, size in sizes.items():
        if size > MAX_COMPUTED_BYTES:
            raise _ConstantTooLarge(f"the constant {name!r} has {size / 1e9:,.1f} GB by its shape")
    plain = [n for n in foldable if all(o in types and types[o].elem_type in _FOLDABLE_DTYPES for o in n.output if o)]
    nodes = {node.name: node for node in _foldable_nodes(plain, constants, opsets)[0]}
    made = {name for node in nodes.values() for name in node.output if name}
    others = (name for node in foldable if node.name not in nodes for name in tensors_read(node))
    wanted = [name for name in dict.fromkeys([*read, *others]) if name in made]
    small = [name for name in wanted if _size_bytes(types[name]) <= MAX_FOLDED_BYTES]
    model.graph.node.extend(nodes.values())
    model.graph.initializer.extend(constants.values())
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in small)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        values = dict(zip(small, map(np.asarray, session.run(small, {})), strict=True))
    except Exception:  # ONNX Runtime's exceptions have no common base; what it cannot run stays in the model
        return set(), {}
    if any(value.dtype != helper.tensor_dtype_to_np_dtype(types[name].elem_type) for name, value in values.items()):
        return set(), {}
    values = {name: value for name, value in values.items() if value.nbytes <= MAX_FOLDED_BYTES}
    left, kept = set(wanted) - values.keys(), set()
    for name, node in reversed(nodes.items()):
        if not left.isdisjoint(node.output):
            left.update(tensors_read(node))
            kept.add(name)
    return nodes.keys() - kept, values


def _result_types(
    model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], constants: Weights, *, data_prop: bool = False
) -> dict[str, onnx.TypeProto.Tensor]:
    """Return the types of the tensors that nodes compute, without sequences and optionals."""
    typed = copy_message(model)
    typed.graph.node.extend(nodes)
    for tensor in constants.values():
        if encoded_size_bytes(tensor) > MAX_SHOWN_BYTES:
            typed.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            typed.graph.initializer.append(tensor)
    inferred = shape_inference.infer_shapes(typed, data_prop=data_prop)
    return {value.name: value.type.tensor_type for value in inferred.graph.value_info}


def _size_bytes(kind: onnx.TypeProto.Tensor) -> int:
    """Return the size of a tensor; 0 if its shape is unknown."""
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return 0
    itemsize: int = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return int(math.prod(dim.dim_value for dim in kind.shape.dim)) * itemsize
