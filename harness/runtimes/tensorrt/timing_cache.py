"""TensorRT's timing cache: which kernel was the fastest for a layer, remembered from build to build.

How it is used is a factor of an experiment. With `cold` every build times its kernels anew, so builds of one model
differ by the noise of that timing; with `shared` later builds do as earlier ones did; `frozen` reads and never writes.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import BuildFailed, UserError
from harness.runtimes.cuda.device import Device
from harness.runtimes.tensorrt.library import TensorRTLibrary

CachePolicy = Literal["cold", "shared", "frozen"]
POLICIES = ("cold", "shared", "frozen")
MAX_CACHE_BYTES = 2**30


def timing_cache_path(folder: Path, version: str, device: Device) -> Path:
    """Return the path of the timing cache for this TensorRT and this kind of GPU."""
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-")
    return folder / "tensorrt" / f"{version}-{gpu}.timing"


@dataclass(frozen=True, slots=True)
class TimingCache:
    """The cache of some builds.

    Attributes:
        path: Its file; not read if the policy is cold.
    """

    policy: CachePolicy
    path: Path

    def enter(self, library: TensorRTLibrary, config: Any) -> None:
        """Load the timing cache into the configuration of a build.

        Raises:
            UserError: The file cannot be read, is too large, damaged, or of another TensorRT or GPU; or it is missing
                and frozen.
        """
        content = b"" if self.policy == "cold" else self._read()
        library.messages.clear()
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, False):
            if not content:
                raise BuildFailed(f"TensorRT makes no empty timing cache: {library.drain_messages()}")
            raise UserError(
                f"timing cache {self.path}: damaged, or made by another TensorRT or on another GPU "
                f"({library.drain_messages()}); delete it, or name another file"
            )

    def leave(self, config: Any) -> None:
        """Save the timings of a build to the shared cache, merged with concurrent writes, atomically.

        Raises:
            UserError: The file cannot be written.
        """
        if self.policy != "shared":
            return
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self._read()
            others = config.create_timing_cache(content) if content else None
            if others is not None:  # what is damaged by now is replaced
                cache.combine(others, False)  # False: of another TensorRT or GPU, it is refused
            _write_atomically(self.path, bytes(cache.serialize()))
        except OSError as error:
            raise UserError(f"timing cache {self.path}: cannot be written ({error.strerror or error})") from error

    def _read(self) -> bytes:
        try:
            if self.path.stat().st_size > MAX_CACHE_BYTES:
                raise UserError(f"timing cache {self.path}: more than 1 GiB; that is no timing cache")
            return self.path.read_bytes()
        except FileNotFoundError as error:
            if self.policy == "frozen":
                raise UserError(
                    f"timing cache {self.path}: no such file, and a frozen cache is never made; "
                    "run with timing_cache: shared once"
                ) from error
            return b""
        except OSError as error:
            raise UserError(f"timing cache {self.path}: cannot be read ({error.strerror or error})") from error


def _write_atomically(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as part:
        try:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise
