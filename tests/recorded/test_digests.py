"""What is exported, searched and tabulated stays the same, bit for bit, unless a change says so."""

import json

from cheap_runs import cheap_runs  # noqa: F401
from digests import FILE, model_digests, run_digests

FULL_TURNS = True
RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


def of_models(name: str) -> bool:
    return not name.startswith(("journal ", "table "))


def changed(expected: dict[str, str], found: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    names = expected.keys() | found.keys()
    return {n: (expected.get(n), found.get(n)) for n in sorted(names) if expected.get(n) != found.get(n)}


def test_exported_models_are_the_recorded_ones(tmp_path):
    expected = {name: digest for name, digest in RECORDED.items() if of_models(name)}
    assert changed(expected, dict(model_digests(tmp_path))) == {}


def test_a_simulated_run_and_its_tables_are_the_recorded_ones(tmp_path):
    expected = {name: digest for name, digest in RECORDED.items() if not of_models(name)}
    assert changed(expected, run_digests(tmp_path)) == {}
