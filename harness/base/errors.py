"""Exceptions of the harness: mistakes of the user, and failures of one candidate.

A `UserError` ends the command with one message and exit status 2, a `DoesNotHold` with 1. A `CandidateError` is raised
by plug-ins; the worker records it as a `records.Failed`, and the search continues.
"""

from __future__ import annotations

import difflib
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from harness.base.text import printable_lines, shorten_values

P = ParamSpec("P")
T = TypeVar("T")
#: Largest accepted number of samples, evaluations or the like. Larger ones are typing errors that cost hours or memory.
MAX_COUNT = 10_000_000
#: Arguments of `qdq.autotune` by the options that messages name.
PYTHON_ARGUMENTS = {"another --out": "another folder (out=...)", "--accept-changes": "accept_changes=True"}


class UserError(Exception):
    """Mistake that the user can correct; the message names the place, the problem and the remedy, as printable text."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shorten_values(printable_lines(str(message))))


class DoesNotHold(UserError):
    """Result that a command examined and that does not hold, such as a damaged file or a failed searcher."""


class SizesMissing(UserError):
    """Dynamic inputs without sizes.

    Attributes:
        remedy: End of the message, with keys of an experiment and options of a command.
        arguments: The same remedy as arguments of a Python call.
    """

    def __init__(self, problem: str, remedy: str, arguments: str) -> None:
        super().__init__(f"{problem}{remedy}")
        self.remedy, self.arguments = remedy, arguments


class CandidateError(Exception):
    """Failure of one candidate; the message is printable text, and `stage` the step that failed."""

    stage = "unknown"

    def __init__(self, message: object = "") -> None:
        super().__init__(printable_lines(str(message)))


class BuildFailed(CandidateError):
    """The runtime rejected the model, or crashed while building it."""

    stage = "build"


class MeasureFailed(CandidateError):
    """The built engine raised, crashed, or reported an impossible latency."""

    stage = "measure"


class EvaluationFailed(CandidateError):
    """The evaluator raised, or its score is not finite."""

    stage = "evaluate"


class WorkerUnusable(SystemExit):
    """Error that ends a worker process, because later candidates would fail in it too; another worker replaces it."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of the project, such as "modelopt", and the environment it needs."""
    where = " in an environment without onnxruntime" if extra == "modelopt" else ""  # it brings onnxruntime-gpu
    return f"pip install 'qdq-bench[{extra}]'{where}"


class _KeyedError(UserError):
    """Mistake at a key of a file."""

    def __init__(self, keys: tuple[str, ...], note: str, message: str) -> None:
        super().__init__(f"{'.'.join(keys)}{f' ({note})' if note else ''}: {message}")
        self.keys, self.note, self.message = keys, note, message


class ErrorCollector:
    """Collector of the user errors of several checks, which are raised together."""

    def __init__(self) -> None:
        self._errors: dict[str, UserError] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the `UserError` of the body instead of raising it."""
        try:
            yield
        except UserError as error:
            self._errors.setdefault(str(error), error)

    def raise_all(self) -> None:
        """Raise one `UserError` with all messages, a line each, if there are any; its cause is the first error."""
        if self._errors:
            raise UserError("\n".join(self._errors)) from next(iter(self._errors.values()))


@contextmanager
def prefix_key(key: str, note: str = "") -> Iterator[None]:
    """Prefix the message of a `UserError` with a key of the file; nested calls give a dotted path.

    Args:
        key: For instance "models.0".
        note: Display name of the entry.
    """
    try:
        yield
    except UserError as error:
        inner = error if isinstance(error, _KeyedError) else _KeyedError((), "", str(error))
        raise _KeyedError((key, *inner.keys), note or inner.note, inner.message) from error


@contextmanager
def prefix_file(name: object) -> Iterator[None]:
    """Prefix each line of the message of a `UserError` with the name of the file."""
    try:
        yield
    except UserError as error:
        lines = str(error).splitlines()
        raise UserError(
            "\n".join(line if line.startswith(str(name)) else f"{name}: {line}" for line in lines)
        ) from error


def without_inner_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of the Python interface that raises each `UserError` without its chain of inner errors.

    The cause is kept if it comes from code of the user (`_cause_with_news`). Options of commands and keys of an
    experiment in the message are replaced by arguments.
    """

    @wraps(function)
    def wrapped(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*args, **keywords)
        except UserError as error:
            text = str(error)
            replaced = dict(PYTHON_ARGUMENTS)
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, SizesMissing):
                    replaced[cause.remedy] = cause.arguments
                cause = cause.__cause__
            for option, argument in replaced.items():
                text = text.replace(option, argument)
            raise UserError(text) from _cause_with_news(error)

    return wrapped


def _cause_with_news(error: UserError) -> BaseException | None:
    """Return the first cause that adds to the message of an error, or None.

    A cause adds nothing if it is a `UserError` or its text is part of the message, unless it comes from code of the
    user, whose traceback is needed.
    """
    cause = error.__cause__
    while cause is not None:
        reason = cause.strerror if isinstance(cause, OSError) else None
        text = reason or str(cause)  # empty for a bare `assert` of a library, of which the message has nothing
        is_repeated = bool(text) and text in str(error) and not _is_foreign(cause)
        if not (isinstance(cause, UserError) or is_repeated):
            break
        cause = cause.__cause__
    return cause


def _is_foreign(error: BaseException) -> bool:
    """Return whether the traceback of an error has a line outside this project, Python and installed packages."""
    packages = Path(__file__).parents[2]
    installed = site.getsitepackages([sys.prefix, sys.base_prefix])
    own = [packages / "harness", packages / "search", *map(Path, [sysconfig.get_path("stdlib"), *installed])]
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    paths = (Path(file) for file in files if not file.startswith("<frozen"))
    return any(not any(path.is_relative_to(folder) for folder in own) for path in paths)


def describe_type(value: object) -> str:
    """Return the type of a wrong value for the end of a message: "got str", or "it is empty" for None."""
    return "it is empty" if value is None else f"got {type(value).__name__}"


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the nearest known names, or else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"known: {', '.join(names) if names else 'none'}"
