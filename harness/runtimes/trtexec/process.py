"""The program trtexec: found, run within a time limit, and quoted where it fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from harness.errors import BuildFailed, CandidateError, UserError
from harness.runtimes.trtexec.flags import parse_version

__all__ = ["error_lines", "find_trtexec", "run_trtexec"]

HELP_TIMEOUT_S = 60.0
MAX_LOG_LINES = 8
"""Lines of its output that messages quote."""


def find_trtexec(path: str | None) -> tuple[str, str]:
    """Return the path of the program and its version.

    Args:
        path: Of the program; None: the one on PATH.

    Raises:
        UserError: There is none, or it is something else.
    """
    program = shutil.which(path or "trtexec")
    if program is None:
        raise UserError(
            f"benchmarker 'trtexec': no program {path or 'trtexec on PATH'}; it comes with TensorRT's archive, Debian "
            "packages and containers, not with pip: give its place by params: {path: ...}, or use 'tensorrt' instead"
        )
    try:
        return program, parse_version(run_trtexec([program, "--help"], HELP_TIMEOUT_S, BuildFailed))
    except BuildFailed as error:
        raise UserError(f"benchmarker 'trtexec': {program}: {error}") from error


def run_trtexec(command: Sequence[str], timeout_s: float, failure: type[CandidateError]) -> str:
    """Run trtexec and return its output.

    Raises:
        CandidateError: `failure`, where it ends with another status than 0 or takes too long.
    """
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise failure(f"trtexec took longer than {timeout_s:g} s (timeout_s)") from error
    except OSError as error:
        raise failure(f"trtexec cannot be started: {error}") from error
    if done.returncode:
        raise failure(f"trtexec failed with status {done.returncode}: {error_lines(done.stdout)}")
    return done.stdout


def error_lines(output: str) -> str:
    """Return the lines of the output that explain a failure: its errors, else the last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "[E]" in line or "Unknown option" in line]
    return " ".join((errors or lines)[-MAX_LOG_LINES:]) or "it printed nothing"
