"""Parts and variants of a model file: operators between two cuts, copies with 7-bit or 32-bit values or other pairs.

Q/DQ pairs stay with their operator, so that a runtime fuses the same operators in a part as in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from harness.graph.io.files import write_model
from harness.graph.io.model_reader import read_model, refuse_damage
from harness.graph.protos import (
    attribute_value,
    constants_by_name,
    copy_message,
    dependent_tensors,
    element_type,
    find_random_nodes,
    input_values,
    iter_graphs,
    iter_nodes,
    replace_field,
    tensors_read,
)
from harness.graph.qdq.qdq_graph import CAST_OPS, DEQUANTIZE, QDQ_OPS, QUANTIZE, QDQGraph, node_name, read_qdq_graph
from harness.plugins.api import Array
from search.space import Edge

DISCONTINUOUS_OPS = frozenset({"ArgMax", "ArgMin", "Hardmax", "NonMaxSuppression", "NonZero", "TopK", "Unique"})
GRAPH = onnx.AttributeProto.GRAPH
NARROWING_DIVISOR = 2  # divisor of 8-bit integers, so that they have 7 bits
NARROWED_SUFFIX = "_narrowed"


class ModelGraph(QDQGraph):
    """Graph of a model file with its external data; parts of it can be written as models."""

    def __init__(self, path: Path) -> None:
        super().__init__(onnx.load(path))
        self._position = {id(node): index for index, node in enumerate(self.proto.graph.node)}
        self.inputs = tuple(value.name for value in input_values(self.proto.graph))

    def float_operators(self) -> list[str]:
        """Return the operator types of the nodes in order, without Q/DQ pairs."""
        return [node.op_type for node in self.proto.graph.node if node.op_type not in QDQ_OPS]

    def operator(self, tensor: str) -> str:
        """Return type and name of the operator that computes a tensor before any Q/DQ pairs, as text: "Conv 'stem'"."""
        node = self.producer.get(self.before_pairs(tensor)) or self.producer[tensor]
        return f"{node.op_type} {node_name(node)!r}"

    @cached_property
    def _depth(self) -> dict[str, int]:
        """Number of operators on the longest path from an input of the model to each tensor that depends on one."""
        depth = dict.fromkeys(self.inputs, 0)
        for node in self.proto.graph.node:
            before = [depth[name] for name in tensors_read(node) if name in depth]
            if before:
                depth.update((name, max(before) + 1) for name in node.output if name)
        return depth

    def sources(self, tensor: str) -> tuple[str, ...]:
        """Return the inputs of a tensor's node that depend on model inputs, skipping results of QuantizeLinear."""
        found: dict[str, None] = {}
        node = self.producer.get(tensor)
        for name in () if node is None else tensors_read(node):
            maker = self.producer.get(name)
            if name in self._depth:
                found.update(dict.fromkeys(self.sources(name) if maker and maker.op_type == QUANTIZE else (name,)))
        return tuple(found)

    def longest_path(self, tensor: str) -> list[str]:
        """Return, in order, the tensors on the longest path from a model input to a tensor, both included."""
        path = [tensor]
        while before := self.sources(path[-1]):
            path.append(max(before, key=lambda name: self._depth[name]))
        return path[::-1]

    def boundary_tensors(self, tensor: str, operators: int) -> tuple[str, ...]:
        """Return the tensors from which the last `operators` operators, without Q/DQ pairs, compute a tensor."""
        inside: set[int] = set()
        front, left = {tensor}, operators
        while left > 0:
            inner = [name for name in front if name in self.producer and name in self._depth]
            if not inner:
                break
            latest = max(inner, key=lambda name: self._position[id(self.producer[name])])
            node = self.producer[latest]
            left -= node.op_type not in QDQ_OPS
            inside.add(id(node))
            front = {name for name in front if name not in node.output}
            front |= {name for name in tensors_read(node) if name in self._depth}
        return tuple(sorted(set(map(self.before_pairs, front)), key=lambda name: self._depth[name]))

    def write_submodel(
        self,
        path: Path,
        outputs: Sequence[str],
        inputs: Mapping[str, Array] | None = None,
        *,
        without_pairs: bool = False,
    ) -> list[str]:
        """Write the model that computes some tensors, and return the names of its inputs.

        Args:
            path: File to write.
            outputs: Names of the output tensors; tensors inside the model get no type, because runtimes infer it.
            inputs: Arrays with type and shape of the tensors that become inputs; None: the inputs of the model.
            without_pairs: Whether Q/DQ pairs of data are removed; weights stay quantized.
        """
        graph, ends = self.proto.graph, dict(inputs or {})
        wanted, tensors, stack = set[int](), set[str](), list(outputs)
        while stack:
            name = stack.pop()
            if name in tensors or name in ends:
                continue
            tensors.add(name)
            node = self.producer.get(name)
            if node is not None and id(node) not in wanted:
                wanted.add(id(node))
                stack.extend(tensors_read(node))
        nodes = []
        for node in graph.node:
            before = self.producer.get(node.input[0]) if without_pairs and node.op_type == DEQUANTIZE else None
            if id(node) in wanted and before is not None and before.op_type == QUANTIZE:
                nodes.append(helper.make_node("Identity", before.input[:1], node.output))
            elif id(node) in wanted:
                nodes.append(node)
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in ends.items()
        ]
        known = {value.name: value for value in graph.output}
        made = helper.make_graph(
            nodes,
            graph.name,
            [*given, *(value for value in input_values(graph) if value.name in tensors)],
            [known.get(name) or onnx.ValueInfoProto(name=name) for name in outputs],
            [tensor for tensor in graph.initializer if tensor.name in tensors],
        )
        opsets, functions = self.proto.opset_import, self.proto.functions
        part = helper.make_model(made, opset_imports=opsets, ir_version=self.proto.ir_version, functions=functions)
        onnx.save(part, path)
        return [value.name for value in made.input]

    def with_types(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays with the element types of the tensors with these names, as far as the file declares them."""
        kinds = {value.name: value.type.tensor_type.elem_type for value in self.proto.graph.value_info}
        return {
            name: array.astype(helper.tensor_dtype_to_np_dtype(kinds[name]), copy=False) if kinds.get(name) else array
            for name, array in arrays.items()
        }


def find_index_outputs(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the outputs that depend on discontinuous (TopK, ...) or random operators, and their computed inputs."""
    proto = onnx.load(path, load_external_data=False)
    graph, random = proto.graph, find_random_nodes(proto)
    jumping = [n for i, n in enumerate(graph.node) if i in random or n.op_type in DISCONTINUOUS_OPS]
    behind = dependent_tensors(graph, [name for n in jumping for name in n.output[1 if n.op_type == "TopK" else 0 :]])
    computed = {name for node in graph.node for name in node.output}
    sources = dict.fromkeys(name for node in jumping for name in tensors_read(node) if name in computed - behind)
    return frozenset(value.name for value in graph.output if value.name in behind), tuple(sources)


def find_random_tensors(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the results of random operators, their other computed inputs, and these operators as text."""
    proto = onnx.load(path, load_external_data=False)
    found = find_random_nodes(proto)
    nodes = [proto.graph.node[index] for index in found]
    results = tuple(name for node in nodes for name in node.output if name)
    computed = {name for node in proto.graph.node for name in node.output}.difference(results)
    sources = dict.fromkeys(name for node in nodes for name in tensors_read(node) if name in computed)
    return results, tuple(sources), ", ".join(dict.fromkeys(found.values()))


def find_exact_outputs(path: Path) -> frozenset[str]:
    """Return the outputs of a model file that no Q/DQ pair changes, such as a cache that is passed on."""
    proto = onnx.load(path, load_external_data=False)
    bodies = {function.name for function in proto.functions}
    changed: set[str] = set()
    for node in proto.graph.node:
        hidden = node.op_type in bodies or any(attribute.type == GRAPH for attribute in node.attribute)
        if hidden or node.op_type in QDQ_OPS or not changed.isdisjoint(node.input):
            changed.update(node.output)
    return frozenset(value.name for value in proto.graph.output) - changed


def write_7bit_copy(path: Path, target: Path, what: Literal["weights", "data"]) -> bool:
    """Write a copy of a Q/DQ model with 7 bits for 8-bit weights or data; return False, without a file, if it has none.

    The copy is less precise than the model, so its results must be compared with a reference execution of the copy.
    """
    proto = onnx.load(path)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    halved: set[str] = set()
    found = False
    for node in proto.graph.node:
        stored = tensors.get(node.input[0]) if node.op_type == DEQUANTIZE else None
        if node.op_type not in QDQ_OPS or (stored is None) != (what == "data"):
            continue
        kind = tensors.get(next(iter(node.input[2:]), "")) if stored is None else stored
        if node.input[1] not in tensors or kind is None or kind.data_type not in (TensorProto.INT8, TensorProto.UINT8):
            continue
        found = True
        for name, factor in zip(node.input[1:], (NARROWING_DIVISOR, 1 / NARROWING_DIVISOR), strict=False):
            narrowed = f"{name}{NARROWED_SUFFIX}"
            if name in tensors and narrowed not in tensors:
                tensors[narrowed] = _scale_tensor(tensors[name], factor, narrowed)
                proto.graph.initializer.append(tensors[narrowed])
        node.input[1:] = [f"{name}{NARROWED_SUFFIX}" if name in tensors else name for name in node.input[1:]]
        if stored is not None and stored.name not in halved:
            halved.add(stored.name)
            stored.CopyFrom(_scale_tensor(stored, 1 / NARROWING_DIVISOR, stored.name))
    if found:
        onnx.save(proto, target)
    return found


def _scale_tensor(tensor: onnx.TensorProto, factor: float, name: str) -> onnx.TensorProto:
    """Return a multiple of a tensor; integers are rounded."""
    array = numpy_helper.to_array(tensor)
    made = array.astype(np.float64) * factor
    return numpy_helper.from_array((np.round(made) if array.dtype.kind in "iu" else made).astype(array.dtype), name)


class PairRemover:
    """Writer of copies of a Q/DQ model with the pairs of some nodes alone; constants that are stored quantized stay so.

    Args:
        path: File of the model.
    """

    def __init__(self, path: Path) -> None:
        self._graph = QDQGraph(read_model(path, str(path))[0])
        self._sources: dict[str, dict[int, str]] = {}
        for label, node in self._graph.nodes.items():
            for slot, name in enumerate(node.input if node.op_type not in CAST_OPS | QDQ_OPS else ()):
                dequantize = self._graph.producer.get(name)
                if dequantize is None or dequantize.op_type != DEQUANTIZE:
                    continue
                quantize = self._graph.producer.get(dequantize.input[0])
                if quantize is not None and quantize.op_type == QUANTIZE:
                    self._sources.setdefault(label, {})[slot] = quantize.input[0]

    @property
    def quantized_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that read pairs, as in edges (`unique_node_names`), in the order of the graph."""
        return tuple(self._sources)

    def write(self, kept_nodes: frozenset[str], path: Path) -> Path:
        """Write the model with the pairs at the inputs of `kept_nodes` alone (others read float), and return `path`."""
        proto = copy_message(self._graph.proto)
        for node, label in zip(proto.graph.node, self._graph.nodes, strict=True):
            for slot, source in self._sources.get(label, {}).items() if label not in kept_nodes else ():
                node.input[slot] = source
        return write_model(proto, path)


def write_without_pairs(shipped: Path, path: Path) -> bool:
    """Write a Q/DQ model without its pairs, for timings of the float model; quantized constants become float.

    Returns:
        Whether the model has a pair; otherwise no file is written.
    """
    with refuse_damage(shipped):
        proto = read_model(shipped, str(shipped))[0]
        constants, between, kept, found = constants_by_name(proto.graph), set[str](), [], False
        for node in map(copy_message, proto.graph.node):
            is_pair = node.op_type == QUANTIZE or (node.op_type == DEQUANTIZE and node.input[0] in between)
            is_stored = node.op_type == DEQUANTIZE and not is_pair and {*filter(None, node.input)} <= constants.keys()
            found |= is_pair or is_stored
            if node.op_type != DEQUANTIZE and (is_pair or between.intersection(node.input)):
                between.update(node.output)  # also of a Transpose or the like between the nodes of a pair
            if is_pair:
                node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))
            if not is_stored:
                kept.append(node)
                continue
            node.domain = ""  # the operator of com.microsoft computes the same
            feeds = {name: numpy_helper.to_array(constants[name]) for name in node.input if name}
            (values,) = ReferenceEvaluator(node, opsets={"": 21}).run(None, feeds)  # has all types and axes
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(values), node.output[0]))
        del proto.graph.node[:], proto.graph.value_info[:]
        proto.graph.node.extend(kept)
        if found:
            write_model(proto, path)
        return found


def write_with_edges(shipped: Path, edges: Sequence[Edge], path: Path) -> bool:
    """Write a Q/DQ model with further quantized edges; a tensor without a pair gets one with another tensor's scale.

    Args:
        shipped: File of the model.
        edges: Edges with the names of this model.
        path: File to write, in the folder of the model because of external data.

    Returns:
        Whether the model has a pair to copy; otherwise no file is written.
    """
    graph = read_qdq_graph(shipped)
    pairs = {edge.tensor: graph.edge_pair(edge) for edge in graph.edges}
    pairs = {tensor: pair for tensor, pair in pairs.items() if pair[0] is not None}
    if not pairs:
        return False
    nodes = list(graph.proto.graph.node)
    for tensor in dict.fromkeys(edge.tensor for edge in edges):
        pair = pairs.get(tensor)
        if pair is None:
            quantize, dequantize = pair = tuple(map(copy_message, next(iter(pairs.values()))))
            for node, op in ((quantize, QUANTIZE), (dequantize, DEQUANTIZE)):
                node.name = node.output[0] = f"{tensor}_cost_{op}"
            quantize.input[0], dequantize.input[0] = tensor, quantize.output[0]
        rest = [node for node in nodes if not any(node is own for own in pair)]
        place = next((i for i, node in enumerate(rest, 1) if tensor in node.output), 0)
        nodes = [*rest[:place], *pair, *rest[place:]]  # in front of all readers
        for edge in edges:
            if edge.tensor == tensor:
                graph.nodes[edge.consumer].input[edge.slot] = pair[1].output[0]
    replace_field(graph.proto.graph.node, [copy_message(node) for node in nodes])
    onnx.save(graph.proto, path)
    return True


UPCAST_NOTE = (
    "its QuantizeLinear take 16-bit floats, which ONNX Runtime's CPU kernel truncates or lacks: it is run in float32 "
    "between the same pairs, with the same scales"
)
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FP8_TYPES = tuple(kind for name, kind in TensorProto.DataType.items() if name.startswith("FLOAT8"))
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision"})
"""Attributes that hold an element type."""


def write_float32_copy(path: Path, folder: Path) -> Path | None:
    """Write a float32 copy of a model with QuantizeLinear nodes that take 16-bit floats to integers; return its path.

    ONNX Runtime's CPU kernel of QuantizeLinear truncates float16 where ONNX specifies rounding (onnxruntime issue
    22741; half of the values are one step off with 1.24), and has no kernel for bfloat16. FP8 is not affected.

    The file is `<stem>.float32.onnx` in `folder`. The result is None, without a file, for other models and unreadable
    files.
    """
    try:
        if b"QuantizeLinear" not in path.read_bytes():
            return None
        if not _quantizes_16bit_floats(onnx.load_model(path, load_external_data=False)):
            return None
    except (OSError, DecodeError):  # the runtime has words for it
        return None
    proto, _ = read_model(path, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    return write_model(_upcast_to_float32(proto), folder / f"{path.stem}.float32.onnx")


def _upcast_to_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with float32 for 16-bit floats, and Casts that keep types of inputs and outputs."""
    copy = copy_message(proto)
    main, graphs = copy.graph, list(iter_graphs(copy.graph))
    inputs = {v.name: v for v in input_values(main) if v.type.tensor_type.elem_type in HALF_TYPES}
    outputs = {v.name: v for v in main.output if v.type.tensor_type.elem_type in HALF_TYPES and v.name not in inputs}
    names = {name for graph in graphs for node in graph.node for name in (*node.input, *node.output)}
    free = next(end for n in count() if not names.intersection(name + (end := f"__float32{n or ''}") for name in names))
    inner = {name: name + free for name in (*inputs, *outputs)}
    constants = {tensor.name for tensor in main.initializer}
    declared = [value for value in main.input if value.name in constants]
    for graph in graphs:
        for node in graph.node:
            node.input[:] = [inner.get(name, name) for name in node.input]
            node.output[:] = [inner.get(name, name) for name in node.output]
        for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
            _widen(tensor)
        del graph.value_info[:]
        if graph is not main:
            declared += (*graph.input, *graph.output)
            for value in graph.output:
                value.name = inner.get(value.name, value.name)
    for tensor in main.initializer:
        tensor.name = inner.get(tensor.name, tensor.name)
    for kind in (element_type(value.type) for value in declared):
        if kind.tensor_type.elem_type in HALF_TYPES:
            kind.tensor_type.elem_type = TensorProto.FLOAT
    for attribute in (attribute for node in iter_nodes(copy) for attribute in node.attribute):
        if attribute.type == AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF_TYPES:
            attribute.i = TensorProto.FLOAT
        for tensor in (attribute.t,) if attribute.type == AttributeProto.TENSOR else attribute.tensors:
            _widen(tensor)
    before = [helper.make_node("Cast", [name], [inner[name]], to=TensorProto.FLOAT) for name in inputs]
    after = [
        helper.make_node("Cast", [inner[name]], [name], to=value.type.tensor_type.elem_type)
        for name, value in outputs.items()
    ]
    replace_field(main.node, [*before, *main.node, *after])
    return copy


def _quantizes_16bit_floats(proto: onnx.ModelProto) -> bool:
    """Return whether a QuantizeLinear takes 16-bit floats to integers."""
    types: dict[str, int] = {}
    for graph in iter_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in iter_nodes(proto):
        if node.op_type == "Cast":
            types[node.output[0]] = attribute_value(node, "to")
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            types[node.output[0]] = node.attribute[0].t.data_type
    some = any(kind in HALF_TYPES for kind in types.values())
    for node in iter_nodes(proto):
        if node.op_type != "QuantizeLinear":
            continue
        stored = types.get(node.input[2], 0) if len(node.input) > 2 else 0
        stored = attribute_value(node, "output_dtype") or stored
        known = [kind for kind in map(types.get, node.input[:2]) if kind]
        half = any(kind in HALF_TYPES for kind in known) if known else some
        if half and (stored not in FP8_TYPES or TensorProto.BFLOAT16 in known):
            return True
    return False


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALF_TYPES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
