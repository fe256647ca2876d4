"""How a command ends when it is stopped or the system fails it: one line, which says what is kept only where it is."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from turngym.envs.common.full_disk import no_room


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever ends well on Ctrl-C ends well on it, too."""


def end_on_sigterm() -> None:
    """SIGTERM raises Terminated, whatever this process inherited; verbs that serve or train install their own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def status(error: KeyboardInterrupt) -> int:
    """As shells count it: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def what_is_kept(verb: str, argv: Sequence[str]) -> str:
    """What is on disk after `verb` was stopped, and how to go on with it; "" where that is not known."""
    out = _out(argv)
    if verb == "train" and out is not None:
        steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        return f"; continue from {steps[-1]} with --resume" if steps else "; there is no checkpoint to continue from"
    if verb in ("eval", "rollout"):
        if out is None:
            return "; without --out nothing is kept"
        trace = out / "trace.jsonl" if verb == "eval" else out
        more = "the same command plays the others" if verb == "eval" else "--append plays the others"
        return f"; episodes that had ended are in {trace}: {more}" if trace.is_file() else "; no episode had ended"
    return ""


def system_failure(error: Exception) -> str | None:
    """One line for a failure of the system that nothing below has explained; None for what is no such thing."""
    if no_room(error):
        where = getattr(error, "filename", None)
        return f"no room left on the disk{'' if where is None else f' for {where}'}: make room and run it again"
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return f"this needs {error.name}: pip install 'turngym[{extra}]'"
    if isinstance(error, OSError) and error.errno in PLACES:
        where = error.filename if error.filename is not None else "a file"
        return f"{where}: {error.strerror}"
    return None


PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.ETXTBSY, errno.ESTALE),
)
"""What says that a file or folder cannot be used as asked."""


EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "jinja2", "tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("flask", "waitress", "httpx"), "serve"),
    "faiss": "dense",
    "pyarrow": "parquet",
    "peft": "lora",
    "ray": "ray",
    "openai": "endpoint",
    "textworld": "alfworld",
}
"""Extra by optional package."""


def _out(argv: Sequence[str]) -> Path | None:
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--out":
            following = argv[place + 1 : place + 2]
            return Path(value) if equals else Path(following[0]) if following else None
    return None
