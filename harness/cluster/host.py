"""What runs on a node of the cluster: one process that has a device to itself, and keeps engines for the driver.

Calls come one at a time, so an engine is timed while nothing else happens on its device. The engines themselves live
where they do on a single machine, in worker processes with limits, so a candidate can take down one of those, not this.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.errors import BuildFailed
from harness.measure.engines import Engines, WorkerSpec
from harness.measure.provenance import environment
from harness.measure.sandbox import open_engines
from harness.measure.site import Maker
from harness.run.config import Limits, Use
from search.space import Resolved

__all__ = ["Files", "Host", "Order"]

Files = Mapping[str, bytes]
"""A model's file, first, and its external data by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A candidate as the driver sends it: its edges, or a key to files that were sent before.

    Attributes:
        files: What `Host.keep` was given; "": the placement is written here, where a file is asked for at all.
    """

    digest: str
    edges: Resolved
    files: str = ""


@dataclass(slots=True, kw_only=True)
class _Session:
    engines: Engines
    maker: Maker | None
    folder: Path
    closing: ExitStack


class Host:
    """An actor; it holds its node's device from its start to its end.

    Args:
        path: Where the driver looks for modules: plug-ins beside an experiment are found where the folder is shared.
    """

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._folder = Path(tempfile.mkdtemp(prefix="qdq-host-"))
        self._sessions: dict[int, _Session] = {}
        self._files: dict[str, Path] = {}

    def facts(self, commit: str | None) -> dict[str, Any]:
        """Where this is, and its environment."""
        return {"node": socket.gethostname(), "niceness": os.nice(0), "environment": environment(commit)}

    def open(self, number: int, spec: WorkerSpec, limits: Limits, maker: Maker | None) -> dict[str, Any]:
        """Open engines under a number, and give the benchmarkers' facts.

        Raises:
            UserError: A plug-in cannot be made here.
        """
        folder = self._folder / str(number)
        folder.mkdir()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            engines = stack.enter_context(open_engines(_moved(spec, folder), limits))
            facts = {name: dict(engines.describe(name)) for name in spec.benchmarkers}
            closing = stack.pop_all()
        self._sessions[number] = _Session(engines=engines, maker=maker, folder=folder, closing=closing)
        return facts

    def keep(self, key: str, files: Files) -> None:
        """Keep a model's files for candidates to come; they are written once on each host."""
        folder = self._folder / f"files-{len(self._files)}"
        folder.mkdir()
        for name, content in files.items():
            (folder / Path(name).name).write_bytes(content)
        self._files[key] = folder / Path(next(iter(files))).name

    def build(self, number: int, order: Order, benchmarker: str) -> Any:
        """Build a candidate; `KeyError` as a value, where its files were never sent here."""
        session = self._sessions[number]
        if order.files:
            if order.files not in self._files:
                return KeyError(order.files)
            path = self._files[order.files]
            return session.engines.build(_candidate(order, path), benchmarker)
        folder, maker = session.folder / "candidates", session.maker

        def source() -> Path:
            if maker is None:
                raise BuildFailed("neither a file nor a way to make one was sent")
            return maker.write(order.edges, folder, name=order.digest)

        try:
            return session.engines.build(Candidate(digest=order.digest, edges=order.edges, source=source), benchmarker)
        finally:
            (folder / f"{order.digest}.onnx").unlink(missing_ok=True)

    def call(self, number: int, method: str, *args: Any) -> Any:
        """One of the other methods of `Engines`."""
        return getattr(self._sessions[number].engines, method)(*args)

    def close(self, number: int) -> None:
        """Close what `open` opened."""
        session = self._sessions.pop(number, None)
        if session is not None:
            session.closing.close()

    def end(self) -> None:
        """Close everything and leave nothing behind."""
        for number in list(self._sessions):
            self.close(number)
        shutil.rmtree(self._folder, ignore_errors=True)


def _candidate(order: Order, path: Path) -> Candidate:
    return Candidate(digest=order.digest, edges=order.edges, source=lambda: path)


def _moved(spec: WorkerSpec, folder: Path) -> WorkerSpec:
    """The specification with the driver's scratch folder replaced by this host's, wherever a parameter lies in it."""

    def moved(value: Any) -> Any:
        if isinstance(value, Path) and value.is_relative_to(spec.workdir):
            return folder / value.relative_to(spec.workdir)
        if isinstance(value, str) and value.startswith(f"{spec.workdir}{os.sep}"):
            return f"{folder}{value[len(str(spec.workdir)) :]}"
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        return value

    def use(given: Use) -> Use:
        return given.model_copy(update={"params": moved(given.params)})

    return replace(
        spec,
        workdir=folder,
        benchmarkers={name: use(given) for name, given in spec.benchmarkers.items()},
        evaluators={name: use(given) for name, given in spec.evaluators.items()},
        reference=None,  # a device of one's own is not so restless that candidates need company
    )
