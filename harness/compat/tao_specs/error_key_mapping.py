"""Messages about the data of an experiment, in the words of the spec file that it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from harness.errors import UserError

__all__ = ["map_error_keys"]

DATA_KEY = re.compile(r"(?<![\w/])data\.(\w+)(?![\w./])")
"""A key of an experiment's `data` mapping, which the evaluators' messages name."""


@contextmanager
def map_error_keys(words: Mapping[str, str], where: str = "") -> Iterator[None]:
    """Let messages about the keys of a `data` mapping name those of the spec that it was made from.

    Args:
        words: Key of the spec by key of the mapping.
        where: What every message begins with.

    Raises:
        UserError: The one that is raised inside, in these words.
    """
    try:
        yield
    except UserError as error:
        said = DATA_KEY.sub(lambda key: words.get(key[1], key[0]), str(error))
        raise UserError(f"{where}: {said}" if where else said) from error
