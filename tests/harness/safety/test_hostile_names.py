"""Names of a model file, nodes and tensors that are markup, formulas or control codes, through every output."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pandas as pd
import pytest
from onnx import helper
from onnx_models import net, normal
from small_results import read_page_data

from harness.base.text import safe_file_name
from harness.cli.main import main
from harness.report.report_table import ReportTable, write_table

DRAWN = LATEX = True

MODEL = "<script>\u202e\x1b[31m.onnx"
YAML_MODEL = MODEL.replace("\u202e", "\\u202e").replace("\x1b", "\\e")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TEX = r"\input{/etc/passwd}%$&_^~#"
CODES = "\x1b]0;title\x07\x1b[2J\x1b[31m\r\u202e\u2066\u200b\ufeff\x85\u2028"
EXPERIMENT = f"""
experiment: names
description: 'a <script>alert(3)</script> & {TEX}'
models: [{{use: "{YAML_MODEL}", label: net, calibration: {{samples: 2}}}}]
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
    names = [f"w{index}{EVIL}{TEX}{CODES}" for index in range(2)]
    nodes = [
        helper.make_node("Conv", ["x", names[0]], [f"a{EVIL}{CODES}"], name=f"first {EVIL}{TEX}{CODES}", pads=[1] * 4),
        helper.make_node("Relu", [f"a{EVIL}{CODES}"], [f"b{TEX}"], name=f"=relu {EVIL}{CODES}"),
        helper.make_node("Conv", [f"b{TEX}", names[1]], ["y"], name=f"second {EVIL}{TEX}{CODES}", pads=[1] * 4),
    ]
    weights = dict(zip(names, (normal(4, 3, 3, 3), normal(4, 4, 3, 3)), strict=True))
    proto = net(nodes, {"x": (1, 3, 8, 8)}, {"y": (1, 4, 8, 8)}, weights)
    proto.graph.name = EVIL
    onnx.save(proto, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    write_model(folder / MODEL)
    (folder / "names.yaml").write_text(EXPERIMENT, encoding="utf-8")
    (folder / f"damaged{CODES}.onnx").write_bytes(b"\x08\x07damaged")
    main(["run", str(folder / "names.yaml"), "--out", str(folder / "out")])
    return folder


def is_plain(text: str) -> bool:
    """Whether a terminal would only print it."""
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


@pytest.mark.parametrize(
    "command",
    [
        "run {0}/names.yaml --out {0}/out",
        "report {0}/out",
        "report {0}/out --trace linear:speedup",
        "verify {0}/out",
        "explain {0}/out",
        "inspect regions {model}",
        "explain {model} --backend onnxruntime --runs 2",
        "inspect regions {damaged}",
        "--verbose explain {damaged} --backend onnxruntime",
        "inspect regions {0}/none{codes}.onnx",
    ],
)
def test_commands_print_no_control_codes(command, folder, capfd):
    words = {
        "model": str(folder / MODEL), "damaged": str(folder / f"damaged{CODES}.onnx"), "codes": CODES,
        "task": "net-simulated-int8",
    }  # fmt: skip
    with suppress(SystemExit):
        main([word.format(folder, **words) for word in command.split(" ")])
    out, err = capfd.readouterr()
    assert out + err
    assert is_plain(out + err), ascii(out + err)


def test_the_page_runs_its_own_scripts_alone(folder):
    page = (folder / "out/report/index.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.found.count("script") == 5, "its data, Plotly, and its code in three parts"
    assert "img" not in tags.found
    assert tags.handlers == []
    assert "script&gt;" in page, "the name is shown"
    data = json.dumps(read_page_data(page), ensure_ascii=False)
    assert "first " in data, "and so are those of the nodes"
    assert "alert(1)</script>" not in page
    assert is_plain(page)
    assert is_plain(data)


def test_report_files_contain_no_active_content(folder):
    paths = [path for path in (folder / "out/report").rglob("*") if path.suffix in (".tex", ".svg", ".md", ".csv")]
    assert {path.suffix for path in paths} == {".tex", ".svg", ".md", ".csv"}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert is_plain(text), path.name
        assert r"\input" not in text or path.suffix in (".csv", ".svg"), path.name
        if path.suffix == ".svg":
            ElementTree.fromstring(text)
            assert "script" not in Tags(text).found, path.name
            assert Tags(text).handlers == [], path.name


@pytest.mark.parametrize("name", ["=1+2", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", "\t=1", f"=A{CODES}", "a|b`<i>"])
def test_table_files_escape_formulas_and_control_codes(name, tmp_path):
    cells = pd.DataFrame({"model": [name], name: ["1"], "change": ["-1.5"]})
    write_table(ReportTable(name="t", cells=cells, raw=cells.assign(ms=[-2.5]), note=name), tmp_path)
    head, row = csv.reader((tmp_path / "t.csv").read_text(encoding="utf-8").splitlines())
    assert not [task for task in head + row if task.lstrip()[:1] in "=@+" or task.startswith("-2+")]
    assert row[-2:] == ["-1.5", "-2.5"]
    for path in tmp_path.iterdir():
        assert is_plain(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b", "\x1b", "-" * 300, ".ssh/keys", "C:\\x", "CON\0"])
def test_file_names_stay_in_their_folder(name, tmp_path):
    path = tmp_path / safe_file_name(name)
    path.write_text("")
    assert path.resolve().parent == tmp_path.resolve()
    assert not path.name.startswith(".")
