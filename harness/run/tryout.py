"""The float model scored on a few samples, before the calibration: data, preprocessing and decoder that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Accuracy, Array, Benchmarker, Candidate, Infer
from harness.errors import CandidateError, UserError
from harness.evaluators.inputs import doubt
from harness.graph.model import Model
from harness.run.config import ModelSpec, Use
from harness.run.models import evaluator_use
from harness.run.observe import Observer
from search.space import digest_of

__all__ = ["try_evaluator"]

FEW = 8
"""Samples that are scored."""


def try_evaluator(spec: ModelSpec, model: Model, file: Path, base: Path, work: Path, observer: Observer) -> None:
    """Score the float model on the first samples of the evaluator's data, with ONNX Runtime on the CPU.

    A model that ONNX Runtime does not run is left to the calibration, which needs it too.

    Args:
        spec: The model with its evaluator; without one nothing is done.
        model: The float model.
        file: Its file.
        base: Folder that relative paths start from.
        work: Scratch folder.
        observer: Told where the score is next to nothing.

    Raises:
        UserError: The float model cannot be scored.
    """
    use = evaluator_use(spec, model, base, work / "tryout")
    if use is None:
        return
    runtime: Benchmarker = registry.create("benchmarker", "onnxruntime", {"optimization": "basic"})
    try:
        artifact = runtime.build(Candidate(digest=digest_of(()), edges=(), source=lambda: file), work)
    except CandidateError:
        return
    evaluator, short = _made(use)
    name = f"evaluator {use.use!r}"
    title, compares = f"{model.source}: try the evaluator on a few samples", "reference" in use.params
    with observer.work(title, 1) as step, runtime.open(artifact) as probe:
        try:
            accuracy = registry.guarded(name, lambda: _scored(evaluator, _bounded(probe.infer), compares))
        except CandidateError as error:
            raise UserError(f"{name}: the float model cannot be scored: {error}") from error
        step.advance()
    if accuracy is None or not short:
        return
    said = doubt(accuracy, evaluator.metric, evaluator.higher_is_better, use.params)
    if said:
        observer.say(f"{spec.name}, on the first {FEW} samples: {said}")


class _Enough(BaseException):
    """Raised to an evaluator that has run the model often enough; no evaluator means to catch it."""


def _made(use: Use) -> tuple[Any, bool]:
    """Return the evaluator for a few samples of its data, and whether it has no more."""
    data = use.params.get("data")
    if isinstance(data, Mapping):
        count = data.get("count")
        few = {**use.params, "data": {**data, "count": min(count, FEW) if isinstance(count, int) else FEW}}
        try:
            return registry.create("evaluator", use.use, few), True
        except UserError:  # there are fewer, or none of them has a label
            pass
    return registry.create("evaluator", use.use, use.params), False


def _scored(evaluator: Any, infer: Infer, compares: bool) -> Accuracy | None:
    """Return the accuracy; None of an evaluator that has not come to an end, or that compares with the float model."""
    try:
        if compares:
            evaluator.prepare(infer)
            return None
        found: Accuracy = evaluator.score(infer)
    except _Enough:
        return None
    return found


def _bounded(infer: Infer) -> Infer:
    """Return what runs the model a few times."""
    done = 0

    def bounded(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        nonlocal done
        done += 1
        if done > FEW:
            raise _Enough
        return infer(feeds)

    return bounded
