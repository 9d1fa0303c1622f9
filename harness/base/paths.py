"""Paths in files of the user (`assets:PATH` is below the folder that QDQ_ASSETS names), and paths of this machine.

Results are published, so error messages and tracebacks in them name no folder of this machine (`hide_paths`).
"""

from __future__ import annotations

import functools
import getpass
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.base.errors import UserError

USER_KEY_BYTES = 32
#: Environment variable that `--with-host` sets: results keep paths and names of this machine.
HOST_VARIABLE = "QDQ_WITH_HOST"
#: Environment variable that `--trust-plugins` sets: `package.module:Class` may be imported, also in worker processes.
TRUST_VARIABLE = "QDQ_TRUST_PLUGINS"
#: Environment variable that `--wait` sets: limit in seconds of a wait for a lock of `harness.workers.locks`.
WAIT_VARIABLE = "QDQ_WAIT"


class RelativePathMissing(UserError):
    """A relative path that does not exist."""


def check_path(path: Path) -> None:
    """Check that a path can be used; opening a pipe or a device may wait forever."""
    try:
        mode = path.resolve().stat().st_mode  # after `..` is resolved
    except FileNotFoundError:
        return
    except (OSError, RuntimeError, ValueError) as error:  # NUL, lone surrogates, loops of links, long names
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{path}: this is no file, but a pipe or a device")


def resolve_path(text: str, base_dir: Path | None = None) -> Path:
    """Return the absolute path of an existing file or folder.

    Args:
        text: A path, or `assets:PATH`.
        base_dir: Folder that relative paths start from; None: the working directory.

    Raises:
        RelativePathMissing: A relative path does not exist.
    """
    if text.startswith("assets:"):
        root_text = os.environ.get("QDQ_ASSETS", "")
        if not root_text:
            raise UserError(f"{text}: set the environment variable QDQ_ASSETS to the folder with models and images")
        root = Path(root_text).resolve()
        path = root / text.removeprefix("assets:")
        check_path(path)
        if not path.resolve().is_relative_to(root):
            raise UserError(f"{text}: leads outside of the folder that QDQ_ASSETS names")
    else:
        path = (base_dir or Path.cwd()) / _expand_user(text)
    check_path(path)
    path = path.resolve()
    if not path.exists():
        place = "" if path == Path(text) else f" ({path})"
        relative = not (text.startswith("assets:") or _expand_user(text).is_absolute())
        raise (RelativePathMissing if relative else UserError)(f"{text}: no such file or folder{place}")
    return path


def _expand_user(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` at the end; an error leaves `path` unchanged."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Return the folder for files that can be regenerated (calibration ranges, drawn images); it is created."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(root) if root else Path.home() / ".cache") / "qdq-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def user_key() -> bytes:
    """Return a secret of this user, stored in the cache folder; a new one at each call if it cannot be stored."""
    fresh = os.urandom(USER_KEY_BYTES)
    try:
        path = cache_dir() / "key"
        with suppress(FileExistsError), open(path, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
            file.write(fresh)
        stored = path.read_bytes()
    except OSError:
        return fresh
    return stored if len(stored) == USER_KEY_BYTES else fresh  # another process may be writing it


def plugins_trusted() -> bool:
    """Return whether `package.module:Class` may be imported."""
    return os.environ.get(TRUST_VARIABLE) == "1"


def require_trust(danger: str) -> None:
    """Raise `UserError` with the option that allows it, unless plug-ins are trusted.

    Args:
        danger: Key and value of a file, and what they would do.
    """
    if not plugins_trusted():
        raise UserError(f"{danger}; if you trust it, give --trust-plugins or set {TRUST_VARIABLE}=1")


def trust_plugins() -> None:
    """Allow `package.module:Class` in this process and the worker processes that it starts."""
    os.environ[TRUST_VARIABLE] = "1"


def keeps_host() -> bool:
    """Return whether results keep paths and names of this machine."""
    return os.environ.get(HOST_VARIABLE) == "1"


def describe_process(with_host: bool) -> str:
    """Return text for a lock file: "PID, since TIME", or "PID of USER on HOST, since TIME" if `with_host`."""
    owner = ""
    if with_host:
        with suppress(KeyError, OSError):  # users of containers may have no name
            owner = f" of {getpass.getuser()} on {socket.gethostname()}"
    return f"{os.getpid()}{owner}, since {time.strftime('%F %T %Z')}"


def hide_paths(text: str) -> str:
    """Replace folders and the name of this machine in a text by marks such as "<tmp>", unless `keeps_host`."""
    if not keeps_host():
        for path, mark in _private_texts(str(Path.cwd())):
            text = text.replace(path, mark)
    return text


@functools.cache
def _private_texts(working_dir: str) -> tuple[tuple[str, str], ...]:
    """Return private texts and their marks, the longest first, because one folder may contain another."""
    marks = {
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        str(Path(__file__).resolve().parents[2]): "<qdq-bench>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
        working_dir: ".",
    }
    host = socket.gethostname()
    if len(host) > 3:  # shorter names are parts of words
        marks[host] = "<host>"
    return tuple((path, marks[path]) for path in sorted(marks, key=len, reverse=True) if path != "/")
