"""What can go wrong, in two families: mistakes of the user, and failures of one candidate.

A `UserError` stops the command with one message and exit code 2. A `CandidateError` is raised by
plug-ins; the sandbox turns it into a `records.Failed`, and the search goes on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BuildFailed", "CandidateError", "EvaluationFailed", "MeasureFailed", "UserError", "got", "nearest"]


class UserError(Exception):
    """Something that the user can mend. The text says where, what, what is allowed, and what to do."""


class CandidateError(Exception):
    """One candidate failed; `stage` says where."""

    stage = "unknown"


class BuildFailed(CandidateError):
    """The runtime refused the model or died building it."""

    stage = "build"


class MeasureFailed(CandidateError):
    """The built engine could not be timed: it raised, crashed, or gave an impossible reading."""

    stage = "measure"


class EvaluationFailed(CandidateError):
    """The evaluator raised, or its figure is not finite."""

    stage = "evaluate"


def got(body: object) -> str:
    """What a file holds in place of what belongs there, after "but"."""
    return "it is empty" if body is None else f"got {type(body).__name__}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A half-sentence that helps with a mistyped name: the nearest known names, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"known: {', '.join(names) if names else 'none'}"
