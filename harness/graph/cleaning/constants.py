"""Compute what depends on constants alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from harness.graph.cleaning.guard import sturdy

__all__ = ["BOX", "FOLD_BYTES", "LARGE_BYTES", "Weights", "folded", "surgeon"]

Weights = dict[str, onnx.TensorProto]
"""Detached initializers by name."""

LARGE_BYTES = 4096
"""Initializers above this size are weights; smaller ones may be shapes, which inference wants to see."""

FOLD_BYTES = 1 << 28
"""Constants larger than this are not computed ahead."""

BOX = "qdq.box"
_FOLDED = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL STRING").split()  # noqa: SIM905
)
"""Results of other types, such as FLOAT8 and sequences, do not come back from ONNX Runtime as what they are."""
_NOT_FOLDED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "RandomNormal", "RandomUniform",
     "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)  # fmt: skip


Values = dict[str, np.ndarray[Any, Any]]


def folded(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, onnx.TensorProto],
    outputs: list[str],
    opsets: dict[str, int],
    source: str,
) -> tuple[set[str], Values]:
    """Compute what depends on constants alone, in the helper process.

    Args:
        nodes: In topological order, with unique names; those of domain `BOX` are left alone.
        constants: Initializers by name.
        outputs: Of the model.
        opsets: By domain.
        source: What messages call the model.

    Returns:
        Names of the nodes that are not needed any more, and values of tensors that they made.
    """
    foldable = _foldable(nodes, constants.keys())
    if not foldable:
        return set(), {}
    needed = {name: constants[name] for node in foldable for name in node.input if name in constants}
    what = f"{source}: the computation of constants"
    return sturdy(what, _folded, foldable, _read(nodes, foldable), outputs, opsets, needed)


def _read(nodes: list[onnx.NodeProto], foldable: list[onnx.NodeProto]) -> list[str]:
    """What other nodes read of what these make."""
    names = {node.name for node in foldable}
    made = {name for node in foldable for name in node.output if name}
    return list(dict.fromkeys(name for node in nodes if node.name not in names for name in node.input if name in made))


def _folded(
    foldable: list[onnx.NodeProto],
    read: list[str],
    outputs: list[str],
    opsets: dict[str, int],
    constants: Weights,
) -> tuple[set[str], Values]:
    """Fold what comes back as a tensor of the type that it is said to have; see `folded`."""
    types = _types_of_results(foldable, opsets, constants.values())
    typed = _foldable([n for n in foldable if all(types.get(name) in _FOLDED for name in n.output if name)], constants)
    names = {node.name for node in typed}
    made = {name for node in typed for name in node.output if name}
    others = [name for node in foldable if node.name not in names for name in node.input]
    inputs = [name for name in dict.fromkeys([*read, *others]) if name in made]
    reader = onnx.NodeProto(name=BOX, op_type="Reader", domain=BOX, input=inputs, output=[BOX])
    ends = [BOX, *(name for name in outputs if name in made)]
    shown = surgeon([*typed, reader], opsets, ends, constants.values())
    shown.fold_constants(
        fold_shapes=False,
        recurse_subgraphs=False,
        flatten_subgraphs=False,
        size_threshold=FOLD_BYTES,
        should_exclude_node=lambda node: node.name not in names,
    )
    shown.cleanup()
    computed = {t.name: t for t in shown.tensors().values() if isinstance(t, gs.Constant) and t.name not in constants}
    values = {name: np.asarray(tensor.values) for name, tensor in computed.items()}
    if any(value.dtype != helper.tensor_dtype_to_np_dtype(types[name]) for name, value in values.items()):
        return set(), {}
    return names - {node.name for node in shown.nodes}, values


def _types_of_results(
    nodes: Iterable[onnx.NodeProto], opsets: dict[str, int], constants: Iterable[onnx.TensorProto]
) -> dict[str, int]:
    """Return the element types of tensors that these nodes make; sequences and optionals are left out."""
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    shown = onnx.ModelProto(graph=onnx.GraphProto(name="shown"), ir_version=10, opset_import=imports)
    shown.graph.node.extend(nodes)
    for tensor in constants:
        if tensor.ByteSize() > LARGE_BYTES:
            shown.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            shown.graph.initializer.append(tensor)
    found = onnx.shape_inference.infer_shapes(shown).graph.value_info
    return {value.name: value.type.tensor_type.elem_type for value in found}


def surgeon(
    nodes: Iterable[onnx.NodeProto],
    opsets: dict[str, int],
    outputs: Iterable[str],
    constants: Iterable[onnx.TensorProto] = (),
) -> gs.Graph:
    """Return a graph of onnx-graphsurgeon with no more than it needs."""
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    shown = onnx.ModelProto(graph=onnx.GraphProto(name="shown"), ir_version=10, opset_import=imports)
    shown.graph.node.extend(nodes)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    shown.graph.initializer.extend(constants)
    # Inputs need not be shown, and must not be: it compares each of them with every tensor (onnx-graphsurgeon 0.6).
    return gs.import_onnx(shown)


def _foldable(nodes: Iterable[onnx.NodeProto], known: Iterable[str]) -> list[onnx.NodeProto]:
    """Nodes that depend on constants alone."""
    constants = {*known, ""}
    found = []
    for node in nodes:
        if constants.issuperset(node.input) and node.domain != BOX and node.op_type not in _NOT_FOLDED:
            constants.update(node.output)
            found.append(node)
    return found
