"""The `turngym` command: finds the verb, runs it, and turns every way of ending into one line and an exit status.

Each verb is a module of this folder and is imported only when it is called, so that `turngym --help` needs no torch.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import errno
import importlib
import importlib.util
import io
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import turngym
from turngym.core.clean_keys import refuse_credentials
from turngym.core.errors import TurngymError, did_you_mean, is_disk_full
from turngym.core.redaction import brief, excerpt, redacted, redacted_traceback, redacted_tracebacks, without_keys
from turngym.core.signals import ending_at_once, on_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Verbs below a verb."""

    about: str
    verbs: Mapping[str, str]


def _below(prefix: str, *names: str) -> dict[str, str]:
    return {name: f"turngym.scripts.{prefix}{name}" for name in names}


GROUPS = {
    "serve": Group(
        about="Serve over HTTP what this machine has: environments, pages to play in, a policy that learns, retrieval.",
        verbs=_below("serve_", "mcp", "openenv", "play", "policy", "proxy", "retrieval", "webshop"),
    ),
    "bench": Group(
        about="Measure this machine: rollouts, a training step on a GPU.", verbs=_below("bench_", "gpu", "rollout")
    ),
    "study": Group(
        about="Methods compared over seeds, worlds and tasks, by one file: run, show, list; plan how large, coverage.",
        verbs=_below("study.", "run", "show", "list", "plan", "coverage", "regime"),
    ),
}
VERBS: dict[str, str | Group] = {
    **_below("", "quickstart", "train", "eval", "rollout", "play", "data", "panel", "trace", "report", "result"),
    **_below("", "index", "model", "plan", "pretrain", "endpoint"),
    **GROUPS,
}
"""Each module has `main(argv) -> exit status`; the first line of its docstring is the verb's help."""


def help_line(module: str | Group) -> str:
    """Returns the first line of a module's docstring without importing the module, which might import torch."""
    if isinstance(module, Group):
        return module.about
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "(not installed)"
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def usage(command: str, verbs: Mapping[str, str | Group]) -> str:
    rows = [f"  {verb:<12} {help_line(module)}" for verb, module in verbs.items()]
    return "\n".join([f"usage: {command} VERB [options]", "", *rows, "", f"`{command} VERB --help` explains a verb."])


def dispatch(command: str, verbs: Mapping[str, str | Group], argv: Sequence[str]) -> int:
    """Runs the verb that `argv` names. Errors of turngym become one line on standard error and exit status 2."""
    if argv and argv[0] in ("-V", "--version"):
        print(f"turngym {turngym.__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(command, verbs))
        return 0 if argv else 2
    if argv[0] not in verbs:
        hint = did_you_mean(argv[0], verbs)
        advice = f"{hint} `{command} --help` lists the verbs." if hint else f"\n\n{usage(command, verbs)}"
        print(f"{command}: unknown verb {brief(argv[0], 80)}.{advice}", file=sys.stderr)
        return 2
    module = verbs[argv[0]]
    if isinstance(module, Group):
        return dispatch(f"{command} {argv[0]}", module.verbs, argv[1:])
    try:
        refuse_torchrun(f"{command} {argv[0]}")
        refuse_gone_folder()
        refuse_credentials_in(argv[1:])
        with ending_at_once(f"{command} {argv[0]}: stopped\n"):
            verb = importlib.import_module(module)
        return int(verb.main(list(argv[1:])))
    except TurngymError as error:
        print(f"{command} {argv[0]}: {_shortened(redacted(str(error)))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        with ending_at_once(""):  # Ctrl-C once more has nothing left to stop
            print(f"{command} {argv[0]}: stopped{resume_hint(f'{command} {argv[0]}', argv[1:])}", file=sys.stderr)
        return exit_status(error)
    except Exception as error:
        reason = system_failure(error)
        if reason is None:
            raise
        print(f"{command} {argv[0]}: {_shortened(reason)}", file=sys.stderr)
        return 2


_ENDLESS = re.compile(r"\S{300,}")


def _shortened(text: str) -> str:
    """An error in which a word without end, such as a file's content in place of its name, is a line still."""
    return _ENDLESS.sub(lambda word: excerpt(word[0], 200), text)


def refuse_gone_folder() -> None:
    """Raises TurngymError in a working folder that is gone: torch's libraries would end the process there."""
    try:
        os.getcwd()
    except OSError as error:
        raise TurngymError(f"the working folder: {error.strerror}; go to one that is there") from None


def refuse_credentials_in(argv: Sequence[str]) -> None:
    """Raises TurngymError for an option with an address that holds a user or a password."""
    option = ""
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else (option, "", word)
        refuse_credentials(option or "an argument", value if equals or not word.startswith("--") else "")


# Only training divides its work among the processes that torchrun starts.
DIVIDED = "turngym train"
RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
"""Environment variables of torchrun."""
LEAD = 5.0
"""Seconds that process 0 gets to say why none goes on, before torchrun ends it because another one has ended."""


def refuse_torchrun(command: str) -> None:
    """Ends every process of torchrun for a verb that would play everything in each of them; process 0 says why."""
    size = os.environ.get(WORLD_SIZE, "")
    if command == DIVIDED or not re.fullmatch("[0-9]{1,9}", size) or int(size) < 2:
        return
    if os.environ.get(RANK, "0") != "0":
        # quietly: torchrun ends it as soon as process 0 has ended
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LEAD)
        raise SystemExit(2)
    raise TurngymError(
        f"torchrun has started {size} processes, but only `{DIVIDED}` divides its work among them; run `{command}` "
        f"without torchrun (and without {WORLD_SIZE} in the environment)"
    )


def open_closed_streams() -> None:
    """Puts the null device in place of standard streams that are closed (`>&-`, daemons, pythonw).

    Else the next file that is opened gets their number, and what a child process prints stands in it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, "r" if name == "stdin" else "w"))  # noqa: SIM115


def write_any_path() -> None:
    """Lets standard output write any path, bytes that are not UTF-8 included, and characters that its encoding
    lacks."""

    def bytes_of(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        letters = error.object[error.start : error.end]
        if all("\udc80" <= letter <= "\udcff" for letter in letters):
            return letters.encode("ascii", "surrogateescape"), error.end
        return codecs.backslashreplace_errors(error)

    codecs.register_error("turngym", bytes_of)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="turngym")


_CODES = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# colors, and what a line of progress needs: up, to the line's beginning, erase it, hide and show the cursor
_OURS = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[AGK]|\?25[hl])")


class Terminal:
    """Standard output or error, to which no control character of a stranger's text comes: a title, a cleared screen.

    Endpoints, traces, servers and file names are printed by every verb. Only a terminal gets our own colors. No key
    that this process knows is printed either, whoever has said it.

    What goes wrong with one that is not `needed` is passed by: work of days must not end because the window in which it
    began is gone, or the disk of its log is full.
    """

    def __init__(self, stream: Any, *, needed: bool = True) -> None:
        self._stream, self._needed = stream, needed

    def write(self, text: str) -> int:
        text = without_keys(text)
        if _CODES.search(text) is not None:
            text = self._plain(text)
        self._tried(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, call: Callable[..., object], *given: str) -> None:
        try:
            call(*given)
        except OSError:
            if self._needed:
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def _plain(self, text: str) -> str:
        shown, end = "", 0
        for match in _OURS.finditer(text) if self._stream.isatty() else ():
            shown += _CODES.sub(_escape, text[end : match.start()]) + match[0]
            end = match.end()
        return shown + _CODES.sub(_escape, text[end:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that make libraries write codes into pipes and files, too."""


@contextlib.contextmanager
def plain_terminal() -> Iterator[None]:
    """Makes standard output and error `Terminal`s inside this context, and turns colors off where there is no
    terminal."""
    before = sys.stdout, sys.stderr
    forcing = {name: os.environ.pop(name) for name in FORCING if name in os.environ}
    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr, needed=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        os.environ.update(forcing)


def main(argv: Sequence[str] | None = None) -> int:
    on_signals(_interrupt)
    open_closed_streams()
    write_any_path()
    with plain_terminal(), redacted_tracebacks(), warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, show=warnings.showwarning)
        try:
            try:
                return dispatch("turngym", VERBS, sys.argv[1:] if argv is None else argv)
            finally:
                # short output waits in a buffer until here; --help leaves by SystemExit
                sys.stdout.flush()
        except BrokenPipeError:  # whoever read our output has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        # the last lines cannot be written, or a bug of ours: all else that is meant to be said is one line above
        except Exception as error:
            reason = system_failure(error)
            sys.stderr.write(redacted_traceback(error) if reason is None else f"turngym: {reason}\n")
            return 1 if reason is None else 2


def _show_warning(message: Any, category: Any, filename: str, lineno: int, *more: Any, show: Any, **named: Any) -> None:
    """Our own warnings in one line, without the source line that Python quotes; others as Python shows them."""
    if Path(filename).resolve().is_relative_to(Path(__file__).resolve().parents[1]):
        print(f"turngym: {redacted(str(message))}", file=sys.stderr)
    else:
        show(message, category, filename, lineno, *more, **named)


# How a command ends when it is stopped, or when the system fails it: with one line, and what it left on disk.


def _interrupt(number: int) -> NoReturn:
    """Ends as Ctrl-C does: what cleans up after that cleans up after any signal."""
    raise KeyboardInterrupt(number)


def exit_status(error: KeyboardInterrupt) -> int:
    """The exit status that shells use: 128 plus the number of the signal, which the error holds (Python's: none)."""
    return 128 + next((argument for argument in error.args if isinstance(argument, int)), signal.SIGINT)


def resume_hint(command: str, argv: Sequence[str]) -> str:
    """Says what a stopped `command` left on disk and how to continue; empty if that is not known."""
    from turngym.core.user_files import user_path
    from turngym.scripts.options import pop_option

    try:
        named = pop_option(argv, "--out")[1]
        out = None if named is None else user_path(named)
    except TurngymError:
        return ""  # it was stopped before anybody read that
    verb = command.removeprefix("turngym ")
    if verb == "train" and out is not None:
        steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        return f"; continue from {steps[-1]} with --resume" if steps else "; there is no checkpoint to continue from"
    if verb in ("eval", "rollout"):
        if out is None:
            return "; without --out nothing is kept"
        trace = out / "trace.jsonl" if verb == "eval" else out
        advice = "the same command plays the others" if verb == "eval" else "--append plays the others"
        return f"; episodes that had ended are in {trace}: {advice}" if trace.is_file() else "; no episode had ended"
    if verb == "index" and out is not None:
        from turngym.retrieval.core import build_folder, real_folder

        building = build_folder(real_folder(out))
        return f"; the same command goes on from {building}" if building.is_dir() else ""
    return ""


def system_failure(error: Exception) -> str | None:
    """Explains a failure of the operating system or a missing package in one line; None for any other exception."""
    if is_disk_full(error):
        where = getattr(error, "filename", None)
        return f"no room left on the disk{'' if where is None else f' for {where}'}: make room and run it again"
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return f"this needs {error.name}: pip install 'turngym[{extra}]'"
    if isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return (
            "no further thread or process can be had: `ulimit -u` says how many there may be; ask for fewer --workers"
        )
    # of Path.resolve
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        return str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in PLACES):
        where = error.filename if error.filename is not None else "the working folder, or a file"
        return f"{where}: {error.strerror}"
    return None


PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.ETXTBSY, errno.ESTALE),
    errno.EBADF,
)
"""Error numbers that mean that a file or folder cannot be used as asked."""
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "jinja2", "tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("flask", "httpx", "starlette", "uvicorn", "a2wsgi"), "serve"),
    "faiss": "dense",
    "pyarrow": "parquet",
    "peft": "lora",
    "ray": "ray",
    "textworld": "alfworld",
}
"""Optional package -> the extra of turngym that installs it."""
