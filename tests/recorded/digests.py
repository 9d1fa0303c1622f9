"""Digests of exported models, of a simulated run and of its tables: the reference of changes that keep the behaviour.

`python tests/recorded/digests.py` records them anew; do so only with a commit that names the change of behaviour.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from harness import zoo
from harness.cli.main import main
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect, load_dialect
from harness.results.lines import read_lines
from search.space import Resolved

FILE = Path(__file__).with_name("digests.json")
DIALECTS = {
    name: load_dialect(name, {"device": "a processor without AMX"})
    for name in (
        "tensorrt", "openvino", "openvino_7bit", "onnxruntime", "onnxruntime_s8", "onnxruntime_7bit",
        "onnxruntime_s8_7bit",
    )
}  # fmt: skip
OF_ZOO = ("tensorrt", "openvino", "onnxruntime")
"""Dialects in which models of the zoo are exported, at INT8; small models are in all, at every precision."""
LARGE = {"resnet50", "encoder48"}
"""Zoo models that are exported in one dialect, since each export takes a second."""

EXPERIMENT = """
experiment: recorded
models: [{use: convolutions.onnx, calibration: {samples: 2}}, {use: movers.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.01, build_noise: 0.005, noise_seed: 7, failure_rate: 0.05}}]
searchers: [random, random_mutation, evolutionary, local, annealing, sensitivity_greedy, portfolio, per_pattern, auto]
initial: [float, all, linear]
baselines: [all, linear]
budget: {evaluations: [6, 14]}
seeds: [0, 1]
executor: {searches: 1}
confirmation: {builds: 3, rounds: 4, samples: 3}
"""
TIMED_TABLES = ("cost", "targets")
"""Tables of wall-clock times."""
VARYING_COLUMNS = ["minutes", "sha256"]
"""Columns that differ between runs (wall-clock time) or processors (digest of a file with calibrated ranges)."""


def record() -> dict[str, str]:
    """Return every digest by name."""
    with tempfile.TemporaryDirectory() as folder:
        models = dict(model_digests(Path(folder)))
        return {**models, **run_digests(Path(folder))}


def model_digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the digest of each exported model, named "MODEL DIALECT PRECISION PLACEMENT".

    Ranges are made from tensor names, because measured ones depend on the processor in the last digit.
    """
    files = {name: zoo.write_model(name, folder / f"{name}.onnx") for name in zoo.model_names()}
    files |= {f"small_{name}": build.save(folder / f"{name}.onnx") for name, build in _small().items()}
    for name, path in files.items():
        prepare = functools.cache(functools.partial(load, path, source=name))
        for label, dialect in DIALECTS.items():
            of_zoo = name in zoo.model_names()
            if of_zoo and label not in (OF_ZOO[1:2] if name in LARGE else OF_ZOO):
                continue
            for precision in ["int8"] if of_zoo else sorted(dialect.precisions):
                model = prepare(min_opset=dialect.opset([precision]))
                yield from _exports(f"{name} {label} {precision}", model, dialect, precision)


def _exports(name: str, model: Model, dialect: Dialect, precision: str) -> Iterator[tuple[str, str]]:
    space = build_space(model, dialect, precisions=[precision])
    inserter = Inserter(model, dialect, _ranges(model))
    rng = np.random.default_rng(0)
    placements = {"all": space.quantize_all(), "linear": space.quantize_roles(("linear",)), "random": space.random(rng)}
    for label, placement in placements.items():
        yield f"{name} {label}", _export(inserter, space.resolve(placement))


def _export(inserter: Inserter, resolved: Resolved) -> str:
    proto = inserter.insert(resolved)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:16]


def _ranges(model: Model) -> dict[str, tuple[float, float]]:
    names = [*model.types, *(name for node in model.nodes for name in node.outputs)]
    return {name: _range(name) for name in names if name not in model.constants}


def _range(name: str) -> tuple[float, float]:
    low, high = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], np.uint32) / 2.0**29
    return (0.0 if low < 2 else -float(low), float(high) + 0.5)


def _small() -> dict[str, GraphBuilder]:
    return {"convolutions": _convolutions(), "attention": _attention(), "movers": _movers()}


def _convolutions() -> GraphBuilder:
    net = GraphBuilder("convolutions", seed=1)
    x = net.input("x", (1, 3, 16, 16))
    for channels in (8, 8, 12, 12):
        x = net.op("Relu", net.conv(x, channels, 3, pad=1))
    x = net.op("Add", x, net.conv(x, 12, 1))
    net.output(net.op("GlobalAveragePool", x))
    return net


def _attention() -> GraphBuilder:
    net = GraphBuilder("attention", seed=2)
    x = net.input("x", (1, 8, 16))
    scores = net.op("Softmax", net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1])), axis=-1)
    net.output(net.op("Sigmoid", net.op("MatMul", scores, x)))
    return net


def _movers() -> GraphBuilder:
    net = GraphBuilder("movers", seed=3)
    x = net.input("x", (1, 4, 8, 8))
    y = net.op("MaxPool", net.conv(x, 6, 3, pad=1), kernel_shape=[2, 2], strides=[2, 2])
    z = net.op("Clip", net.conv(y, 6, 1), net.const(np.float32(0)), net.const(np.float32(6)))
    net.output(net.op("Concat", y, z, net.op("HardSwish", z), axis=1))
    return net


def run_digests(folder: Path) -> dict[str, str]:
    """Run the simulated experiment; return digests of its journals, its selection and its tables."""
    _convolutions().save(folder / "convolutions.onnx")
    _movers().save(folder / "movers.onnx")
    (folder / "recorded.yaml").write_text(EXPERIMENT, encoding="utf-8")
    out = folder / "out"
    with suppress(SystemExit):
        main(["run", str(folder / "recorded.yaml"), "--out", str(out)])
    journals = sorted(out.glob("*/runs/*.jsonl.gz"))
    found = {f"journal {path.parts[-3]} {path.name.removesuffix('.jsonl.gz')}": _journal(path) for path in journals}
    tables = [path for path in sorted(out.glob("report/*.csv")) if path.stem not in TIMED_TABLES]
    return found | {f"table {path.stem}": table_digest(path) for path in tables}


def _journal(path: Path) -> str:
    """Return the digest of what was proposed and measured, in order and without wall-clock times.

    Samples count with nine significant digits, because the last ones depend on the processor.
    """
    whole = hashlib.sha256()
    for _, line in read_lines(path):
        entry = json.loads(line)
        outcome = entry.get("outcome", {})
        facts = [entry.get(key) for key in ("number", "digest", "origin", "duplicate_of")]
        samples = [f"{sample_ms:.9g}" for sample_ms in outcome.get("samples_ms", ())]
        whole.update(json.dumps([*facts, outcome.get("status"), samples]).encode())
    return whole.hexdigest()[:16]


def table_digest(path: Path) -> str:
    """Return the digest of a CSV table without the columns that vary, at nine significant digits."""
    frame = pd.read_csv(path).drop(columns=VARYING_COLUMNS, errors="ignore")
    return hashlib.sha256(frame.to_csv(float_format="%.9g").encode()).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n", encoding="utf-8")
