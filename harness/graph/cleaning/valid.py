"""Whether a model is valid ONNX, whatever its size and whoever's operators are in it."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import checker, helper

from harness.graph.cleaning.clean import mask_unknown

__all__ = ["check_valid"]


def check_valid(proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto] = ()) -> None:
    """Check a model, which stays as it is.

    Args:
        proto: The model.
        constants: Initializers that are not in it. They stand in as inputs, because the checker serializes what it
            checks, which ends at 2 GiB.

    Raises:
        onnx.checker.ValidationError: It is no valid ONNX.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(proto)
    checked.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in constants)
    for value in checked.graph.output:
        if not value.type.WhichOneof("value") or value.type.HasField("tensor_type"):
            # The checker insists on a declared type of outputs; runtimes infer it, and so does loading.
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
    mask_unknown(checked)
    checker.check_model(checked)
