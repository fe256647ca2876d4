"""What rendering a chat template may cost: a template comes with a model, and a model may come from anyone.

`render` sends a conversation to a process of its own, which renders every template that does not come along with
turngym, with limits on its memory and processor time. A loop of 10^10 steps, a power of a power or a text that doubles
60 times ends there, in the first conversation as in the thousandth: no template can know that it is only tried.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from turngym.core.child_process import ENDING_SECONDS, ChildProcess
from turngym.core.redaction import excerpt

CPU_SECONDS = 5
"""Processor time of one rendering."""
MEMORY = 1 << 30
"""Bytes that a rendering may add to its process."""
SECONDS = 60.0
"""Wall clock of one rendering, on a machine that may be busy; a process that needs longer is replaced once."""
START_SECONDS = 120.0
"""Wall clock of the start of the process."""
LONGEST_RENDERED = 1 << 26
"""Most characters of a rendered conversation."""
LONGEST_REASON = 500
"""Most characters of why a template refuses a conversation."""
PHRASE_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The template of our own small models (`agents/worlds/phrase_tokenizer.py`): a role token before each message and an
end token after it, two tokens of overhead, and append-only."""
TRUSTED: set[str] = {PHRASE_TEMPLATE}
"""Templates of our own, which are rendered in this process: the other one needs a second to start, and a tenth of a
millisecond for each rendering."""


class TemplateLimit(Exception):
    """A template went beyond a limit; the text is a clause for an error, and says what is allowed."""

    def __init__(self, what: str) -> None:
        most = f"{CPU_SECONDS} s of processor time, {MEMORY >> 20:,} MiB and {LONGEST_RENDERED:,} characters"
        super().__init__(f"{what}; one conversation may take {most}")


class TemplateRefusal(Exception):
    """A template refused a conversation; the text says why."""


_TEXT, _REFUSED, _LONG, _NO_JINJA = b"t", b"r", b"l", b"j"
"""First byte of an answer."""
_OUT_OF_MEMORY = 3
"""Exit status of the process after a rendering that took too much."""


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None,
    generate: bool,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as text, rendered in the other process; any number of threads may ask.

    Raises TemplateLimit for what costs too much, TemplateRefusal for what the template does not render, ImportError
    without jinja2.
    """
    arguments = {"tools": tools, "add_generation_prompt": generate, **variables}
    work = pickle.dumps((source, list(messages), arguments, CPU_SECONDS, MEMORY, LONGEST_RENDERED))
    with _process.lock:
        try:
            answer = _process.ask(work)
        except _Ended:
            # somebody may have killed or stopped it; a template's own doing comes again
            try:
                answer = _process.ask(work)
            except _Ended as ended:
                raise TemplateLimit(str(ended)) from None
    kind, content = answer[:1], answer[1:]
    if kind == _LONG:
        raise TemplateLimit("made too long a text")
    text = content.decode("utf-8", "surrogatepass")
    if kind == _REFUSED:
        raise TemplateRefusal(text)
    if kind == _NO_JINJA:
        raise ImportError(text)
    return text


class _Ended(Exception):
    """The process broke off, or did not answer in time."""


class _Process:
    """The process that renders, started when it is first needed; whoever asks holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._child: ChildProcess | None = None

    def ask(self, work: bytes) -> bytes:
        if self._child is None:
            self._child = _start()
        child = self._child
        try:
            child.pipe.send_bytes(work)
            if child.pipe.poll(SECONDS):
                # ends: it has begun, and `patience` limits the rest
                return child.pipe.recv_bytes(4 * LONGEST_RENDERED + 1)
            raise _Ended(f"did not render a conversation within {SECONDS:g} s")
        except BlockingIOError:
            self._end()
            raise _Ended(f"did not render a conversation within {SECONDS:g} s") from None
        except (EOFError, OSError):
            status = child.exit_status(ENDING_SECONDS)
            if status == -signal.SIGXCPU:
                raise TemplateLimit("took too much time") from None
            if status == _OUT_OF_MEMORY:
                raise TemplateLimit("took too much memory") from None
            raise _Ended(f"ended the process that renders it, with status {status}") from None
        except BaseException:
            # Ctrl-C: an answer that nobody waited for would be that of the next conversation
            self._end()
            raise
        finally:
            if child.exit_status(0.0) is not None:
                self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


_process = _Process()


def _forget() -> None:
    """A forked process has no right to its parent's pipe."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forget)


def _start() -> ChildProcess:
    child = ChildProcess(_serve, name="turngym-template", threads=1, patience=SECONDS)
    try:
        if child.pipe.poll(START_SECONDS):
            child.pipe.recv_bytes(1)  # ends: something is there
            return child
    except (EOFError, OSError):
        pass
    reason = child.death() if child.exit_status(0.0) is not None else f"is not ready after {START_SECONDS:g} s"
    child.end()
    raise TemplateLimit(f"cannot be rendered: its {reason}")


def _serve(pipe: Connection) -> None:
    """Runs in the process: renders what is sent until the pipe is closed."""
    import resource

    # what Python says when no memory is left even for an exception
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    _limit(resource.RLIMIT_CORE, 0)
    own_memory = None
    # where the system says and limits it
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        own_memory = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    pipe.send_bytes(b"")
    while True:
        try:
            work = pipe.recv_bytes()  # ends: with the parent, whose end of the pipe closes
        except (EOFError, OSError):
            return
        source, messages, arguments, seconds, memory, longest = pickle.loads(work)
        used = int(time.process_time())
        _limit(resource.RLIMIT_CPU, used + seconds + 1)
        if own_memory is not None:
            _limit(resource.RLIMIT_AS, own_memory + memory)
        try:
            pipe.send_bytes(_answer(PreTrainedTokenizerBase, source, messages, arguments, longest))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)


def _limit(kind: int, most: int) -> None:
    """Limits this process softly, so that the next rendering gets as much again; a limit of its user stays."""
    import resource

    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(
    tokenizers: Any, source: str, messages: list[dict[str, Any]], arguments: dict[str, Any], longest: int
) -> bytes:
    """The library's own rendering, of a tokenizer that is no more than its template."""
    tokenizer = SimpleNamespace(get_chat_template=lambda *_, **__: source, special_tokens_map={})
    try:
        text = tokenizers.apply_chat_template(tokenizer, messages, tokenize=False, **arguments)
    except MemoryError:
        raise
    except ImportError as error:
        return _NO_JINJA + str(error).encode()
    # templates raise anything, jinja2's own errors included
    except Exception as error:
        return _REFUSED + excerpt(error, LONGEST_REASON).encode("utf-8", "surrogatepass")
    return _LONG if len(text) > longest else _TEXT + text.encode("utf-8", "surrogatepass")
