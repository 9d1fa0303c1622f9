"""Causes of user errors: which of them a caller of the Python interface sees."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

import harness
from harness.base.errors import UserError, without_inner_errors

PROJECT = Path(harness.__file__).parents[1]
STDLIB, PACKAGES = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))


def visible_cause(file: Path, statement: str) -> BaseException | None:
    """Return the visible cause of an error whose own cause was raised by a statement of a file."""

    @without_inner_errors
    def call() -> None:
        try:
            exec(compile(statement, str(file), "exec"), {})
        except Exception as error:
            start = error.__traceback__
            cause = error.with_traceback(start and start.tb_next)  # without the line of this file
            raise UserError(f"it failed: {error}") from cause

    with pytest.raises(UserError) as caught:
        call()
    return caught.value.__cause__


@pytest.mark.parametrize(
    "file",
    [
        PROJECT / "search_mine.py",
        PROJECT / "harness2" / "metric.py",
        Path(sys.prefix) / "work" / "metric.py",
        Path(sys.base_prefix) / "src" / "metric.py",
        Path("<stdin>"),
    ],
)
def test_exception_of_the_callers_code_is_the_cause(file):
    assert isinstance(visible_cause(file, "raise ValueError('no boxes')"), ValueError)


@pytest.mark.parametrize(
    "file",
    [PROJECT / "search" / "a.py", PROJECT / "harness" / "a.py", STDLIB / "json.py", PACKAGES / "library" / "a.py"],
)
def test_exception_of_a_library_is_the_cause_only_if_the_message_lacks_it(file):
    assert visible_cause(file, "raise ValueError('no boxes')") is None
    assert isinstance(visible_cause(file, "assert False"), AssertionError)
