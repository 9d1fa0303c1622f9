"""Ranking of the quantized layers of a Q/DQ model by their harm: each is quantized alone, outputs are compared."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import registry
from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.api import Array, Benchmarker, Candidate
from harness.errors import EvaluationFailed
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.qdq.remove_pairs import PairRemover
from harness.graph.qdq.upcast import UPCAST_NOTE, write_float32_copy
from harness.graph.signature import read_signature, with_static_inputs
from harness.progress import Observer

__all__ = ["LayerSensitivity", "rank_layers", "suggest_skip_names"]

logger = logging.getLogger(__name__)

MAX_FEEDS = 4
MAX_SUGGESTED_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivity:
    """What one layer's pairs cost.

    Attributes:
        node: Its name.
        sqnr_db: Of the model's worst output with this layer quantized alone, against none; the smaller, the worse.
    """

    node: str
    sqnr_db: float


def rank_layers(path: Path, feeds: Iterable[Mapping[str, Array]], observer: Observer) -> tuple[LayerSensitivity, ...]:
    """Return the layers of a Q/DQ model, the worst first.

    Args:
        path: The model; it is run by ONNX Runtime without its optimizers, so that any precision is emulated.
        feeds: Inputs, all of the same shapes, which dynamic inputs take; a few are enough.
        observer: Is told of each layer, which is a build of its own.

    Raises:
        CandidateError: The model does not run.
    """
    inputs = list(itertools.islice(feeds, MAX_FEEDS))
    runtime: Benchmarker = registry.create_plugin("benchmarker", "onnxruntime", {"optimization": "disabled"})
    found = []
    with tempfile.TemporaryDirectory(prefix="qdq-sensitivity-") as scratch, ExitStack() as stack:
        static = _fix_input_shapes(path, inputs, Path(scratch))
        wide = write_float32_copy(static, Path(scratch))
        if wide is not None:
            observer.say(f"{path.name}: {UPCAST_NOTE}")
        bypass = PairRemover(wide or static)
        step = stack.enter_context(
            observer.work(f"{path.name}: each layer quantized alone", len(bypass.quantized_nodes))
        )
        file = Path(scratch) / path.name
        expected = _run_model(runtime, bypass.write(frozenset(), file), inputs)
        layout = plan_comparison(expected)
        for node in bypass.quantized_nodes:
            outputs = _run_model(runtime, bypass.write(frozenset({node}), file), inputs)
            try:
                sqnr_db = compare_outputs(zip(expected, outputs, strict=True), layout).metrics["sqnr_db"]
            except EvaluationFailed:
                sqnr_db = -np.inf
            step.advance()
            found.append(LayerSensitivity(node=node, sqnr_db=sqnr_db))
    return tuple(sorted(found, key=lambda layer: layer.sqnr_db))


def suggest_skip_names(ranked: tuple[LayerSensitivity, ...]) -> list[str]:
    """What to add to `skip_names`, as lines of a spec file."""
    if not ranked:
        return ["no activation of this model is quantized: its weights alone cost the accuracy"]
    lines = ["skip_names:  # the worst layers first; outputs against those without Q/DQ on activations"]
    return lines + [f'  - "{layer.node}"  # {layer.sqnr_db:.1f} dB' for layer in ranked[:MAX_SUGGESTED_LAYERS]]


def _fix_input_shapes(path: Path, inputs: list[Mapping[str, Array]], scratch: Path) -> Path:
    """Return the model with its dynamic inputs in the shapes that are fed: the runtime takes no dynamic ones."""
    if not inputs or not any(None in dims for _, dims in read_signature(path).inputs.values()):
        return path
    sizes = InputSizes(shapes={name: array.shape for name, array in inputs[0].items()})
    return with_static_inputs(path, sizes, scratch / "static.onnx")


def _run_model(runtime: Benchmarker, path: Path, inputs: list[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    candidate = Candidate(digest=path.stem, edges=(), source=lambda: path)
    with runtime.open(runtime.build(candidate, path.parent)) as probe:
        return [probe.infer(feed) for feed in inputs]
