"""What is said of a pattern that matches no node."""

from __future__ import annotations

from types import SimpleNamespace

from harness.compat.tao_specs.selection import match_skip_names


def test_modules_are_named_before_what_exporters_made_up(caplog):
    made_up = [SimpleNamespace(name=f"Identity_{number}", op="Identity") for number in range(60, 80)]
    own = [
        SimpleNamespace(name=name, op="Conv") for name in ("/stem/conv/Conv", "/heads.0/Conv", "/heads.0/Add", "last")
    ]
    assert match_skip_names([*made_up, *own], ["/nothing/*"]) == frozenset()
    assert caplog.messages == [
        "skip_names: '/nothing/*' matches no node; names begin with '/stem', '/heads.0', 'Identity_60', 'Identity_61', "
        "'Identity_62', 'Identity_63', 'Identity_64', 'Identity_65'"
    ]
