"""Files of few bytes that describe many values: a reader takes little memory, whether it uses or refuses them."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forks import in_fork
from stored import JOURNAL_HEADER, write_lines

from harness.accuracy.data.arrays import read_rows
from harness.accuracy.data.labels import read_labels
from harness.base.errors import UserError
from harness.base.files import add_checksum, read_json
from harness.compat.modelopt_autotune.session import read_state
from harness.compat.tao_specs.spec import read_spec
from harness.config.experiment import load_experiment, plan_tasks
from harness.graph.pattern_cache import read_cache
from harness.replay.path_cache import COLUMNS, PathCache
from harness.results.artifacts import DYNAMIC_AXES_FILE, read_dynamic_axes
from harness.results.deploy_folder import MANIFEST_FILE, read_bundle
from harness.results.journal import read_journal
from harness.results.manifest import read_manifest
from harness.results.stored_experiment import Environment
from harness.results.turns import read_comparison

ALLOWED_MB = 300
PROPOSAL = '{"kind":"proposal","number":0,"choices":[0],"digest":"d","origin":"searcher"}'
RESULT = (
    '{"kind":"result","number":0,"elapsed_s":1.0,"outcome":'
    '{"status":"measured","build_s":1.0,"measure_s":1.0,"samples_ms":[1.0],"%s":%s}}'
)
TURN = '{"kind":"turn","build":0,"group":0,"round":0,"row":"float","samples_ms":%s}'
Reader = Callable[[], object]


def peak_growth_mb(read: Reader) -> tuple[str, float]:
    """Read in a fork; return the error, or "used", and the growth of the memory at its peak in MB."""

    def work() -> str:
        before_mb = status_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far: proc(5)
        try:
            read()
            said = "used"
        except UserError as error:
            said = str(error)
        return f"{status_mb('VmHWM') - before_mb} {said}"

    growth, _, said = in_fork(work, 600).partition(" ")
    assert re.fullmatch(r"[-.e\d]+", growth), f"{growth} {said}"
    return said, float(growth)


def status_mb(key: str) -> float:
    (kib,) = re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 1024


def repeated(text: str, count: int) -> str:
    return "[" + ",".join([text] * count) + "]"


def mapping(value: str, count: int) -> str:
    return "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"


def journal(field: str, values: str) -> Callable[[Path], Reader]:
    def make(folder: Path) -> Reader:
        write_lines(folder / "j.jsonl", [JOURNAL_HEADER, PROPOSAL, RESULT % (field, values)])
        return lambda: list(read_journal(folder / "j.jsonl"))

    return make


def packed_journal(folder: Path) -> Reader:
    """Write a line of 128 MB in 130 kB."""
    with gzip.open(folder / "j.jsonl.gz", "wb") as file:
        for _ in range(64):
            file.write(b"1," * 2**20)
    return lambda: list(read_journal(folder / "j.jsonl"))


def turn_log(folder: Path) -> Reader:
    write_lines(folder / "t.jsonl", [JOURNAL_HEADER, TURN % repeated("1.5", 1_800_000)])
    return lambda: read_comparison(folder / "t.jsonl")


def text(name: str, read: Callable[[Path], object], content: str) -> Callable[[Path], Reader]:
    def make(folder: Path) -> Reader:
        (folder / name).write_text(content)
        return lambda: read(folder / name)

    return make


def yaml(read: Callable[[Path], object], content: str) -> Callable[[Path], Reader]:
    return text("f.yaml", read, content)


def record(name: str, read: Callable[[Path], object], body: str) -> Callable[[Path], Reader]:
    return text(name, read, add_checksum(body))


def shipped(folder: Path) -> Reader:
    raw = add_checksum('{"schema":1,"runtime":' + mapping("[]", 100_000) + "}").encode()
    (folder / "ship.json").write_bytes(raw)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(raw).hexdigest()}  ship.json\n")
    return lambda: read_bundle(folder)


def submitted(folder: Path) -> Reader:
    """Write more evaluations than a submission may have, in few bytes."""
    walks = pa.ListArray.from_arrays([0, *([2**25 + 2**19] * 1)], pa.repeat(pa.scalar(1, pa.int32()), 2**25 + 2**19))
    columns = [pa.array([text]) for text in "tsam"]
    numbers = [pa.array([0], pa.int32()), pa.array([1], pa.int32())]
    pq.write_table(pa.table([*columns, *numbers, walks], schema=COLUMNS), folder / "walks.parquet", compression="zstd")
    return lambda: PathCache(folder)


EXPERIMENT, CACHE = "experiment: e\nmodels: ", "kind: qdq pattern cache\nschema: 1\n"
FILES: dict[str, Callable[[Path], Reader]] = {
    "journal, numbers": journal("raw_ms", repeated("1.5", 1_800_000)),
    "journal, wrong texts": journal("raw_ms", repeated('"a"', 600_000)),
    "journal, wrong lists": journal("rebuilt_ms", repeated("1.5", 1_800_000)),
    "journal, wrong keys": journal("metrics", mapping('"x"', 50_000)),
    "journal, levels": journal("info", "[" * 100_000 + "]" * 100_000),
    "journal, packed": packed_journal,
    "turn log": turn_log,
    "manifest": record(
        "manifest.json", lambda path: read_manifest(path.parent), '{"files":' + mapping("[]", 90_000) + "}"
    ),
    "environment": record(
        "env.json",
        lambda path: read_json(path, {}, Environment),
        '{"cpu":{"flags":' + repeated("1.5", 3_000_000) + "}}",
    ),
    "experiment, models": yaml(load_experiment, EXPERIMENT + repeated("[]", 99_000)),
    "experiment, 4 MB": yaml(load_experiment, EXPERIMENT + repeated("a", 1_900_000)),
    "experiment, matrix": yaml(
        load_experiment,
        f"{EXPERIMENT}[{{use: a, dims: {{{', '.join(f'd{n}: 1' for n in range(30_000))}}}}}]\n"
        f"matrix: {{models.label: [{', '.join(f'l{n}' for n in range(9_999))}]}}",
    ),
    "experiment, tasks": yaml(
        lambda path: plan_tasks(load_experiment(path)),
        f"{EXPERIMENT}[{', '.join(f'm{n}' for n in range(3_000))}]\n"
        f"backends: [{', '.join(f'{{use: simulated, label: b{n}}}' for n in range(3_000))}]",
    ),
    "pattern cache, 16 MB": yaml(read_cache, f"{CACHE}patterns: {repeated('a', 8_000_000)}"),
    "pattern cache, keys": yaml(read_cache, CACHE + "".join(f"k{n}: 1\n" for n in range(149_000))),
    "spec file": yaml(read_spec, "quantize:\n" + "".join(f"  k{n}: 1\n" for n in range(49_000))),
    "spec file, levels": yaml(read_spec, "quantize: " + "[" * 100_000 + "]" * 100_000),
    "spec file, aliases": yaml(read_spec, "quantize: [&a [1, 1], " + "*a, " * 50_000 + "]"),
    "spec file, digits": yaml(read_spec, "quantize: " + "9" * 3_000_000),
    "state of the autotuner": yaml(
        lambda path: read_state(path, {}),
        "kind: qdq autotuner state\nschema: 1\nfacts: {}\npatterns: " + repeated("{}", 290_000),
    ),
    "dynamic axes": record(DYNAMIC_AXES_FILE, lambda path: read_dynamic_axes(path.parent), mapping("[]", 90_000)),
    "manifest to deploy": text(MANIFEST_FILE, lambda path: read_bundle(path.parent), "0" * 64 + "\n" * 2**23),
    "labels of arrays": text("rows.csv", read_rows, "1\n" * 1_500_000),
    "label of many digits": text("labels.txt", read_labels, "a.png " + "9" * 100_000),
    "ship facts": shipped,
    "submission": submitted,
}


@pytest.mark.parametrize("kind", FILES)
def test_file_of_many_values_takes_little_memory(tmp_path, kind):
    said, growth_mb = peak_growth_mb(FILES[kind](tmp_path))
    assert growth_mb < ALLOWED_MB, said[:300]
    if said != "used":
        assert str(tmp_path) in said or kind == "experiment, tasks"
        assert all(len(line) < 2_000 for line in said.splitlines())
