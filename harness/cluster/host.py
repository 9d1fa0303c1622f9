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
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.api import Candidate
from harness.errors import BuildFailed
from harness.measure.engines import Engines, WorkerSpec
from harness.measure.provenance import environment
from harness.measure.sandbox import open_engines
from harness.measure.site import Maker
from harness.run.config import Limits, Use
from harness.run.journal import writing
from search.space import Resolved

__all__ = ["KEPT_BYTES", "Files", "Host", "Order", "Recent"]

Files = Mapping[str, bytes]
"""A model's file, first, and its external data by name."""
KEPT_BYTES = 4_000_000_000
"""Of models that are kept ready in the object store, and as files on each worker's disk."""
T = TypeVar("T")


class Recent(Generic[T]):
    """Things by key, as many as there is room for: those used longest ago go first, the newest stays in any case.

    Args:
        room_bytes: For all of them.
        drop: Called with each that goes.
    """

    def __init__(self, room_bytes: int, drop: Callable[[T], object]) -> None:
        self._room_bytes = room_bytes
        self._drop = drop
        self._there: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        """What was put under this key; None where it went, or never came."""
        if key not in self._there:
            return None
        self._there.move_to_end(key)
        return self._there[key][0]

    def put(self, key: str, thing: T, size_bytes: int) -> None:
        """Take in something new."""
        self._there[key] = (thing, size_bytes)
        while len(self._there) > 1 and sum(size for _, size in self._there.values()) > self._room_bytes:
            _, (gone, _) = self._there.popitem(last=False)
            self._drop(gone)


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
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts, which says what kind it is
        self._folder = Path(tempfile.mkdtemp(prefix="qdq-host-"))
        self._sessions: dict[int, _Session] = {}
        self._files: Recent[Path] = Recent(KEPT_BYTES, lambda file: shutil.rmtree(file.parent, ignore_errors=True))

    def facts(self, commit: str | None) -> dict[str, Any]:
        """Where this is, and its environment."""
        return {"node": socket.gethostname(), "niceness": os.nice(0), "environment": environment(commit)}

    def open(
        self, number: int, spec: WorkerSpec, limits: Limits, maker: Maker | None
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Open engines under a number, and give the benchmarkers' facts and the GPUs that they run on.

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
        return facts, engines.gpus

    def keep(self, key: str, files: Files) -> None:
        """Keep a model's files for candidates to come.

        Raises:
            UserError: The disk of this machine is full.
        """
        with writing(self._folder):
            folder = Path(tempfile.mkdtemp(prefix="files-", dir=self._folder))
            for name, content in files.items():
                (folder / Path(name).name).write_bytes(content)
        self._files.put(key, folder / Path(next(iter(files))).name, sum(map(len, files.values())))

    def build(self, number: int, order: Order, benchmarker: str) -> Any:
        """Build a candidate; `KeyError` as a value, where its files are not here, or no longer."""
        session = self._sessions[number]
        if order.files:
            path = self._files.get(order.files)
            if path is None:
                return KeyError(order.files)
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
