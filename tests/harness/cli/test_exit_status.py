"""Exit status of commands: one table for all of them."""

import sys

import pytest
from small import qdq

from harness.base.errors import DoesNotHold, UserError
from harness.cli.main import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_is_a_usage_error_of_every_command(command, capsys):
    assert qdq(*command.split(), "--frobnicate") == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (DoesNotHold("it differs"), 1, "qdq: it differs"),
        (UserError("no such file"), 2, "qdq: no such file"),
        (SystemExit(1), 2, "sys.exit(1)"),
        (SystemExit("a text"), 2, "a text"),
        (RuntimeError("a bug"), 3, "internal error"),
        (EOFError(), 3, "internal error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_exit_status_by_error(monkeypatch, capsys, error, status, said):
    def examine():
        if error is not None:
            raise error
        return []

    monkeypatch.setattr("harness.cli.doctor.examine_machine", examine)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer replaces it after a broken pipe
    assert qdq("doctor") == status
    found = capsys.readouterr().err
    assert said in found
    assert ("Traceback" in found) == (status == 3)
