"""Float models with additional outputs: the errors that quantized inputs cause in the nodes that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from harness.graph.model import Model
from harness.graph.protos import copy_message
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.rules.operator_sets import CONVOLUTION_OPS
from harness.plugins.api import Array
from search.space import Edge

_NAME_PREFIX = "#form."
_TINY = float(np.finfo(np.float32).tiny)


class InputForm(NamedTuple):
    """Form of one quantized input in one file.

    Attributes:
        arrays: Scale and zero point of an activation, or the dequantized values of a weight alone.
        nodes: QuantizeLinear and DequantizeLinear of an activation; empty for a weight.
    """

    arrays: tuple[Array, ...]
    nodes: tuple[onnx.NodeProto, ...] = ()


def read_input_form(graph: QDQGraph, edge: Edge) -> InputForm:
    """Return the form of a quantized input in a Q/DQ model; `edge` must be one of `graph.edges`."""
    quantize, dequantize = graph.edge_pair(edge)
    scale, zero = (numpy_helper.to_array(graph.constants[name]) for name in dequantize.input[1:3])
    if quantize is not None:
        return InputForm(arrays=(scale, zero), nodes=(quantize, dequantize))
    stored = numpy_helper.to_array(graph.constants[dequantize.input[0]]).astype(np.float32)
    axis = helper.get_node_attr_value(dequantize, "axis") if scale.ndim else 0
    shape = [-1 if i == axis else 1 for i in range(stored.ndim)]
    return InputForm(arrays=((stored * scale.astype(np.float32).reshape(shape)).astype(scale.dtype),))


class ReaderErrors:
    """Float model with copies of nodes that read quantized inputs, and the squared errors of these copies as outputs.

    Attributes:
        proto: Copy of the model with the added nodes; its outputs are sums of squares.
    """

    def __init__(self, model: Model) -> None:
        self._model, self.proto = model, copy_message(model.proto)
        del self.proto.graph.output[:]
        self._readers = {node.name: self.proto.graph.node[node.index] for node in model.nodes}
        self._names = (f"{_NAME_PREFIX}{number}" for number in count())
        self._outputs: dict[Edge, tuple[str, dict[str, str]]] = {}

    def add_readers(self, edge: Edge, forms: Mapping[str, InputForm]) -> None:
        """Add a copy of the node at an edge for each different form of its input, and outputs for the squared errors.

        Args:
            edge: Edge of the float model, or an output of the model.
            forms: Forms of the input by name of a file; equal ones share a copy.
        """
        reader = self._readers.get(edge.consumer)
        result = edge.tensor if reader is None else reader.output[0]
        found: dict[str, str] = {}
        for name, form in forms.items():
            equal = next((n for n in found if all(map(np.array_equal, forms[n].arrays, form.arrays))), None)
            if equal is not None:
                found[name] = found[equal]
                continue
            grid = [next(self._names) for _ in form.arrays]
            tensors = map(numpy_helper.from_array, form.arrays, grid)
            self.proto.graph.initializer.extend(tensors)
            changed = edge.tensor if form.nodes else grid[0]
            for template in form.nodes:
                changed = self._add_copy(template, [changed, *grid])
            if reader is not None:
                inputs = list(reader.input)
                inputs[edge.slot] = changed
                changed = self._add_copy(reader, inputs)
            error = self._add("Sub", changed, result)
            if reader is not None and reader.op_type in CONVOLUTION_OPS:  # bias correction removes the mean error
                error = self._add("Sub", error, self._add("GlobalAveragePool", error))
            found[name] = self._add_energy(error, self._model.types[result].dtype)
        self._outputs[edge] = (self._add_energy(result, self._model.types[result].dtype), found)

    def relative_errors(self, sums: Mapping[str, float]) -> dict[Edge, dict[str, float]]:
        """Return the squared error of each form relative to the squared float result, by edge and name of the form.

        Args:
            sums: Sum of each output of `proto` over the batches, by name.
        """
        return {
            edge: {name: sums[output] / max(sums[energy], _TINY) for name, output in found.items()}
            for edge, (energy, found) in self._outputs.items()
        }

    def _add(self, op: str, *inputs: str, **attributes: int) -> str:
        made = helper.make_node(op, inputs, [next(self._names)], **attributes)
        self.proto.graph.node.append(made)
        return str(made.output[0])

    def _add_copy(self, template: onnx.NodeProto, inputs: Sequence[str]) -> str:
        node = copy_message(template)
        node.name = next(self._names)
        node.input[:] = inputs
        node.output[:] = [next(self._names) if name else "" for name in template.output]
        self.proto.graph.node.append(node)
        return str(node.output[0])

    def _add_energy(self, tensor: str, dtype: str) -> str:
        whole = tensor if dtype == "float" else self._add("Cast", tensor, to=onnx.TensorProto.FLOAT)
        energy = self._add("ReduceSumSquare", whole, keepdims=0)
        self.proto.graph.output.append(helper.make_tensor_value_info(energy, onnx.TensorProto.FLOAT, ()))
        return energy
