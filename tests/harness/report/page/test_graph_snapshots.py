"""The graph of the page: whose insertion points it shows."""

import logging

import pytest
from small_results import TASK, edit_json

from harness.report.page.graph_layout import load_task_graph
from harness.results.folder import load


def points(folder) -> int:
    scene = load_task_graph(load(folder).tasks[0])["scene"]
    return sum(len(pattern["points"]) for pattern in scene["patterns"])


def change(folder, **facts) -> None:
    edit_json(folder / TASK / "task.json", **facts)


@pytest.fixture
def custom(with_models):
    """A run with `use: my_module:Class`, a benchmarker that no entry point names."""
    change(with_models, backend={"name": "my own runtime", "device": "A CPU"})
    return with_models


def test_custom_benchmarker_uses_recorded_dialect(custom, caplog):
    change(custom, dialect_use="openvino")
    with caplog.at_level(logging.WARNING):
        assert points(custom) > 0
    assert caplog.text == ""


def test_recorded_dialect_determines_points(with_models):
    change(with_models, dialect_use="openvino")
    wide = points(with_models)
    change(with_models, dialect_use="tensorrt")
    assert 0 < points(with_models) < wide


def test_third_party_dialect_is_not_imported_and_has_no_points(custom, caplog):
    change(custom, dialect_use="my_module:DIALECT")
    with caplog.at_level(logging.WARNING):
        assert points(custom) == 0
    assert f"{TASK}: no insertion points on the page: my_module:DIALECT is not a dialect of qdq-bench" in caplog.text


def test_points_of_a_mixed_task_are_shown(with_models):
    change(with_models, precision="mixed", dialect_use="openvino")
    assert points(with_models) > 0
