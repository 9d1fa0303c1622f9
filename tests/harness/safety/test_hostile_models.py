"""Mutated ONNX files: each is read or refused with one message; none takes the driver down or leads it elsewhere.

QDQ_FUZZ sets how many (docs/explanation/reliability.md has the figures of 10,000); QDQ_SEED draws others. Files are
read in a fork, so that a crash of the C++ below onnx is a finding, and not the end of the tests.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load, load_proto, read_signature
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO

FUZZ = int(os.environ.get("QDQ_FUZZ", "300"))
SEED = int(os.environ.get("QDQ_SEED", "7"))
ALLOWED_GB = 4
SLOW_S = 20.0


def use(path: Path) -> str:
    """All that the driver does with a file before a benchmarker sees it."""
    try:
        model = load(path)
        space = build_space(model, OPENVINO)
        edges = {edge.tensor for dimension in space.dimensions for edge in dimension.edges}
        ranges = dict.fromkeys(edges - set(model.constants), (-1.0, 1.0))
        if len(space):
            Inserter(model, OPENVINO, ranges).insert(space.resolve(space.quantize_all()))
    except UserError:
        return "refused"
    return "used"


def corpus() -> list[bytes]:
    """Small models with all that goes wrong: weights, constants, branches, attributes, a subgraph."""
    builder = GraphBuilder("conv", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for channels in (4, 6):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    x = builder.op("Add", x, builder.conv(x, 6, 1))
    builder.output(builder.op("GlobalAveragePool", x))
    made = [builder.build().SerializeToString()]
    branch = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["z"])], "then", [], [helper.make_tensor_value_info("z", 1, [1, 4])]
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch),
            helper.make_node("Reshape", ["o", "s"], ["r"]),
        ],
        "sub",
        [helper.make_tensor_value_info("x", 1, [1, 4]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("r", 1, None)],
        [
            helper.make_tensor("w", 1, [4, 4], [0.5] * 16),
            helper.make_tensor("s", TensorProto.INT64, [2], [2, -1]),
        ],
    )
    made.append(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return made


def flipped(raw: bytes, rng: random.Random) -> bytes:
    """A few bits turned over."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncated(raw: bytes, rng: random.Random) -> bytes:
    """Cut short."""
    return raw[: rng.randrange(len(raw))]


def spliced(raw: bytes, rng: random.Random) -> bytes:
    """A piece taken out, doubled or moved."""
    a, b = sorted(rng.randrange(len(raw)) for _ in range(2))
    piece, at = raw[a:b], rng.randrange(len(raw))
    return rng.choice([raw[:a] + raw[b:], raw[:b] + piece + raw[b:], raw[:at] + piece + raw[at:]])


def random_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Noise in the middle."""
    a = rng.randrange(len(raw))
    return raw[:a] + rng.randbytes(rng.randint(1, 32)) + raw[a + rng.randint(0, 32) :]


def rewritten(raw: bytes, rng: random.Random) -> bytes:
    """Well-formed, with fields that lie: shapes, types, names, attributes, edges."""
    proto = onnx.ModelProto.FromString(raw)
    graph = proto.graph
    for _ in range(rng.randint(1, 3)):
        with suppress(IndexError):  # the part that it would change was dropped before
            rng.choice([_shape, _rename, _retype, _attribute, _drop, _version])(graph, proto, rng)
    return proto.SerializeToString()


def _shape(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    wild = rng.choice([0, -1, 1, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62)])
    tensor = rng.choice(list(graph.initializer))
    if tensor.dims and rng.random() < 0.5:
        tensor.dims[rng.randrange(len(tensor.dims))] = wild
    else:
        dims = rng.choice(list(graph.input)).type.tensor_type.shape.dim
        if dims:
            rng.choice(list(dims)).dim_value = wild


def _rename(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    names = [name for node in graph.node for name in (*node.input, *node.output)] + [
        "",
        "../x",
        "\udcff" * 0 + "é" * 500,
    ]
    node = rng.choice(list(graph.node))
    target = rng.choice([node.input, node.output])
    if target:
        target[rng.randrange(len(target))] = rng.choice(names)


def _retype(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.choice([0, 1, 2, 7, 8, 9, 10, 14, 16, 17, 99])
    rng.choice(list(graph.initializer)).data_type = kind
    if rng.random() < 0.5:
        rng.choice(list(graph.input)).type.tensor_type.elem_type = kind


def _attribute(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(list(graph.node))
    for attribute in node.attribute:
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice([0, -1, 2**31, 2**62, -(2**62)])
        attribute.type = rng.choice([attribute.type, 1, 2, 3, 4, 5, 6, 7])
    if rng.random() < 0.3:
        node.op_type = rng.choice(
            ["Conv", "Loop", "Scan", "Reshape", "Expand", "Tile", "ConstantOfShape", "Range", "nope"]
        )


def _drop(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    part = rng.choice([graph.node, graph.initializer, graph.input, graph.output])
    if part:
        del part[rng.randrange(len(part))]


def _version(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.opset_import[0].version = rng.choice([0, -1, 1, 7, 11, 13, 26, 999, 2**40])
    proto.ir_version = rng.choice([0, 1, 3, 8, 10, 99, 2**40])


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, truncated, spliced, random_bytes, rewritten)


def in_fork(work: Callable[[], str], limit_s: float = SLOW_S) -> str:
    """What `work` says, or how its process ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        gc.freeze()  # finalizers of the parent's objects may wait for threads that a fork lacks
        said = "broken"
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            said = work()
        except BaseException as error:  # all that is no UserError is a finding
            said = f"broken: {type(error).__name__}: {str(error)[:200]}"
        finally:
            os.write(write, said.encode(errors="replace")[:4000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return said if os.WIFEXITED(status) and said else f"crash: signal {os.WTERMSIG(status)}"


def batch(folder: Path, numbers: range) -> str:
    """Read many in one process; what was found stands in a file, so that a crash tells where it was."""
    models = corpus()
    found: Counter[str] = Counter()
    for number in numbers:
        rng = random.Random(f"{SEED} {number}")
        mutation = MUTATIONS[number % len(MUTATIONS)]
        path = folder / "hostile.onnx"
        (folder / "at").write_text(f"{number} {mutation.__name__}")
        path.write_bytes(mutation(rng.choice(models), rng))
        started_s = time.process_time()
        try:
            found[use(path)] += 1
        except Exception as error:  # a finding
            found["broken"] += 1
            with (folder / "findings").open("a") as file:
                where = traceback.extract_tb(error.__traceback__)
                ours = [f"{Path(f.filename).name}:{f.lineno}" for f in where if "harness" in f.filename]
                file.write(f"{number} {mutation.__name__}: {type(error).__name__}: {str(error)[:150]!r} {ours[-1]}\n")
        assert time.process_time() - started_s < SLOW_S, f"{number} took too long"
        used_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        assert used_gb < ALLOWED_GB, f"{number} took {used_gb:.1f} GB"
    return " ".join(f"{what}={count}" for what, count in found.items())


def test_a_comment_that_is_no_utf8_does_no_harm(tmp_path: Path) -> None:
    proto = onnx.load_model_from_string(corpus()[0])
    proto.producer_name = proto.doc_string = "marker"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString().replace(b"marker", b"mark\xf6r"))
    assert use(tmp_path / "m.onnx") == "used"


@pytest.mark.slow
def test_mutated_models_are_read_or_refused_and_nothing_falls(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    findings = []
    number = 0
    while number < FUZZ:
        numbers = range(number, min(number + 100, FUZZ))
        said = in_fork(lambda numbers=numbers: batch(tmp_path, numbers), 600)  # type: ignore[misc]
        if "=" in said and not said.startswith(("broken:", "crash:")):
            for part in said.split():
                what, _, count = part.partition("=")
                found[what] += int(count)
            number = numbers.stop
        else:
            at = (tmp_path / "at").read_text()
            findings.append(f"{at}: {said}")
            found["finding"] += 1
            number = int(at.split()[0]) + 1
    if (tmp_path / "findings").exists():
        findings += (tmp_path / "findings").read_text().splitlines()
    print(f"{FUZZ} files: {dict(found)}", *findings, sep="\n")
    assert findings == []
    assert found["refused"] > FUZZ // 2
    assert found["used"] > 0


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "..\\secret.bin", "link.bin", ""]
)
def test_external_data_outside_of_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"x" * 64)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    proto = onnx.ModelProto.FromString(corpus()[1])
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value="64")
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"m\.onnx: .*(external data|outside|link)"):
        load(folder / "m.onnx")


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    info = [helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "b")]
    graph = helper.make_graph(nodes, "cycle", info[:1], info[1:])
    path = tmp_path / "cycle.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    with pytest.raises(UserError, match=r"cycle\.onnx: "):
        load(path)


def nested(depth: int) -> bytes:
    """Subgraphs within subgraphs, as wire bytes: protobuf for Python would not even build them."""

    def field(number: int, payload: bytes) -> bytes:
        size, head = len(payload), [number << 3 | 2]
        while size > 127:
            head.append(size & 127 | 128)
            size >>= 7
        return bytes([*head, size]) + payload

    graph = field(2, b"g")
    for _ in range(depth):
        attribute = field(1, b"then_branch") + b"\xa0\x01\x05" + field(6, graph)
        graph = field(1, field(4, b"If") + field(5, attribute)) + field(2, b"g")
    return b"\x08\x08" + field(7, graph) + field(8, b"\x10\x11")


@pytest.mark.parametrize("depth", [3, 30, 90, 150, 5000])
def test_deep_nesting_is_read_or_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "deep.onnx"
    path.write_bytes(nested(depth))
    assert in_fork(lambda: use(path)) in ("refused", "used")


def calling_functions(calls: dict[str, list[str]], *, wrapped: bool = False) -> onnx.ModelProto:
    """A model that calls `f0`; each function calls others, in a branch of an If if `wrapped`."""

    def node(name: str) -> onnx.NodeProto:
        call = helper.make_node(name, ["x"], ["y"], domain="f")
        if not wrapped:
            return call
        branch = helper.make_graph([call], "branch", [], [helper.make_tensor_value_info("y", 1, [1])])
        return helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)

    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = [
        helper.make_function("f", name, ["x", "c"], ["y"], [node(each) for each in called], opsets)
        for name, called in calls.items()
    ]
    values = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x", ""], ["y"], domain="f")], "calls", values[:1], values[1:])
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("calls", "cause"),
    [
        ({"f0": ["f0"]}, r"calls itself \(f0 -> f0\)"),
        ({"f0": ["f1"], "f1": ["f2"], "f2": ["f1"]}, "calls itself"),
        ({f"f{level}": [f"f{level + 1}"] * 2 for level in range(40)} | {"f40": []}, "100,000 are inlined"),
    ],
)
def test_functions_that_never_end_are_refused_before_native_code(
    calls: dict[str, list[str]], cause: str, wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = calling_functions(calls, wrapped=wrapped)
    onnx.save(proto, tmp_path / "f.onnx")
    monkeypatch.setattr("harness.graph.io.helper_process._process_helper", None)
    for read in (load, read_signature):
        with pytest.raises(UserError, match=rf"f\.onnx: .*{cause}"):
            read(tmp_path / "f.onnx")
    with pytest.raises(UserError, match=cause):
        load_proto(proto, source="f", sha256="")


def test_a_long_chain_of_functions_is_read(tmp_path: Path) -> None:
    chain = {f"f{level}": [f"f{level + 1}"] for level in range(300)}
    proto = calling_functions(chain | {"f300": []})
    proto.functions[-1].node.append(helper.make_node("Relu", ["x"], ["y"]))
    onnx.save(proto, tmp_path / "f.onnx")
    assert [node.op for node in load(tmp_path / "f.onnx").nodes] == ["Relu"]
