"""Report on what a compiler made of a Q/DQ model: precision of each layer, pairs that take effect, added kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from harness.explain.kernel_reader import CompiledLayer, EdgeEffect, KernelReader, tensor_types
from harness.explain.layers import is_low_precision
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.runtimes.rtx_compile.compiler import Compilation
from harness.runtimes.rtx_compile.layer_log import Kernel

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
        layers: In the order of the file.
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
        """Return the linear operators whose pairs are pure overhead."""
        return tuple(layer for layer in self.layers if layer.is_fallback)

    @property
    def idle_edges(self) -> tuple[EdgeEffect, ...]:
        """Return the quantized edges without effect."""
        return tuple(edge for edge in self.edges if edge.effect != "taken")

    @property
    def added_kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels that no node of the file became: changes of layout or type."""
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
        asked = sum("float" not in layer.asked for layer in self.layers if layer.operator in LINEAR_OPS)
        low = sum(map(is_low_precision, self.precision.values()))
        taken = len(self.edges) - len(self.idle_edges)
        return [
            f"{head}: built in {made.build_s:.1f} s; nothing was timed. {len(made.kernels)} kernels: {counts}",
            f"Linear operators: {len(self.precision)}; quantized in the file {asked}, in the kernels {low}",
            f"Quantized edges: {len(self.edges)}; {taken} take effect"
            + (f" ({taken / len(self.edges):.1%})" if self.edges else ""),
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
        layer_rows = [(e.name, e.operator, "/".join(e.asked), e.compiled or "-", e.kind) for e in self.layers]
        idle = [
            (e.tensor, f"{e.consumer or 'output'} {e.slot}", e.precision, EFFECT_TEXTS[e.effect])
            for e in self.idle_edges
        ]
        added = [
            (kernel.name, "+".join(tensor_types(kernel.inputs)), "+".join(tensor_types(kernel.outputs)))
            for kernel in self.added_kernels
        ]
        return [
            (LAYERS_TITLE, ("layer", "operator", "asked", "compiled", "kernel"), layer_rows),
            (
                "Silent fallbacks to float: the pairs cost time and gain nothing",
                ("layer", "operator", "asked", "compiled", "kernel"),
                [(e.name, e.operator, "/".join(e.asked), e.compiled, e.kind) for e in self.fallbacks],
            ),
            ("Pairs without effect", ("tensor", "consumer, input", "asked", "reason"), idle),
            ("Kernels that only change layout or type", ("kernel", "from", "to"), added),
        ]


def explain_compilation(path: Path, compilation: Compilation) -> CompiledReport:
    """Return what a compiler made of a file.

    Args:
        path: The file that was compiled.
        compilation: Its verdict; without kernels the report has no layers.

    Raises:
        UserError: The file is no ONNX model.
    """
    if not compilation.kernels:
        return CompiledReport(compilation=compilation, layers=(), edges=())
    reader = KernelReader(read_qdq_graph(path), compilation.kernels)
    return CompiledReport(compilation=compilation, layers=tuple(reader.layers()), edges=reader.edges)
