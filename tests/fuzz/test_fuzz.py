"""Mutated inputs of every kind: each is used or refused by an error of the harness that names its file.

QDQ_FUZZ sets how many of each kind, QDQ_SEED draws others (docs/explanation/reliability.md has the figures of 3,000).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_tables import save_table
from mutations import (
    AUTOTUNE_STATE,
    BYTE_MUTATIONS,
    EXPERIMENT_YAML,
    ONNX_MUTATIONS,
    PATTERN_CACHE,
    edited,
    misfilled,
    onnx_files,
)
from onnx_models import loaded
from PIL import Image
from small_results import TASK, write_folder
from stored import write_lines

from harness.accuracy.data.arrays import read_rows
from harness.accuracy.data.datasets import open_data
from harness.base.errors import CandidateError, UserError
from harness.base.files import add_checksum, remove_checksum, write_json
from harness.base.progress import NullProgress
from harness.cli.main import app
from harness.compat.modelopt_autotune.session import read_state
from harness.config.experiment import load_experiment
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model
from harness.graph.load import load, read_signature
from harness.graph.model import Model
from harness.graph.pattern_cache import read_cache
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.plugins import registry
from harness.replay.bench.accuracy import PlacementAccuracy, read_accuracy, write_accuracy
from harness.replay.bench.submission import check_submission, run_searchers
from harness.replay.bench.tasks import DATA_VARIABLE
from harness.replay.budget_study import ReplayedSearcher
from harness.replay.path_cache import PathCache, SearchKey, SearchPath, write_paths
from harness.report.frames import main_frame
from harness.results.deploy_folder import read_bundle
from harness.results.folder import load as load_results
from harness.results.journal import read_journal
from harness.results.lines import strip_seal
from harness.results.manifest import check_results, close_results, complete_task, describe_files
from harness.runtimes.onnxruntime import ONNXRuntimeBenchmarker
from harness.runtimes.replay import DIGEST_KEY, METADATA_KEY, read_table, read_table_metadata
from harness.ship.bundle import generated_script

FUZZ = int(os.environ.get("QDQ_FUZZ", "300"))
SEED = int(os.environ.get("QDQ_SEED", "7"))
HANG_S = 30  # of this process's own time, which other programs do not lengthen
WAIT_S = 600  # of a wait, for a child process or a pipe
ALLOWED_GB = 4.0
Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """Kind of input.

    Attributes:
        name: Of the file.
        files: Valid contents.
        mutations: Applied in turn.
        use: Reads the file as a command does.
    """

    name: str
    files: Callable[[], list[bytes]]
    mutations: tuple[Mutation, ...]
    use: Callable[[Path], object]


def use_model(path: Path) -> None:
    model = load(path)
    space = build_space(model, OPENVINO)
    edges = {edge.tensor for dimension in space.dimensions for edge in dimension.edges}
    if len(space):
        ranges = dict.fromkeys(edges - set(model.constants), (-1.0, 1.0))
        Inserter(model, OPENVINO, ranges).insert(space.resolve(space.quantize_all()))


@cache
def float_model() -> Model:
    return loaded(onnx.ModelProto.FromString(onnx_files()[0]), "net")


@cache
def quantized_files() -> list[bytes]:
    model = float_model()
    space = build_space(model, OPENVINO)
    tensors = {edge.tensor for dimension in space.dimensions for edge in dimension.edges}
    inserter = Inserter(model, OPENVINO, dict.fromkeys(tensors - set(model.constants), (-1.0, 1.0)))
    return [inserter.insert(space.resolve(space.quantize_all())).SerializeToString()]


def use_quantized(path: Path) -> None:
    refusals = []
    readers = (
        lambda: import_placement(path, float_model()), lambda: read_qdq_graph(path), lambda: read_signature(path),
        lambda: digest_file(path), lambda: copy_model(path, path.parent, "copy.onnx"),
    )  # fmt: skip
    for read in readers:
        try:
            read()
        except UserError as error:
            refusals.append(error)
    if refusals:
        raise min(refusals, key=lambda error: path.name in str(error))


def coco_files() -> list[bytes]:
    boxes = {
        "images": [{"id": 7, "file_name": "0.png", "height": 8, "width": 8}],
        "annotations": [{"image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3], "area": 6, "iscrowd": 0, "id": 1}] * 2,
        "categories": [{"id": 5, "name": "cat"}, {"id": 9, "name": "dog"}],
    }
    segments = [{"id": 3, "category_id": 5}]
    masks = {**boxes, "annotations": [{"image_id": 7, "file_name": "0.png", "segments_info": segments}]}
    return [json.dumps(labels).encode() for labels in (boxes, masks)]


def refilled(raw: bytes, rng: random.Random) -> bytes:
    return json.dumps(misfilled(json.loads(raw), rng)).encode()


def use_coco(path: Path) -> None:
    with Image.new("RGB", (8, 8)) as image:
        image.save(path.parent / "0.png")
    spec: dict[str, Any] = {"use": "images", "images": str(path.parent), "labels": str(path), "count": 1}
    if b"segments_info" in path.read_bytes():
        data = open_data({**spec, "masks": str(path.parent), "classes": ["void", "cat"]})
        assert data.mask is not None  # type: ignore[union-attr]
        data.mask(0)  # type: ignore[union-attr]
        return
    params = {"data": spec, "preprocess": "ultralytics", "decode": "ultralytics"}
    evaluator = registry.create_plugin(
        "evaluator", "coco_map", params, {"input_name": "x", "input_shape": (1, 3, 8, 8)}
    )
    evaluator.score(lambda _: {"y": np.zeros((1, 6, 1), np.float32)})


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz_files() -> list[bytes]:
    made = []
    for save in (np.savez, np.savez_compressed):
        for labels in ({}, {"y": np.arange(4)}):
            file = io.BytesIO()
            save(file, x=np.ones((4, 3), np.float32), **labels)
            made.append(file.getvalue())
    return made


def rezipped(raw: bytes, rng: random.Random) -> bytes:
    """One array of an archive changed, with the checksum that it has then."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as before, zipfile.ZipFile(file, "w") as after:
        changed = rng.choice(before.namelist())
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, rng.choice(BYTE_MUTATIONS)(content, rng) if name == changed else content)
    return file.getvalue()


def use_arrays(path: Path) -> None:
    spec = {"use": path.suffix[1:], "path": str(path)}
    labelled = b"y.npy" in path.read_bytes()
    for each in (spec, spec | {"labels": "y" if labelled else str(path)}):
        data = open_data(each)
        assert len(data) > 0
    if not labelled:
        read_rows(path)


def image_files() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 255, (12, 12, 3), np.uint8)
    made = []
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        made.append(file.getvalue())
    return made


def recompressed(raw: bytes, rng: random.Random) -> bytes:
    """A chunk of a PNG changed, with the checksum that it has then."""
    if not raw.startswith(b"\x89PNG"):
        return raw
    at, data = 8, bytearray(raw)
    length = int.from_bytes(data[at : at + 4])
    data[at + 8 + rng.randrange(length)] = rng.randrange(256)
    data[at + 8 + length : at + 12 + length] = zlib.crc32(data[at + 4 : at + 8 + length]).to_bytes(4)
    return bytes(data)


def use_image(path: Path) -> None:
    spec: dict[str, Any] = {"use": "images", "images": str(path.parent)}
    data = open_data(spec)
    data.image(0)  # type: ignore[union-attr]
    masked = open_data({**spec, "masks": str(path.parent)})
    masked.mask(0)  # type: ignore[union-attr]


def journal_files() -> list[bytes]:
    lines = [
        '{"kind":"header","schema":2,"fingerprint":{}}',
        '{"kind":"proposal","number":0,"choices":[0,1],"digest":"d","origin":"searcher","duplicate_of":null}',
        '{"kind":"result","number":0,"outcome":{"status":"failed","stage":"build","reason":"x"},"elapsed_s":1.0}',
    ]
    return ["".join(f"{add_checksum(line)}\n" for line in lines).encode()]


def written_by(write: Callable[[Path], object]) -> list[bytes]:
    with TemporaryDirectory() as folder:
        write(Path(folder) / "file")
        return [(Path(folder) / "file").read_bytes()]


def use_table(path: Path) -> None:
    read_table_metadata(path)
    read_table(path)


def accuracy_files() -> list[bytes]:
    row = PlacementAccuracy(
        model="m", model_sha256="0" * 64, precision="int8", dialect="openvino", digest="d", metrics={"top1": 0.5},
        failure="", samples=10, data="d", calibrated_on="c", computed_by="x",
    )  # fmt: skip
    return written_by(lambda path: write_accuracy(path, {row.key: row}))


def search_files() -> list[bytes]:
    key = SearchKey("t", "s", "a", "m")
    return written_by(lambda path: write_paths(path, {key: {0: SearchPath(np.arange(9, dtype=np.int32), 9)}}))


def deployed_files() -> list[bytes]:
    runtime = dict(ONNXRuntimeBenchmarker().describe())
    facts = {
        "schema": 1, "file": "net.onnx", "answer": "a", "latency_ms": [1.0, 0.9, 1.1], "speedup": [2.0, 1.9, 2.1],
        "runtime": runtime, "experiment": {}, "dynamic_file": "net.dynamic.onnx",
        "shapes": {"small": {"inputs": {"x": [1, 3, 8, 8]}}},
    }  # fmt: skip
    return [json.dumps(facts).encode()]


def seal(path: Path, raw: bytes) -> None:
    """Write a JSON file, or lines of JSON, whose checksums are right, as those of a stranger are."""
    with suppress(ValueError):
        lines = [json.dumps(json.loads(line)) for line in raw.decode().splitlines()]
        if path.suffix == ".jsonl":
            write_lines(path, lines)
            return
        raw = "".join(f"{add_checksum(line)}\n" for line in lines).encode()
    path.write_bytes(raw)


def use_deployed(path: Path) -> None:
    """Read facts whose checksum and manifest are right, as those of a stranger are."""
    seal(path, path.read_bytes())
    others = [path.with_name(name) for name in ("net.onnx", "net.dynamic.onnx", "deploy.py", "report.md")]
    for other in others:
        other.write_bytes(onnx_files()[0])
    files = (path, *others)
    (path.parent / "SHA256SUMS").write_text(
        "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    )
    with generated_script(path.parent, read_bundle(path.parent)):
        pass


@cache
def finished_results() -> TemporaryDirectory[str]:
    made = TemporaryDirectory()
    write_folder(Path(made.name))
    complete_task(Path(made.name, TASK), "", complete=True)
    close_results(Path(made.name), [TASK])
    return made


def result_files() -> list[bytes]:
    """Return the records of a finished task, with the path of each before it, as JSON."""
    folder = Path(finished_results().name)
    found = [path for path in sorted(folder.rglob("*.json*")) if path.is_file()]
    return [f"{path.relative_to(folder)}\n{_content(path)}".encode() for path in found]


def _content(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = raw.splitlines()
    return "\n".join(strip_seal(line).decode() for line in lines if line)


def refilled_record(raw: bytes, rng: random.Random) -> bytes:
    name, *lines = raw.decode().splitlines()
    place = rng.randrange(len(lines))
    lines[place] = refilled(lines[place].encode(), rng).decode()
    return "\n".join([name, *lines]).encode()


def use_results(path: Path) -> None:
    """Read results of which one record is wrong, as `qdq report` and `qdq verify` do."""
    name, _, content = path.read_text().partition("\n")
    folder = path.parent / "results"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished_results().name, folder)
    (folder / name).unlink()  # may be compressed
    seal(folder / name.removesuffix(".gz"), content.encode())
    if name != "manifest.json":
        (folder / "manifest.json").unlink()
    try:
        check_results(folder)
        main_frame(load_results(folder))
    except UserError as error:
        named = folder.name in str(error)
        raise UserError(f"{path.name if named else ''}: {error}") from error


@cache
def submitted() -> tuple[TemporaryDirectory[str], bytes]:
    """Return a folder with a benchmark of one small task and a submission, and what the latter says."""
    made = TemporaryDirectory()
    tasks, folder = Path(made.name, "tasks"), Path(made.name, "submission")
    tasks.mkdir()
    save_table(tasks / "one.parquet", 3)
    task = "{family: CNN, split: test, tier: lite}"
    (tasks / "tasks.yaml").write_text(f"tiers: {{lite: {{seeds: 2, budgets: [4]}}}}\ntasks: {{one: {task}}}\n")
    with patch.dict(os.environ, {DATA_VARIABLE: str(tasks)}):
        run_searchers([ReplayedSearcher(use="random")], "lite", folder, NullProgress())
    return made, remove_checksum((folder / "submission.json").read_bytes())


def use_submission(path: Path) -> None:
    """Check a submission whose manifest and checksum are right."""
    seal(path, path.read_bytes())
    made = Path(submitted()[0].name)
    shutil.copy(made / "submission" / "walks.parquet", path.parent)
    files = describe_files(path.parent, [path, path.parent / "walks.parquet"])
    write_json(path.parent / "manifest.json", {"complete": True, "tasks": {}, "files": files})
    with patch.dict(os.environ, {DATA_VARIABLE: str(made / "tasks")}):
        check_submission(path.parent, searches=1, seed=0, observer=NullProgress())


@cache
def described_table() -> tuple[bytes, pa.Table]:
    with TemporaryDirectory() as folder:
        save_table(Path(folder) / "t.parquet")
        table = pq.read_table(Path(folder) / "t.parquet")
    return table.schema.metadata[METADATA_KEY], table


def use_description(path: Path) -> None:
    """Read a table whose description has the right digest."""
    raw, table = path.read_bytes(), described_table()[1]
    described = table.replace_schema_metadata({METADATA_KEY: raw, DIGEST_KEY: hashlib.sha256(raw).hexdigest()})
    pq.write_table(described, path)
    read_table(path)


KINDS = {
    "onnx": Kind("m.onnx", onnx_files, ONNX_MUTATIONS, use_model),
    "qdq": Kind("q.onnx", quantized_files, ONNX_MUTATIONS, use_quantized),
    "coco": Kind("labels.json", coco_files, (refilled, refilled, refilled, edited), use_coco),
    "npz": Kind("a.npz", npz_files, (*BYTE_MUTATIONS, rezipped, rezipped), use_arrays),
    "npy": Kind("a.npy", lambda: [npy(np.ones((4, 3), np.float32)), npy(np.arange(4))], BYTE_MUTATIONS, use_arrays),
    "image": Kind("0.png", image_files, (*BYTE_MUTATIONS, recompressed), use_image),
    "experiment": Kind("e.yaml", lambda: [EXPERIMENT_YAML.encode()], (edited, *BYTE_MUTATIONS), load_experiment),
    "cache": Kind("c.yaml", lambda: [PATTERN_CACHE.encode()], (edited, *BYTE_MUTATIONS), read_cache),
    "state": Kind(
        "s.yaml", lambda: [AUTOTUNE_STATE.encode()], (edited, *BYTE_MUTATIONS), lambda path: read_state(path, {})
    ),
    "journal": Kind("j.jsonl", journal_files, (flipped_bytes := BYTE_MUTATIONS[0], *BYTE_MUTATIONS),
                    lambda path: list(read_journal(path))),
    "table": Kind("t.parquet", lambda: written_by(save_table), BYTE_MUTATIONS, use_table),
    "accuracies": Kind("a.parquet", accuracy_files, BYTE_MUTATIONS, read_accuracy),
    "searches": Kind("walks.parquet", search_files, BYTE_MUTATIONS, lambda path: PathCache(path.parent)),
    "deployed": Kind("ship.json", deployed_files, (refilled, refilled, refilled, edited), use_deployed),
    "results": Kind("record.json", result_files, (refilled_record,), use_results),
    "submission": Kind("submission.json", lambda: [submitted()[1]], (refilled, refilled, refilled, edited),
                       use_submission),
    "description": Kind("t.parquet", lambda: [described_table()[0]], (refilled,), use_description),
}  # fmt: skip


@contextmanager
def time_limit() -> Iterator[None]:
    """End a hang; the exception is no Exception, which code under test might catch."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"works more than {HANG_S} s" if number == signal.SIGPROF else f"waits {WAIT_S} s")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, HANG_S), signal.SIGALRM: (signal.ITIMER_REAL, WAIT_S)}
    before = {number: signal.signal(number, stop) for number in timers}
    try:
        for timer, seconds in timers.values():
            signal.setitimer(timer, seconds)
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def outcome_of(use: Callable[[], object], name: str) -> str:
    """Return "used", "refused", or the finding."""
    try:
        with time_limit():
            use()
    except (UserError, CandidateError) as error:
        if "doubles that limit" in str(error):  # a hang of the process that reads models
            return f"hangs: {error}"
        named = name in str(error) or "0.png" in str(error) or str(error).startswith("data.")  # a key of the experiment
        return "refused" if named else f"names no file: {error}"
    except BaseException as error:  # a finding; the hang is a KeyboardInterrupt
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/harness/" in f.filename]
        return f"{type(error).__name__}: {str(error)[:150]!r} at {ours[-1:]}"
    return "used"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_used_or_refused(kind, tmp_path):
    spec = KINDS[kind]
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest memory so far: proc(5)
    files, found, findings = spec.files(), Counter[str](), Counter[str]()
    for number in range(FUZZ):
        rng = random.Random(f"{SEED} {kind} {number}")
        mutation = spec.mutations[number % len(spec.mutations)]
        path = tmp_path / spec.name
        path.write_bytes(mutation(rng.choice(files), rng))
        said = outcome_of(lambda path=path: spec.use(path), spec.name)  # type: ignore[misc]
        found[said if said in ("used", "refused") else "finding"] += 1
        if said not in ("used", "refused"):
            findings[f"{said} ({number} {mutation.__name__})" if FUZZ <= 300 else said] += 1
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    used_gb = int(peak_kib) / 2**20
    print(f"{kind}: {dict(found)}, {used_gb:.1f} GB", *findings.items(), sep="\n")
    assert not findings, [*findings][:5]
    assert found["refused"]
    assert found["used"]
    assert used_gb < ALLOWED_GB


PATH_PARTS = ("a", "..", "\0", "\n", "\ud800", "x" * 300, "", "con", "-", "%s", "a b", "$H", "*", "\u202e", "d.onnx")
COMMANDS = (
    "run {} --check", "inspect regions {}", "explain {}", "report {}", "report {} --compare {}", "verify {}",
    "report {} --trace 1:speedup", "run {} --reproduce", "init {} -o first.yaml",
    "evaluate {}", "quantize {}", "gen-trt-engine {}", "calib-data {} --output {}", "bench replay {}",
)  # fmt: skip


def odd_path(folder: Path, rng: random.Random) -> str:
    """A path to nothing, a folder, a file of another kind, a pipe or a device."""
    made = [folder, folder / "d.onnx", folder / "pipe", folder / "loop", "/dev/zero", "/dev/null", "zoo:", "zoo:../x"]
    if rng.random() < 0.4:
        return str(rng.choice(made))
    name = "/".join(rng.choice(PATH_PARTS) for _ in range(rng.randint(1, 4)))
    return rng.choice(["", "assets:", f"{folder}/", "/", "zoo:"]) + name + rng.choice(["", ".onnx", ".yaml", ".npz"])


@pytest.mark.slow
def test_unusual_paths_do_not_crash_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDQ_ASSETS", str(tmp_path))
    (tmp_path / "d.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    findings: Counter[str] = Counter()
    for number in range(FUZZ):
        rng = random.Random(f"{SEED} path {number}")
        words, path = rng.choice(COMMANDS).split(), odd_path(tmp_path, rng)
        arguments = [path if word == "{}" else word for word in words]

        def call(arguments: list[str] = arguments) -> None:
            try:
                app(args=arguments)
            except SystemExit:  # typer's own refusal
                return

        said = outcome_of(call, "")
        if said not in ("used", "refused"):
            findings[f"{said}: {ascii(arguments)[:200]}"] += 1
    print(*findings.items(), sep="\n")
    assert not findings
