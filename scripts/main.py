"""The `turngym` command: one verb per module of this folder, imported only when it is called."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import turngym
from turngym.envs.core.errors import TurngymError
from turngym.scripts.options import end_on_sigterm, status, system_failure, what_is_kept

VERBS = {
    "quickstart": "turngym.scripts.quickstart",
    "train": "turngym.scripts.train",
    "eval": "turngym.scripts.eval",
    "rollout": "turngym.scripts.rollout",
    "play": "turngym.scripts.play",
    "panel": "turngym.scripts.panel",
    "trace": "turngym.scripts.trace",
    "report": "turngym.scripts.report",
    "index": "turngym.scripts.index",
    "model": "turngym.scripts.model",
    "plan": "turngym.scripts.plan",
    "pretrain": "turngym.scripts.pretrain",
    "serve": "turngym.scripts.serve",
    "bench": "turngym.scripts.bench",
    "study": "turngym.scripts.study.main",
}
"""Each module has `main(argv) -> exit status`; the first line of its docstring is the verb's help."""


def help_line(module: str) -> str:
    """First line of the module's docstring, read without importing the module (nor torch with it)."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "(not installed)"
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def usage(command: str, verbs: dict[str, str]) -> str:
    rows = [f"  {verb:<12} {help_line(module)}" for verb, module in verbs.items()]
    return "\n".join([f"usage: {command} VERB [options]", "", *rows, "", f"`{command} VERB --help` explains a verb."])


def dispatch(command: str, verbs: dict[str, str], argv: Sequence[str]) -> int:
    """Run the verb that `argv` names; errors of our own become one line on standard error and status 2."""
    if argv and argv[0] in ("-V", "--version"):
        print(f"turngym {turngym.__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(command, verbs))
        return 0 if argv else 2
    if argv[0] not in verbs:
        print(f"{command}: unknown verb {argv[0]!r}\n\n{usage(command, verbs)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(verbs[argv[0]]).main(list(argv[1:])))
    except TurngymError as error:
        print(f"{command} {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"{command} {argv[0]}: stopped{what_is_kept(argv[0], argv[1:])}", file=sys.stderr)
        return status(error)
    except Exception as error:
        said = system_failure(error)
        if said is None:
            raise
        print(f"{command} {argv[0]}: {said}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    end_on_sigterm()
    with warnings.catch_warnings():
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


def _show_warning(message: Any, category: Any, filename: str, lineno: int, *more: Any, show: Any, **named: Any) -> None:
    """Our own warnings in one line, without the source line that Python quotes; others as Python shows them."""
    if Path(filename).resolve().is_relative_to(Path(__file__).resolve().parents[1]):
        print(f"turngym: {message}", file=sys.stderr)
    else:
        show(message, category, filename, lineno, *more, **named)


if __name__ == "__main__":
    sys.exit(main())
