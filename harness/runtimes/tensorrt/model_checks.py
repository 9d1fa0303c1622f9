"""Preparation of model files for TensorRT: refusal of those whose build would fail, and casts to FP16 or BF16.

A strongly typed network runs every operator in the type of the ONNX file, so an FP16 engine needs a file with weights,
constants and scales of Q/DQ pairs in FP16 (TensorRT, "Strongly typed networks"; DequantizeLinear returns the type of
its scale).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from harness.base.errors import BuildFailed, UserError, install_hint
from harness.graph.io.digests import digest_file
from harness.graph.io.files import move_model, write_model
from harness.graph.passes.dimension_sizes import axes_of
from harness.graph.plugin_operators import find_plugin_nodes, remove_plugins, restore_plugins
from harness.graph.protos import constants_by_name
from harness.graph.qdq.file_checks import find_refused_qdq
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

Structure: TypeAlias = onnx.ModelProto
"""A model without its external data."""
MAX_PROTOBUF_BYTES = 2**31 - 1
"""Protobuf reads no more; neither can a model be cast that has more weights."""
FP8_TYPES = frozenset((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2))
FLOAT_TYPE_NAMES = {TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16"}
LOW_PRECISION = {"f16": "fp16", "bf16": "bf16"}
CAST_METADATA_KEY = "qdq_bench.cast_to"
"""Metadata of a cast file, and of what is inserted into it: where all weights are INT8, nothing else would tell."""


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a model without its external data.

    Raises:
        BuildFailed: The file is missing, no ONNX model, or too large.
    """
    try:
        if path.stat().st_size > MAX_PROTOBUF_BYTES:
            raise BuildFailed(
                f"{path.name}: larger than 2 GiB, which protobuf cannot read; keep weights in external data"
            )
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise BuildFailed(f"{path.name}: cannot be read ({error.strerror or error})") from error
    except DecodeError as error:
        raise BuildFailed(f"{path.name}: no ONNX model, or cut short ({error})") from error


def has_qdq(proto: onnx.ModelProto) -> bool:
    """Return whether the main graph has a DequantizeLinear node."""
    return any(node.op_type == "DequantizeLinear" for node in proto.graph.node)


def has_fp8(proto: onnx.ModelProto) -> bool:
    """Return whether any constant of the main graph, zero points included, is FP8."""
    return any(tensor.data_type in FP8_TYPES for tensor in constants_by_name(proto.graph).values())


def read_input_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input by name, -1 for a dynamic size; initializers listed as inputs are excluded."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    return {
        value.name: tuple(axis if isinstance(axis, int) else -1 for axis in axes_of(value) or ())
        for value in proto.graph.input
        if value.name not in constants
    }


def read_io_dtypes(proto: onnx.ModelProto) -> tuple[dict[str, np.dtype[Any]], dict[str, np.dtype[Any]]]:
    """Return NumPy's element type of each input by name, and of each output by name."""

    def types(values: Any) -> dict[str, np.dtype[Any]]:
        kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        return {name: np.dtype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds.items()}

    own = read_input_shapes(proto)
    return types(v for v in proto.graph.input if v.name in own), types(proto.graph.output)


def dominant_float_type(proto: onnx.ModelProto) -> str:
    """Return the float type of most elements of the constants: "f32", "f16" or "bf16"; "f32" if nothing tells.

    Types may differ, because operators without FP16 stay FP32 in a cast model. The type in the metadata of a file that
    this project cast takes precedence; without float constants, the types of inner tensors count.
    """
    said = next((entry.value for entry in proto.metadata_props if entry.key == CAST_METADATA_KEY), None)
    if said in LOW_PRECISION:
        return str(said)
    sizes: Counter[str] = Counter()
    for tensor in constants_by_name(proto.graph).values():
        if tensor.data_type in FLOAT_TYPE_NAMES:
            sizes[FLOAT_TYPE_NAMES[tensor.data_type]] += int(np.prod(tensor.dims, dtype=np.int64))
    if not sizes:
        scales = (FLOAT_TYPE_NAMES.get(value.type.tensor_type.elem_type) for value in proto.graph.value_info)
        sizes.update(kind for kind in scales if kind is not None)
    return sizes.most_common(1)[0][0] if sizes else "f32"


def check_tensorrt_qdq(proto: onnx.ModelProto, path: Path, capability: tuple[int, int]) -> None:
    """Raise an error for Q/DQ pairs that TensorRT does not accept, because a build would fail only after minutes.

    Args:
        proto: Model without its external data.
        path: File of the model, from which external data are read.
        capability: Compute capability of the GPU.

    Raises:
        BuildFailed: A pair is not accepted; the message names the first such node.
    """
    for problem in find_refused_qdq(QDQGraph(proto, path.parent), capability):
        raise BuildFailed(f"{path.name}: {problem}")


def cast_model(path: Path, precision: str, folder: Path) -> Path:
    """Cast a model to FP16 or BF16 without its inputs and outputs, and return the path of the new file.

    ModelOpt's autocast casts every operator that supports it, except plug-ins, and the scales of Q/DQ pairs. The
    default operator set becomes 19 (FP16) or 22 (BF16). An existing cast of the same content in the folder is reused,
    because a cast takes seconds.

    Args:
        path: File of the model; it is returned if the precision is "f32" or the model has the type already.
        precision: "f32", "f16" or "bf16".
        folder: Folder of the new file.

    Raises:
        BuildFailed: The model is too large to be cast, or ModelOpt refuses it.
    """
    if precision not in LOW_PRECISION or dominant_float_type(read_structure(path)) == precision:
        return path
    target = folder / f"{path.stem}.{digest_file(path)[:16]}.{precision}.onnx"
    if target.exists():
        return target
    if _external_weight_bytes(path) > MAX_PROTOBUF_BYTES:
        raise BuildFailed(
            f"{path.name}: more than 2 GB of weights cannot be cast to {precision} here; cast the model beforehand "
            f"(python -m modelopt.onnx.autocast --low_precision_type {LOW_PRECISION[precision]}), or use precision: f32"
        )
    what = f"{path.name}: the cast to {precision}"
    cast = call_in_helper_process(what, _convert_precision, path, precision, factor=RUNTIME_FACTOR)
    onnx.helper.set_model_props(cast, {**{p.key: p.value for p in cast.metadata_props}, CAST_METADATA_KEY: precision})
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:  # so that an interrupted call leaves no partial file
        move_model(write_model(cast, Path(scratch) / target.name), target)
    return target


def _convert_precision(path: Path, precision: str) -> onnx.ModelProto:
    """Return a model at FP16 or BF16, except for plug-in operators, which ModelOpt cannot cast without TensorRT."""
    try:
        from modelopt.onnx.autocast.convert import convert_to_f16
    except ImportError as error:
        raise UserError(
            f"{path.name}: {precision} needs ModelOpt ({error}): {install_hint('modelopt')}, or use precision: f32"
        ) from error

    model = onnx.load(path)
    plugins = find_plugin_nodes(model)
    try:
        known = remove_plugins(model, plugins, path.name) if plugins else model
    except BuildFailed as error:
        raise BuildFailed(f"{error}, or use precision: f32") from error
    try:
        cast = convert_to_f16(known, low_precision_type=LOW_PRECISION[precision], keep_io_types=True)
    except Exception as error:  # ModelOpt raises this very class too
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise BuildFailed(f"{path.name}: ModelOpt cannot cast it to {precision}: {words}") from error
    return restore_plugins(cast, model, plugins) if plugins else cast


def _external_weight_bytes(path: Path) -> int:
    proto = read_structure(path)
    external = sum(
        int(entry.value)
        for tensor in proto.graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    )
    return path.stat().st_size + external
