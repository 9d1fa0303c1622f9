"""Models with many nodes, readers, inputs, outputs or list entries: the work grows in proportion.

The work is the number of Python lines executed, which no other load of the machine changes. With QDQ_NODES (10,000 for
docs/explanation/reliability.md) it is the processor time at that size and at twice the size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import helper
from onnx_models import net

from harness.graph.io.files import write_model
from harness.graph.load import load
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.insight.region_report import inspect_regions

pytestmark = pytest.mark.slow
TIMED_NODES = int(os.environ.get("QDQ_NODES", "0"))
NODES = TIMED_NODES or 60
MAX_RATIO = 2.5
SHAPE = (1, 2, 2, 2)


def save(
    path: Path,
    nodes: Iterable[onnx.NodeProto],
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    more: Iterable[onnx.TensorProto] = (),
) -> None:
    weight = np.full((2, 2, 1, 1), 0.01, np.float32)
    proto = net(nodes, dict.fromkeys(inputs, SHAPE), dict.fromkeys(outputs), {"w": weight})
    proto.graph.initializer.extend(more)
    onnx.save(proto, path)


def node(op: str, inputs: Sequence[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def many_consumers(path: Path, count: int) -> None:
    """A tensor that this number of convolutions read, and a Sum of their results."""
    names = [f"c{number}" for number in range(count)]
    save(path, [node("Relu", ["x"], "r"), *(node("Conv", ["r", "w"], name) for name in names), node("Sum", names, "y")])


def wide_concat(path: Path, count: int) -> None:
    names = [f"c{number}" for number in range(count)]
    relus = (node("Relu", ["r"], name) for name in names)
    save(path, [node("Conv", ["x", "w"], "r"), *relus, node("Concat", names, "y", axis=1)])


def many_outputs(path: Path, count: int) -> None:
    names = [f"c{number}" for number in range(count)]
    save(path, [node("Conv", ["x", "w"], "r"), *(node("Relu", ["r"], name) for name in names)], outputs=names)


def many_inputs(path: Path, count: int) -> None:
    """This number of inputs, each added to the sum of those before it."""
    names = [f"i{number}" for number in range(count)]
    sums = [f"s{number}" for number in range(count - 1)]
    adds = [
        node("Add", [before, name], after)
        for before, name, after in zip(["r", *sums], names, [*sums, "y"], strict=False)
    ]
    save(path, [node("Conv", ["x", "w"], "r"), *adds], inputs=("x", *names))


def equal_names(path: Path, count: int) -> None:
    """A chain of nodes of one name."""
    names = [f"c{number}" for number in range(count)]
    chain = [
        helper.make_node("Relu", [before], [name], name="same")
        for before, name in zip(["x", *names], names, strict=False)
    ]
    save(path, [*chain, node("Conv", [names[-1], "w"], "y")])


def long_lists(path: Path, count: int) -> None:
    """Lists of 25 times as many entries: of attributes, of initializers that nothing reads, and of constants."""
    values = [node("Constant", [], f"k{number}", value_floats=[0.5] * count * 12) for number in range(2)]
    unread = [helper.make_tensor(f"u{number}", 1, [1], [0.5]) for number in range(count * 25)]
    tops = [node("ReduceMax", [f"k{number}"], f"m{number}", keepdims=0) for number in range(2)]
    save(path, [*values, *tops, node("Conv", ["x", "w"], "r"), node("Sum", ["r", "m0", "m1"], "y")], more=unread)


def use(path: Path) -> None:
    """All that is done with a model before an engine is built, and with the Q/DQ model that comes of it."""
    model = load(path)
    assert list(inspect_regions(str(path), {}, dims={}).lines(include_all=True, verbose=True))
    space = build_space(model, OPENVINO)
    tensors = {edge.tensor for dimension in space.dimensions for edge in dimension.edges}
    inserter = Inserter(model, OPENVINO, dict.fromkeys(tensors - set(model.constants), (-1.0, 1.0)))
    quantized = path.with_name("q.onnx")
    write_model(inserter.insert(space.resolve(space.quantize_all())), quantized)
    read_qdq_graph(quantized)
    import_placement(quantized, model)


def processor_time_s(path: Path) -> float:
    """Return the processor time that this process and its helper process need to use a model."""

    def used_s() -> float:
        times = [psutil.Process().cpu_times(), *(child.cpu_times() for child in psutil.Process().children())]
        return sum(each.user + each.system for each in times)

    before_s = used_s()
    use(path)
    return used_s() - before_s


def count_lines(path: Path) -> int:
    """Return the number of Python lines, rounds of comprehensions included, that are executed to use a model."""
    count = 0

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use(path)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "make", [many_consumers, wide_concat, many_outputs, many_inputs, equal_names, long_lists], ids=lambda f: f.__name__
)
def test_work_grows_linearly_with_model_size(tmp_path, make):
    make(tmp_path / "m.onnx", 10)
    use(tmp_path / "m.onnx")  # starts the helper process and imports what is imported late
    measure = processor_time_s if TIMED_NODES else count_lines
    work: list[float] = []
    for count in (NODES, 2 * NODES):
        make(tmp_path / "m.onnx", count)
        work.append(measure(tmp_path / "m.onnx"))
    print(f"{make.__name__}: {work[0]:g} and {work[1]:g}, ratio {work[1] / work[0]:.2f}")
    assert work[1] <= MAX_RATIO * work[0]
