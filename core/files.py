"""How files of ours are kept safe: one writer at a time, checksums of what was written, and whole model weights.

- `locked_folder` and `locked_file` let one process write at a time and tell the next one who that is.
- `new_folder` makes a folder that is whole or not there.
- `add_files` puts files into a folder beside what is there and replaces none.
- `write_sums` records the checksums of a model or checkpoint folder, and `check_sums` refuses a damaged one.
- `weights_hash` names the weights of a folder, and `missing_weights` says which of them were never loaded.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, SoftFileLock, Timeout

from turngym.core.clean_keys import recorded_command
from turngym.core.errors import ModelError, TurngymError, first_few
from turngym.core.line_file import refuse_link
from turngym.core.manifest import Files, changed_files, describe_files, files_under, read_manifest, write_manifest
from turngym.core.redaction import brief, excerpt
from turngym.core.user_files import json_of

LOCK = ".turngym.lock"
"""The lock file of a folder; the lock of a file NAME is `.NAME.lock` beside it. It is deleted when the writer ends."""


class FolderInUseError(TurngymError):
    """Another process is writing to the folder or file."""


def locked_folder(folder: str | Path | None) -> AbstractContextManager[None]:
    """Makes the caller the only writer of `folder`, which is created if needed. None locks nothing.

    A killed process leaves its lock file behind, but the operating system drops the lock, so the next process gets it
    at once. A folder that was created here and is still empty at the end is removed again. Where the file system has
    no locks (some network disks), a warning says so, and a marker file that only one process can create is the lock.

    Raises:
        FolderInUseError: another process, or another call in this one, has the lock; the error names the holder.
        TurngymError: the lock file cannot be written.
    """
    return nullcontext() if folder is None else _locked(Path(folder) / LOCK, Path(folder))


def locked_file(path: str | Path | None) -> AbstractContextManager[None]:
    """Makes the caller the only writer of the file `path`; otherwise as `locked_folder`."""
    if path is None:
        return nullcontext()
    if not Path(path).name:
        raise TurngymError(f"{path} is a folder that is there already; choose another place")
    return _locked(Path(path).with_name(f".{Path(path).name}.lock"), Path(path))


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    # innermost first, which is the order in which they can be removed
    created = [folder for folder in path.parents if not folder.exists()]
    # not thread-local: a run may be closed by another thread than the one that opened it
    lock: FileLock | SoftFileLock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    owner = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_link(path)
            path.open("ab").close()
        except OSError as error:
            blocked = isinstance(error, FileExistsError | NotADirectoryError)
            why = "a file is where a folder must be" if blocked else error.strerror
            raise TurngymError(f"{target} cannot be written: {why} ({path}); choose another place") from error
        try:
            try:
                lock.acquire()  # ends: at once, with a time-out of 0
            except (OSError, NotImplementedError) as error:
                if isinstance(error, Timeout):
                    raise
                lock = marker_lock(path, error, timeout=0)
                lock.acquire()  # ends: at once
        except Timeout:
            raise FolderInUseError(
                f"{target} is in use by {_holder(path)}: wait until it has ended, or choose another place"
            ) from None
        owner = os.getpid()
        # the lock belongs to the open file, so the name may be written through another one
        path.write_text(json.dumps(_this_process()) + "\n", encoding="utf-8")
        yield
    finally:
        # a forked child, in which filelock has no lock, must not delete its parent's file
        if owner == os.getpid():
            # deleted while the lock is held: whoever waits with this file open sees that its name is gone
            path.unlink(missing_ok=True)
            lock.release()
        for folder in created:
            with suppress(OSError):  # not empty, because something was written in it
                folder.rmdir()


def marker_lock(path: Path, why: BaseException, *, timeout: float) -> SoftFileLock:
    """A lock for a file system that refuses locks: the marker `PATH.held`. It is taken over if its process is gone."""
    marker = path.with_name(f"{path.name}.held")
    warnings.warn(
        f"{path} cannot be locked here ({why}): {marker.name} marks it as in use, for processes of this kind alone; a "
        "killed process on another machine leaves it behind, then delete it",
        stacklevel=4,
    )
    return SoftFileLock(marker, timeout=timeout, thread_local=False)


def _this_process() -> dict[str, Any]:
    program = Path(sys.argv[0])
    # `python -m turngym` has turngym/__main__.py as its program
    name = program.parent.name if program.name == "__main__.py" else program.name
    command = recorded_command([name or "python", *sys.argv[1:]])
    start = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": start, "command": command}


def _holder(path: Path) -> str:
    """The process that wrote the lock file `path`, for an error message."""
    try:
        holder = json_of(path.read_text(encoding="utf-8"))
        short = excerpt(" ".join(str(holder["command"]).split()), 157)
        return f"process {holder['pid']} on {holder['host']} since {holder['start']} ({short})"
    except (OSError, ValueError, LookupError, TypeError):
        # it has the lock and is about to write its name
        return "another process"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder`, which must not exist, once all of it is written; gone after an error."""
    # the name begins with a dot, because nobody keeps files of their own under it: what a killed process left goes
    scratch = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def add_files(names: Iterable[str], source: Path, folder: Path, error: type[TurngymError]) -> None:
    """Moves the files `names` from `source` to the same places under `folder`, each whole; all else there stays.

    A file that is there with the same content stays, too. Raises `error`, and moves nothing, if one has other content.
    `source` is on the same disk.
    """
    paths = ((name, folder / name) for name in names)
    missing = [name for name, path in paths if not (path.is_file() and filecmp.cmp(path, source / name, shallow=False))]
    if changed := [name for name in missing if os.path.lexists(folder / name)]:
        others = f" (so have {len(changed) - 1:,} other files)" if len(changed) > 1 else ""
        raise error(
            f"{folder / changed[0]} has other content than the file that belongs there{others}; nothing was replaced: "
            "move it away, or choose another folder with --out"
        )
    for name in missing:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, folder / name)


# Checksums of the files of a model or checkpoint folder, in one file beside them.

SUMS_FILE = "turngym.sums"
"""Holds sizes and CRC-32s by file name. A folder without it, such as another program's model, is not checked."""
CHEAP = 1 << 32
"""Folders of up to this many bytes are checked whenever they are loaded: a second or two, less than reading them."""


class ChangedFileError(TurngymError):
    """A file is not as it was written."""


def inside(name: str) -> bool:
    """Whether `name`, a path that a stranger's file states, stays within the folder of that file."""
    return not os.path.isabs(name) and ".." not in Path(name).parts


def write_sums(folder: Path, *, without: Collection[str] = ()) -> None:
    """Writes `turngym.sums` for all files under `folder` except those under the names `without`."""
    write_manifest(
        folder / SUMS_FILE, {"files": describe_files(folder, files_under(folder, without=(SUMS_FILE, *without)))}
    )


def changed_sums(folder: Path, *, limit: float = float("inf")) -> list[str]:
    """Lists what is wrong with the files that `turngym.sums` names, missing ones too; empty without that file.

    Sizes are always compared, contents only while the files have at most `limit` bytes together.
    """
    return changed_files(folder, read_sums(folder), limit=limit)


def check_sums(folder: str | Path) -> None:
    """Raises ChangedFileError if a folder that is about to be loaded is not as it was written."""
    folder = Path(folder)
    if problems := changed_sums(folder, limit=CHEAP):
        raise ChangedFileError(
            f"{folder} is damaged: {'; '.join(problems)}. Take another copy; if you changed it on purpose, delete "
            f"{folder / SUMS_FILE}"
        )


class _Sums(msgspec.Struct):
    files: Files


def read_sums(folder: Path) -> Files:
    """Size and CRC-32 by file name; empty without `turngym.sums`. Raises ChangedFileError if that file is damaged."""
    path = folder / SUMS_FILE
    if not path.is_file():
        return {}

    def damaged(why: str) -> ChangedFileError:
        return ChangedFileError(f"{why}; delete it if the other files there are known to be whole")

    files = read_manifest(path, _Sums, damaged).files
    if outside := next((name for name in files if not inside(name)), None):
        raise damaged(f"{path} names {brief(outside, 80)}, which is outside of the folder")
    return files


WEIGHTS = (".safetensors", ".bin")
"""How the names of weight files end."""


def holds_weights(folder: Path) -> bool:
    """Whether a folder is a model's: it has weight files."""
    return any(path.suffix in WEIGHTS for path in folder.glob("*"))


def weights_hash(folder: str | Path) -> str:
    """Names the weights of a model folder: 16 hex digits over its configuration and weight files.

    The configuration of an adapter counts: it names the base. Raises ModelError for a folder without weights.
    """
    digest, files = hashlib.sha256(), sorted(Path(folder).glob("*"))
    weights = [path for path in files if path.suffix in WEIGHTS]
    if not weights:
        # the hash of nothing would be the same for every one of them
        raise ModelError(f"{folder} holds no weights; a model is a folder with *.safetensors or *.bin")
    for path in files:
        if path in weights or path.name in ("config.json", "adapter_config.json"):
            with path.open("rb") as file:
                # file_digest reads in pieces: weights may be larger than memory
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def missing_weights(loading: Mapping[str, Collection[Any]]) -> str:
    """Says which weights of a model its files lack or have in another shape, as a clause for an error; empty if all are
    as they should be.

    `loading` is what transformers returns with `output_loading_info` and `ignore_mismatched_sizes`. Transformers fills
    such weights with random numbers and only warns. Weights that are tied to others are not counted as missing.
    """
    if mismatched := sorted(loading["mismatched_keys"]):
        name, shape, wanted = mismatched[0]
        return f"its files have {name} as {list(shape)}, its config.json says {list(wanted)}"
    missing = sorted(loading["missing_keys"])
    return f"its files lack the weights {first_few(missing, 3)}; they would be random" if missing else ""
