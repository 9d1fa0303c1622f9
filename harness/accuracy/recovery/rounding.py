"""Rounding of weights in which later weights of a channel compensate the errors of earlier ones.

Objective: ||W X - W' X||^2 of each layer, where X is its quantized data. Errors of the data are left out, because a fit
to them did not hold on other samples. Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative
pre-trained transformers", arXiv:2210.17323, equations 1 to 3, in the order of decreasing diagonals. The compared
results are the layer's own, before an activation or an Add that a runtime fuses with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits

from harness.accuracy.recovery.pipeline import Feeds, PlacedModel, quantized_layers
from harness.graph.constant_edits import is_private, replace_constants
from harness.graph.load import save_to_folder
from harness.graph.model import Node
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.segmented_run import SegmentedRun
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from search.space import Edge

MAX_SAMPLES = 16
MAX_COLUMNS = 4096
"""Largest number of positions, over all samples, to which a layer is fitted."""
DAMPING = 0.01
"""Share of the mean diagonal element that is added to each diagonal element, as in GPTQ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnfoldedLayer:
    """Linear operator, with the attributes of a convolution for unfolding its data.

    Attributes:
        edge: Input with the quantized weight.
        transposed: Whether the shape of the weight is [inputs, outputs].
    """

    name: str
    op: str
    edge: Edge
    groups: int = 1
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    transposed: bool = False

    def rows(self, weight: Array) -> Array:
        """Return a weight as [groups, outputs, inputs]."""
        matrix = weight.T if self.transposed else weight
        return matrix.reshape(self.groups, len(matrix) // self.groups, -1)

    def restore(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Return rows as a weight of the given shape; the inverse of `rows`."""
        return rows[0].T if self.transposed else rows.reshape(shape)

    def unfold(self, data: Array, kernel: tuple[int, ...], count: int) -> Array:
        """Return the data that multiply the weights of each result, as [groups, weights, at most `count` results]."""
        if self.op != "Conv":
            rows = data.reshape(-1, data.shape[-1])
            return rows[_spread(len(rows), count)].T[None]
        rank = len(kernel)
        edges = [(0, 0), (0, 0), *zip(self.pads[:rank], self.pads[rank:], strict=True)]
        sizes = [(size - 1) * step + 1 for size, step in zip(kernel, self.dilations, strict=True)]
        windows = sliding_window_view(np.pad(data, edges), sizes, axis=tuple(range(2, 2 + rank)))
        steps = tuple(slice(None, None, step) for step in (1, 1, *self.strides, *self.dilations))
        windows = np.moveaxis(windows[steps], 1, 1 + rank)  # [batch, *positions, channels, *kernel]
        places = np.unravel_index(_spread(int(np.prod(windows.shape[: 1 + rank])), count), windows.shape[: 1 + rank])
        chosen = windows[places]
        return np.moveaxis(chosen.reshape(len(chosen), self.groups, -1), 0, 2)


class CompensatedRounding:
    """Rounding of the weights of each linear operator for the least error of its results, with unchanged scales."""

    keeps_function = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Round the INT8 weights again; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if no layer has such a weight.
        """
        precisions = dict(placed.resolved)
        layers = [layer for node in quantized_layers(placed) if (layer := _describe(placed, node, precisions))]
        if not layers:
            return None
        files = save_to_folder(placed.reference, folder / "reference"), placed.export(folder / "unrounded.onnx")
        what = f"rounding of {placed.model.source}"
        samples = batches[:MAX_SAMPLES]
        weights = call_in_helper_process(what, _round_layers, *files, layers, samples, factor=RUNTIME_FACTOR)
        return replace(placed, model=replace_constants(placed.model, weights))


def _describe(placed: PlacedModel, node: Node, precisions: Mapping[Edge, str]) -> _UnfoldedLayer | None:
    """Return the layer of an operator whose INT8 weight may be rounded again, or None for any other operator."""
    edge, get = Edge(node.inputs[1], node.name, 1), node.attributes.get
    dims = tuple(placed.model.constants[node.inputs[1]].dims)
    fits = {
        "Conv": get("auto_pad", "NOTSET") in ("NOTSET", b"NOTSET"),
        "Gemm": not get("transA", 0) and get("alpha", 1.0) == 1,
        "MatMul": len(dims) == 2,
    }
    if precisions.get(edge) != "int8" or not fits.get(node.op, False) or not is_private(placed.model, node.inputs[1]):
        return None
    rank = len(dims) - 2
    return _UnfoldedLayer(
        name=node.name,
        op=node.op,
        edge=edge,
        groups=get("group", 1) if node.op == "Conv" else 1,
        strides=tuple(get("strides", [1] * rank)),
        dilations=tuple(get("dilations", [1] * rank)),
        pads=tuple(get("pads", [0] * 2 * rank)),
        transposed=node.op == "MatMul" or (node.op == "Gemm" and not get("transB", 0)),
    )


def _round_layers(
    float_path: Path, quantized_path: Path, layers: Sequence[_UnfoldedLayer], batches: Sequence[Feeds]
) -> dict[str, Array]:
    """Return the rounded weights of layers by name, each fitted to the float model's data quantized by its own pair."""
    graphs = read_qdq_graph(float_path), read_qdq_graph(quantized_path)
    runs = SegmentedRun(float_path, batches), SegmentedRun(quantized_path, batches)
    by_name, found = {layer.name: layer for layer in layers}, dict[str, Array]()
    for layer in (by_name[name] for name in runs[1].names if name in by_name):
        _, dequantize = graphs[1].edge_pair(layer.edge)
        stored, scale = map(graphs[1].values, dequantize.input[:2])
        weight = graphs[0].values(layer.edge.tensor)
        _, data = graphs[1].edge_pair(replace(layer.edge, slot=0))
        runs[1].run_before(layer.name)
        count, inputs = MAX_COLUMNS // len(batches), runs[1].values[data.output[0]]
        unfolded = np.concatenate([layer.unfold(each, stored.shape[2:], count) for each in inputs], axis=2)
        exact = unfolded.astype(np.float64)
        moments = exact @ np.swapaxes(exact, 1, 2)
        steps = np.broadcast_to(scale.reshape(-1, 1), (stored.shape[int(layer.transposed)], 1))
        rows, kept = (layer.rows(each) for each in (weight, stored))
        with threadpool_limits(limits=1):  # several threads take up to 20 times as long for a small factorization
            rounded = round_compensated(rows, kept, steps.reshape(*rows.shape[:2], 1), moments)
        found[layer.edge.tensor] = layer.restore(rounded, stored.shape)
        result = runs[0].run_to(layer.name)
        runs[1].skip(layer.name, runs[0].values[result])
    return found


def round_compensated(weight: Array, stored: Array, scale: Array, moments: Array) -> Array:
    """Return weights that are multiples of the scales and give a small error of the results, in the shape of `weight`.

    With moments D = R R^T and R upper triangular, the squared error of a row w is |(w - w') R|^2, where column j
    depends on the weights up to j only. So each weight is rounded in turn to the value that compensates the errors of
    earlier weights in its column; this is GPTQ without an inverse. The largest stored weight of each row keeps its
    value, so that its magnitude gives the same scale again.

    Args:
        weight: Float weights as [groups, rows, columns].
        stored: The weights rounded to the nearest integer multiples of the scales, as integers.
        scale: Scale of each row as [groups, rows, 1].
        moments: Sums over positions of products of the layer's inputs as [groups, columns, columns].
    """
    columns = moments.shape[-1]
    diagonals = np.einsum("gii->gi", moments)
    damping = np.maximum(DAMPING * diagonals.mean(axis=1), np.finfo(np.float32).tiny)
    order = np.argsort(-diagonals, axis=1, kind="stable")
    groups, back = np.arange(len(order))[:, None, None], order[:, ::-1]
    sorted_back = moments[groups, back[:, :, None], back[:, None]] + damping[:, None, None] * np.eye(columns)
    factors = np.linalg.cholesky(sorted_back)[:, ::-1, ::-1]
    wanted, kept = (np.take_along_axis(each, order[:, None], axis=2) for each in (weight, stored))
    largest, limit = np.abs(kept).argmax(axis=2), np.abs(kept).max(axis=2)
    rounded, errors = (np.empty(wanted.shape) for _ in range(2))
    for column in range(columns):
        before = factors[:, :column, column, None] / factors[:, column, column, None, None]
        compensated = wanted[:, :, column] + (errors[:, :, :column] @ before)[:, :, 0]
        nearest = np.clip(np.rint(compensated / scale[:, :, 0]), -limit, limit)
        rounded[:, :, column] = np.where(largest == column, kept[:, :, column], nearest) * scale[:, :, 0]
        errors[:, :, column] = wanted[:, :, column] - rounded[:, :, column]
    return np.take_along_axis(rounded, np.argsort(order, axis=1)[:, None], axis=2).astype(weight.dtype)


def _spread(size: int, count: int) -> Array:
    """Return at most `count` indices, evenly distributed below `size`."""
    return np.linspace(0, size - 1, min(size, count)).astype(np.int64)
