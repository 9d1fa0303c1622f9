"""Tensors inside one generated kernel of TensorRT-RTX, by what makes and what reads them."""

import numpy as np
import pytest
from onnx_models import loaded

from harness.graph.builder import GraphBuilder
from harness.graph.rules.dialects import TENSORRT, TENSORRT_RTX
from harness.graph.rules.kernel_fusion import find_inner_tensors
from harness.graph.rules.placement_rules import first_violated_rule


def inner(behind: str) -> list[str]:
    """The operators whose results are inside: of Conv, Sigmoid, Mul, Transpose; then what the name says."""
    net = GraphBuilder("net", seed=1)
    x = net.op("Sigmoid", net.conv(net.input("x", (1, 16, 8, 8)), 16, 3, pad=1))
    x = net.op("Transpose", net.op("Mul", x, net.const(np.float32(0.5))), perm=[0, 1, 3, 2])
    made = {
        "conv": lambda: net.conv(x, 16, 1),
        "pool": lambda: net.op("MaxPool", x, kernel_shape=[2, 2]),
        "tanh": lambda: net.op("Tanh", x),
        "both": lambda: net.op("Add", net.conv(x, 16, 1), net.op("Tanh", x)),
        "output": lambda: x,
    }[behind]()
    net.output(made)
    model = loaded(net)
    found = find_inner_tensors(model)
    return [node.op for node in model.nodes if node.outputs[0] in found]


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("conv", ["Conv", "Conv"]),
        ("pool", ["Conv"]),
        ("tanh", ["Conv", "Sigmoid", "Mul", "Transpose", "Tanh"]),
        ("both", ["Conv", "Conv", "Tanh", "Add"]),
        ("output", ["Conv", "Sigmoid", "Mul", "Transpose"]),
    ],
)
def test_inputs_of_products_and_pools_are_not_inner_tensors(behind, expected):
    assert inner(behind) == expected


def test_one_kernel_rule_applies_to_rtx_only():
    net = GraphBuilder("net", seed=1)
    net.output(net.op("Tanh", net.op("Softmax", net.input("x", (1, 4, 8)))))
    model = loaded(net)
    rules = [first_violated_rule(model, dialect, model.nodes[1], 0) for dialect in (TENSORRT_RTX, TENSORRT)]
    assert [rule.name if rule else "legal" for rule in rules] == ["one kernel", "legal"]


def test_results_of_activation_products_are_not_inner_tensors():
    net = GraphBuilder("net", seed=1)
    x = net.input("x", (1, 8, 8))
    scores = net.op("MatMul", x, x)
    net.output(net.op("Softmax", net.op("Div", scores, net.const(np.float32(8)))))
    model = loaded(net)
    assert not {scores, "Div_out"} & find_inner_tensors(model)
