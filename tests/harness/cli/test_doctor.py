"""`qdq doctor` reports what works, what is missing and what is broken."""

import pytest
from small import qdq

from harness.base.errors import UserError
from harness.cli import doctor
from harness.plugins import registry

GPU = {"name": "NVIDIA H100", "driver_version": "570.1", "memory.total": "81559 MiB"}
TIMING_FACTS = ("cpu.governor", "cpu.mhz", "cpu.turbo")


@pytest.fixture
def rows(monkeypatch):
    """Examine a machine with the given facts; rows by name."""

    def examine(**facts):
        monkeypatch.setattr("harness.measure.provenance.describe_environment", lambda: facts)
        return {what: (state, detail) for what, state, detail in doctor.examine_machine()}

    return examine


def test_doctor_reports_missing_gpu_and_clock_readings(rows):
    found = rows(cpu={"model": "x", "flags": ["avx2", "amx_int8"]})
    assert found["gpu"][0] == "none found"
    assert [found[name][0] for name in TIMING_FACTS] == ["not readable"] * 3
    assert found["cpu.flags"] == ("", "avx2, amx_int8")


def test_gpus_and_clocks_are_readable(rows):
    found = rows(cpu={"governor": "performance", "mhz": 2100, "turbo": False}, gpus=[GPU])
    assert found["gpu 0"] == ("ok", "name NVIDIA H100, driver_version 570.1, memory.total 81559 MiB")
    assert [found[name][1] for name in TIMING_FACTS] == ["performance", "2100", "off"]


@pytest.mark.parametrize(
    ("flags", "warned"),
    [(["avx2"], True), (["avx2", "avx512f"], True), (["avx2", "avx_vnni"], False), (["asimddp"], False), ([], False)],
)
def test_saturating_integer_products_are_a_warning(rows, flags, warned):
    state, detail = rows(cpu={"model": "x", "flags": flags}).get("int8 on this cpu", ("", ""))
    assert (state == "warning") is ("no VNNI" in detail) is ("saturate" in detail) is warned


def test_two_onnx_runtimes_are_a_warning(rows, monkeypatch):
    assert "onnxruntime twice" not in rows()
    monkeypatch.setattr(doctor, "version", lambda name: "1.24")
    state, detail = rows()["onnxruntime twice"]
    assert state == "warning"
    assert "onnxruntime 1.24 and onnxruntime-gpu 1.24 overwrite each other: pip uninstall" in detail


def test_broken_plug_ins_are_listed_and_the_others_work(rows, monkeypatch):
    def plugins(kind):
        points = [p.entry_point for p in real(kind)]
        if kind in ("benchmarker", "searcher"):
            points.append(
                registry.EntryPoint(name="broken", value="broken_plug_in:X", group=registry.ENTRY_POINT_GROUPS[kind])
            )
        return tuple(registry.Plugin(name=p.name, kind=kind, origin="o", entry_point=p) for p in points)

    real = registry.installed_plugins
    monkeypatch.setattr(registry, "installed_plugins", plugins)
    found = rows()
    assert found["benchmarker broken"][0] == found["searcher broken"][0] == "not usable"
    assert "cannot be loaded: ModuleNotFoundError" in found["searcher broken"][1]
    assert found["benchmarker simulated"][0] == "ok"


def test_tools_lists_environments_and_refuses_other_actions(capsys, monkeypatch):
    installed = []
    monkeypatch.setattr("harness.accuracy.tools.ptq.install_environment", lambda *given: installed.append(given))
    assert qdq("tools") == 0
    before = capsys.readouterr().out
    assert "quark" in before
    assert qdq("tools", "install", "quark", "--index-url", "https://example.org") == 0
    assert installed == [("quark", "https://example.org")]
    assert capsys.readouterr().out == before
    assert qdq("tools", "remove") == 2
    assert "install or list, but got 'remove'" in capsys.readouterr().err


def test_list_shows_dialects_that_cannot_be_used(monkeypatch, capsys):
    def refuse(name):
        raise UserError("no dialect")

    monkeypatch.setattr("harness.graph.rules.dialects.load_dialect", refuse)
    assert qdq("list", "dialect") == 0
    assert "cannot be used: no dialect" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["", *registry.ENTRY_POINT_GROUPS, "zoo-models"])
def test_list_fits_a_terminal(capsys, kind):
    assert qdq("list", kind) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_list_of_an_unknown_kind_names_the_kinds(capsys):
    assert qdq("list", "runtime") == 2
    assert "benchmarker" in capsys.readouterr().err


def test_doctor_names_a_package_without_wheels_for_this_python(monkeypatch):
    text = "tensorrt-rtx-cu12; python_version < '3' and extra == 'rtx'"
    monkeypatch.setattr(doctor, "requires", lambda name: [text])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    details = {what: detail for what, _, detail in doctor.examine_machine()}
    assert "no wheels for Python" in details["tensorrt-rtx"]
    assert details["ray"] == "pip install 'qdq-bench[ray]'"
    assert details["tensorrt"].startswith("pip install 'qdq-bench[tensorrt]'")


@pytest.mark.parametrize(
    ("rows", "uses"),
    [
        ([("benchmarker openvino", "ok", ""), ("nncf", "ok", "")], "measurements on openvino; PTQ by nncf; replays"),
        ([("benchmarker openvino", "not usable", "")], "no runtime works: pip install"),
    ],
)
def test_doctor_ends_with_the_uses_that_are_ready(capsys, monkeypatch, rows, uses):
    monkeypatch.setattr(doctor, "examine_machine", lambda: rows)
    assert qdq("doctor") == 0
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header == "what\tstate\tdetail"
    assert last.startswith("ready for: ")
    assert uses in last
