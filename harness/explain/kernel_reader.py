"""Kernels of a compiled model by the nodes that became them, and what each quantized edge has become.

All of it is read from types of kernels. A pair takes effect if the kernel of its consumer reads the tensor quantized,
or moves it and writes it quantized. A product in which only one operand is quantized is computed in float, and a pair
whose QuantizeLinear and consumer became one kernel saves no memory traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.explain.layers import is_low_precision
from harness.graph.qdq.qdq_graph import DEQUANTIZE, QDQ_OPS, QDQGraph, node_name
from harness.graph.rules.agreements import PASSING_OPS, SCALING_OPS
from harness.graph.rules.operator_sets import LINEAR_OPS, MOVEMENT_OPS
from harness.runtimes.rtx_compile.layer_log import Kernel, KernelTensor
from search.space import Edge

GENERATED_KINDS = frozenset({"kgen", "runtime_function"})
"""Kernels that the compiler generates around a product, for instance to pad its channels."""
FUSED_KIND = "runtime_fusion"
"""A generated kernel with a product, whose name lists its steps: a Cast converts operands to float first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEffect:
    """A quantized edge of the file.

    Attributes:
        precision: The one that was asked for.
        effect: "taken", "float" (the kernel reads it in float), "inside", or "unknown" (no kernel names the consumer).
        kernel: Kernel of the consumer; "" if none names it.
    """

    tensor: str
    consumer: str
    slot: int
    precision: str
    effect: str
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayer:
    """An operator of the file that is linear or reads quantized tensors.

    Attributes:
        asked: Precisions of its inputs, "float" without a pair; of a linear operator data and weight.
        compiled: Precision that its kernel computes in; "" if no kernel names it.
        kernel: The kernel's name.
        kind: The kernel's kind.
    """

    name: str
    operator: str
    asked: tuple[str, ...]
    compiled: str
    kernel: str
    kind: str

    @property
    def is_fallback(self) -> bool:
        """Return whether data and weight are quantized in the file, and the kernel computes in float."""
        linear = self.operator in LINEAR_OPS and "float" not in self.asked
        return linear and bool(self.compiled) and not is_low_precision(self.compiled)


class KernelReader:
    """Kernels of a file by the nodes that became them."""

    def __init__(self, graph: QDQGraph, kernels: Sequence[Kernel]) -> None:
        self._graph, self._kernels = graph, kernels

    @cached_property
    def _by_node(self) -> Mapping[str, list[Kernel]]:
        found: dict[str, list[Kernel]] = {}
        for kernel in self._kernels:
            for name in dict.fromkeys(kernel.origin):
                found.setdefault(name, []).append(kernel)
        return found

    @cached_property
    def _nodes(self) -> Mapping[str, Any]:
        return dict(zip(self._graph.labels, self._graph.proto.graph.node, strict=True))

    def layers(self) -> Iterator[CompiledLayer]:
        """Yield the layers that are linear or read quantized tensors, in the order of the file."""
        asked = {(edge.consumer, edge.slot): edge for edge in self.edges}
        for label, node in self._nodes.items():
            linear = node.op_type in LINEAR_OPS
            found = [asked.get((label, slot)) for slot in range(2 if linear else len(node.input))]
            if node.op_type not in QDQ_OPS and (linear or any(found)):
                kernel = next(iter(self._main_kernels(node)), None)
                taken = next((edge.precision for edge in found if edge is not None and edge.effect == "taken"), "")
                if linear and kernel is not None:
                    taken = _product_type(kernel, len({*node.input[:2]}))
                yield CompiledLayer(
                    name=label,
                    operator=node.op_type,
                    asked=tuple("float" if edge is None else edge.precision for edge in found),
                    compiled=(taken or _float_type(kernel)) if kernel is not None else "",
                    kernel="" if kernel is None else kernel.name,
                    kind="" if kernel is None else kernel.kind,
                )

    @cached_property
    def edges(self) -> tuple[EdgeEffect, ...]:
        """Quantized edges of the file."""
        return tuple(self._explain_edge(edge, precision) for edge, precision in self._graph.edges.items())

    def _explain_edge(self, edge: Edge, precision: str) -> EdgeEffect:
        node = self._nodes.get(edge.consumer)
        kernels = [] if node is None else self._main_kernels(node)
        return EdgeEffect(
            tensor=edge.tensor,
            consumer=edge.consumer,
            slot=edge.slot,
            precision=precision,
            effect="unknown" if node is None else self._effect(node, edge.slot, kernels),
            kernel=kernels[0].name if kernels else "",
        )

    def _main_kernels(self, node: Any) -> list[Kernel]:
        """Return the kernels of a node; of a linear operator those that compute the product, if any is known."""
        found = self._by_node.get(node_name(node), [])
        products = [kernel for kernel in found if kernel.kind not in GENERATED_KINDS]
        return products or found if node.op_type in LINEAR_OPS else found

    def _effect(self, node: Any, slot: int, kernels: Sequence[Kernel]) -> str:
        if node.op_type in LINEAR_OPS:
            count = len({*node.input[:2]})
            taken = any(_product_type(kernel, count) for kernel in kernels)
            return "taken" if taken else "float" if kernels else "unknown"
        dequantize = self._graph.producer_through(node.input[slot], frozenset({"Cast", "Identity"}))
        quantize = self._graph.producer.get(dequantize.input[0]) if dequantize is not None else None
        made = "" if quantize is None or quantize.op_type == DEQUANTIZE else node_name(quantize)
        # A consumer that only moves values may be gone, and its DequantizeLinear be part of the next kernel.
        readers = [*kernels, *(self._by_node.get(node_name(dequantize), ()) if dequantize is not None else ())]
        for kernel in readers:
            moves = node.op_type in MOVEMENT_OPS | PASSING_OPS and any(
                map(is_low_precision, tensor_types(kernel.outputs))
            )
            if moves or (made not in kernel.origin and _has_low(kernel.inputs)):
                return "taken"
        if any(made in kernel.origin for kernel in readers):
            return "inside"
        if not kernels and node.op_type in MOVEMENT_OPS | PASSING_OPS | SCALING_OPS and self._is_read_quantized(node):
            return "taken"
        return "float" if kernels else "unknown"

    def _is_read_quantized(self, node: Any) -> bool:
        """Return whether a kernel behind a node that became none reads quantized values."""
        for reader in (reader for name in node.output for reader in self._graph.readers.get(name, ())):
            kernels, count = self._main_kernels(reader), len({*reader.input[:2]})
            linear = reader.op_type in LINEAR_OPS
            if any(_product_type(each, count) if linear else _has_low(each.inputs) for each in kernels):
                return True
            if not kernels and self._is_read_quantized(reader):
                return True
        return False


def _product_type(kernel: Kernel, operands: int) -> str:
    """Return the quantized type that a kernel multiplies in, or "" if it multiplies in float."""
    low = [t.type for t in (*kernel.inputs, *kernel.constants) if is_low_precision(t.type)]
    converts = kernel.kind == FUSED_KIND and "Cast" in kernel.name
    return low[0] if len(low) >= operands and not converts else ""


def _has_low(tensors: Sequence[KernelTensor]) -> bool:
    return any(is_low_precision(tensor.type) for tensor in tensors)


def _float_type(kernel: Kernel) -> str:
    types = (tensor.type for tensor in (*kernel.inputs, *kernel.constants, *kernel.outputs))
    return next((kind for kind in types if not is_low_precision(kind)), "")


def tensor_types(tensors: Sequence[KernelTensor]) -> list[str]:
    """Return the types of tensors, each once."""
    return list(dict.fromkeys(tensor.type for tensor in tensors))
