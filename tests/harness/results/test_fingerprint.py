"""Digests of facts, by which a run recognises changed inputs."""

from __future__ import annotations

import subprocess
import sys

from harness.base.files import facts_digest

FACTS = "{'b': frozenset({'int8', 'fp8', 'float'}), 'a': [1, 2.5, None], 'c': {'x': True}}"


def test_digests_depend_neither_on_the_process_nor_on_the_order():
    code = f"from harness.base.files import facts_digest; print(facts_digest({FACTS}))"
    command = [sys.executable, "-c", code]
    environments = [{"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)} for seed in ("1", "2")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=env) for env in environments]
    here = facts_digest({"c": {"x": True}, "a": [1, 2.5, None], "b": frozenset({"fp8", "float", "int8"})})
    assert {run.stdout.strip() for run in runs} == {here}
    assert here == "6e8a9d39542f4498"


def test_digests_of_different_facts_differ():
    assert len({facts_digest(facts) for facts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": {1}}, {"a": {1, 2}})}) == 5
