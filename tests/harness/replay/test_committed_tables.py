"""Committed replay tables: complete, small, of the present models, with correct figures in the docs."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from small import qdq

from harness.config.sections import ModelSpec
from harness.replay.bench import read_catalogue
from harness.replay.bench.accuracy import ACCURACY_FILE, read_accuracy
from harness.replay.bench.tasks import data_folder, table_path
from harness.replay.replay import Landscape
from harness.replay.replay_report import check_table, table_lines
from harness.runtimes.replay import read_table, read_table_metadata

ROOT = Path(__file__).resolve().parents[3]
read_table = functools.cache(read_table)
TABLES = sorted((ROOT / "results" / "tables").glob("*.parquet"))
assert len(TABLES) >= 4

SHAPES = {
    "mobilenet_v1_0.75_224": {"input": "1x3x224x224"},
    "deit_tiny_patch16_224": {"input": "1x3x224x224"},
    "squeezenet1.1": {"data": "1x3x224x224"},
}
"""Shapes of files with a dynamic batch, as in the commands of docs/explanation/replay.md."""


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_table_is_small_and_matches_model(path, tmp_path):
    assert path.stat().st_size < 5_000_000
    table = read_table(path)  # refuses an incomplete or damaged table
    if table.metadata.source.startswith("assets:") and not os.environ.get("QDQ_ASSETS"):
        pytest.skip("QDQ_ASSETS is not set")
    shapes = SHAPES.get(table.metadata.model, {})
    check_table(table, ModelSpec(use=table.metadata.source, label=table.metadata.model, shapes=shapes), tmp_path)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_optimum_is_not_slower_than_initial_placements(path):
    landscape = Landscape(read_table(path))
    best_ms = landscape.latency_ms[landscape.optimum]
    assert min(landscape.anchors_ms.values()) > 0.98 * best_ms, "the optimum of a table is no lucky reading"


EXTENDED = [name for name, task in read_catalogue().tasks.items() if task.tier == "extended"]


@pytest.mark.parametrize(
    ("name", "page"),
    [*((path.stem, "explanation/replay.md") for path in TABLES), *((name, "reference/bench.md") for name in EXTENDED)],
)
def test_documented_figures_match_table(name, page, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = read_table(table_path(name))
    if name in EXTENDED:
        assert len(table.rows) >= 128
        assert {"note", "noise_floor"} <= set(table.metadata.environment)
    line = next(line for line in (ROOT / "docs" / page).read_text().splitlines() if f"| `{name}` |" in line)
    _, dimensions, models, best_ms, *anchors = [cell.strip() for cell in line.strip("|").split("|")][:7]
    placements, optimum = table_lines(table)[1:3]
    assert f"placements of {dimensions} dimensions, {models} different models" in placements
    shown = zip(("float", "all", "linear"), anchors, strict=True)
    assert optimum.startswith(f"optimum {best_ms} ms ({', '.join(f'{name} {ms} ms' for name, ms in shown)})")


def test_accuracy_file_refers_to_models_of_tables():
    scores = read_accuracy(data_folder() / ACCURACY_FILE)
    assert all(row.samples == 64 for row in scores.values())
    tables = {
        (facts.model_sha256, facts.precision, facts.dialect)
        for facts in (read_table_metadata(table_path(name)) for name in read_catalogue().tasks)
    }
    assert {key[:3] for key in scores} <= tables


def test_run_on_a_table_of_another_model_is_refused(tmp_path, capsys):
    file = tmp_path / "other.yaml"
    table = ROOT / "results" / "tables" / "encoder6-openvino-f32.parquet"
    file.write_text(
        "experiment: other\nmodels: [zoo:resnet18]\nsearchers: [random]\ninitial: [float]\nbaselines: []\n"
        f"backends: [{{use: replay, params: {{table: {table}}}}}]\nbudget: {{evaluations: [5]}}\n"
    )
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    assert "'replay' has recordings of another model than zoo:resnet18" in capsys.readouterr().err
