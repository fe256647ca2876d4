"""One writer at a time: a lock on a folder or a file, which ends with its process and says who holds it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import socket
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.trace import check_seal, seal

LOCK = ".turngym.lock"
"""In a folder that is written to; the lock of a file NAME is `.NAME.lock` beside it. Gone when the writer is."""
UNABLE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What flock says on file systems that have no locks."""
_held: set[int] = set()
"""Descriptors of the locks of this process."""


class FolderInUseError(TurngymError):
    """Another process writes there."""


@contextmanager
def locked_folder(folder: str | Path | None) -> Iterator[None]:
    """The only writer of `folder`, which is made if need be; None: nothing is locked.

    A killed process leaves its lock file, but not its lock: the next one gets it at once. Nothing but the lock file is
    written, and a folder that was made here and is still empty at the end goes with it.

    Raises FolderInUseError, which names the holder, where another process (or another call in this one) has it;
    TurngymError where the lock file cannot be written.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    with _locked(folder / LOCK, folder):
        yield


@contextmanager
def locked_file(path: str | Path | None) -> Iterator[None]:
    """The only writer of the file `path`, as `locked_folder`."""
    if path is None:
        yield
        return
    path = Path(path)
    with _locked(path.with_name(f".{path.name}.lock"), path):
        yield


@contextmanager
def _locked(lock: Path, what: Path) -> Iterator[None]:
    made = _make(lock.parent, what)
    number = -1
    try:
        number = _acquire(lock, what)
        yield
    finally:
        if number in _held:  # not in a forked child
            # while it is ours: whoever waits with this file open sees that its name is gone, and opens another
            lock.unlink(missing_ok=True)
            _held.discard(number)
            os.close(number)
        for folder in made:
            with suppress(OSError):  # something was written in it
                folder.rmdir()


def _make(folder: Path, what: Path) -> list[Path]:
    """Folders that did not exist, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        blocked = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is where a folder must be" if blocked else error.strerror
        raise TurngymError(f"{what} cannot be written: {why} ({folder}); choose another place") from error
    return missing


def _acquire(lock: Path, what: Path) -> int:
    """The descriptor of the locked file, with the holder's name in it."""
    while True:
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise TurngymError(f"{what} cannot be written: {error.strerror} ({lock}); choose another place") from error
        try:
            _flock(number, lock, what)
            # the holder before removes the file: what was locked then may have no name any more
            if _same_file(number, lock):
                os.ftruncate(number, 0)
                os.pwrite(number, _holder(), 0)
                _held.add(number)
                return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _flock(number: int, lock: Path, what: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUseError(
            f"{what} is in use by {_described(lock)}: wait until it has ended, or choose another place"
        ) from None
    except OSError as error:
        if error.errno not in UNABLE:
            raise


def _same_file(number: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), lock.stat())
    except FileNotFoundError:
        return False


def _holder() -> bytes:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m turngym
    words = [name or "python", *sys.argv[1:]]
    start = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"host": socket.gethostname(), "pid": os.getpid(), "start": start, "command": shlex.join(words)}
    return json.dumps(content).encode() + b"\n"


def _described(lock: Path) -> str:
    """Who wrote `lock`, for people."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        command = " ".join(str(holder["command"]).split())
        short = command if len(command) <= 160 else f"{command[:157]}..."
        return f"process {holder['pid']} on {holder['host']} since {holder['start']} ({short})"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"  # it is just about to write its name


def _let_go() -> None:
    for number in _held:
        with suppress(OSError):
            os.close(number)
    _held.clear()


# a forked child would hold the lock after its parent was killed
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

# Checksums of the files of a folder of ours (a model, a checkpoint), in a file beside them.

FILE = "turngym.sums"
"""Sizes and CRC-32s by file name; a folder without it (of another program, of an older version) is not compared."""
CHEAP = 1 << 32
"""Up to this many bytes a folder is compared whenever it is loaded: a second or two, less than reading it."""
_BLOCK = 1 << 24


class ChangedFileError(TurngymError):
    """A file is not as it was written."""


def write_sums(folder: Path, *, without: Collection[str] = ()) -> Path:
    """Write `turngym.sums` for all files under `folder`, except those under the names `without`."""
    names = [name for name in _files(folder) if name.partition("/")[0] not in without]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # crc32 lets other threads run
        facts = dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))
    path, scratch = folder / FILE, folder / f"{FILE}.writing"
    try:
        scratch.write_text(seal(json.dumps({"files": facts})) + "\n", encoding="ascii")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def changed_files(folder: Path, *, limit: float = float("inf")) -> list[str]:
    """What is wrong with the files that `turngym.sums` names; empty without it.

    Sizes are always compared, contents while they are no more than `limit` bytes together. Missing files are reported.
    """
    facts = read_sums(folder)
    contents = sum(size for size, _ in facts.values()) <= limit
    problems = []
    for name, (size, checksum) in sorted(facts.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (found := path.stat().st_size) != size:
            problems.append(f"{name} has {found} bytes, {size} were written")
        elif contents and _describe(path)[1] != checksum:
            problems.append(f"{name} was changed after it was written (its checksum differs)")
    return problems


def check_sums(folder: str | Path) -> None:
    """Raises ChangedFileError where a folder that is about to be loaded is not as it was written."""
    folder = Path(folder)
    if problems := changed_files(folder, limit=CHEAP):
        raise ChangedFileError(
            f"{folder} is damaged: {'; '.join(problems)}. Take another copy; if you changed it on purpose, delete "
            f"{folder / FILE}"
        )


def read_sums(folder: Path) -> Mapping[str, tuple[int, int]]:
    """(bytes, CRC-32) by file name; empty without `turngym.sums`. Raises ChangedFileError where that is damaged."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        line = path.read_bytes()
        check_seal(line)
        found: Any = json.loads(line)["files"]
        return {name: (int(size), int(checksum)) for name, (size, checksum) in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ChangedFileError(
            f"{path} is damaged ({error}); delete it if the other files there are known to be whole"
        ) from error


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != FILE)


def _describe(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum


# The weights in a folder: a short name for them, and whether all are there.


def weights_hash(folder: str | Path) -> str:
    """16 hex digits over the configuration and weight files of a model folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name == "config.json":
            with path.open("rb") as file:
                # file_digest reads in pieces: weights may be larger than memory
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def lacking(loading: Mapping[str, Collection[str]]) -> str:
    """What to say of weights that a model has and its files have not; empty where they hold all.

    `loading`: what transformers tells of a load (`output_loading_info`). It fills such weights with random numbers and
    says so in a warning. Weights that are tied to others are not among them.
    """
    missing = sorted(loading["missing_keys"])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"its files lack the weights {', '.join(missing[:3])}{more}" if missing else ""
