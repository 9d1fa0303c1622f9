"""Rounding of weights in which later weights of a channel compensate the errors of earlier ones.

Objective: ||W X - W' X||^2 of each layer, where X is its quantized data. Errors of the data are left out, because a fit
to them did not hold on other samples. Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative
pre-trained transformers", arXiv:2210.17323, equations 1 to 3, in the order of decreasing diagonals. The compared
results are the layer's own, before an activation or an Add that a runtime fuses with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits

from harness.accuracy.calibration.range_estimators import finite_ranges
from harness.accuracy.calibration.ranges import calibrate_by_methods
from harness.accuracy.recovery.pipeline import Feeds, PlacedModel, quantized_layers
from harness.graph.io.files import write_model
from harness.graph.load import save_to_folder
from harness.graph.model import Model, Node
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.quantize.numeric_choices import is_depthwise
from harness.graph.quantize.scales import ScaleLinks
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES, is_private, replace_constants, with_own_biases
from harness.graph.reader_errors import ReaderErrors, read_input_form
from harness.graph.segmented_run import SegmentedRun, channel_maxima, measure_layer_shifts, sum_outputs
from harness.plugins import registry
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


_HOMOGENEOUS_OPS = frozenset({"Identity", "LeakyRelu", "Relu"})
"""Operators with f(s x) = s f(x) for s > 0, through which a scale can move."""
_MAX_SWEEPS = 20
_CONVERGED_FACTOR = 1.01
_SMOOTHING_EXPONENT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledPair:
    """Constants around a tensor whose channels may be scaled.

    Attributes:
        before: Constants that are divided by the scales along their first axis.
        after: Constants that are multiplied by the scales, each with its axis.
        tensor: Name of the scaled tensor.
    """

    before: tuple[str, ...]
    after: tuple[tuple[str, int], ...]
    tensor: str


class CrossLayerEqualization:
    """Scaling of the channels between two convolutions, through ReLU, for equal weight ranges on both sides.

    s_i = sqrt(r1_i r2_i) / r2_i (Nagel et al. 2019, arXiv:1906.04721, equation 11), with the largest range of all
    convolutions that read the channel.
    """

    keeps_function = True

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Equalize all pairs of convolutions until they change by less than 1 %; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if the model has no such pair.
        """
        pairs = [pair for node in placed.model.nodes if (pair := _convolution_pair(placed.model, node))]
        if not pairs:
            return None
        arrays = _private_arrays(placed.model, pairs)
        for _ in range(_MAX_SWEEPS):
            changes = []
            for pair in pairs:
                weight = arrays[pair.before[0]]
                first, second = np.abs(weight).reshape(len(weight), -1).max(axis=1), _channel_magnitudes(pair, arrays)
                usable = (first > 0) & (second > 0)
                scales = np.sqrt(np.where(usable, first, 1) / np.where(usable, second, 1))
                _scale_channels(pair, arrays, scales)
                changes.append(float(np.max(np.maximum(scales, 1 / scales))))
            if max(changes) < _CONVERGED_FACTOR:
                break
        return replace(placed, model=replace_constants(placed.model, arrays))


class SmoothQuant:
    """Move of the range of activation channels from a LayerNorm into the weights of the MatMuls after it.

    s_j = max|X_j|^a / max|W_j|^(1 - a) with a = 0.5; scale and shift of the normalization are divided by s.
    """

    keeps_function = True

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Move the ranges of all such channels into the weights; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if no LayerNorm is followed by MatMuls only.
        """
        pairs = [pair for node in placed.model.nodes if (pair := _normalized_pair(placed.model, node))]
        if not pairs:
            return None
        path = save_to_folder(placed.model, folder / "smoothed")
        what, tensors = f"smoothing of {placed.model.source}", [pair.tensor for pair in pairs]
        maxima = call_in_helper_process(what, channel_maxima, path, tensors, batches, factor=RUNTIME_FACTOR)
        arrays = _private_arrays(placed.model, pairs)
        for pair in pairs:
            after = _channel_magnitudes(pair, arrays)
            found = maxima[pair.tensor].astype(np.float64)
            usable = (found > 0) & (after > 0)
            powers = (
                np.where(usable, found, 1) ** _SMOOTHING_EXPONENT,
                np.where(usable, after, 1) ** (1 - _SMOOTHING_EXPONENT),
            )
            _scale_channels(pair, arrays, powers[0] / powers[1])
        return replace(placed, model=replace_constants(placed.model, arrays))


def _private_arrays(model: Model, pairs: Sequence[_ScaledPair]) -> dict[str, Array]:
    names = {name for pair in pairs for name in (*pair.before, *(name for name, _ in pair.after))}
    arrays = ((name, model.constant_array(name)) for name in sorted(names))
    return {name: array.astype(np.float64) for name, array in arrays if array is not None}


def _channel_magnitudes(pair: _ScaledPair, arrays: dict[str, Array]) -> Array:
    """Return the largest magnitude of the weights that read each channel."""
    found = [np.abs(np.moveaxis(arrays[name], axis, 0)) for name, axis in pair.after]
    return np.asarray(np.max([each.reshape(len(each), -1).max(axis=1) for each in found], axis=0))


def _scale_channels(pair: _ScaledPair, arrays: dict[str, Array], scales: Array) -> None:
    """Divide the constants before the tensor by the scales of its channels, and multiply those after it, in place."""
    for name in pair.before:
        arrays[name] = arrays[name] / scales.reshape(-1, *[1] * (arrays[name].ndim - 1))
    for name, axis in pair.after:
        shape = [-1 if i == axis else 1 for i in range(arrays[name].ndim)]
        arrays[name] = arrays[name] * scales.reshape(shape)


def _readers(model: Model, tensor: str) -> list[tuple[Node, int]] | None:
    """Return the consumers of a tensor with their input indices; None if it is an output or a subgraph reads it."""
    if tensor in model.outputs or tensor in model.captured:
        return None
    return [(model.nodes[index], slot) for index, slot in model.consumers.get(tensor, ())]


def _convolution_pair(model: Model, node: Node) -> _ScaledPair | None:
    if node.op != "Conv" or node.opaque or not all(is_private(model, name) for name in node.inputs[1:] if name):
        return None
    tensor, readers = node.outputs[0], _readers(model, node.outputs[0])
    while readers is not None and len(readers) == 1 and readers[0][0].op in _HOMOGENEOUS_OPS:
        tensor = readers[0][0].outputs[0]
        readers = _readers(model, tensor)
    after = []
    for reader, slot in readers or ():
        grouped = reader.attributes.get("group", 1) != 1
        channels_differ = grouped and (
            not is_depthwise(model, reader) or model.constants[reader.inputs[1]].dims[0] != reader.attributes["group"]
        )
        if reader.op != "Conv" or slot != 0 or not is_private(model, reader.inputs[1]) or channels_differ:
            return None
        after.append((reader.inputs[1], 0 if grouped else 1))
    before = tuple(name for name in node.inputs[1:3] if name)
    return _ScaledPair(before=before, after=tuple(after), tensor=tensor) if after else None


def _normalized_pair(model: Model, node: Node) -> _ScaledPair | None:
    before = tuple(name for name in node.inputs[1:3] if name)  # scale and shift
    if node.op == "Add":  # at the end of a normalization of single operators, after a Mul
        shift = next((name for name in node.inputs if name in model.constants), "")
        mul = next((made for name in node.inputs if (made := model.producer_node(name)) and made.op == "Mul"), None)
        alone = mul is not None and _readers(model, mul.outputs[0])
        scale = next((name for name in mul.inputs if name in model.constants), "") if mul is not None else ""
        before = (scale, shift) if alone and len(alone) == 1 else ()
    elif node.op != "LayerNormalization":
        return None
    width = model.types[node.outputs[0]].shape[-1] if node.outputs[0] in model.types else 0
    if not before or not all(
        is_private(model, name) and tuple(model.constants[name].dims) == (width,) for name in before
    ):
        return None
    readers, after = _readers(model, node.outputs[0]), []
    for reader, slot in readers or ():
        matrix = reader.inputs[1] if len(reader.inputs) > 1 else ""
        if (
            reader.op != "MatMul"
            or slot != 0
            or not is_private(model, matrix)
            or len(model.constants[matrix].dims) != 2
        ):
            return None
        after.append((matrix, 0))
    return _ScaledPair(before=before, after=tuple(after), tensor=node.outputs[0]) if after else None


MAX_BIAS_SAMPLES = 16
"""Largest number of samples; the activations of all samples are in memory at the same time."""


class FastBiasCorrection:
    """Correction of each layer's bias by the mean error of its results on the float model's activations."""

    keeps_function = False
    sequential = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Correct the biases of the quantized layers, adding biases where there are none.

        See `RecoveryStep.apply` for arguments. The result is None if no layer can have a bias.
        """
        layers = quantized_layers(placed)
        model, biases = with_own_biases(placed.model, layers)
        axes = {node.name: 1 if node.op.startswith("Conv") else -1 for node in layers if node.name in biases}
        if not axes:
            return None
        files = (
            save_to_folder(placed.reference, folder / "reference"),
            replace(placed, model=model).export(folder / "uncorrected.onnx"),
        )
        what = f"bias correction of {model.source}"
        samples = batches[:MAX_BIAS_SAMPLES]
        shifts = call_in_helper_process(
            what, measure_layer_shifts, *files, axes, samples, self.sequential, factor=RUNTIME_FACTOR
        )
        values = {biases[name]: model.constant_array(biases[name]) for name in shifts}
        corrected = {biases[name]: values[biases[name]] - shift for name, shift in shifts.items()}
        return replace(placed, model=replace_constants(model, corrected))


class SequentialBiasCorrection(FastBiasCorrection):
    """Correction of each layer's bias, in graph order, by its mean error on the results of corrected earlier layers."""

    sequential = True


MAX_ESTIMATOR_SAMPLES = 6
"""Largest number of samples from which ranges are estimated, and of other samples on which errors are measured."""
_AS_GIVEN = ""


class EstimatorSelection:
    """Choice of the estimator, or of the present range or weights, with the smallest error for every quantized input.

    Tensors that share a scale share the estimator. Scales by channel are not changed, because each channel has its own.
    The chosen quantized weights replace the float weights; quantizing them again gives the same values.
    """

    keeps_function = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Select the estimators; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if the present ranges and weights have the smallest errors.
        """
        path = save_to_folder(placed.reference, folder / "reference")
        samples = batches[: 2 * MAX_ESTIMATOR_SAMPLES]
        variants = {_AS_GIVEN: placed}
        by_method = calibrate_by_methods(
            path,
            sorted({edge.tensor for edge, _ in placed.resolved} & placed.ranges.keys()),
            samples[::2],
            methods=[plugin.name for plugin in registry.installed_plugins("range estimator")],
            percentile=placed.choices.percentile,
            source=placed.model.source,
        )
        for method, ranges in by_method.items():
            usable = {name: pair for name, pair in finite_ranges(ranges).items() if name in placed.ranges}
            variants[f"activations {method}"] = replace(placed, ranges={**placed.ranges, **usable})
        for plugin in registry.installed_plugins("weight estimator"):
            choices = replace(placed.choices, weights=plugin.name)
            variants[f"weights {plugin.name}"] = replace(placed, choices=choices)
        graphs = {name: read_qdq_graph(each.export(folder / "variant.onnx")) for name, each in variants.items()}
        forms = {
            edge: {name: read_input_form(graph, edge) for name, graph in graphs.items()}
            for edge, _ in placed.resolved
            if _is_selectable(placed, edge)
        }
        measured = ReaderErrors(placed.reference)
        for edge, candidates in forms.items():
            measured.add_readers(edge, candidates)
        file = write_model(measured.proto, folder / "errors.onnx")
        what = f"estimator selection of {placed.model.source}"
        sums = call_in_helper_process(what, sum_outputs, file, samples[1::2], factor=RUNTIME_FACTOR)
        best = _best_variants(placed, measured.relative_errors(sums))
        changed = {edge: name for edge, name in best.items() if name != _AS_GIVEN}
        if not changed:
            return None
        chosen_ranges, weights = dict(placed.ranges), {}
        for edge, name in changed.items():
            if edge.tensor in placed.model.constants:
                weights[edge.tensor] = forms[edge][name].arrays[0]
            else:
                chosen_ranges[edge.tensor] = variants[name].ranges[edge.tensor]
        return replace(placed, model=replace_constants(placed.model, weights), ranges=chosen_ranges)


def _is_selectable(placed: PlacedModel, edge: Edge) -> bool:
    """Return whether an edge reads an activation, or a weight that only one linear operator reads."""
    model = placed.model
    reader = next((node for node in model.nodes if node.name == edge.consumer), None)
    result = edge.tensor if reader is None else reader.outputs[0]
    if result not in model.types or model.types[result].dtype not in QUANTIZABLE_DTYPES:
        return False
    if edge.tensor not in model.constants:
        by_channel = placed.choices.depthwise == "channel" and reader is not None and is_depthwise(model, reader)
        return not by_channel
    is_weight = reader is not None and edge.slot == 1 and reader.op in placed.dialect.linear_ops
    return is_weight and is_private(model, edge.tensor)


def _best_variants(placed: PlacedModel, errors: Mapping[Edge, Mapping[str, float]]) -> dict[Edge, str]:
    """Return the variant with the smallest sum of errors for each edge; edges that share a scale have the same one."""
    links = ScaleLinks(placed.model, placed.dialect)
    quantized = {edge.consumer for edge, _ in placed.resolved}
    joins = (node for node in links.joins if node.name in quantized or node.index in links.fixed)
    joined = {links.group_name(node.inputs[0]) for node in joins}
    units: dict[str, list[Edge]] = defaultdict(list)
    for edge in errors:
        group = links.group_name(edge.tensor)
        units[group if group in joined else edge.tensor].append(edge)
    best = {}
    for edges in units.values():
        sums = {name: sum(errors[edge][name] for edge in edges) for name in errors[edges[0]]}
        best.update(dict.fromkeys(edges, min(sums, key=lambda name: sums[name])))
    return best
