"""Report on a compiled Q/DQ model, and check of a file by the rules of a dialect and by the compiler.

The report (precision of each layer, pairs with an effect, added kernels) is derived from the types of kernels. A pair
takes effect if the kernel of its consumer reads the tensor
quantized, or moves it and writes it quantized. A product in which only one operand is quantized is computed in float,
and a pair whose QuantizeLinear and consumer became one kernel saves no memory traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from harness.base.errors import CandidateError, UserError, suggest_names
from harness.config.sections import PluginSpec
from harness.graph.io.model_reader import refuse_damage
from harness.graph.qdq.file_checks import CHECKED_DIALECTS, QDQProblem, find_qdq_problems
from harness.graph.qdq.qdq_graph import DEQUANTIZE, QDQ_OPS, QDQGraph, node_name, read_qdq_graph
from harness.graph.rules.agreements import PASSING_OPS, SCALING_OPS
from harness.graph.rules.operator_sets import LINEAR_OPS, MOVEMENT_OPS
from harness.insight.model_report import is_low_precision, open_static_file
from harness.plugins import registry
from harness.runtimes.rtx_compile import (
    DEFAULT_TARGET,
    TARGETS,
    Compilation,
    Kernel,
    KernelTensor,
    compile_file,
    require_target,
)

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
        quantized = (e for e in self.layers if e.operator in LINEAR_OPS and "float" not in e.requested)
        return tuple(layer for layer in quantized if layer.compiled and not is_low_precision(layer.compiled))

    @property
    def added_kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels without a node of the file, which change layout or type."""
        return tuple(kernel for kernel in self.compilation.kernels if not kernel.origin)

    def kernel_counts(self) -> Counter[str]:
        """Return the number of kernels by kind and types of their inputs."""
        return Counter(f"{kernel.kind} {_types(kernel.inputs) or '-'}" for kernel in self.compilation.kernels)

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
        effective = sum(edge.effect == "taken" for edge in self.edges)
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
        for title, header, rows in self.tables() if self.compilation.refusal is None else ():
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
        layers, fallbacks = (
            [(e.name, e.operator, "/".join(e.requested), e.compiled or "-", e.kind) for e in part]
            for part in (self.layers, self.fallbacks)
        )
        idle = [
            (e.tensor, f"{e.consumer or 'output'} {e.slot}", e.precision, EFFECT_TEXTS[e.effect])
            for e in self.edges
            if e.effect != "taken"
        ]
        added = [(e.name, _types(e.inputs), _types(e.outputs)) for e in self.added_kernels]
        header = ("layer", "operator", "in the file", "compiled", "kernel")
        return [
            (LAYERS_TITLE, header, layers),
            ("Silent fallbacks to float: the pairs cost time and gain nothing", header, fallbacks),
            ("Pairs without effect", ("tensor", "consumer, input", "in the file", "reason"), idle),
            ("Kernels that only change layout or type", ("kernel", "from", "to"), added),
        ]


def compile_report(use: str, backend: PluginSpec, shapes: Mapping[str, str], dims: Mapping[str, int]) -> CompiledReport:
    """Return what a compiler makes of a model; for the arguments see `harness.insight.model_report.explain_model`."""
    compiler = registry.create_plugin("benchmarker", backend.use, backend.params)
    with open_static_file(use, shapes, dims) as (path, _):
        try:
            return explain_compilation(path, compile_file(path, compiler.target))
        except CandidateError as error:
            raise UserError(f"{use} on {backend.use}: {error}") from error


def explain_compilation(path: Path, compilation: Compilation) -> CompiledReport:
    """Return the report on a compiled file.

    Args:
        path: The Q/DQ file.
        compilation: Verdict of the compiler; without kernels the report has no layers.
    """
    if not compilation.kernels:
        return CompiledReport(compilation=compilation, layers=(), edges=())
    reader = _KernelReader(read_qdq_graph(path), compilation.kernels)
    edges = tuple(reader.edges())
    return CompiledReport(compilation=compilation, layers=tuple(reader.layers(edges)), edges=edges)


class _KernelReader:
    """Reader of the layers and edges of a Q/DQ file, `graph`, from the kernels that the compiler made of it."""

    def __init__(self, graph: QDQGraph, kernels: Sequence[Kernel]) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._by_node: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            for name in dict.fromkeys(kernel.origin):
                self._by_node.setdefault(name, []).append(kernel)

    def layers(self, edges: Sequence[EdgeEffect]) -> Iterator[CompiledLayer]:
        """Yield the layers that are linear or read quantized tensors, in the order of the file."""
        by_input = {(edge.consumer, edge.slot): edge for edge in edges}
        for label, node in self._nodes.items():
            linear = node.op_type in LINEAR_OPS
            found = [by_input.get((label, slot)) for slot in range(2 if linear else len(node.input))]
            if node.op_type in QDQ_OPS or not (linear or any(found)):
                continue
            compiled = name = kind = ""
            for kernel in self._main_kernels(node)[:1]:
                name, kind = kernel.name, kernel.kind
                taken = (edge.precision for edge in found if edge is not None and edge.effect == "taken")
                compiled = _product_type(kernel, node) if linear else next(taken, "")
                types = [tensor.type for tensor in (*kernel.inputs, *kernel.constants, *kernel.outputs)]
                compiled = compiled or next((each for each in types if not is_low_precision(each)), "")
            yield CompiledLayer(
                name=label,
                operator=node.op_type,
                requested=tuple("float" if edge is None else edge.precision for edge in found),
                compiled=compiled,
                kernel=name,
                kind=kind,
            )

    def edges(self) -> Iterator[EdgeEffect]:
        """Yield the quantized edges of the file."""
        for edge, precision in self._graph.edges.items():
            node = self._nodes.get(edge.consumer)
            kernels = [] if node is None else self._main_kernels(node)
            yield EdgeEffect(
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
        otherwise = "float" if kernels else "unknown"
        if node.op_type in LINEAR_OPS:
            return "taken" if any(_product_type(kernel, node) for kernel in kernels) else otherwise
        dequantize = self._graph.producer_through(node.input[slot], frozenset({"Cast", "Identity"}))
        quantize = self._graph.producer.get(dequantize.input[0]) if dequantize is not None else None
        made = "" if quantize is None or quantize.op_type == DEQUANTIZE else node_name(quantize)
        moves = node.op_type in MOVEMENT_OPS | PASSING_OPS
        # A consumer that only moves values may be gone, and its DequantizeLinear be part of the next kernel.
        readers = [*kernels, *(self._by_node.get(node_name(dequantize), ()) if dequantize is not None else ())]
        for kernel in readers:
            if (moves and _has_low(kernel.outputs)) or (made not in kernel.origin and _has_low(kernel.inputs)):
                return "taken"
        if any(made in kernel.origin for kernel in readers):
            return "inside"
        gone = not kernels and (moves or node.op_type in SCALING_OPS)
        return "taken" if gone and self._is_read_quantized(node) else otherwise

    def _is_read_quantized(self, node: Any) -> bool:
        """Return whether a kernel after a node without a kernel reads quantized values."""
        for reader in (reader for name in node.output for reader in self._graph.readers.get(name, ())):
            kernels, linear = self._main_kernels(reader), reader.op_type in LINEAR_OPS
            if any(_product_type(each, reader) if linear else _has_low(each.inputs) for each in kernels):
                return True
            if not kernels and self._is_read_quantized(reader):
                return True
        return False


def _product_type(kernel: Kernel, node: Any) -> str:
    """Return the quantized type in which a kernel multiplies the operands of a node, or "" if it does in float."""
    low = [t.type for t in (*kernel.inputs, *kernel.constants) if is_low_precision(t.type)]
    converts = kernel.kind == FUSED_KIND and "Cast" in kernel.name
    return low[0] if len(low) >= len({*node.input[:2]}) and not converts else ""


def _has_low(tensors: Sequence[KernelTensor]) -> bool:
    return any(is_low_precision(tensor.type) for tensor in tensors)


def _types(tensors: Sequence[KernelTensor]) -> str:
    return "+".join(dict.fromkeys(tensor.type for tensor in tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """Verdict on a file.

    Attributes:
        dialect: Dialect whose rules were applied.
        target: Compute capability, as a key of `TARGETS`.
        problems: Violations of the rules.
        compilation: Verdict of the compiler; None if it did not run.
        reason: Why the compiler did not run; "" if it did.
    """

    dialect: str
    target: str
    problems: tuple[QDQProblem, ...]
    compilation: Compilation | None
    reason: str = ""

    @property
    def is_refused(self) -> bool:
        """Return whether the rules or the compiler refuse the file."""
        rules = any(problem.level == "refused" for problem in self.problems)
        return rules or (self.compilation is not None and self.compilation.refusal is not None)

    def lines(self) -> Iterator[str]:
        """Yield the verdict as text."""
        counts = Counter(problem.level for problem in self.problems)
        totals = ", ".join(f"{count} {level}" for level, count in counts.items())
        yield f"Rules of dialect {self.dialect} at {self.target}: {totals or 'nothing is refused'}"
        for problem in self.problems:
            yield f"  {problem.level}, {problem.rule}: {problem}"
        made = self.compilation
        if made is None:
            yield f"Compiler: not asked: {self.reason}"
            return
        built = f"built, {len(made.kernels)} kernels" if made.refusal is None else str(made.refusal)
        yield f"TensorRT-RTX {made.version} for {made.target}: {built}"
        for text in made.warnings:
            yield f"  warning: {text}"
        yield SCOPE_NOTE

    def data(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**asdict(self), "is_refused": self.is_refused, "note": SCOPE_NOTE}


def check_file(
    use: str, dialect: str, target: str, *, shapes: Mapping[str, str], dims: Mapping[str, int]
) -> FileVerdict:
    """Return the verdict on a model file.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        dialect: One of `CHECKED_DIALECTS`.
        target: Key of `TARGETS`.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
        dims: Sizes of dynamic dimensions by symbol.
    """
    if dialect not in CHECKED_DIALECTS:
        raise UserError(f"--dialect {dialect}: no rules about files; {suggest_names(dialect, CHECKED_DIALECTS)}")
    require_target(target)
    with open_static_file(use, shapes, dims) as (path, _):
        with refuse_damage(use):
            problems = tuple(find_qdq_problems(read_qdq_graph(path), TARGETS[target], CHECKED_DIALECTS[dialect]))
        compilation, reason = None, ""
        try:
            compilation = compile_file(path, target)
        except (UserError, CandidateError) as error:
            reason = str(error)
    return FileVerdict(dialect=dialect, target=target, problems=problems, compilation=compilation, reason=reason)


def hand_over_lines(path: Path, command: str, shapes: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield the compiler's report on a file, if it is installed, and the command that builds an engine elsewhere.

    Args:
        command: Command that builds the engine on a machine with a GPU.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
    """
    try:
        with open_static_file(str(path), shapes, {}) as (file, _):
            yield from explain_compilation(file, compile_file(file, DEFAULT_TARGET)).summary()
    except (UserError, CandidateError) as error:
        yield f"Not compiled on this machine: {error}"
    yield f"On a machine with a GPU and TensorRT: {command}"
