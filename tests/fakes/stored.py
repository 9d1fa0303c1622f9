"""Stored records as tests read and change them: JSON lines, plain or compressed, with their checksums."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.base.files import read_json, write_json
from harness.results.lines import read_lines, restore_lines, seal_line, stored_path
from harness.results.manifest import MANIFEST_FILE

JOURNAL_HEADER = '{"kind":"header","schema":3,"fingerprint":{}}'


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for _, line in read_lines(path)]


def read_text(path: Path) -> str:
    stored = stored_path(path)
    return (gzip.decompress(stored.read_bytes()) if stored.suffix == ".gz" else stored.read_bytes()).decode()


def write_records(path: Path, records: Iterable[Mapping[str, Any] | str]) -> None:
    """Write records, as objects or as JSON text, into a plain file."""
    texts = (record if isinstance(record, str) else json.dumps(record, separators=(",", ":")) for record in records)
    write_lines(path, texts)


def write_lines(path: Path, texts: Iterable[str], *, chained: bool = True) -> None:
    """Write JSON texts as the lines of a plain file, chained or as earlier versions did."""
    last, lines = "" if chained else None, []
    for text in texts:
        line, last = seal_line(text, last)
        lines.append(f"{line}\n")
    path.write_text("".join(lines))


def forget_task(folder: Path) -> None:
    """Remove a task from the manifest, so that its files are compared with nothing."""
    path = folder.parent / MANIFEST_FILE
    manifest = read_json(path)
    manifest["tasks"].pop(folder.name, None)
    write_json(path, manifest)


def unpack(folder: Path) -> None:
    """Make a finished task one that a run was killed in: plain logs, no manifest."""
    forget_task(folder)
    for path in (*folder.glob("*.jsonl.gz"), *folder.glob("runs/*.jsonl.gz")):
        restore_lines(path.with_suffix(""))


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a part of the JSON text of a file or of its lines, and renew the checksums."""
    if path.suffix == ".json":
        write_json(path, json.loads(json.dumps(read_json(path), separators=(",", ":")).replace(old, new)))
    else:
        texts = (json.dumps(record, separators=(",", ":")) for record in read_records(path))
        write_records(path, [text.replace(old, new) for text in texts])
