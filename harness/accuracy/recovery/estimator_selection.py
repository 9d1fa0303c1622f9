"""Choice of the range estimator with the smallest error of the consumers, for each activation and each weight.

The criterion is the squared error of a consumer's result with one input quantized, as in Wu et al. 2020, "EasyQuant:
post-training quantization via scale optimization", arXiv:2006.16669, section 3, but among estimators. One model
contains all consumers with all estimators, so one pass over the samples decides about every input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.accuracy.calibration.ranges import calibrate_by_methods
from harness.accuracy.calibration.usable_ranges import finite_ranges
from harness.accuracy.recovery.pipeline import Feeds, PlacedModel
from harness.graph.constant_edits import is_private, replace_constants
from harness.graph.io.files import write_model
from harness.graph.load import save_to_folder
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.quantize.numeric_choices import is_depthwise
from harness.graph.quantize.scales import ScaleLinks
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES
from harness.graph.reader_errors import ReaderErrors, read_input_form
from harness.graph.segmented_run import sum_outputs
from harness.plugins import registry
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from search.space import Edge

MAX_SAMPLES = 6
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
        samples = batches[: 2 * MAX_SAMPLES]
        variants = dict(_iter_variants(placed, samples[::2], path))
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
        ranges, weights = dict(placed.ranges), {}
        for edge, name in changed.items():
            if edge.tensor in placed.model.constants:
                weights[edge.tensor] = forms[edge][name].arrays[0]
            else:
                ranges[edge.tensor] = variants[name].ranges[edge.tensor]
        return replace(placed, model=replace_constants(placed.model, weights), ranges=ranges)


def _iter_variants(placed: PlacedModel, samples: Sequence[Feeds], path: Path) -> Iterator[tuple[str, PlacedModel]]:
    """Yield the given placement, then variants with each estimator of ranges and each estimator of weights, by name."""
    yield _AS_GIVEN, placed
    tensors = sorted({edge.tensor for edge, _ in placed.resolved} & placed.ranges.keys())
    by_method = calibrate_by_methods(
        path,
        tensors,
        samples,
        methods=[plugin.name for plugin in registry.installed_plugins("range estimator")],
        percentile=placed.choices.percentile,
        source=placed.model.source,
    )
    for method, ranges in by_method.items():
        usable = {name: pair for name, pair in finite_ranges(ranges).items() if name in placed.ranges}
        yield f"activations {method}", replace(placed, ranges={**placed.ranges, **usable})
    for plugin in registry.installed_plugins("weight estimator"):
        yield f"weights {plugin.name}", replace(placed, choices=replace(placed.choices, weights=plugin.name))


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
