"""Check of a model with dynamic axes at the sizes of the search and at two others, in ONNX Runtime and OpenVINO."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.accuracy.calibration.ranges import data_batches
from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.base.random_inputs import MAX_INPUT_ELEMENTS, random_feeds
from harness.graph.dynamic_axes import write_dynamic
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.io.files import move_model
from harness.graph.model import Model, TensorType
from harness.graph.passes.dimension_sizes import Axes, evaluate_expression, expression_symbols, is_batch, iter_sizes
from harness.graph.protos import find_random_outputs
from harness.graph.segmented_run import open_reference_session
from harness.plugins.api import Array, name_arrays
from harness.results.artifacts import (
    DYNAMIC_AXES_FILE,
    DYNAMIC_MODEL_SUFFIX,
    FinalistSet,
    read_dynamic_axes,
)
from harness.results.manifest import write_record
from harness.runtimes.host_clock import one_line_error
from harness.workers.helper_process import call_in_helper_process

Outputs = tuple[Array, ...]
Feeds = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]
Case = tuple[int, Shapes]
"""Number of an input, from 1, which is the seed of a random one (not that of the calibration), and its shapes."""
# Sizes to try: number of samples to add to the batch; factor and offset of other dimensions.
RESIZE_PLANS = (
    (1, 2.0, 0), (2, 1.0, -1), (1, 0.5, 0), (2, 1.0, 32), (1, 1.0, 0), (2, 1.0, 0), (0, 2.0, 0), (0, 1.0, -1),
    (0, 0.5, 0), (0, 1.0, 32), (0, 1.0, 1), (3, 1.5, 0), (0, 1.5, 0),
)  # fmt: skip
CHECK_RUNTIMES = ("onnxruntime", "openvino")
OTHER_SHAPE_COUNT = 2  # number of other sizes at which a model is compared with the float model
MAX_RELATIVE_DIFFERENCE = 1e-3  # of the dynamic file to the fixed file at the sizes of the search
CHECK_INPUT_COUNT = 6  # at the sizes of the search, of which the largest difference to the float model is used
# Limit of the difference to the float model at other sizes: factor times the difference at the sizes of the search,
# plus slack.
FLOAT_DIFFERENCE_FACTOR, FLOAT_DIFFERENCE_SLACK = 3.0, 0.05
#: Whether inputs are samples of data, and the remark on the differences in that case.
INPUT_NOTES = {
    True: "on calibration data (relative difference: root mean square of the difference over that of the output)",
    False: "on random inputs (relative difference: root mean square of the difference over that of the output; on "
    "random inputs it is no measure of accuracy, and shows only whether the sizes agree)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCheckTarget:
    """Model files to compare, with their inputs.

    Attributes:
        axes: Declared dimensions by input, sizes or symbols; None if an input declares none.
        types: Element type and shape of each input in the search.
        floating: The original float model; `fixed` and `dynamic` are the quantized ones at fixed sizes, and with
            dynamic axes.
        requested: Shapes to check at before any others.
        random: Numbers of the outputs that change from run to run, which are not compared.
        samples: Inputs at the sizes of the search, which are resized to others; random inputs are drawn without any.
    """

    axes: Mapping[str, Axes | None]
    types: Mapping[str, TensorType]
    floating: Path
    fixed: Path
    dynamic: Path
    requested: tuple[Shapes, ...] = ()
    random: frozenset[int] = frozenset()
    samples: tuple[Feeds, ...] = ()

    @property
    def search_inputs(self) -> int:
        """Return the number of input sets compared at the shapes of the search; those at other shapes follow."""
        return len(self.samples) or CHECK_INPUT_COUNT

    @property
    def searched_shapes(self) -> Shapes:
        """Return the shapes of the search."""
        return {name: kind.shape for name, kind in self.types.items()}

    def other_shapes(self) -> Iterator[Shapes]:
        """Yield the requested shapes, then those of the function `other_shapes`, each once, except the searched."""
        requested = [dict(shape) for shape in self.requested if dict(shape) != self.searched_shapes]
        yield from requested
        yield from (shape for shape in other_shapes(self.axes, self.searched_shapes) if shape not in requested)


def other_shapes(axes: Mapping[str, Axes | None], searched: Shapes) -> Iterator[Shapes]:
    """Yield shapes of the inputs with other sizes of the dynamic axes, each once, in the order of `RESIZE_PLANS`.

    Axes with the same symbol have the same size, and the sizes of expressions such as "past + 1" follow from those of
    their symbols.

    Args:
        axes: Declared dimensions by input; all dimensions of an input without an entry are dynamic.
        searched: Shapes of the search by input, which are left out.
    """
    declared = {name: axes.get(name) or (None,) * len(shape) for name, shape in searched.items()}
    # The key of a dynamic dimension is its symbol, or its input and position if it has none.
    keys = {
        name: [(name, place) if axis is None else axis for place, axis in enumerate(declared[name])]
        for name in searched
    }
    places = [(key, name, place) for name in keys for place, key in enumerate(keys[name]) if not isinstance(key, int)]
    sizes = {key: searched[name][place] for key, name, place in places}
    batches = {key for key, name, place in places if is_batch(declared[name][place], place)}
    parts = {
        key: names
        for key in sizes
        if isinstance(key, str)
        and not key.isidentifier()
        and (names := expression_symbols(key))
        and sizes.keys() >= set(names)
    }
    tried = [dict(searched)]
    for samples, factor, offset in RESIZE_PLANS:
        changed = {
            key: size + samples if key in batches else math.ceil(size * factor) + offset for key, size in sizes.items()
        }
        for key, names in parts.items():
            value = evaluate_expression(key, {name: changed[name] for name in names})
            changed[key] = -1 if value is None else value
        shapes = {name: tuple(key if isinstance(key, int) else changed[key] for key in keys[name]) for name in keys}
        pairs = [pair for name in shapes for pair in zip(shapes[name], searched[name], strict=True)]
        if shapes not in tried and all(size > 0 or size == old for size, old in pairs):
            tried.append(shapes)
            yield shapes


def resize_array(array: Array, shape: Sequence[int]) -> Array:
    """Return an array of another shape, of the nearest values (nearest-neighbor interpolation along each axis).

    An empty array becomes one of zeros.
    """
    if not array.size:
        return np.zeros(shape, array.dtype)
    for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
        if old != new:
            array = np.take(array, np.arange(new) * old // new, axis)
    return array


class _OutputMismatch(Exception):
    """The dynamic file fails, or its outputs differ from those of the fixed file or the float model."""


def check_dynamic_model(subject: DynamicCheckTarget, backend: str) -> str:
    """Compare the dynamic file with the fixed one, and with the float model at other sizes.

    Args:
        backend: Runtime of the search. It and ONNX Runtime must agree; a failure of another runtime is only reported.

    Returns:
        Text with the sizes that were checked, and the differences; it begins with "not checked" if ONNX Runtime does
        not run the float model.

    Raises:
        UserError: The outputs differ, or the file fails at a size at which the float model runs.
    """
    others = (
        shapes
        for shapes in subject.other_shapes()
        if all(math.prod(shape) <= MAX_INPUT_ELEMENTS for shape in shapes.values())
    )
    cases = list(enumerate([*[subject.searched_shapes] * subject.search_inputs, *others], start=1))
    count = max(OTHER_SHAPE_COUNT, len(subject.requested)) + subject.search_inputs
    try:
        run = _run_in_process(CHECK_RUNTIMES[0], subject.floating, subject, cases, count)
    except UserError as error:
        return f"not checked: ONNX Runtime does not run the float model ({error})"
    if not run[0] and run[0] is not None:
        return "not checked: every output depends on random operators"
    if run[0] is None:
        return "not checked: ONNX Runtime does not run the float model at the size of the search"
    float_runs = [(case, outputs) for case, outputs in zip(cases, run, strict=False) if outputs is not None]
    lines = []
    for runtime in CHECK_RUNTIMES:
        try:
            lines.append(_compare_files(runtime, subject, float_runs))
        except _OutputMismatch as error:
            if runtime in (backend, CHECK_RUNTIMES[0]):
                raise UserError(f"{runtime}: {error}") from error
            lines.append(f"not for {runtime}: {error}")
        except UserError as error:
            lines.append(f"not checked in {runtime} ({error})")
    return "; ".join(
        [_describe_shapes(subject, [shape for (_, shape), _ in float_runs[subject.search_inputs :]]), *lines]
    )


def _describe_shapes(subject: DynamicCheckTarget, shapes: Sequence[Shapes]) -> str:
    """Return the sizes at which the model was checked, as text."""
    if not shapes:
        return "not checked at other sizes: the float model runs at none that was tried"
    few = "" if len(shapes) >= OTHER_SHAPE_COUNT else "; the float model runs at no second size that was tried"
    searched, *others = (dict(iter_sizes(subject.axes, shape)) for shape in (subject.searched_shapes, *shapes))
    still = [name for name, size in searched.items() if all(other[name] == size for other in others)]
    sizes = " and ".join(", ".join(f"{name} {size}" for name, size in other.items()) for other in others)
    fixed = f"; the float model runs at no other size of {', '.join(still)} that was tried" if still else ""
    return f"checked at {sizes} {INPUT_NOTES[bool(subject.samples)]}{few}{fixed}"


def _compare_files(runtime: str, subject: DynamicCheckTarget, float_runs: Sequence[tuple[Case, Outputs]]) -> str:
    """Compare the files in a runtime, and return the differences as text.

    Args:
        float_runs: Cases with outputs of the float model; the first `search_inputs` have the searched sizes.

    Raises:
        UserError: The runtime does not run the fixed file.
        _OutputMismatch: The dynamic file fails or differs.
    """
    cases, floats = [case for case, _ in float_runs], [outputs for _, outputs in float_runs]
    (fixed,) = _run_in_process(runtime, subject.fixed, subject, cases[:1], 1)
    if fixed is None:
        raise UserError("it does not run the fixed file")
    try:
        results = _run_in_process(runtime, subject.dynamic, subject, cases, len(cases))
    except UserError as error:
        raise _OutputMismatch(f"the file with dynamic axes fails: {error}") from error
    if any(outputs is None for outputs in results):
        failed = next(shape for (_, shape), outputs in zip(cases, results, strict=False) if outputs is None)
        raise _OutputMismatch(f"the file with dynamic axes fails at {dict(failed)}, where the float model runs")
    outputs = [each for each in results if each is not None]
    differences = [
        _largest_difference(outputs_of_case, reference)
        for outputs_of_case, reference in zip(outputs, floats, strict=True)
    ]
    at_search, at_others = max(differences[: subject.search_inputs]), differences[subject.search_inputs :]
    to_fixed = _largest_difference(outputs[0], fixed, every=True)
    if to_fixed > (
        MAX_RELATIVE_DIFFERENCE
        if runtime == CHECK_RUNTIMES[0]
        else FLOAT_DIFFERENCE_FACTOR * at_search + FLOAT_DIFFERENCE_SLACK
    ):  # OpenVINO fuses less at dynamic shapes
        raise _OutputMismatch(f"at the size of the search its outputs differ from the fixed file's by {to_fixed:.2g}")
    worst = max(at_others, default=0.0)
    if worst > FLOAT_DIFFERENCE_FACTOR * at_search + FLOAT_DIFFERENCE_SLACK:
        raise _OutputMismatch(
            f"at other sizes its outputs differ from the float model's by {worst:.2g}, but by {at_search:.2g} at the "
            "size of the search"
        )
    figures = ", ".join(f"{value:.2g}" for value in at_others)
    return (
        f"{runtime}: relative difference to the float model {figures} ({at_search:.2g} at the size of the search)"
        if at_others
        else runtime
    )


def _largest_difference(outputs: Outputs, reference: Outputs, *, every: bool = False) -> float:
    """Return the largest relative difference (root mean square) between outputs.

    Args:
        every: Also compare non-floating outputs, by their share of different values, and count a different shape as
            infinite. Otherwise both are ignored, as for models whose number of boxes depends on the data.
    """
    worst = math.inf if every and len(outputs) != len(reference) else 0.0
    for output, other in zip(outputs, reference, strict=False):
        if output.shape != other.shape:
            worst = max(worst, math.inf if every else 0.0)
        elif other.dtype.kind == "f":
            a, b = output.astype(np.float64), other.astype(np.float64)
            finite = np.isfinite(a) & np.isfinite(b)
            if every and not np.array_equal(np.isfinite(a), np.isfinite(b)):
                return math.inf
            norm = float(np.linalg.norm(b[finite]))
            difference = float(np.linalg.norm(a[finite] - b[finite]))
            worst = max(worst, difference / norm if norm else difference)
        elif every and output.size:
            worst = max(worst, float(np.mean(output != other)))
    return worst


def _run_in_process(
    runtime: str, path: Path, subject: DynamicCheckTarget, cases: Sequence[Case], wanted: int
) -> list[Outputs | None]:
    """Run a model on the input of each case until `wanted` cases succeeded; a failed case gives None.

    Raises:
        UserError: The runtime refuses the model, or its process ended.
    """
    what = f"{path.name}: {runtime}"
    return call_in_helper_process(what, _run_cases, runtime, path, subject, list(cases), wanted)


def _run_cases(
    runtime: str, path: Path, subject: DynamicCheckTarget, cases: Sequence[Case], wanted: int
) -> list[Outputs | None]:
    """Run the cases of `_run_in_process` in this process."""
    try:
        infer = {"onnxruntime": _open_onnxruntime, "openvino": _open_openvino}[runtime](path)
    except Exception as error:  # runtimes share no class of exceptions
        raise UserError(one_line_error(error)) from error
    found: list[Outputs | None] = []
    for case in cases:
        try:
            number, shapes = case
            if subject.samples:  # with rows, columns and so on repeated or left out
                sample = subject.samples[(number - 1) % len(subject.samples)]
                feeds = {name: resize_array(array, shapes[name]) for name, array in sample.items()}
            else:
                types = {name: (kind.dtype, shapes[name]) for name, kind in subject.types.items()}
                (feeds,) = random_feeds(types, 1, number)
            outputs = infer(feeds)
            compared = {str(index): each for index, each in enumerate(outputs) if index not in subject.random}
            found.append(tuple(name_arrays(compared).values()))
        except Exception:
            found.append(None)
        if sum(outputs is not None for outputs in found) >= wanted or found[0] is None:
            break
    return found


def _open_onnxruntime(path: Path) -> Callable[[Feeds], Sequence[Any]]:
    """Return a function that runs a model in ONNX Runtime, operator by operator as it is written."""
    session = open_reference_session(str(path))
    return lambda feeds: session.run(None, dict(feeds))


def _open_openvino(path: Path) -> Callable[[Feeds], Outputs]:
    """Return a function that runs a model in OpenVINO."""
    import openvino

    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Any = openvino.Core().compile_model(str(path), "CPU", options)

    def infer(feeds: Feeds) -> Outputs:
        result = compiled(dict(feeds))
        return tuple(np.array(result[port]) for port in compiled.outputs)

    return infer


class DynamicModel(NamedTuple):
    """Result of writing a file with dynamic axes.

    Attributes:
        file: Path of the file; None if it was not written.
        remark: Sentence with the result of the check, or the reason why it was not written.
    """

    file: Path | None
    remark: str


def dynamic_model_path(file: Path) -> Path:
    """Return the path of the dynamic form of a model file: `NAME.dynamic.onnx` in the same folder."""
    return file.with_name(f"{file.stem}{DYNAMIC_MODEL_SUFFIX}")


def remove_dynamic_model(file: Path) -> Path:
    """Remove the dynamic form of a model file, if there is one, and return the path of that form."""
    target = dynamic_model_path(file)
    for stale in (target, target.with_name(f"{target.name}.data")):
        stale.unlink(missing_ok=True)
    return target


def format_fixed_shapes(model: Model) -> str:
    """Return the shapes that a model with fixed inputs takes, as text: "ids 1x128"."""
    return ", ".join(f"{name} {'x'.join(map(str, model.types[name].shape))}" for name in model.inputs)


def write_dynamic_model(
    model: Model, file: Path, backend: str, shapes: Sequence[Shapes] = (), data: Iterable[Feeds] = ()
) -> DynamicModel | None:
    """Write a quantized model with the dynamic axes of its original to the same folder.

    Args:
        model: The float model at fixed sizes.
        file: The model with Q/DQ pairs that was made from it.
        backend: Runtime of the search; the file is not written if its outputs differ there.
        shapes: Input shapes to check at; other shapes are tried if there are fewer than two.
        data: Calibration batches, of which the first are the inputs of the check; random inputs are drawn without any.

    Returns:
        Path and remark of the file; None if the original has no dynamic axes.
    """
    target = remove_dynamic_model(file)
    if model.origin is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qdq-dynamic-") as scratch:
        tried = Path(scratch) / target.name
        try:
            floating, axes = write_dynamic(model, file, tried)
            types = {name: model.types[name] for name in model.inputs}
            samples = data_batches(data, CHECK_INPUT_COUNT)
            random = frozenset(map(model.outputs.index, find_random_outputs(model.proto)))
            subject = DynamicCheckTarget(
                axes=axes,
                types=types,
                floating=floating,
                fixed=file,
                dynamic=tried,
                requested=tuple(shapes),
                random=random,
                samples=samples,
            )
            remark = check_dynamic_model(subject, backend)
        except (UserError, OSError, ValueError) as error:
            return DynamicModel(file=None, remark=f"{target.name} is not written: {error}")
        move_model(tried, target)
    symbols = dict.fromkeys(str(axis) for each in axes.values() for axis in each or () if isinstance(axis, str))
    names = f" ({', '.join(symbols)})" if symbols else ""
    return DynamicModel(file=target, remark=f"{target.name} keeps the dynamic axes{names}: {remark}")


def write_dynamic_rows(
    model: Model,
    table: FinalistSet,
    backend: str,
    observer: Observer,
    shapes: Sequence[Shapes] = (),
    data: Iterable[Feeds] = (),
) -> None:
    """Write each quantized row of a task also with the dynamic axes of the original model.

    The results are recorded in `dynamic.json`; rows with an unchanged record are not written again.

    Args:
        model: The float model at fixed sizes; nothing is written if its original has static inputs.
        backend: Runtime of the search.
        observer: Receives the number of written files, and why a row was not written.
        shapes: Input shapes to check at, as in `write_dynamic_model`.
        data: Calibration batches, as in `write_dynamic_model`.
    """
    if model.origin is None:
        return
    records: dict[str, dict[str, Any]] = {**read_dynamic_axes(table.folder)}
    rows = [row for row in table.rows if row.pairs and not row.file.endswith(IR_SUFFIX)]
    models = table.folder / "models"
    outdated = set()
    for row in rows:
        known = records.get(row.id, {})
        kept = known.get("file") is None or (models / known["file"]).exists()
        if not kept or not {"file", "remark"} <= known.keys() or known.get("sha256") != row.sha256:
            outdated.add(row.id)
    samples = data_batches(data, CHECK_INPUT_COUNT) if outdated else ()
    with observer.work("dynamic axes", len(rows)) as step:
        for row in rows:
            if row.id in outdated:
                file = models / row.file
                with explain_write_errors(file):
                    result = write_dynamic_model(model, file, backend, shapes, samples)
                records[row.id] = {
                    "sha256": row.sha256,
                    "file": result and result.file and result.file.name,
                    "remark": result and result.remark,
                }
            step.advance()
    write_record(table.folder / DYNAMIC_AXES_FILE, records)
    written = sum(records[row.id]["file"] is not None for row in rows)
    observer.say(
        f"{written} of {len(rows)} quantized models are written with their dynamic axes too: {DYNAMIC_AXES_FILE}"
    )
    for row in rows:
        if records[row.id]["file"] is None and row.choices is not None:
            observer.say(str(records[row.id]["remark"]))
