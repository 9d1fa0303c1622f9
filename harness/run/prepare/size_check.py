"""Check that a model with dynamic inputs runs at the sizes that it was fixed to; search for sizes at which it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.random_inputs import InputTypes
from harness.graph.equivalence.versions import Feeds, iter_random_inputs
from harness.graph.load import read_signature
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes, resolve_shapes
from harness.graph.segmented_run import open_reference_session
from harness.run.prepare.input_shapes import DynamicDimensions, Shapes, nearby_shapes, resize_array, small_shapes
from harness.runtimes.host_clock import one_line_error
from harness.workers.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process, call_with_reports

MAX_SEARCH_S = 20.0
MAX_SHOWN_FITS = 3
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInputs:
    """Inputs to run a model on.

    Attributes:
        types: Element type and shape of each input at the sizes of the experiment.
        sample: Batch of calibration data at these sizes, which is resized to others; None: several kinds of random
            inputs are drawn, because a model may not accept each of them.
    """

    types: InputTypes
    sample: Feeds | None = None

    def feeds(self, shapes: Shapes) -> Iterator[Feeds]:
        """Yield the inputs at the given shapes."""
        if self.sample is None:
            yield from iter_random_inputs({name: (dtype, shapes[name]) for name, (dtype, _) in self.types.items()})
        else:
            yield {name: resize_array(array, shapes[name]) for name, array in self.sample.items()}


def check_input_sizes(model: Model, inputs: TrialInputs, sizes: InputSizes) -> str:
    """Raise an error if a model does not run in ONNX Runtime at its input sizes, but does at others.

    Models with static inputs, or widened to several samples, are not checked. One that ONNX Runtime runs at no size
    that is tried may have operators that only other runtimes support, or need other values.

    Args:
        model: The loaded model.
        inputs: Inputs at its sizes.
        sizes: Sizes that the experiment gives; the others are those of the calibration data.

    Returns:
        Remark on a model that does not run, if no other size is found at which it does, else "".

    Raises:
        UserError: The model runs only at other sizes; the message names the keys of the sizes, and some of these sizes.
    """
    origin = model.origin
    if origin is None or not isinstance(path := origin.model, Path):
        return ""
    given = {name: shape for name, (_, shape) in inputs.types.items()}
    axes = read_signature(path, model.source).axes
    dimensions = DynamicDimensions.of(axes, given)
    if dimensions.shapes({}) != given:  # the file takes one sample
        return ""
    kind = "random inputs" if inputs.sample is None else "calibration data"
    at = f"with {dimensions.format_sizes(given)[0]} on {kind}"
    what, fits = f"{model.source}: the run at its input sizes", list[Shapes]()
    try:
        reason = call_in_helper_process(what, _explain_failure, path, inputs, given, factor=RUNTIME_FACTOR)
    except HelperCallFailed as error:
        return f"not run {at}: ONNX Runtime {error.how}"
    if not reason:
        return ""
    with suppress(HelperCallFailed):  # the sizes found before are kept
        what = f"{model.source}: the search for input sizes"
        call_with_reports(what, _report_fits, path, inputs, dimensions, factor=1.0, on_report=fits.append)
    if not fits:
        return f"ONNX Runtime does not run it {at} ({reason}), and no other sizes were found with which it does"
    keys = [key for key in ("shapes", "dims") if getattr(sizes, key)]
    if resolve_shapes(axes, sizes, model.source).missing:
        keys.append("calibration.data")
    shown, *found = dimensions.format_sizes(given, *fits)
    raise UserError(
        f"{' or '.join(keys)}: {model.source} does not run with {shown} ({reason}); it runs with {'; '.join(found)}"
    )


def _explain_failure(path: Path, inputs: TrialInputs, shapes: Shapes) -> str:
    """Return why a model runs on none of its inputs at these shapes; "" if it runs, or cannot be loaded."""
    try:
        session = open_reference_session(str(path))
    except Exception:  # ONNX Runtime's exceptions have no common base; `_ort_remark` of the model checks has the reason
        return ""
    reasons = []
    for feeds in inputs.feeds(shapes):
        if not (reason := _why_not(session, feeds)):
            return ""
        reasons.append(reason)
    return (reasons[0].partition("while running ")[2] or reasons[0])[:MAX_REASON_CHARS]


def _report_fits(path: Path, inputs: TrialInputs, dimensions: DynamicDimensions, report: Callable[..., object]) -> None:
    """Report shapes at which a model runs on all its inputs: one that only some accept may depend on their values."""
    session = open_reference_session(str(path))
    end_s = time.monotonic() + MAX_SEARCH_S
    in_time = takewhile(lambda _: time.monotonic() < end_s, small_shapes(nearby_shapes(dimensions)))
    fits = (shapes for shapes in in_time if not any(_why_not(session, feeds) for feeds in inputs.feeds(shapes)))
    for shapes in islice(fits, MAX_SHOWN_FITS):
        report(shapes)


def _why_not(session: Any, feeds: Feeds) -> str:
    """Return why a session does not run these inputs, or "" if it does."""
    try:
        session.run(None, dict(feeds))
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        return one_line_error(error)
    return ""
