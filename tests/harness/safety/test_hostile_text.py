"""YAML, caches, states, journals, names and plug-ins from strangers: data at most, else refused with one message."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import registry
from harness.compat.modelopt_autotune.storage import read_state
from harness.config.experiment import load_experiment, parse_experiment
from harness.errors import UserError
from harness.graph.pattern_cache_io import read_cache
from harness.results_dir.io import add_checksum, read_json
from harness.results_dir.journal import read_journal

FUZZ = int(os.environ.get("QDQ_FUZZ", "300"))
VALID = """
experiment: small
models: [{use: net.onnx, label: net, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5}}]
searchers: [random, {use: tpe, label: tpe5}]
budget: {evaluations: [25, 50]}
executor: {use: local, workers: 2}
matrix: {backends.params.seed: [1, 2]}
"""
CACHE = f"""
kind: qdq pattern cache
schema: 1
minimum_distance: 4
maximum_schemes: 32
patterns:
- signature: {"ab" * 32}
  size: 3
  schemes:
  - {{latency_ms: 4.5, baseline_ms: 9.0, backend: openvino, precision: int8, device: "", points: [output/0.0/int8]}}
"""
STATE = """
kind: qdq autotuner state
schema: 1
facts: {model_sha256: ab, inputs: {x: [1, 3]}}
baseline_latency_ms: 9.0
beside_float: false
current_profile_pattern_schemes_signature: null
config: {verbose: false}
measured: {abcd: {latency_ms: 4.5, signature: ab, timestamp: '2026-11-21T21:00:00+00:00'}}
patterns:
- pattern_signature: ab
  pattern_size: 3
  schemes:
  - {latency_ms: 4.5, error: false, profile_timestamp: null, nodes_insertion_points: [], child_region_inputs: [],
     region_outputs: [], hash: ab}
"""
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
def test_yaml_makes_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, reader: str) -> None:
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
def test_bombs_and_nesting_without_end_are_refused_quickly(tmp_path: Path, reader: str, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"file\.yaml"):
        _read(reader, path)


@pytest.mark.parametrize("reader", ["file", "cache", "state"])
def test_a_file_larger_than_ours_ever_are_is_not_read(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "file.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match=r"file\.yaml: 1073741824 bytes, but at most"):
        _read(reader, path)


def test_a_matrix_that_asks_for_millions_of_cells_is_refused() -> None:
    axes = "".join(f"  backends.params.p{n}: [{', '.join(map(str, range(100)))}]\n" for n in range(9))
    with pytest.raises(
        UserError, match=r"e\.yaml: matrix\.backends\.\*: asks for 1000000000000000000 backends, but at"
    ):
        parse_experiment(f"{VALID.partition('matrix')[0]}matrix:\n{axes}", "e.yaml")


def _said(work: Callable[[], object]) -> str:
    """ "read", or the one message of a refusal."""
    try:
        work()
    except UserError as error:
        return str(error)
    return "read"


def _read(reader: str, path: Path) -> object:
    if reader == "experiment":
        return parse_experiment(path.read_text(), str(path))
    if reader == "file":
        return load_experiment(path)
    return read_cache(path) if reader == "cache" else read_state(path, {})


def _edited(text: str, rng: random.Random) -> str:
    """A few characters replaced by others, more or fewer of them."""
    data = list(text)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 3)] = rng.choices(
            [*sorted(set(text)), "&", "*", "!", "\t", "é", "\x85", "%"], k=rng.randint(0, 3)
        )
    return "".join(data)


def test_mutated_experiments_are_read_or_refused() -> None:
    rng = random.Random(7)
    edited = (_edited(VALID, rng) for _ in range(FUZZ))
    outcomes = {_said(lambda text=text: parse_experiment(text, "e.yaml"))[:6] for text in edited}  # type: ignore[misc]
    assert outcomes == {"read", "e.yaml"}


@pytest.mark.parametrize("reader", ["cache", "state"])
def test_mutated_caches_and_states_are_read_or_refused(tmp_path: Path, reader: str) -> None:
    rng, path, outcomes = random.Random(7), tmp_path / "file.yaml", set()
    for _ in range(FUZZ):
        path.write_text(_edited(CACHE if reader == "cache" else STATE, rng))
        said = _said(lambda: _read(reader, path))
        outcomes.add("read" if said == "read" else said[: len(str(path))])
    assert outcomes == {"read", str(path)}


def test_mutated_journals_are_read_or_refused(tmp_path: Path) -> None:
    told = '{"kind":"result","number":0,"outcome":{"status":"failed","stage":"build","reason":"x"},"elapsed_s":1.0}'
    asked = '{"kind":"proposal","number":0,"choices":[0,1],"digest":"d","origin":"searcher","duplicate_of":null}'
    lines = map(add_checksum, ['{"kind":"header","schema":2,"fingerprint":{}}', asked, told])
    whole = "".join(f"{line}\n" for line in lines).encode()
    rng = random.Random(7)
    path = tmp_path / "j.jsonl"
    for _ in range(FUZZ):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        said = _said(lambda: list(read_journal(path)))
        assert said == "read" or "j.jsonl" in said


@pytest.mark.parametrize("content", [b"", b"[]", b"\x80\x04\x95", b"{", b"\xff\xfe", b'{"a": ' * 100_000])
def test_damaged_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.json"):
        read_json(path)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
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
def test_plug_in_names_are_names_and_no_paths(tmp_path: Path, use: str) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    with pytest.raises(UserError, match="searcher "):
        registry.create_plugin("searcher", use, {})


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 101, "a\nb", "<script>", "\\input{x}", "-rf"])
def test_names_that_become_folders_are_refused(name: str) -> None:
    for text in (
        VALID.replace("experiment: small", f"experiment: {json.dumps(name)}"),
        VALID.replace("label: net", f"label: {json.dumps(name)}"),
        VALID.replace("label: tpe5", f"label: {json.dumps(name)}"),
    ):
        with pytest.raises(UserError, match="is no folder name"):
            parse_experiment(text, "e.yaml")


def test_nothing_is_sent_anywhere() -> None:
    """A process that loads the runtimes opens no connection; what would report is switched off."""
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = refuse\nsocket.create_connection = refuse\n"
        "from harness.registry import load_plugin\n"
        "for name in ('openvino', 'onnxruntime', 'simulated'):\n"
        "    load_plugin('benchmarker', name)().describe()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
