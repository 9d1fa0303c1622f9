"""Three small tasks and a solved one, of made-up tables, as the whole benchmark."""

from __future__ import annotations

import pytest
from made_up_tables import make_table

__all__ = ["make_table"]

TASKS = """
tiers:
  lite: {seeds: 2, budgets: [4, 8]}
  full: {seeds: 3, budgets: [4, 8, 12]}
tasks:
  one: {family: CNN classifier, split: development, tier: lite}
  two: {family: detector, split: test, tier: lite, initial: [float]}
  three: {family: detector, split: test, tier: full}
  solved: {family: detector, split: test, tier: lite, initial: [float, all], solved_by: all}
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch, make_table):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tasks.yaml").write_text(TASKS)
    for number, name in enumerate(("one", "two", "three", "solved")):
        make_table(dimensions=5, noise=0.01 * (1 + number), path=folder / f"{name}.parquet", model=f"net {name}")
    monkeypatch.setenv("QDQ_BENCH_DATA", str(folder))
    return folder
