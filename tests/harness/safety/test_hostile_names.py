"""A model file and nodes whose names are markup, from the run to the page and to LaTeX."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.config.experiment import parse_experiment
from harness.pipeline.runner import run_experiment
from harness.progress import NullProgress
from harness.report import render

MODEL = "<script>.onnx"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TEX = r"\input{/etc/passwd}%$&_^~#"
EXPERIMENT = f"""
experiment: names
description: 'a <script>alert(3)</script> & {TEX}'
models: [{{use: "{MODEL}", label: net, calibration: {{samples: 2}}}}]
backends: [{{use: simulated, params: {{seed: 5, noise: 0.0}}}}]
searchers: [random]
initial: [float, all]
baselines: [all, linear]
budget: {{evaluations: [4]}}
sampling: {{warmup_ms: 0, min_samples: 5, max_samples: 5}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""


class Tags(HTMLParser):
    """What a browser would make of a page: its elements, and their attributes that run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def write_model(path: Path) -> None:
    """Two convolutions whose nodes, tensors and graph are named like markup."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.normal(size=(4, channels, 3, 3)).astype(np.float32), f"w{index}{EVIL}{TEX}")
        for index, channels in enumerate((3, 4))
    ]
    nodes = [
        helper.make_node("Conv", ["x", weights[0].name], [f"a{EVIL}"], name=f"first {EVIL}{TEX}", pads=[1] * 4),
        helper.make_node("Relu", [f"a{EVIL}"], [f"b{TEX}"], name=f"relu {EVIL}"),
        helper.make_node("Conv", [f"b{TEX}", weights[1].name], ["y"], name=f"second {EVIL}{TEX}", pads=[1] * 4),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, c, 8, 8)) for name, c in (("x", 3), ("y", 4))]
    graph = helper.make_graph(nodes, EVIL, ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    write_model(folder / MODEL)
    run_experiment(parse_experiment(EXPERIMENT, "names.yaml", folder), out=folder / "out", observer=NullProgress())
    render(folder / "out")
    return folder / "out" / "report"


def test_the_page_runs_its_own_scripts_alone(report: Path) -> None:
    page = (report / "index.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.found.count("script") == 5, "its data, Plotly, and its code in three parts"
    assert "img" not in tags.found
    assert tags.handlers == []
    assert "script&gt;.onnx" in page, "the name is shown"
    assert "first " in page, "and so are those of the nodes"
    assert "alert(1)</script>" not in page


def test_latex_reads_no_file_and_runs_no_command(report: Path) -> None:
    files = sorted(report.glob("*.tex"))
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert r"\input" not in text
        assert "<script>" not in text


def test_pictures_are_no_scripts_either(report: Path) -> None:
    for path in report.glob("*.svg"):
        tags = Tags(path.read_text(encoding="utf-8"))
        assert "script" not in tags.found, path.name
        assert tags.handlers == [], path.name
