"""What can go wrong, in two families: mistakes of the user, and failures of one candidate.

A `UserError` stops the command with one message and exit code 2. A `CandidateError` is raised by
plug-ins; the sandbox turns it into a `records.Failed`, and the search goes on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "BuildFailed", "CandidateError", "EvaluationFailed", "MeasureFailed", "UserError", "prefix_key", "describe_type", "prefix_file",
    "suggest_names",
]  # fmt: skip


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


class _KeyedError(UserError):
    """A mistake at a key of a file; keys are added from the inside to the outside."""

    def __init__(self, keys: tuple[str, ...], note: str, words: str) -> None:
        super().__init__(f"{'.'.join(keys)}{f' ({note})' if note else ''}: {words}")
        self.keys, self.note, self.message = keys, note, words


@contextmanager
def prefix_key(key: str, note: str = "") -> Iterator[None]:
    """Begin messages of mistakes with a key of the file; nested ones make a dotted path.

    Args:
        key: The key, for instance "models.0".
        note: What people call the entry.

    Raises:
        UserError: The one that is raised inside, with that.
    """
    try:
        yield
    except UserError as error:
        inner = error if isinstance(error, _KeyedError) else _KeyedError((), "", str(error))
        raise _KeyedError((key, *inner.keys), note or inner.note, inner.message) from error


@contextmanager
def prefix_file(name: object) -> Iterator[None]:
    """Begin each line of the messages of mistakes with the name of the file that they are in.

    Raises:
        UserError: The one that is raised inside, with that.
    """
    try:
        yield
    except UserError as error:
        lines = str(error).splitlines()
        raise UserError(
            "\n".join(line if line.startswith(str(name)) else f"{name}: {line}" for line in lines)
        ) from error


def describe_type(body: object) -> str:
    """What a file holds in place of what belongs there, after "but"."""
    return "it is empty" if body is None else f"got {type(body).__name__}"


def suggest_names(name: str, known: Iterable[str]) -> str:
    """A half-sentence that helps with a mistyped name: the nearest known names, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"known: {', '.join(names) if names else 'none'}"
