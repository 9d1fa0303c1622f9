"""Reading of ONNX files from other tools; nothing in them is trusted before it is checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from harness.errors import UserError
from harness.graph.model import iter_graphs

__all__ = ["load_external_data", "read_model"]

_LFS_POINTER_PREFIX = b"version https://git-lfs"
_DTYPE_NAMES_BY_BITS = {
    2: "INT2 UINT2",
    4: "INT4 UINT4 FLOAT4E2M1",
    8: "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
    16: "INT16 UINT16 FLOAT16 BFLOAT16",
    32: "INT32 UINT32 FLOAT",
    64: "INT64 UINT64 DOUBLE COMPLEX64",
    128: "COMPLEX128",
}
_DTYPE_CODES = dict(onnx.TensorProto.DataType.items())  # an older onnx does not know all of them
_BITS_BY_DTYPE = {
    _DTYPE_CODES[name]: bits
    for bits, names in _DTYPE_NAMES_BY_BITS.items()
    for name in names.split()
    if name in _DTYPE_CODES
}


def read_model(path: Path, source: str) -> tuple[onnx.ModelProto, str]:
    """Return the model in a file with all its weights, and the SHA-256 of the file and its external data.

    Raises:
        UserError: The file is missing, truncated or not ONNX; weights do not have the declared size; or external data
            are missing, too short or outside the model's folder.
    """
    raw = _read_bytes(path, source)
    proto = _parse_model(raw, source)
    digest = hashlib.sha256(raw)
    external = load_external_data(proto, path.parent, source)
    for file in sorted({file for _, file in external}):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    for tensor, _ in external:
        try:
            load_external_data_for_tensor(tensor, str(path.parent))
        except (ValueError, OSError, onnx.checker.ValidationError) as error:
            raise UserError(
                f"{source}: the external data of {tensor.name!r} is truncated or damaged ({error}); "
                "fetch or export model and data again, together"
            ) from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    for tensor in _iter_tensors(proto):
        _check_size(tensor, source)
    return proto, digest.hexdigest()


def load_external_data(proto: onnx.ModelProto, folder: Path, source: str) -> list[tuple[onnx.TensorProto, Path]]:
    """Return the tensors of a model whose values are in other files, each with that file.

    Raises:
        UserError: A file is missing, or outside the model's folder.
    """
    external = (tensor for tensor in _iter_tensors(proto) if tensor.data_location == onnx.TensorProto.EXTERNAL)
    return [(tensor, _external_data_path(tensor, folder, source)) for tensor in external]


def _read_bytes(path: Path, source: str) -> bytes:
    if path.is_dir():
        raise UserError(f"{source}: this is a folder; name the .onnx file in it")
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{source}: no such file ({path})") from error
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from error
    if not raw:
        raise UserError(f"{source}: the file is empty; fetch or export the model again")
    if raw.startswith(_LFS_POINTER_PREFIX):
        raise UserError(f"{source}: this is a Git LFS pointer, not the model; run 'git lfs pull' in its repository")
    return raw


def _parse_model(raw: bytes, source: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    truncated = UserError(
        f"{source}: a truncated or damaged ONNX file ({len(raw)} bytes); compare its size with the original "
        "and fetch or export the model again"
    )
    not_onnx = UserError(
        f"{source}: not an ONNX file (it starts with {raw[:12]!r}); export the model to ONNX first, "
        "for instance with torch.onnx.export"
    )
    try:
        proto.ParseFromString(raw)
    except DecodeError as error:
        # Field 1 (ir_version, a small number) comes first in every file that a known exporter writes.
        raise truncated if len(raw) > 1 and raw[0] == 0x08 and 0 < raw[1] < 0x20 else not_onnx from error
    if proto.ir_version and proto.HasField("graph") and proto.opset_import:
        return proto
    is_onnx = proto.ir_version and (proto.HasField("graph") or proto.opset_import)
    raise truncated if is_onnx or proto.producer_name else not_onnx


def _iter_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and tensor attributes of all graphs and functions."""
    nodes = [node for function in proto.functions for node in function.node]
    for graph in iter_graphs(proto.graph):
        yield from graph.initializer
        nodes.extend(graph.node)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_size(tensor: onnx.TensorProto, source: str) -> None:
    """Check that a tensor's values fill its shape exactly (onnx.proto, TensorProto.raw_data)."""
    bits = _BITS_BY_DTYPE.get(tensor.data_type)
    problem = ""
    if tensor.HasField("raw_data") and bits is not None:
        needed, found = -(-math.prod(tensor.dims) * bits // 8), len(tensor.raw_data)
        problem = f"has {found} bytes, but needs {needed}" if needed != found else ""
    else:
        try:
            numpy_helper.to_array(tensor)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"and type {tensor.data_type} cannot be read ({error})"
    if problem:
        raise UserError(
            f"{source}: the tensor {tensor.name!r} of shape {list(tensor.dims)} {problem}; the file is damaged, fetch "
            "or export the model again"
        )


def _external_data_path(tensor: onnx.TensorProto, folder: Path, source: str) -> Path:
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    absolute = Path(location).is_absolute() or bool(PureWindowsPath(location).drive)
    file = folder / location
    if not location or absolute or not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{source}: the weights {tensor.name!r} refer to the file {location!r} outside of the model's folder, "
            "which is refused; save the model again with its data in the same folder "
            "(onnx.save(model, path, save_as_external_data=True))"
        )
    if not file.is_file():
        raise UserError(
            f"{source}: the external data {location!r} with the weights {tensor.name!r} is missing; "
            f"put that file into {folder}"
        )
    return file
