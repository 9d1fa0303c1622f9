"""Report on a compiled Q/DQ model: precision of each layer, pairs with an effect, and added kernels.

The report is derived from the types of kernels. A pair takes effect if the kernel of its consumer reads the tensor
quantized, or moves it and writes it quantized. A product in which only one operand is quantized is computed in float,
and a pair whose QuantizeLinear and consumer became one kernel saves no memory traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from harness.graph.qdq.qdq_graph import DEQUANTIZE, QDQ_OPS, QDQGraph, node_name, read_qdq_graph
from harness.graph.rules.agreements import PASSING_OPS, SCALING_OPS
from harness.graph.rules.operator_sets import LINEAR_OPS, MOVEMENT_OPS
from harness.insight.layers import is_low_precision
from harness.runtimes.rtx_compile.compiler import Compilation, Kernel, KernelTensor
from search.space import Edge

SCOPE_NOTE = (
    "For TensorRT, refusals of the parser should be the same (it is NVIDIA's ONNX parser; unverified). Refusals of the "
    "builder and the kernels hold only for TensorRT-RTX; a successful build proves neither speed nor kernels at run "
    "time."
)
LAYERS_TITLE = "Layers"
EFFECT_TEXTS = {
    "float": "the kernel reads it in float",
    "inside": "QuantizeLinear and consumer became one kernel",
    "unknown": "no kernel names the consumer",
}


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """Report on a compiled model.

    Attributes:
        layers: Layers in the order of the file.
        edges: All quantized edges of the file.
    """

    compilation: Compilation
    layers: tuple[CompiledLayer, ...]
    edges: tuple[EdgeEffect, ...]

    @property
    def precision(self) -> Mapping[str, str]:
        """Return the precision of each linear operator by name."""
        return {layer.name: layer.compiled for layer in self.layers if layer.operator in LINEAR_OPS}

    @property
    def fallbacks(self) -> tuple[CompiledLayer, ...]:
        """Return the linear operators with quantized data and weight that are computed in float."""
        return tuple(layer for layer in self.layers if layer.is_fallback)

    @property
    def idle_edges(self) -> tuple[EdgeEffect, ...]:
        """Return the quantized edges without effect."""
        return tuple(edge for edge in self.edges if edge.effect != "taken")

    @property
    def added_kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels without a node of the file, which change layout or type."""
        return tuple(kernel for kernel in self.compilation.kernels if not kernel.origin)

    def kernel_counts(self) -> Counter[str]:
        """Return the number of kernels by kind and types of their inputs."""
        return Counter(
            f"{kernel.kind} {'+'.join(tensor_types(kernel.inputs)) or '-'}" for kernel in self.compilation.kernels
        )

    def data(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "kernel_counts": dict(self.kernel_counts()), "note": SCOPE_NOTE}

    def summary(self) -> list[str]:
        """Return the head of the report, as lines."""
        made = self.compilation
        head = f"TensorRT-RTX {made.version} for {made.target}"
        if made.refusal is not None:
            return [f"{head}: {made.refusal}", SCOPE_NOTE]
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kernel_counts().most_common())
        quantized = sum("float" not in layer.requested for layer in self.layers if layer.operator in LINEAR_OPS)
        low = sum(map(is_low_precision, self.precision.values()))
        effective = len(self.edges) - len(self.idle_edges)
        return [
            f"{head}: built in {made.build_s:.1f} s; nothing was timed. {len(made.kernels)} kernels: {counts}",
            f"Linear operators: {len(self.precision)}; quantized in the file {quantized}, in the kernels {low}",
            f"Quantized edges: {len(self.edges)}; {effective} take effect"
            + (f" ({effective / len(self.edges):.1%})" if self.edges else ""),
            *(f"Warning of the compiler: {text}" for text in made.warnings),
            SCOPE_NOTE,
        ]

    def lines(self, top: int) -> Iterator[str]:
        """Yield the report as text; each table but that of the layers has at most `top` rows."""
        yield from self.summary()
        if self.compilation.refusal is not None:
            return
        for title, header, rows in self.tables():
            shown = rows if title == LAYERS_TITLE else rows[:top]
            yield f"{title}: {len(rows)}"
            if rows:
                yield from tabulate(shown, headers=header, tablefmt="plain", disable_numparse=True).splitlines()
            if len(shown) < len(rows):
                yield f"  and {len(rows) - len(shown)} more"

    def html(self) -> str:
        """Return the report as an HTML page, which opens offline."""
        from harness.report.page.html_document import render_html

        values = {"title": f"Compiled for {self.compilation.target}", "head": self.summary(), "tables": self.tables()}
        return render_html("compiled.html.j2", (), {}, values)

    def tables(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Return the tables of the report: title, header, rows."""
        layer_rows = [(e.name, e.operator, "/".join(e.requested), e.compiled or "-", e.kind) for e in self.layers]
        idle = [
            (e.tensor, f"{e.consumer or 'output'} {e.slot}", e.precision, EFFECT_TEXTS[e.effect])
            for e in self.idle_edges
        ]
        added = [
            (kernel.name, "+".join(tensor_types(kernel.inputs)), "+".join(tensor_types(kernel.outputs)))
            for kernel in self.added_kernels
        ]
        return [
            (LAYERS_TITLE, ("layer", "operator", "in the file", "compiled", "kernel"), layer_rows),
            (
                "Silent fallbacks to float: the pairs cost time and gain nothing",
                ("layer", "operator", "in the file", "compiled", "kernel"),
                [(e.name, e.operator, "/".join(e.requested), e.compiled, e.kind) for e in self.fallbacks],
            ),
            ("Pairs without effect", ("tensor", "consumer, input", "in the file", "reason"), idle),
            ("Kernels that only change layout or type", ("kernel", "from", "to"), added),
        ]


def explain_compilation(path: Path, compilation: Compilation) -> CompiledReport:
    """Return the report on a compiled file.

    Args:
        path: The Q/DQ file.
        compilation: Verdict of the compiler; without kernels the report has no layers.

    Raises:
        UserError: The file is no ONNX model.
    """
    if not compilation.kernels:
        return CompiledReport(compilation=compilation, layers=(), edges=())
    reader = KernelReader(read_qdq_graph(path), compilation.kernels)
    return CompiledReport(compilation=compilation, layers=tuple(reader.layers()), edges=reader.edges)


GENERATED_KINDS = frozenset({"kgen", "runtime_function"})
"""Kernels that the compiler generates around a product, for instance to pad its channels."""
FUSED_KIND = "runtime_fusion"
"""A generated kernel with a product, whose name lists its steps: a Cast converts operands to float first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEffect:
    """A quantized edge of the file.

    Attributes:
        precision: Precision of the pair in the file.
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
        requested: Precisions of its inputs in the file (data and weight of a linear operator); "float" without a pair.
        compiled: Precision of its kernel; "" if no kernel names the operator.
    """

    name: str
    operator: str
    requested: tuple[str, ...]
    compiled: str
    kernel: str
    kind: str

    @property
    def is_fallback(self) -> bool:
        """Return whether data and weight are quantized in the file, and the kernel computes in float."""
        linear = self.operator in LINEAR_OPS and "float" not in self.requested
        return linear and bool(self.compiled) and not is_low_precision(self.compiled)


class KernelReader:
    """Reader of the layers and edges of a Q/DQ file, `graph`, from the kernels that the compiler made of it."""

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
        by_input = {(edge.consumer, edge.slot): edge for edge in self.edges}
        for label, node in self._nodes.items():
            linear = node.op_type in LINEAR_OPS
            found = [by_input.get((label, slot)) for slot in range(2 if linear else len(node.input))]
            if node.op_type not in QDQ_OPS and (linear or any(found)):
                kernel = next(iter(self._main_kernels(node)), None)
                taken = next((edge.precision for edge in found if edge is not None and edge.effect == "taken"), "")
                if linear and kernel is not None:
                    taken = _product_type(kernel, len({*node.input[:2]}))
                yield CompiledLayer(
                    name=label,
                    operator=node.op_type,
                    requested=tuple("float" if edge is None else edge.precision for edge in found),
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
        kernels = self._by_node.get(node_name(node), [])
        products = [kernel for kernel in kernels if kernel.kind not in GENERATED_KINDS]
        return products or kernels if node.op_type in LINEAR_OPS else kernels

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
        """Return whether a kernel after a node without a kernel reads quantized values."""
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
