"""Actor on a node of the cluster: one process with a device of its own that keeps engines for the driver.

Calls are handled one at a time, so nothing else uses the device while an engine is timed. The engines themselves are in
worker processes with limits, as on a single machine, so a candidate can crash one of those and not the actor.
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
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from harness.base.errors import BuildFailed
from harness.base.files import explain_write_errors
from harness.config.sections import Limits, PluginSpec
from harness.measure.provenance import describe_environment
from harness.plugins.api import Candidate
from harness.workers.engines import EngineRequest, Engines, WorkerHistory, WorkerSpec
from harness.workers.sandbox import open_engines
from harness.workers.trial_pool import CandidateWriter
from search.space import Resolved

ModelFiles = Mapping[str, bytes]
"""Name and content of a model's file, then of its external data."""
DEVICE_LABEL = "qdq-device"  # of nodes, for differences that the processor's name does not show
FILE_CACHE_BYTES = 4_000_000_000  # of models in the object store, and as files on each worker's disk
T = TypeVar("T")


class LRUByteCache(Generic[T]):
    """Cache with a capacity in bytes that evicts the least recently used values, but never the newest.

    Args:
        capacity_bytes: Total size.
        drop: Called with each evicted value.
    """

    def __init__(self, capacity_bytes: int, drop: Callable[[T], object]) -> None:
        self._capacity_bytes = capacity_bytes
        self._drop = drop
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        """Return the value of a key; None if it was evicted or never stored."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: str, value: T, size_bytes: int) -> None:
        """Store a new value, and evict others until the sizes fit the capacity."""
        self._entries[key] = (value, size_bytes)
        while len(self._entries) > 1 and sum(size for _, size in self._entries.values()) > self._capacity_bytes:
            _, (evicted, _) = self._entries.popitem(last=False)
            self._drop(evicted)


class RayWorker:
    """Actor that holds its node's device as long as it lives.

    Args:
        path: The driver's module search path: plug-ins of an experiment's folder are found if the folder is shared.
        variables: The driver's environment variables that its options set.
    """

    def __init__(self, path: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
        os.environ.update(variables)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi, which gives the GPU's name
        self._folder = Path(tempfile.mkdtemp(prefix="qdq-host-"))
        self._sessions: dict[int, tuple[Engines, CandidateWriter | None, ExitStack]] = {}
        self._history = WorkerHistory()  # of all sessions
        self._files: LRUByteCache[Path] = LRUByteCache(
            FILE_CACHE_BYTES, lambda file: shutil.rmtree(file.parent, ignore_errors=True)
        )

    def describe(self, commit: str | None) -> dict[str, Any]:
        """Return the node's name, this process's niceness and the environment, with the node's label if it has one."""
        import ray

        label = ray.get_runtime_context().get_node_labels().get(DEVICE_LABEL)
        environment = describe_environment(commit) | ({} if label is None else {"node_label": label})
        return {"node": socket.gethostname(), "niceness": os.nice(0), "environment": environment}

    def lock_wait_s(self) -> float:
        """Return the seconds for which this worker has waited for other runs on its node; called during other calls."""
        return sum(self._history.lock_waits_s)

    def open(
        self, number: int, spec: WorkerSpec, limits: Limits, writer: CandidateWriter | None
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Open engines as a session; return the benchmarkers' facts and the GPUs that they run on."""
        folder = self._folder / str(number)
        folder.mkdir()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            engines = stack.enter_context(open_engines(_relocate_paths(spec, folder), limits, self._history))
            facts = {name: dict(engines.describe(name)) for name in spec.benchmarkers}
            self._sessions[number] = (engines, writer, stack.pop_all())
        return facts, engines.gpus

    def store_files(self, key: str, files: ModelFiles) -> None:
        """Keep a model's files for later build requests."""
        with explain_write_errors(self._folder):
            folder = Path(tempfile.mkdtemp(prefix="files-", dir=self._folder))
            for name, content in files.items():
                (folder / Path(name).name).write_bytes(content)
        self._files.put(key, folder / Path(next(iter(files))).name, sum(map(len, files.values())))

    def build(self, number: int, digest: str, edges: Resolved, benchmarker: str, files_key: str = "") -> Any:
        """Build a candidate; return a `KeyError` if its files are not here, or not any more.

        Args:
            files_key: Key given to `store_files`; "": the worker writes the placement if a file is needed.
        """
        engines, writer, _ = self._sessions[number]
        written = self._folder / str(number) / "candidates" / f"{digest}.onnx"
        path = self._files.get(files_key) if files_key else None
        if files_key and path is None:
            return KeyError(files_key)

        def source() -> Path:
            if path is not None:
                return path
            if writer is None:
                raise BuildFailed("neither a file nor a candidate writer was sent")
            return writer.write(edges, written.parent, name=digest)

        try:
            return engines.build(Candidate(digest=digest, edges=edges, source=source), benchmarker)
        finally:
            written.unlink(missing_ok=True)

    def answer(self, number: int, request: EngineRequest[Any]) -> Any:
        """Return the answer of a session's engines to a request."""
        return self._sessions[number][0].request(request)

    def close(self, number: int) -> None:
        """Close a session."""
        if number in self._sessions:
            self._sessions.pop(number)[-1].close()

    def end(self) -> None:
        """Close all sessions and remove all files."""
        for number in list(self._sessions):
            self.close(number)
        shutil.rmtree(self._folder, ignore_errors=True)


def _relocate_paths(spec: WorkerSpec, folder: Path) -> WorkerSpec:
    """Return the specification with the driver's scratch folder replaced by this worker's, also in parameters."""

    def relocate(value: Any) -> Any:
        if isinstance(value, Path) and value.is_relative_to(spec.workdir):
            return folder / value.relative_to(spec.workdir)
        if isinstance(value, str) and value.startswith(f"{spec.workdir}{os.sep}"):
            return f"{folder}{value[len(str(spec.workdir)) :]}"
        if isinstance(value, dict):
            return {key: relocate(each) for key, each in value.items()}
        return value

    def relocate_all(plugins: Mapping[str, PluginSpec]) -> dict[str, PluginSpec]:
        return {name: each.model_copy(update={"params": relocate(each.params)}) for name, each in plugins.items()}

    return replace(
        spec,
        workdir=folder,
        benchmarkers=relocate_all(spec.benchmarkers),
        evaluators=relocate_all(spec.evaluators),
        reference=None,  # a device without other work is quiet enough to time candidates alone
    )
