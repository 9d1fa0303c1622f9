"""Preparation keeps inputs and outputs, or the model is refused."""

import onnx
import pytest
from onnx import parser

import harness.graph.passes.pipeline as pipeline
from harness.base.errors import UserError
from harness.graph.load import load_proto
from harness.graph.passes.pipeline import upgrade_opset


def model(opset: int = 13) -> onnx.ModelProto:
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2,3] x, int64[2] i) => (float[2,3] y, float[2,3] z)
        {{ y = Softmax(x)  z = Gather(y, i) }}"""
    )


def renamed(proto: onnx.ModelProto) -> None:
    proto.graph.output[1].name = proto.graph.node[1].output[0] = "other"


def retyped(proto: onnx.ModelProto) -> None:
    proto.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT32


def reshaped(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5


def shortened(proto: onnx.ModelProto) -> None:
    del proto.graph.output[1]


def swapped(proto: onnx.ModelProto) -> None:
    outputs = list(proto.graph.output)[::-1]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)


def transposed(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "Transpose"
    del proto.graph.node[1].input[1:]
    proto.graph.output[1].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("change", [renamed, retyped, reshaped, shortened, swapped, transposed])
def test_a_changed_interface_is_refused(change, monkeypatch):

    def broken(*args: object) -> onnx.ModelProto:
        proto: onnx.ModelProto = upgrade_opset(*args)  # type: ignore[arg-type]
        change(proto)
        return proto

    assert load_proto(model(), source="m.onnx", sha256="0").outputs == ("y", "z")
    monkeypatch.setattr(pipeline, "upgrade_opset", broken)
    monkeypatch.setattr("harness.graph.load.check_equivalent", lambda *_: None)
    with pytest.raises(UserError, match=r"m\.onnx: preparing the model would change .*newer opset"):
        load_proto(model(), source="m.onnx", sha256="0")


def test_names_of_data_dependent_dimensions_are_kept():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[2,3] x) => (float[hits] y, int64[2,found] z)
        { z = NonZero(x)  r = Relu(x)  f = Flatten<axis=0>(r)  k = Cast<to=9>(f)  o = Squeeze(k)
        y = Compress(r, o) }"""
    )
    outputs = load_proto(proto, source="m.onnx", sha256="0").proto.graph.output
    assert [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in outputs] == [
        ["hits"],
        [2, "found"],
    ]
