"""Models of one placement with other estimators and scales, with recovery steps, and with nodes left float."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.accuracy.calibration.range_estimators import Ranges, finite_ranges
from harness.accuracy.calibration.ranges import calibrate, calibrate_by_methods
from harness.accuracy.recovery.pipeline import (
    MIN_GAIN_DB,
    Feeds,
    FloatGroup,
    PlacedModel,
    StepGain,
    create_steps,
    iter_float_sets,
    leave_float,
    measure_sqnr_db,
    rank_groups,
    recover,
    split_held_out,
)
from harness.base.errors import CandidateError, UserError
from harness.base.progress import Observer
from harness.graph.io.digests import digest_file
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.quantize.numeric_choices import NumericChoices, depthwise_inputs
from harness.plugins.api import Array
from harness.run.prepare.task import Task
from search.space import Resolved

RECOVERY_STEPS = ("equalization", "smoothing", "rounding", "bias_correction")
"""Recovery steps in order; each is undone if held-out samples show no gain. `estimator_selection` is not among them: it
takes longer than all of these together and gained less than half a decibel on five models."""
ESTIMATORS = ("mean",)
"""Range estimators that are tried in addition to that of the experiment; for channels, the others take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedModel:
    """Model of a placement with the SQNR of its outputs on held-out samples, in dB."""

    placed: PlacedModel
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacer:
    """Inserter of Q/DQ pairs with several combinations of estimators and scales.

    Attributes:
        combinations: Choices of estimators and scales, each of which gives a model.
        tensors: Names of the activations that may be quantized.
        by_method: Ranges of the activations by estimator.
    """

    task: Task
    combinations: Sequence[NumericChoices]
    tensors: Sequence[str]
    by_method: Mapping[str, Ranges]
    _recalibrated: dict[tuple[str, NumericChoices], Ranges] = field(default_factory=dict)

    def place(self, resolved: Resolved) -> Iterator[PlacedModel]:
        """Yield the model of quantized edges with each combination of choices."""
        for choices in self.combinations:
            yield PlacedModel(
                model=self.task.model,
                reference=self.task.model,
                dialect=self.task.dialect,
                ranges=finite_ranges(self.by_method[choices.activations]),
                resolved=resolved,
                choices=choices,
            )

    def rank(self, resolved: Resolved, held: Sequence[Feeds]) -> list[JudgedModel]:
        """Return the models of quantized edges in descending order of their SQNR on held-out samples.

        The combination of the task is first unless another one is better by at least `MIN_GAIN_DB`.

        Raises:
            UserError: ONNX Runtime does not run a model.
        """
        models = list(self.place(resolved))
        judged = [
            JudgedModel(placed=model, sqnr_db=figure)
            for model, figure in zip(models, measure_sqnr_db(models, held), strict=True)
        ]
        return sorted(judged, key=lambda each: -each.sqnr_db - MIN_GAIN_DB * (each is judged[0]))

    def recalibration(
        self, choices: NumericChoices, batches: Sequence[Mapping[str, Array]]
    ) -> Callable[[Model], Ranges]:
        """Return a function that calibrates a changed float model on `batches` with the estimators of `choices`.

        Ranges are stored by the digest of the model, because a step may change it in the same way for each placement.
        """

        def calibrate_again(model: Model) -> Ranges:
            path = save_to_folder(model, self.task.work / "recovery")
            key = digest_file(path), choices
            if key not in self._recalibrated:
                self._recalibrated[key] = calibrate_file(path, model)
            return self._recalibrated[key]

        def calibrate_file(path: Path, model: Model) -> Ranges:
            found = calibrate(
                path,
                self.tensors,
                batches,
                method=choices.activations,
                percentile=choices.percentile,
                channels=depthwise_inputs(model) if choices.depthwise == "channel" else None,
                source=self.task.model.source,
            )
            return finite_ranges(found)

        return calibrate_again


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAttempt:
    """Model of a placement after recovery steps.

    Attributes:
        sqnr_db: SQNR of the outputs on held-out calibration samples, in dB.
        gains: Effect of each recovery step.
        left_float: Groups of nodes that are left float.
    """

    placed: PlacedModel
    sqnr_db: float
    gains: tuple[StepGain, ...] = ()
    left_float: tuple[FloatGroup, ...] = ()

    def keeps_kernels(self, choices: NumericChoices) -> bool:
        """Return whether the file runs the same kernels as one with `choices`, so that both are equally fast."""
        return not self.left_float and self.placed.choices.depthwise == choices.depthwise

    @property
    def label(self) -> str:
        """Return the choices, steps and float nodes that the file adds to the placement; "as given" without any."""
        kept = [gain.step for gain in self.gains if gain.kept]
        left = sum(len(group.nodes) for group in self.left_float)
        float_nodes = f"{left} nodes float" if left else ""
        return ", ".join(filter(None, [self.placed.choices.text, *kept, float_nodes])) or "as given"


def list_choices(task: Task) -> list[NumericChoices]:
    """Return the choices of a task, then variants with other estimators and with scales by channel."""
    own = task.choices
    grains = [own.depthwise]
    if task.dialect.channel_activations and depthwise_inputs(task.model) and own.depthwise == "tensor":
        grains.append("channel")
    estimators = dict.fromkeys((own.activations, *ESTIMATORS))
    return [replace(own, activations=each, depthwise=grain) for each, grain in itertools.product(estimators, grains)]


def open_placer(
    task: Task,
    combinations: Sequence[NumericChoices],
    batches: Collection[Mapping[str, Array]] | Iterable[Mapping[str, Array]],
    count: int,
    observer: Observer,
) -> ModelPlacer:
    """Calibrate a task by the estimators of several combinations, in one pass over the data.

    Args:
        batches: Calibration samples.
        count: Number of batches, for the progress bar.

    Raises:
        UserError: The dialect does not offer a combination, or samples have other sizes than the inputs of the model.
    """
    if task.sizes is not None and not all(map(task.sizes.fit, batches)):
        raise UserError(
            f"{task.model.source}: recovery takes calibration samples of the timed size; pad or cut the others"
        )
    for choices in combinations:
        choices.adapt_dialect(task.dialect)  # raises before minutes of calibration
    tensors = sorted({e.tensor for d in task.space.dimensions for e in d.edges if e.tensor not in task.model.constants})
    channels = depthwise_inputs(task.model) if any(c.depthwise == "channel" for c in combinations) else {}
    with observer.work(f"calibrate {task.model.source}", count) as progress:
        by_method = calibrate_by_methods(
            task.float_file,
            tensors,
            batches,
            methods=tuple(dict.fromkeys(c.activations for c in combinations)),
            percentile=task.choices.percentile,
            channels=channels,
            progress=lambda _: progress.advance(),
            source=task.model.source,
        )
    return ModelPlacer(task=task, combinations=combinations, tensors=tensors, by_method=by_method)


def iter_attempts(
    placer: ModelPlacer, resolved: Resolved, batches: Sequence[Feeds], observer: Observer
) -> Iterator[RecoveryAttempt]:
    """Yield models of a placement: without recovery, with recovery steps, with other scales, and partly float.

    The last ones are recovered models with increasing numbers of float groups of nodes, those that cost most accuracy
    first. The iteration ends if ONNX Runtime does not run a model.
    """
    held_out = split_held_out(batches)[1]
    with suppress(UserError, CandidateError):
        ranked = placer.rank(resolved, held_out)
        given = next(each for each in ranked if each.placed.choices == placer.task.choices)
        yield RecoveryAttempt(placed=given.placed, sqnr_db=given.sqnr_db)
        recalibrate = placer.recalibration(ranked[0].placed.choices, batches)
        placed, gains = recover(ranked[0].placed, create_steps(RECOVERY_STEPS), batches, recalibrate, observer)
        gained = [gain.after_db for gain in gains if gain.kept]
        if gained:
            yield RecoveryAttempt(placed=placed, gains=gains, sqnr_db=gained[-1] or 0.0)
        others = (each for each in ranked[:2] if each is not given)
        yield from (RecoveryAttempt(placed=each.placed, sqnr_db=each.sqnr_db) for each in others)
        groups = rank_groups(placed, held_out, observer)
        for chosen in iter_float_sets(groups):
            partly = leave_float(placed, {name for group in chosen for name in group.nodes})
            (sqnr_db,) = measure_sqnr_db([partly], held_out)
            yield RecoveryAttempt(placed=partly, gains=gains, sqnr_db=sqnr_db, left_float=chosen)
