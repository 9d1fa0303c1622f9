"""Pipeline of recovery steps over one placement: each step is kept if held-out samples show a gain."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from harness.accuracy.calibration.range_estimators import Ranges
from harness.accuracy.metrics.closeness import ComparisonLayout, part_sqnr, plan_comparison
from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.graph.load import save_to_folder
from harness.graph.model import Model, Node
from harness.graph.qdq.insert import Inserter
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices
from harness.graph.quantize.weights import bias_place, is_private, replace_constants
from harness.graph.rules.dialects import Dialect
from harness.graph.segmented_run import iter_outputs
from harness.plugins import registry
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from search.space import Resolved

Feeds = Mapping[str, Array]
HELD_OUT_STRIDE = 4
"""Every n-th sample is held out and decides whether a step is kept; the steps use the others."""
MIN_GAIN_DB = 0.5
"""Smallest gain in dB for which a step is kept; smaller gains are within the uncertainty of few samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """Placement with everything from which its Q/DQ model is made.

    Attributes:
        model: Float model whose constants are quantized.
        reference: Float model whose outputs the quantized model should have; corrections change only `model`.
        dialect: Dialect of the Q/DQ pairs.
        ranges: Lowest and highest value of each activation of `reference`.
        resolved: Quantized edges with their precisions.
        choices: Numeric choices for scales and weights.
    """

    model: Model
    reference: Model
    dialect: Dialect
    ranges: Ranges
    resolved: Resolved
    choices: NumericChoices = DEFAULT_CHOICES

    def export(self, path: Path) -> Path:
        """Write the Q/DQ model to a file, and return its path."""
        return Inserter(self.model, self.dialect, self.ranges, self.choices).export(self.resolved, path)


class RecoveryStep(Protocol):
    """Change of constants or ranges that makes the quantized form of a model more accurate.

    Attributes:
        keeps_function: Whether the changed float model computes the same outputs; then its ranges are calibrated again.
    """

    keeps_function: bool

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Return a changed copy of the placement with the same nodes and pairs, or None if there is nothing to change.

        Args:
            placed: The placement, which is not changed.
            batches: Calibration samples, by input name.
            folder: Scratch folder.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGain:
    """Effect of a step on held-out samples.

    Attributes:
        step: Name of the step.
        before_db: SQNR of the outputs, mean over the samples and over parts that differ in scale, see `part_sqnr`. The
            worst part, which `fidelity` reports, is often only noise before a recovery and shows no gain.
        after_db: The same SQNR with the step; None if the step found nothing to change.
        kept: Whether the gain was at least `MIN_GAIN_DB`.
    """

    step: str
    before_db: float
    after_db: float | None
    kept: bool

    def __str__(self) -> str:
        if self.after_db is None:
            return f"{self.step}: nothing to change"
        return f"{self.step}: {self.before_db:.2f} to {self.after_db:.2f} dB, {'kept' if self.kept else 'undone'}"


def create_steps(names: Sequence[str]) -> dict[str, RecoveryStep]:
    """Return new recovery steps by name, in the given order.

    Raises:
        UserError: A name is not in `qdq.recovery_steps`.
    """
    return {name: registry.create_plugin("recovery step", name, {}) for name in names}


def quantized_layers(placed: PlacedModel) -> list[Node]:
    """Return, in graph order, the linear operators with quantized data and constant weight that can have a bias."""
    nodes = {node.name: node for node in placed.model.nodes}
    slots: dict[str, set[int]] = {}
    for edge, _ in placed.resolved:
        slots.setdefault(edge.consumer, set()).add(edge.slot)
    found = [nodes[name] for name, seen in slots.items() if name and seen >= {0, 1}]
    layers = (
        node for node in found if node.op in placed.dialect.linear_ops and node.inputs[1] in placed.model.constants
    )
    return sorted((node for node in layers if bias_place(placed.model, node)), key=lambda node: node.index)


def split_held_out(batches: Sequence[Feeds]) -> tuple[list[Feeds], list[Feeds]]:
    """Return the samples that steps use, and the held-out samples (every fourth).

    Raises:
        UserError: There are less than four samples.
    """
    held = list(batches[HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE])
    if not held:
        wanted = f"recovery needs {HELD_OUT_STRIDE} calibration samples or more"
        raise UserError(f"calibration.samples: {wanted}, but got {len(batches)}")
    return [batch for i, batch in enumerate(batches) if i % HELD_OUT_STRIDE != HELD_OUT_STRIDE - 1], held


def recover(
    placed: PlacedModel,
    steps: Mapping[str, RecoveryStep],
    batches: Sequence[Feeds],
    calibrate: Callable[[Model], Ranges],
    observer: Observer,
) -> tuple[PlacedModel, tuple[StepGain, ...]]:
    """Apply steps in order, and undo each that does not improve the outputs on held-out samples.

    Args:
        placed: The placement.
        steps: Steps by name, in order; those that keep the function come first.
        batches: Calibration samples, one batch each.
        calibrate: Function that returns the ranges of a changed float model.
        observer: Receiver of the progress.

    Returns:
        The placement with the kept steps, and the effect of each step.

    Raises:
        UserError: There are too few samples, or ONNX Runtime does not run the model.
    """
    seen, held = split_held_out(batches)
    gains = []
    with (
        tempfile.TemporaryDirectory(prefix="qdq-recover-") as scratch,
        observer.work("recover", len(steps)) as progress,
    ):
        folder = Path(scratch)
        judge = _Judge(placed.reference, held, folder)
        best_db = judge.sqnr_db(placed)
        for name, step in steps.items():
            changed = step.apply(placed, seen, folder)
            if changed is None:
                gains.append(StepGain(step=name, before_db=best_db, after_db=None, kept=False))
            else:
                if step.keeps_function:
                    changed = replace(changed, reference=changed.model, ranges=calibrate(changed.model))
                after_db = judge.sqnr_db(changed)
                kept = after_db >= best_db + MIN_GAIN_DB
                gains.append(StepGain(step=name, before_db=best_db, after_db=after_db, kept=kept))
                if kept:
                    placed, best_db = changed, after_db
            progress.advance(str(gains[-1]))
    return placed, tuple(gains)


def measure_sqnr_db(
    models: Iterable[PlacedModel], held: Sequence[Feeds], progress: Callable[[int], None] = lambda _: None
) -> list[float]:
    """Return the SQNR in dB, as in `StepGain`, of placed models with the same reference.

    Args:
        models: Placed models, one in memory at a time.
        held: Held-out samples, by input name.
        progress: Function that receives the number of each model before it is run.

    Raises:
        UserError: ONNX Runtime does not run a model.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-recover-") as scratch:
        judge, figures = None, list[float]()
        for number, each in enumerate(models):
            judge = judge or _Judge(each.reference, held, Path(scratch))
            progress(number)
            figures.append(judge.sqnr_db(each))
        return figures


class _Judge:
    """Measures the SQNR of quantized models against a float model on samples."""

    def __init__(self, model: Model, batches: Sequence[Feeds], folder: Path) -> None:
        self._batches, self._folder, self._source = batches, folder, model.source
        self._floats = self._run(save_to_folder(model, folder / "judged"))
        self._layout: ComparisonLayout = plan_comparison(self._floats)

    def _run(self, path: Path) -> list[dict[str, Array]]:
        what = f"recovery of {self._source}"
        return call_in_helper_process(what, iter_outputs, path, self._batches, factor=RUNTIME_FACTOR)

    def sqnr_db(self, placed: PlacedModel) -> float:
        outputs = self._run(placed.export(self._folder / "candidate.onnx"))
        pairs = list(zip(self._floats, outputs, strict=True))
        figures = [
            part_sqnr(reference[name], output[name], part)
            for name, parts in self._layout.parts.items()
            for part in parts or (None,)
            for reference, output in pairs
        ]
        return float(np.mean(figures))


class RecoveryStepContract:
    """Tests of the contract of a recovery step; a subclass sets the attributes in a fixture.

    Attributes:
        step: The step.
        placed: A placement that the step may change.
        batches: Calibration samples for the step.
        folder: Scratch folder.
    """

    step: RecoveryStep
    placed: PlacedModel
    batches: Sequence[Feeds]
    folder: Path

    def _outputs(self, model: Model) -> list[dict[str, Array]]:
        return iter_outputs(save_to_folder(model, self.folder / "contract"), self.batches)

    def test_the_given_model_is_not_changed_and_the_step_repeats(self) -> None:
        before, ranges = self.placed.model.proto.SerializeToString(deterministic=True), dict(self.placed.ranges)
        results = [self.step.apply(self.placed, self.batches, self.folder) for _ in range(2)]
        assert self.placed.model.proto.SerializeToString(deterministic=True) == before
        assert self.placed.ranges == ranges
        texts = {None if each is None else each.model.proto.SerializeToString(deterministic=True) for each in results}
        assert len(texts) == 1, "the same placement and samples give the same model"
        first, second = (None if each is None else dict(each.ranges) for each in results)
        assert first == second, "and the same ranges"

    def test_nodes_keep_names_and_data_and_the_placement_stays_valid(self) -> None:
        changed = self.step.apply(self.placed, self.batches, self.folder)
        if changed is None:
            return
        models = self.placed.model, changed.model
        shapes = [[(n.name, n.op, n.inputs[:1], n.outputs) for n in m.nodes] for m in models]
        assert shapes[0] == shapes[1]
        assert changed.resolved == self.placed.resolved
        changed.export(self.folder / "changed.onnx")

    def test_the_float_function_is_kept_if_the_step_says_so(self) -> None:
        changed = self.step.apply(self.placed, self.batches, self.folder)
        if changed is None or not self.step.keeps_function:
            return
        for before, after in zip(self._outputs(self.placed.model), self._outputs(changed.model), strict=True):
            for name, values in before.items():
                scale = float(np.abs(values).max())
                np.testing.assert_allclose(after[name], values, atol=1e-4 * scale, rtol=1e-4)


MAX_SAMPLES = 2
"""Number of samples on which each group is measured; few, because each group needs a model of its own."""

FLOAT_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of groups of nodes that are left float if a recovered placement still misses the bound. With more groups a
file is rarely faster than the float model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatGroup:
    """Nodes that are left float together.

    Attributes:
        nodes: Names of the nodes in topological order; "" for the outputs of the model.
        alone_db: SQNR of the outputs of the model, in dB, if only these nodes are quantized.
        at_outputs: Whether the nodes are last linear operators or lie between these and the outputs of the model.
    """

    nodes: tuple[str, ...]
    alone_db: float
    at_outputs: bool


def rank_groups(placed: PlacedModel, held: Sequence[Feeds], observer: Observer) -> list[FloatGroup]:
    """Return groups of the quantized nodes in ascending order of the SQNR with only that group quantized.

    The errors of groups add up, so this order is valid for any number of groups. The gain of leaving one group float is
    no criterion: if two groups cause the loss, the error of each hides the gain of the other.

    Args:
        placed: The placement with its scales and weights.
        held: Held-out samples by input name; the first two are used.
        observer: Receiver of the progress.

    Raises:
        UserError: ONNX Runtime does not run a model.
    """
    last, tensors = {""}, list(placed.model.output_names)  # from the last linear operators to the outputs
    while tensors:
        node = placed.model.producer_node(tensors.pop())
        if node is None or node.name in last:
            continue
        last.add(node.name)
        if node.op not in placed.dialect.linear_ops:
            tensors += filter(None, node.inputs)
    groups = _group_nodes(placed, last)
    names = {name for group in groups for name in group}
    with observer.work("quantize each group alone", len(groups)) as progress:
        figures = measure_sqnr_db(
            (leave_float(placed, names.difference(group)) for group in groups),
            held[:MAX_SAMPLES],
            lambda _: progress.advance(),
        )
    ranked = [
        FloatGroup(nodes=group, alone_db=sqnr_db, at_outputs=group[0] in last)
        for group, sqnr_db in zip(groups, figures, strict=True)
    ]
    return sorted(ranked, key=lambda group: group.alone_db)


def iter_float_sets(groups: Sequence[FloatGroup]) -> Iterator[tuple[FloatGroup, ...]]:
    """Yield sets to leave float: all groups at the outputs, then the first 1, 2, 4, ... others, without and with these.

    Neither the empty set, the set of all groups nor a set twice is yielded. Groups at the outputs are separate because
    their errors are not attenuated, and a metric may lose more by them than the SQNR shows: the boxes and scores of a
    detector share a scale there.

    Args:
        groups: Groups in the order of `rank_groups`, the one that costs most accuracy first.
    """
    last = tuple(group for group in groups if group.at_outputs)
    others = tuple(group for group in groups if not group.at_outputs)
    sets = [last, *chain.from_iterable((others[:count], last + others[:count]) for count in FLOAT_COUNTS)]
    yield from (chosen for chosen in dict.fromkeys(sets) if 0 < len(chosen) < len(groups))


def _group_nodes(placed: PlacedModel, last: Collection[str]) -> list[tuple[str, ...]]:
    """Return the quantized nodes in groups of a linear operator and the quantized nodes up to the next one.

    Args:
        placed: The placement.
        last: Nodes that form a separate group.
    """
    inputs: dict[str, list[str]] = {}
    for edge, _ in placed.resolved:
        inputs.setdefault(edge.consumer, []).append(edge.tensor)
    nodes = {node.name: node for node in placed.model.nodes}
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}  # for each node, the first node of its group
    for name in sorted(inputs, key=lambda name: nodes[name].index if name else len(nodes)):
        if name in last:
            groups.setdefault("", []).append(name)
            continue
        producers = [placed.model.producer_node(tensor) for tensor in inputs[name]]
        before = [first[node.name] for node in producers if node is not None and node.name in first]
        starts = not before or nodes[name].op in placed.dialect.linear_ops
        first[name] = name if starts else max(before, key=lambda each: nodes[each].index)
        groups.setdefault(first[name], []).append(name)
    return [tuple(group) for group in groups.values()]


def leave_float(placed: PlacedModel, names: Collection[str]) -> PlacedModel:
    """Return the placement without the pairs of some nodes, which get the constants of `placed.reference` again.

    Args:
        names: Names of the nodes; "" for the outputs of the model. Names of no node are ignored.
    """
    model, reference = placed.model, placed.reference
    arrays: dict[str, Array] = {}
    for node in model.nodes:
        if node.name not in names:
            continue
        place = bias_place(model, node)
        bias = [place[0].inputs[place[1]]] if place is not None and len(place[0].inputs) > place[1] else []
        for constant in filter(lambda name: is_private(model, name), [*node.inputs, *bias]):
            original = reference.constant_array(constant) if constant in reference.constants else None
            corrected = model.constant_array(constant)
            if corrected is not None:  # a bias that only the correction added is 0
                arrays[constant] = np.zeros_like(corrected) if original is None else original
    kept = tuple((edge, precision) for edge, precision in placed.resolved if edge.consumer not in names)
    return replace(placed, model=replace_constants(model, arrays), resolved=kept)
