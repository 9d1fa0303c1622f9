"""The graph of the page: whose insertion points it shows."""

import json
import logging

import pytest

from harness.report.load.results import load
from harness.report.page.graph_snapshots import load_task_graph

CELL = "net-openvino-int8"


def points(folder) -> int:
    scene = load_task_graph(load(folder).cells[0])["scene"]
    return sum(len(pattern["points"]) for pattern in scene["patterns"])


def change(folder, **facts) -> None:
    path = folder / CELL / "cell.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


@pytest.fixture
def of_ones_own(with_models):
    """A run with `use: my_module:Class`, a benchmarker that no entry point names."""
    change(with_models, backend={"name": "my own runtime", "device": "A CPU"})
    return with_models


def test_a_benchmarker_of_ones_own_is_not_looked_up_by_the_name_that_it_gives_itself(of_ones_own, caplog):
    change(of_ones_own, dialect_use="openvino")
    with caplog.at_level(logging.WARNING):
        assert points(of_ones_own) > 0
    assert caplog.text == ""


def test_the_dialect_is_the_one_that_the_parameters_chose(with_models):
    change(with_models, dialect_use="openvino")
    wide = points(with_models)
    change(with_models, dialect_use="tensorrt")
    assert 0 < points(with_models) < wide


def test_a_dialect_that_is_not_installed_any_more_costs_the_points_alone(of_ones_own, caplog):
    with caplog.at_level(logging.WARNING):
        assert points(of_ones_own) == 0
    assert f"{CELL}: no insertion points on the page: no benchmarker is called 'my own runtime'" in caplog.text


def test_points_of_a_mixed_cell_are_shown(with_models):
    change(with_models, precision="mixed", dialect_use="openvino")
    assert points(with_models) > 0
