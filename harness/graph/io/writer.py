"""Writing of models to files."""

from __future__ import annotations

from pathlib import Path

import onnx

__all__ = ["is_large", "write_model"]

MAX_SINGLE_FILE_BYTES = 1_900_000_000  # of weights; protobuf itself ends at 2 GiB


def is_large(proto: onnx.ModelProto) -> bool:
    """Return whether a model is too large for one file."""
    return bool(sum(tensor.ByteSize() for tensor in proto.graph.initializer) > MAX_SINGLE_FILE_BYTES)


def write_model(proto: onnx.ModelProto, path: Path) -> Path:
    """Write a model to one file or, above 1.9 GB, to the file and `<name>.data`; equal models give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_large(proto):
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return path
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx appends to an existing file
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    onnx.save_model(copy, path, save_as_external_data=True, location=data.name)
    return path
