"""File of the float model's outputs or answers, which evaluators without labels compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import Array
from harness.errors import EvaluationFailed

FINGERPRINT = "fingerprint"


def write_reference(path: Path, arrays: Mapping[str, Array], fingerprint: str) -> None:
    """Write arrays to a reference file, all or nothing.

    Args:
        path: The file; its folder is made.
        fingerprint: Fingerprint of the evaluator that reads them again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **{**arrays, FINGERPRINT: np.array(fingerprint)})
    partial.replace(path)


@contextmanager
def open_reference(path: Path, fingerprint: str, evaluator: str) -> Iterator[Any]:
    """Yield the arrays of a reference file by name, read on demand.

    Raises:
        EvaluationFailed: There is no such file, or it was made on other inputs.
    """
    if not path.is_file():
        raise EvaluationFailed(
            f"no outputs of the float model in {path}: {evaluator} compares with them, so score the float model before "
            "any other; 'qdq run' does, in code call prepare(infer) with the float model's engine"
        )
    with np.load(path, allow_pickle=False) as stored:
        if FINGERPRINT not in stored or str(stored[FINGERPRINT]) != fingerprint:
            raise EvaluationFailed(f"{path} was made on other inputs: remove it and run again")
        yield stored
