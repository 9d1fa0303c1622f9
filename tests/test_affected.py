"""Tests that `make check` chooses by the import graph."""

import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
affected_tests = runpy.run_path(str(TESTS / "affected.py"))["affected_tests"]


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("harness/results/journal.py", "tests/harness/results/test_journal.py"),
        ("harness/measure/elimination.py", "tests/harness/run/select/test_racing.py"),
        ("tests/harness/zoo/test_shapes.py", "tests/harness/zoo/test_shapes.py"),
    ],
)
def test_tests_of_a_module_or_of_its_nearest_importers_are_chosen(changed, test):
    assert TESTS.parent / test in affected_tests([Path(changed)])
