"""What rendering a chat template may cost: a template comes with a model, and a model may come from anyone.

- `rehearse` renders short conversations in a process of its own, with limits on its processor time and memory, before a
  template is used. A loop of 10^10 steps or a text that doubles 60 times ends there.
- `time_limit` ends a rendering that takes too long later, for example in long conversations alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from turngym.retrieval.child_process import GRACE, ChildProcess

CPU_SECONDS = 10
MEMORY = 1 << 30
"""Bytes of the rehearsal's whole process, Python itself included."""
SECONDS = 60.0
"""Wall clock of one rendering, and twice that of a rehearsal, on a machine that may be busy."""
LONGEST = 1 << 26
"""Most characters of a rendered conversation."""
TRUSTED: set[str] = set()
"""Templates of our own, which need no rehearsal."""


class TemplateLimit(Exception):
    """A template went beyond a limit; the text is a clause for an error."""


_OUT_OF_MEMORY = 3
"""Exit status of a rehearsal."""


def _rehearsal(pipe: Connection, source: str, seconds: int, memory: int, longest: int) -> None:
    """Runs in the child. Sends b"long" for a text that is too long, else b"".

    Only costs are looked at here: whether the template can be used is found out where it is used.
    """
    # what Python says when no memory is left even for an exception
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        pipe.send_bytes(b"")
        return

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda value, **more: json.dumps(value, indent=more.get("indent"))
    env.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    text = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": text}}
    said = [{"role": role, "content": "some text"} for _ in range(8) for role in ("user", "assistant")]
    answer = b""
    try:
        template = env.from_string(source)
        for messages in (said, [{"role": "system", "content": "s"}, *said, said[0]]):
            for tools in (None, [tool]):
                variables = {"messages": messages, "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
                try:
                    rendered = template.render(variables, add_generation_prompt=True)
                except MemoryError:
                    raise
                except Exception:
                    continue
                if len(rendered) > longest:
                    answer = b"long"
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except Exception:
        pass
    pipe.send_bytes(answer)


def rehearse(source: str) -> None:
    """Raises TemplateLimit if short conversations cost more than they may. Once per template and process."""
    if source not in TRUSTED:
        _rehearsed(source, CPU_SECONDS, MEMORY)


@lru_cache(maxsize=256)
def _rehearsed(source: str, seconds: int, memory: int) -> None:
    child = ChildProcess(_rehearsal, source, seconds, memory, LONGEST, name="turngym-template", threads=1)
    try:
        if not child.pipe.poll(2 * SECONDS):
            raise TemplateLimit(f"takes more than {2 * SECONDS:g} s for a short conversation")
        if child.pipe.recv_bytes():
            raise TemplateLimit(f"makes more than {LONGEST:,} characters of a short conversation")
    except (EOFError, OSError):
        # out of memory may also be a crash inside an allocation that cannot be caught
        if child.exit_status(GRACE) in (-signal.SIGXCPU, -signal.SIGKILL):
            raise TemplateLimit(f"takes more than {seconds} s of processor time for a short conversation") from None
        raise TemplateLimit(f"takes more than {memory >> 20} MiB for a short conversation") from None
    finally:
        child.end()


_lock = threading.Lock()
_deadlines: dict[int, float] = {}
"""When the rendering of a thread must have ended; `_lock` guards it."""
_watching = False


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises TemplateLimit in this thread if what is inside takes longer than `SECONDS`; for pure Python code."""
    global _watching
    thread = threading.get_ident()
    with _lock:
        _deadlines[thread] = time.monotonic() + SECONDS
        if not _watching:
            _watching = True
            threading.Thread(target=_watch, name="turngym-template-limit", daemon=True).start()
    try:
        yield
    finally:
        with _lock:
            _deadlines.pop(thread, None)


def _watch() -> None:
    """Ends once nothing has been rendered for a while, so that idle processes have no such thread."""
    global _watching
    idle = 0
    while True:
        time.sleep(min(1.0, SECONDS / 4))
        with _lock:
            idle = 0 if _deadlines else idle + 1
            if idle > 30:
                _watching = False
                return
            for thread, deadline in list(_deadlines.items()):
                if time.monotonic() > deadline:
                    del _deadlines[thread]
                    # the only way to stop Python code in another thread
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TemplateLimit))
