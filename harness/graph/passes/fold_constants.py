"""Constant folding: nodes that depend on constants alone are computed by ONNX Runtime, in the helper process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from harness.graph.io.helper_process import call_in_helper_process

__all__ = ["MAX_FOLDED_BYTES", "MAX_SHOWN_BYTES", "OPAQUE_DOMAIN", "Weights", "fold_constants"]

Weights = dict[str, onnx.TensorProto]
"""Initializers by name that are kept outside of the model."""
TensorValues = dict[str, np.ndarray[Any, Any]]

MAX_SHOWN_BYTES = 4096  # larger initializers are weights; smaller ones may be shapes, which inference needs
MAX_FOLDED_BYTES = 1 << 28  # larger results are not computed in advance
OPAQUE_DOMAIN = "qdq.box"  # of nodes with subgraphs and of operators that ONNX does not define
# Results of other types, such as FLOAT8 and sequences, do not come back from ONNX Runtime with their type.
_FOLDABLE_DTYPES = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL STRING").split()  # noqa: SIM905
)
_UNFOLDABLE_OPS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "RandomNormal", "RandomUniform",
     "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)  # fmt: skip


def fold_constants(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, onnx.TensorProto],
    outputs: list[str],
    opsets: Mapping[str, int],
    source: str,
) -> tuple[set[str], TensorValues]:
    """Compute the nodes outside `OPAQUE_DOMAIN` that depend on constants alone.

    Nodes must be in topological order and have unique names.

    Returns:
        Names of the nodes that are not needed any more, and the values of tensors that they computed.
    """
    foldable = _foldable_nodes(nodes, constants)
    if not foldable:
        return set(), {}
    computed = {node.name for node in foldable}
    read = [*(name for node in nodes if node.name not in computed for name in node.input), *outputs]
    needed = {name: constants[name] for node in foldable for name in node.input if name in constants}
    what = f"{source}: the computation of constants"
    return call_in_helper_process(what, _evaluate_nodes, foldable, read, opsets, needed)


def _foldable_nodes(nodes: Iterable[onnx.NodeProto], constants: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that depend on constants alone."""
    known = {*constants, ""}
    foldable = []
    for node in nodes:
        if known.issuperset(node.input) and node.domain != OPAQUE_DOMAIN and node.op_type not in _UNFOLDABLE_OPS:
            known.update(node.output)
            foldable.append(node)
    return foldable


def _evaluate_nodes(
    foldable: list[onnx.NodeProto], read: list[str], opsets: Mapping[str, int], constants: Weights
) -> tuple[set[str], TensorValues]:
    """Compute the nodes whose results come back from ONNX Runtime with their type; see `fold_constants`."""
    import onnxruntime

    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.ModelProto(graph=onnx.GraphProto(name="constants"), ir_version=10, opset_import=imports)
    types = _result_types(model, foldable, constants)
    plain = [n for n in foldable if all(o in types and types[o].elem_type in _FOLDABLE_DTYPES for o in n.output if o)]
    nodes = {node.name: node for node in _foldable_nodes(plain, constants)}
    made = {name for node in nodes.values() for name in node.output if name}
    others = (name for node in foldable if node.name not in nodes for name in node.input)
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
    return nodes.keys() - _nodes_behind(nodes.values(), set(wanted) - values.keys()), values


def _result_types(
    model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], constants: Weights
) -> dict[str, onnx.TypeProto.Tensor]:
    """Return the types of the tensors that nodes compute, without sequences and optionals."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    typed.graph.node.extend(nodes)
    for tensor in constants.values():
        if tensor.ByteSize() > MAX_SHOWN_BYTES:
            typed.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            typed.graph.initializer.append(tensor)
    return {value.name: value.type.tensor_type for value in shape_inference.infer_shapes(typed).graph.value_info}


def _size_bytes(kind: onnx.TypeProto.Tensor) -> int:
    """Return the size of a tensor; 0 if its shape is unknown."""
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return 0
    itemsize: int = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return int(math.prod(dim.dim_value for dim in kind.shape.dim)) * itemsize


def _nodes_behind(nodes: Iterable[onnx.NodeProto], tensors: set[str]) -> set[str]:
    """Return the names of the nodes that these tensors depend on."""
    names = set()
    for node in reversed(list(nodes)):
        if not tensors.isdisjoint(node.output):
            tensors = tensors.union(node.input)
            names.add(node.name)
    return names
