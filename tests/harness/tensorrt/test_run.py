"""A whole experiment on TensorRT: searched, exported, scored and confirmed; on the fakes of both majors."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from harness.graph.build import GraphBuilder
from harness.run.config import parse_experiment
from harness.run.experiment import run_experiment
from harness.run.observe import Silent

YAML = """
experiment: trt
models:
  - use: {model}
    label: net
    evaluator: {{use: fidelity, params: {{samples: 2}}}}
backends: [{{use: 'fake_machine:TensorRT{major}', label: tensorrt, params: {{precision: f32}}}}]
precision: [int8]
searchers: [random]
initial: none
baselines: [all, linear]
budget: {{evaluations: [3]}}
sampling: {{warmup_ms: 0, min_samples: 3, max_samples: 3}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""


@pytest.mark.parametrize("major", [10, 11])
def test_a_whole_experiment(major: int, tmp_path: Path) -> None:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    model = builder.save(tmp_path / "net.onnx")
    experiment = parse_experiment(YAML.format(model=model, major=major), "test")
    out = tmp_path / "out"
    run_experiment(experiment, base=tmp_path, out=out, observer=Silent())
    (cell,) = [path for path in out.iterdir() if (path / "rows.json").exists()]
    rows = json.loads((cell / "rows.json").read_text())["rows"]
    facts = json.loads((cell / "cell.json").read_text())
    assert facts["backend"]["version"].startswith(f"{major}.")
    events = [json.loads(line) for line in (cell / "confirm.jsonl").read_text().splitlines()]
    assert not [event for event in events if "failed" in json.dumps(event).lower()]
    files = {row["file"] for row in rows}
    assert len(files) > 1
    for name in files:
        proto = onnx.load(cell / "models" / name)
        zeros = {t.data_type for t in proto.graph.initializer if t.name.startswith("@qdq.zero")}
        assert zeros <= {onnx.TensorProto.INT8}
