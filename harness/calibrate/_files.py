"""Model files with the external data that belong to them, copied and moved as one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["copy_model", "move_model"]


def copy_model(model_path: Path, folder: Path) -> Path:
    """Copy a model to `folder/model.onnx`, because every tool here writes beside the model that it is given.

    External data are the files whose names stand in the model; one that only happens to be named there costs a copy.
    Links would do, but ONNX refuses linked external data.

    Returns:
        The copy.
    """
    content = model_path.read_bytes()
    target = folder / "model.onnx"
    if b"location" in content:
        for other in _named(content, model_path):
            shutil.copyfile(other, folder / other.name)
    target.write_bytes(content)
    return target


def move_model(model_path: Path, target: Path) -> None:
    """Move a model and the data beside it; the model itself comes last, so that it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in [*_named(model_path.read_bytes(), model_path), model_path]:
        final = target if other == model_path else target.with_name(other.name)
        part = final.with_name(f"{final.name}.{os.getpid()}.part")
        shutil.move(other, part)
        os.replace(part, final)


def _named(content: bytes, model_path: Path) -> list[Path]:
    others = (other for other in sorted(model_path.parent.iterdir()) if other != model_path)
    return [other for other in others if other.name.encode() in content and other.is_file()]
