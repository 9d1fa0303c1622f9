"""A path that is no readable file gives one error with the path, whichever reader opens it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from harness.accuracy.data.arrays import read_rows
from harness.accuracy.data.labels import read_labels
from harness.base.errors import UserError
from harness.base.files import explain_write_errors, read_json
from harness.compat.modelopt_autotune.region_search import get_node_filter_list
from harness.compat.modelopt_autotune.session import read_state
from harness.compat.tao_specs.engine import read_facts
from harness.compat.tao_specs.spec import read_spec
from harness.config.experiment import load_experiment
from harness.graph.pattern_cache import read_cache
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.replay.bench.accuracy import read_accuracy
from harness.replay.path_cache import FILE, PathCache
from harness.results.artifacts import DYNAMIC_AXES_FILE, read_dynamic_axes
from harness.results.deploy_folder import MANIFEST_FILE, read_bundle
from harness.results.journal import Journal, read_journal
from harness.results.lines import first_line, read_lines
from harness.results.stored_experiment import read_stored_experiment
from harness.run.prepare.initial_design import read_prior

READERS: dict[str, Callable[[Path], object]] = {
    "labels": read_labels,
    "spec": read_spec,
    "experiment": load_experiment,
    "stored experiment": read_stored_experiment,
    "cache": read_cache,
    "record": read_json,
    "sensitivities": read_prior,
    "journal": lambda path: list(read_journal(path)),
    "opened journal": lambda path: Journal(path, {}),
    "lines": lambda path: list(read_lines(path)),
    "first line": first_line,
    "state of the autotuner": lambda path: read_state(path, {}),
    "wildcards": lambda path: get_node_filter_list(str(path)),
    "numbers": read_rows,
    "facts of an engine": lambda path: read_facts(path.with_suffix("")),
    "dynamic axes": lambda path: read_dynamic_axes(path.parent),
    "manifest to deploy": lambda path: read_bundle(path.parent),
    "Q/DQ file": read_qdq_graph,
    "searches of a submission": lambda path: PathCache(path.parent),
    "accuracies": read_accuracy,
}
#: By reader: name of its file if that decides on the kind, or is the only one that it reads.
NAMES = {
    "labels": "a.json", "record": "a.json", "sensitivities": "a.json", "numbers": "a.csv",
    "facts of an engine": "a.json", "dynamic axes": DYNAMIC_AXES_FILE, "manifest to deploy": MANIFEST_FILE,
    "searches of a submission": FILE, "accuracies": "a.parquet",
}  # fmt: skip
#: Readers that take a path without a file as a new or an absent one.
OPTIONAL = ("journal", "opened journal", "first line", "state of the autotuner", "facts of an engine", "dynamic axes",
            "searches of a submission", "accuracies")  # fmt: skip


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_link(path: Path) -> Path:
    path.symlink_to("nothing")
    return path


def make_loop(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


def below_file(path: Path) -> Path:
    path.write_text("")
    return path / path.name


PATHS: dict[str, Callable[[Path], Path]] = {
    "folder": make_folder, "pipe": make_pipe, "link to nothing": make_link, "loop": make_loop,
    "below a file": below_file, "long name": lambda path: path.with_name("x" * 300 + path.name),
}  # fmt: skip


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("reader", READERS)
def test_unreadable_path_is_refused_with_the_path(tmp_path, reader, kind):
    path = PATHS[kind](tmp_path / NAMES.get(reader, "a.jsonl"))
    may_be_new = kind in ("below a file", "long name") and reader in OPTIONAL
    with suppress(UserError, FileNotFoundError) if may_be_new else pytest.raises(UserError, match=str(tmp_path)):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_file_without_permission_is_refused_with_the_path(tmp_path, monkeypatch, reader):
    path = tmp_path / NAMES.get(reader, "a.jsonl")
    path.write_text("{}\n")

    def refuse(file, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr("harness.base.files.os.open", refuse)
    with pytest.raises(UserError, match=rf"{path}: cannot be read: Permission denied"):
        READERS[reader](path)


def test_full_disk_names_the_file(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json: cannot be written \(No space left"), explain_write_errors(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(UserError, match=r"a\.json: cannot be written \(Permission denied\)$"),
        explain_write_errors(path),
    ):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
