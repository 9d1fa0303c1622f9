"""Where files named by users are: plain paths, and `assets:PATH` below the folder QDQ_ASSETS names."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import UserError

__all__ = ["RelativePathMissing", "cache_dir", "resolve_path"]


class RelativePathMissing(UserError):
    """Nothing is where a relative path leads."""


def resolve_path(text: str, base: Path | None = None) -> Path:
    """The absolute path of an existing file or folder.

    Args:
        text: A path (relative ones are relative to `base`, else to the working directory), or `assets:PATH`.
        base: Folder of the file that names it.

    Raises:
        Absent: A relative path leads to nothing.
        UserError: Nothing is there, QDQ_ASSETS is not set, or `assets:` leads outside of its folder.
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
        path = ((base or Path.cwd()) / Path(text).expanduser()).resolve()
    if not path.exists():
        relative = not (text.startswith("assets:") or Path(text).expanduser().is_absolute())
        raise (RelativePathMissing if relative else UserError)(f"{text}: no such file or folder ({path})")
    return path


def cache_dir() -> Path:
    """The folder for things that can be made again (calibration ranges, drawn images)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(root) if root else Path.home() / ".cache") / "qdq-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
