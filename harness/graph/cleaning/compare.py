"""Compare what the original and the prepared version of a model compute.

This runs in the helper process of `guard`: neither version is trusted, and ONNX Runtime may crash.

Outputs are compared end to end first. If that does not settle it (an output deviates, or is an index, a boolean or a
constant, which shows little of what is upstream), every node is compared on its own: each node of the prepared model
reads the values that the original computed. A node that then agrees was not changed by preparation: it only amplified
rounding, as ArgMax, TopK, NonMaxSuppression, Round and casts to integers do near a tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, numpy_helper

from harness.graph.cleaning.deviation import deviation_db, is_informative, normalization_db, threshold_db
from harness.graph.cleaning.shapes import types_of
from harness.graph.cleaning.versions import Comparison, Feeds, NotRun, Values, Version, accepted_runs

__all__ = ["Verdict", "compare_runs"]

LOCAL_ELEMENTS = 500_000_000
"""Intermediate results of more elements than this are not compared node by node: they are held in memory twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        change: What differs and by how much; "" if preparation changed nothing.
        unchecked: Why nothing, or not all, could be compared; "" if everything was.
    """

    change: str = ""
    unchecked: str = ""


def compare_runs(comparison: Comparison) -> Verdict:
    """Run both versions on random inputs and compare their outputs, then their nodes if need be."""
    try:
        original = Version(comparison.original, comparison)
        runs = accepted_runs(original, comparison)
    except NotRun as error:
        return Verdict(unchecked=f"ONNX Runtime cannot run the original: {error}")
    verdict, limit_db = Verdict(), threshold_db(original.proto)
    try:
        prepared = Version(comparison.prepared, comparison)
        session = prepared.session()
        for before, feeds in runs:
            after = prepared.run(session, feeds)
            found = {name: deviation_db(value, after.get(name)) for name, value in before.items()}
            failing = {name: found_db for name, found_db in found.items() if found_db < limit_db}
            if failing or not found or not all(map(is_informative, before.values())):
                verdict = _settled(comparison, feeds, before, failing, limit_db)
            if verdict != Verdict():
                break
    except NotRun as error:
        if error.not_implemented:
            return Verdict(unchecked=f"ONNX Runtime cannot run the prepared model: {error}")
        return Verdict(change=f"the prepared model does not run in ONNX Runtime: {error}")
    return verdict


def _settled(
    comparison: Comparison, feeds: Feeds, before: Values, failing: dict[str, float], limit_db: float
) -> Verdict:
    """Return the verdict on models whose outputs do not tell enough; `failing` are those that deviate, in dB."""
    original = Version(comparison.original, comparison)
    session = original.session()
    once, again = (original.run_samples(session, feeds) if failing else {} for _ in range(2))
    varying = [name for name in failing if deviation_db(once[name], again[name]) < limit_db]
    stable = [name for name in failing if name not in varying]
    change = _first_change(original, Version(comparison.prepared, comparison), feeds, limit_db)
    if change is None and not before:
        return Verdict(unchecked="NumPy lacks the types of its outputs")
    if change is None:
        change = f"output {stable[0]!r}{_said(failing[stable[0]], limit_db)}" if stable else ""
    if varying and not change:
        return Verdict(unchecked=f"outputs that change from run to run: {', '.join(varying)}")
    return Verdict(change=change)


def _first_change(original: Version, prepared: Version, feeds: Feeds, limit_db: float) -> str | None:
    """Return the first node whose results differ on equal inputs, "" without one, None if that cannot be told."""
    graph = prepared.proto.graph
    makers = {name: node for node in original.proto.graph.node for name in node.output if name}
    made = {name for node in graph.node for name in node.output}
    folded = {t.name: t for t in graph.initializer if t.name in makers and not _is_external(t)}
    names = [name for name in makers if name in made or name in folded]
    types = types_of(graph)
    if sum(math.prod(types[name].shape) for name in names if name in types) > LOCAL_ELEMENTS:
        return None
    norms = {n: node.input[0] for n, node in makers.items() if node.op_type == "BatchNormalization"}
    try:
        values = original.values_of([*names, *({*norms.values()} & makers.keys() - {*names})], feeds)
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        own = prepared.own_values({n: v for n, v in arrays.items() if n in made}, feeds, arrays)[0]
        own |= {name: numpy_helper.to_array(tensor) for name, tensor in folded.items()}
        found = {name: (deviation_db(value, own[name]), limit_db) for name, value in values.items() if name in own}
        found = {name: figures for name, figures in found.items() if figures[0] < limit_db}
        for name in found.keys() & norms.keys() & {n for n, x in norms.items() if x in arrays}:
            found[name] = (found[name][0], normalization_db(arrays[norms[name]], arrays[name], limit_db))
        found = {name: figures for name, figures in found.items() if figures[0] < figures[1]}
        if found and not original.comparison.widened:
            # In 16 bits ONNX Runtime rounds less between nodes that follow each other, and random numbers vary.
            alone, again = original.own_values(arrays, feeds, found, times=2)
            found = {
                name: figures
                for name, figures in found.items()
                if deviation_db(alone[name], own[name]) < figures[1] <= deviation_db(alone[name], again[name])
            }
    except NotRun:
        return None
    name = next(iter(found), "")
    return name and f"node {makers[name].name!r} ({makers[name].op_type}, output {name!r}){_said(*found[name])}"


def _said(found_db: float, limit_db: float) -> str:
    if found_db == -math.inf:
        return " gives another result"
    return f" gives a result that is {found_db:.1f} dB from the original's, and at least {limit_db:g} dB are required"


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)
