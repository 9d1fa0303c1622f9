"""Nodes whose quantization costs most: the first to be left float if a recovered placement still misses a bound."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from harness.accuracy.recovery.pipeline import Feeds, PlacedModel, measure_sqnr_db
from harness.api import Array
from harness.graph.constant_edits import is_private, replace_constants
from harness.graph.quantize.weights import bias_place
from harness.progress import Observer

__all__ = ["FloatGain", "leave_float", "rank_nodes"]

MAX_SAMPLES = 2
"""Samples that each node is judged on: there is one model a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatGain:
    """SQNR that the outputs gain, in dB, if one node is left float."""

    node: str
    gain_db: float


def rank_nodes(placed: PlacedModel, held: Sequence[Feeds], observer: Observer) -> list[FloatGain]:
    """Return the gain of leaving each quantized node float by itself, the largest first.

    Args:
        placed: The placement with its contents.
        held: Samples that nothing in it was fitted to; the first `MAX_SAMPLES` are used.
        observer: Receives the progress.

    Raises:
        UserError: ONNX Runtime does not run a model.
    """
    names = list(dict.fromkeys(edge.consumer for edge, _ in placed.resolved))
    with observer.work("leave each node float", len(names)) as progress:
        whole, *single = measure_sqnr_db(
            chain([placed], (leave_float(placed, {name}) for name in names)),
            held[:MAX_SAMPLES],
            lambda _: progress.advance(),
        )
    gains = [FloatGain(node=name, gain_db=sqnr_db - whole) for name, sqnr_db in zip(names, single, strict=True)]
    return sorted(gains, key=lambda gain: -gain.gain_db)


def leave_float(placed: PlacedModel, names: Collection[str]) -> PlacedModel:
    """Return the placement without the pairs of some nodes, whose constants are those of the float model again."""
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
