"""YAML, caches, states, journals, names and plug-ins from strangers: data at most, else refused with one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import EXPERIMENT_YAML

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.base.paths import TRUST_VARIABLE
from harness.base.progress import NullProgress
from harness.compat.modelopt_autotune.session import read_state
from harness.config.experiment import load_experiment, parse_experiment
from harness.config.sections import ExecutorSpec, Limits
from harness.graph.io.files import model_files
from harness.graph.pattern_cache import read_cache
from harness.plugins import registry
from harness.workers.ray import open_execution_target

PAYLOADS = (
    "!!python/object/apply:os.system ['touch pwned']",
    "!!python/object/new:subprocess.Popen [['touch', 'pwned']]",
    "!!python/name:os.system",
    "!!python/module:os",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch pwned']",
)
BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("reader", ["experiment", "cache", "state"])
def test_yaml_creates_no_python_objects(tmp_path, monkeypatch, payload, reader):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.yaml"
    path.write_text(f"experiment: {payload}\nmodels: [net.onnx]\n")
    with pytest.raises(UserError, match=r"file\.yaml"):
        _read(reader, path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("reader", ["experiment", "cache", "state"])
@pytest.mark.parametrize(
    "text", [BOMB, "a: " + "[" * 100_000, "a: " + "{a: " * 5_000, "? " * 5_000, "\0", "a: 'x\n" * 50]
)
def test_yaml_bombs_and_deep_nesting_are_refused(tmp_path, reader, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"file\.yaml"):
        _read(reader, path)


@pytest.mark.parametrize("reader", ["file", "json", "cache", "state"])
def test_oversized_file_is_refused_unread(tmp_path, reader):
    path = tmp_path / "file.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match=r"file\.yaml: 1073741824 bytes, but at most"):
        _read(reader, path)


def test_a_matrix_that_asks_for_millions_of_tasks_is_refused():
    axes = "".join(f"  backends.params.p{n}: [{', '.join(map(str, range(100)))}]\n" for n in range(9))
    with pytest.raises(UserError, match=r"e\.yaml: matrix\.backends\.\*: asks for 1000000000000000000 backends with"):
        parse_experiment(f"{EXPERIMENT_YAML.partition('matrix')[0]}matrix:\n{axes}", "e.yaml")


def _read(reader: str, path: Path) -> object:
    if reader == "experiment":
        return parse_experiment(path.read_text(), str(path))
    if reader == "file":
        return load_experiment(path)
    if reader == "json":
        return read_json(path)
    return read_cache(path) if reader == "cache" else read_state(path, {})


@pytest.mark.parametrize("content", [b"", b"[]", b"\x80\x04\x95", b"{", b"\xff\xfe", b'{"a": ' * 100_000])
def test_damaged_json_is_refused(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.json"):
        read_json(path)


def test_source_has_no_unsafe_deserialization(tmp_path):
    """Nothing in the harness unpickles a file; only the pipe between the driver and its own workers carries pickles."""
    root = Path(registry.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(
            word in path.read_text()
            for word in ("pickle.load", "allow_pickle=True", "marshal.load", "shelve.open", "yaml.unsafe")
        )
    }
    assert users == set()


@pytest.mark.parametrize(
    "use",
    ["../evil:Thing", "/tmp/evil.py:X", "..evil:X", "evil/../x:Thing", "os:system;x", ":", "a:", ":b", "a b:c", "\0:x"],
)  # fmt: skip
def test_plug_in_names_are_names_and_no_paths(tmp_path, use):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    with pytest.raises(UserError, match="searcher "):
        registry.create_plugin("searcher", use, {})


def test_untrusted_experiment_connects_to_no_cluster(monkeypatch):
    monkeypatch.delenv(TRUST_VARIABLE)
    executor = ExecutorSpec(use="ray", address="ray://stranger:10001")
    with (
        pytest.raises(UserError, match=r"executor\.address: .*ray://stranger:10001.*--trust-plugins"),
        open_execution_target(executor, Limits(), None, NullProgress(), model_files),
    ):
        pass


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 101, "a\nb", "<script>", "\\input{x}", "-rf"])
def test_names_that_become_folders_are_refused(name):
    for text in (
        EXPERIMENT_YAML.replace("experiment: small", f"experiment: {json.dumps(name)}"),
        EXPERIMENT_YAML.replace("label: net", f"label: {json.dumps(name)}"),
        EXPERIMENT_YAML.replace("label: tpe5", f"label: {json.dumps(name)}"),
    ):
        with pytest.raises(UserError, match="is no folder name"):
            parse_experiment(text, "e.yaml")


def test_loading_runtimes_opens_no_connection():
    """A process that loads the runtimes opens no connection; what would report is switched off."""
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = refuse\nsocket.create_connection = refuse\n"
        "from harness.plugins.registry import load_plugin\n"
        "for name in ('openvino', 'onnxruntime', 'simulated'):\n"
        "    load_plugin('benchmarker', name)().describe()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
