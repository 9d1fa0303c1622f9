"""Stored records as tests read and change them: JSON lines, plain or compressed, with their checksums."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.results_dir.io import add_checksum, read_json, write_json
from harness.results_dir.lines import open_lines, read_lines, restore_lines
from harness.results_dir.manifest import reopen_task


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for _, line in read_lines(path)]


def read_text(path: Path) -> str:
    with open_lines(path) as file:
        return file.read().decode()


def write_records(path: Path, records: Iterable[Mapping[str, Any] | str]) -> None:
    """Write records, as objects or as JSON text, into a plain file."""
    texts = (record if isinstance(record, str) else json.dumps(record, separators=(",", ":")) for record in records)
    path.write_text("".join(f"{add_checksum(text)}\n" for text in texts))


def unpack(folder: Path) -> None:
    """Make a finished task one that a run was killed in: plain logs, no manifest."""
    reopen_task(folder)
    for path in (*folder.glob("*.jsonl.gz"), *folder.glob("runs/*.jsonl.gz")):
        restore_lines(path.with_suffix(""))


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a part of the JSON text of a file or of its lines, and renew the checksums."""
    if path.suffix == ".json":
        write_json(path, json.loads(json.dumps(read_json(path), separators=(",", ":")).replace(old, new)))
    else:
        texts = (json.dumps(record, separators=(",", ":")) for record in read_records(path))
        write_records(path, [text.replace(old, new) for text in texts])
