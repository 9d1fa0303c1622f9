"""Paths that users write: plain paths, and `assets:PATH` below the folder that QDQ_ASSETS names."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import UserError

__all__ = ["RelativePathMissing", "cache_dir", "resolve_path"]


class RelativePathMissing(UserError):
    """A relative path that does not exist."""


def resolve_path(text: str, base_dir: Path | None = None) -> Path:
    """Return the absolute path of an existing file or folder.

    Args:
        text: A path, or `assets:PATH`.
        base_dir: Folder that relative paths start from; None: the working directory.

    Raises:
        RelativePathMissing: A relative path does not exist.
        UserError: Another path does not exist, QDQ_ASSETS is not set, or `assets:` leaves its folder.
    """
    if text.startswith("assets:"):
        root_text = os.environ.get("QDQ_ASSETS", "")
        if not root_text:
            raise UserError(f"{text}: set the environment variable QDQ_ASSETS to the folder with models and images")
        root = Path(root_text).resolve()
        path = (root / text.removeprefix("assets:")).resolve()
        if not path.is_relative_to(root):
            raise UserError(f"{text}: leads outside of the folder that QDQ_ASSETS names")
    else:
        path = ((base_dir or Path.cwd()) / Path(text).expanduser()).resolve()
    if not path.exists():
        relative = not (text.startswith("assets:") or Path(text).expanduser().is_absolute())
        raise (RelativePathMissing if relative else UserError)(f"{text}: no such file or folder ({path})")
    return path


def cache_dir() -> Path:
    """Return the folder for files that can be regenerated (calibration ranges, drawn images)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(root) if root else Path.home() / ".cache") / "qdq-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
