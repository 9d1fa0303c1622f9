"""Check that a model with dynamic inputs runs at the sizes that it was fixed to; search for sizes at which it does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import UserError
from harness.graph.io.helper_process import call_in_helper_process
from harness.graph.load import read_signature
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import Axes, is_batch
from harness.graph.segmented_run import open_reference_session
from harness.random_inputs import MAX_INPUT_ELEMENTS, random_feeds
from harness.runtimes.host_clock import one_line_error
from harness.verification.input_shapes import Shapes, iter_sizes, nearby_shapes

MAX_SEARCH_S = 20.0
MAX_SHOWN_FITS = 3
MAX_REASON_CHARS = 200


def check_input_sizes(model: Model, keys: Sequence[str]) -> str:
    """Raise an error if a model does not run in ONNX Runtime at its input sizes, but does at others.

    The model is run on random inputs. Models with static inputs are not checked. One that ONNX Runtime runs at no size
    that is tried may have operators that only other runtimes support, or need real data.

    Args:
        keys: Keys of the experiment that set the sizes, for the message.

    Returns:
        Remark on a model that runs at no size that is tried, else "".

    Raises:
        UserError: The model runs only at other sizes; the message names the keys, and some of these sizes.
    """
    origin = model.origin
    if origin is None or not isinstance(origin.model, Path):
        return ""
    axes = read_signature(origin.model, model.source).axes
    dtypes = {name: model.types[name].dtype for name in model.inputs}
    given = {name: model.types[name].shape for name in model.inputs}
    what = f"{model.source}: the search for input sizes"
    reason, fits = call_in_helper_process(what, _find_fitting_shapes, origin.model, dtypes, axes, given)
    sizes, *found = (_format_sizes(axes, shapes) for shapes in (given, *fits))
    if fits:
        where = " or ".join(keys)
        raise UserError(
            f"{where}: {model.source} does not run with {sizes} ({reason}); it runs with {'; '.join(found)}"
        )
    return reason and f"ONNX Runtime runs it neither with {sizes} nor with other sizes that were tried: {reason}"


def _format_sizes(axes: Mapping[str, Axes | None], shapes: Shapes) -> str:
    """Return the sizes of the dynamic dimensions without the batch: "h 32, w 192"."""
    sizes = [(name, size) for name, size in iter_sizes(axes, shapes) if name in shapes or not is_batch(name, 0)]
    return ", ".join(f"{name} {size}" for name, size in sizes)


def _find_fitting_shapes(
    path: Path, dtypes: Mapping[str, str], axes: Mapping[str, Axes | None], given: Shapes
) -> tuple[str, list[Shapes]]:
    """Return why a model does not run at the given shapes, and some shapes at which it runs; none if it runs."""
    end_s, fits = time.monotonic() + MAX_SEARCH_S, list[Shapes]()
    try:
        session = open_reference_session(str(path))
    except Exception:  # ONNX Runtime cannot run it at any size, which another remark says
        return "", []
    if not (reason := _why_not(session, dtypes, given)):
        return "", []
    for shapes in _small_shapes(axes, given):
        if len(fits) == MAX_SHOWN_FITS or time.monotonic() > end_s:
            break
        if not _why_not(session, dtypes, shapes):
            fits.append(shapes)
    return (reason.partition("while running ")[2] or reason)[:MAX_REASON_CHARS], fits


def _small_shapes(axes: Mapping[str, Axes | None], given: Shapes) -> Iterator[Shapes]:
    for shapes in nearby_shapes(axes, given):
        if all(math.prod(shape) <= MAX_INPUT_ELEMENTS for shape in shapes.values()):
            yield shapes


def _why_not(session: object, dtypes: Mapping[str, str], shapes: Shapes) -> str:
    """Return why a session does not run random inputs of these shapes, or "" if it does."""
    try:
        (feeds,) = random_feeds({name: (dtype, shapes[name]) for name, dtype in dtypes.items()}, 1)
        session.run(None, dict(feeds))  # type: ignore[attr-defined]
    except Exception as error:  # of any class, as the inputs are no data
        return one_line_error(error)
    return ""
