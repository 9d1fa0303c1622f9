"""Builder of small ONNX models without protobuf code.

builder = GraphBuilder("tiny") x = builder.input("x", (1, 3, 32, 32)) x = builder.op("Relu",
builder.batch_norm(builder.conv(x, 16, 3))) builder.output(builder.linear(builder.op("Flatten",
builder.op("GlobalAveragePool", x)), 10), name="logits") model = builder.build()
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, shape_inference

MAX_IR_VERSION = 10
"""The newest ONNX file format that every supported runtime reads."""

Shape = Sequence[int | str | None]


class GraphBuilder:
    """Builder of one ONNX graph, with random weights: the same seed and calls give the same bytes.

    Methods that add nodes return the names of output tensors.

    Args:
        name: Name of the graph.
        seed: Seed of the random weights.
        opset: Version of the default operator set.
    """

    def __init__(self, name: str, *, seed: int = 0, opset: int = 17) -> None:
        self.name = name
        self._rng = np.random.default_rng(seed)
        self._opsets = {"": opset}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._types: dict[str, onnx.TypeProto] = {}
        self._taken: set[str] = set()

    def input(self, name: str, shape: Shape, dtype: str = "float") -> str:
        """Add a model input, and return its name.

        Args:
            shape: Static sizes; a string or None makes a dimension dynamic.
            dtype: ONNX element type in lower case ("float", "int64", "string").
        """
        info = helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(dtype.upper()), list(shape))
        self._inputs.append(info)
        self._types[name] = info.type
        self._taken.add(name)
        return name

    def const(self, array: npt.ArrayLike, name: str | None = None) -> str:
        """Add an initializer and return its unique name; plain Python floats become float32, integers int64."""
        values = np.asarray(array)
        if values.dtype == np.float64 and not isinstance(array, np.ndarray | np.generic):
            values = values.astype(np.float32)
        name = self._unique(name or "const")
        tensor = numpy_helper.from_array(values, name)
        self._constants[name] = tensor
        self._types[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        return name

    @overload
    def op(
        self,
        op_type: str,
        *inputs: str,
        outputs: str | None = None,
        name: str | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str: ...
    @overload
    def op(
        self, op_type: str, *inputs: str, outputs: int | Sequence[str], name: str | None = None, domain: str = "",
        **attrs: Any,
    ) -> tuple[str, ...]: ...  # fmt: skip
    def op(
        self,
        op_type: str,
        *inputs: str,
        outputs: int | str | Sequence[str] | None = None,
        name: str | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str | tuple[str, ...]:
        """Add a node, and return the tensor name of its output, or a tuple of names if `outputs` is given.

        Args:
            *inputs: Tensor names; "" omits an optional input.
            outputs: Name of the only output, or number or names of several; not given: one output.
            name: Name of the node, which is made unique; by default derived from the operator.
            domain: Operator domain; domains other than the default one are imported at version 1.
            **attrs: Attributes; an `onnx.GraphProto` (see `graph`) becomes a subgraph.

        Raises:
            ValueError: The inputs do not fit the operator.
        """
        label = self._unique(name or op_type)
        if outputs is None:
            names: tuple[str, ...] = (self._unique(f"{label}_out"),)
        elif isinstance(outputs, int):
            names = tuple(self._unique(f"{label}_out{i}") for i in range(outputs))
        else:
            names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
            self._taken.update(names)
        node = helper.make_node(op_type, list(inputs), list(names), name=label, domain=domain, **attrs)
        self._opsets.setdefault(domain, 1)
        self._nodes.append(node)
        self._types.update(self._infer_types(node))
        return names[0] if outputs is None or isinstance(outputs, str) else names

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the static shape of a tensor; a dynamic dimension counts as -1.

        Raises:
            ValueError: Unknown tensor, or its shape cannot be inferred.
        """
        known = self._types.get(tensor)
        if known is None or not known.tensor_type.HasField("shape"):
            raise ValueError(f"{self.name}: the shape of tensor {tensor!r} is not known")
        return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in known.tensor_type.shape.dim)

    def graph(self) -> onnx.GraphProto:
        """Return the unchecked graph, for the body of an If, Loop or Scan; it may read tensors of the outer graph."""
        return helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, initializer=list(self._constants.values())
        )

    def build(self) -> onnx.ModelProto:
        """Return the model with inferred shapes after a check by `onnx.checker`.

        Raises:
            onnx.checker.ValidationError: The model is not valid ONNX.
        """
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        needed = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        ir_version = min(MAX_IR_VERSION, max(needed, 4))  # 4: initializers need not be inputs
        model = helper.make_model(self.graph(), opset_imports=opsets, ir_version=ir_version, producer_name="qdq-bench")
        known = {info.name for info in (*self._inputs, *self._outputs)}
        made = {name for node in self._nodes for name in node.output} - known
        model.graph.value_info.extend(
            onnx.ValueInfoProto(name=name, type=kind) for name, kind in self._types.items() if name in made
        )
        onnx.checker.check_model(model)
        return model

    def save(self, path: Path) -> Path:
        """Build the model, write it to a file, whose folder is created, and return the path; see `build` for errors."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.build().SerializeToString(deterministic=True))
        return path

    def _unique(self, stem: str) -> str:
        name, number = stem, 0
        if stem in self._taken and (match := re.fullmatch(r"(.*)_(\d+)", stem)):
            stem = match[1]
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        pad: int | tuple[int, int] | None = None,
        groups: int = 1,
        bias: bool = True,
        name: str = "Conv",
        **attrs: Any,
    ) -> str:
        """Add a 2-D convolution of NCHW `x`, and return the name of its output.

        Args:
            channels: Number of output channels.
            pad: Padding of height and width on each side; None keeps the size at stride 1 and an odd kernel.
            groups: Number of groups; -1: one for each channel (depthwise).
        """
        kh, kw = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        ph, pw = (kh // 2, kw // 2) if pad is None else pad if isinstance(pad, tuple) else (pad, pad)
        inputs = self.shape(x)[1]
        groups = inputs if groups == -1 else groups
        parameters = [self._weight((channels, inputs // groups, kh, kw), inputs // groups * kh * kw, name, gain=2.0)]
        if bias:
            parameters.append(self._bias(channels, name))
        geometry = {"kernel_shape": [kh, kw], "strides": [stride, stride], "pads": [ph, pw, ph, pw], "group": groups}
        out: str = self.op("Conv", x, *parameters, name=name, **{**geometry, **attrs})
        return out

    def gemm(self, x: str, features: int, *, name: str = "Gemm") -> str:
        """Add a fully connected layer on 2-D `x`, as one Gemm with a [features, inputs] weight."""
        inputs = self.shape(x)[-1]
        parameters = self._weight((features, inputs), inputs, name), self._bias(features, name)
        return self.op("Gemm", x, *parameters, name=name, transB=1)

    def linear(self, x: str, features: int, *, bias: bool = True, name: str = "MatMul") -> str:
        """Add a fully connected layer on the last axis of `x`: MatMul with a [inputs, features] weight, then Add."""
        inputs = self.shape(x)[-1]
        out = self.op("MatMul", x, self._weight((inputs, features), inputs, name), name=name)
        return self.op("Add", out, self._bias(features, name)) if bias else out

    def batch_norm(self, x: str, *, epsilon: float = 1e-5, gain: float = 1.0) -> str:
        """Add a BatchNormalization, and return the name of its output.

        Means and biases are random near 0, variances from 0.5 to 1.5, and scales from 0.5 to 1.5 times `gain`.
        """
        channels = self.shape(x)[1]
        drawn = {
            "scale": gain * self._rng.uniform(0.5, 1.5, channels),
            "bias": self._rng.normal(0.0, 0.1, channels),
            "mean": self._rng.normal(0.0, 0.1, channels),
            "var": self._rng.uniform(0.5, 1.5, channels),
        }
        parameters = [self.const(v.astype(np.float32), f"BatchNormalization_{key}") for key, v in drawn.items()]
        return self.op("BatchNormalization", x, *parameters, epsilon=epsilon)

    def layer_norm(self, x: str, *, epsilon: float = 1e-5) -> str:
        """Add a LayerNormalization of the last axis (opset 17) with scale 1 and bias 0."""
        size = self.shape(x)[-1]
        scale = self.const(np.ones(size, np.float32), "LayerNormalization_scale")
        bias = self.const(np.zeros(size, np.float32), "LayerNormalization_bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)

    def output(self, tensor: str, shape: Shape | None = None, *, name: str | None = None) -> str:
        """Make a tensor an output of the model, under another name if one is given, and return the name.

        Args:
            shape: Shape of a tensor whose shape cannot be inferred; the element type is then float.
            name: Name of the output; the tensor's own by default.

        Raises:
            ValueError: The new name is taken, or the tensor is not the output of a node.
        """
        if name is not None and name != tensor:
            if name in self._taken:
                raise ValueError(f"{self.name}: the name {name!r} is taken")
            if not any(tensor in node.output for node in self._nodes):
                raise ValueError(f"{self.name}: {tensor!r} is not the output of a node, so it cannot become {name!r}")
            for names in (names for node in self._nodes for names in (node.input, node.output)):
                names[:] = [name if each == tensor else each for each in names]
            self._taken.add(name)
            if tensor in self._types:
                self._types[name] = self._types.pop(tensor)
            tensor = name
        info = onnx.ValueInfoProto(name=tensor)
        if shape is not None:
            info.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, list(shape)))
        elif tensor in self._types:
            info.type.CopyFrom(self._types[tensor])
        self._outputs.append(info)
        return tensor

    def _weight(self, shape: tuple[int, ...], fan_in: int, label: str, gain: float = 1.0) -> str:
        # He et al. 2015, "Delving Deep into Rectifiers", eq. 10: gain 2 behind a ReLU, 1 without one.
        drawn = self._rng.normal(0.0, np.sqrt(gain / fan_in), shape)
        return self.const(drawn.astype(np.float32), f"{label}_weight")

    def _bias(self, size: int, label: str) -> str:
        return self.const(self._rng.normal(0.0, 0.02, size).astype(np.float32), f"{label}_bias")

    def _infer_types(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Return the types of a node's outputs; none if ONNX does not know the operator or an input is untyped."""
        known = {name: self._types[name] for name in node.input if name in self._types}
        if len(known) < len({name for name in node.input if name}) or not onnx.defs.has(node.op_type, node.domain):
            return {}
        schema = onnx.defs.get_schema(node.op_type, self._opsets[node.domain], node.domain)
        imports = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        constants = {name: self._constants[name] for name in node.input if name in self._constants}
        small = {name: tensor for name, tensor in constants.items() if np.prod(tensor.dims) <= 1024}
        try:
            found: dict[str, onnx.TypeProto] = shape_inference.infer_node_outputs(
                schema, node, known, small, opset_imports=imports
            )
        except shape_inference.InferenceError as error:
            raise ValueError(f"{self.name}: {node.op_type} {node.name!r}: {error}") from error
        return found
