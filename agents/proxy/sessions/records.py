"""Records of turns and session ends as sealed JSON lines, flushed one by one; open sessions are rebuilt from them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.proxy.conversation.messages import ChatMessage, Tools
from turngym.agents.proxy.errors import ProxyError
from turngym.envs.common.folder_lock import FolderInUseError, locked_file
from turngym.envs.common.sealed_line import check_seal, is_sealed, seal

SCHEMA = 1
FILE = "records.jsonl"
VersionSpans = tuple[tuple[int, int, int], ...]
"""(policy version, start, end) of each stretch of an answer's ids."""
TORN = b" (torn)\n"
"""Ends a line in whose middle a process was killed: its turn was never answered, so nothing is missing without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordProblem:
    """A line that is damaged; `line` counts from 1. What it said is not known."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One finished turn."""

    session: str
    """The session's key; empty for side turns without a session. Never what the client called it."""
    main: bool
    kept: int
    """How many messages of the session, from its start, the request repeated."""
    messages: tuple[ChatMessage, ...]
    """Those after them."""
    tools: Tools | None
    """None: those of the turn before in the session."""
    opens: bool
    prompt_ids: NDArray[np.int32]
    """Ids that the turn adds before the answer; the whole prompt where a segment opens."""
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reply: ChatMessage
    text: str
    """The answer as sampled."""
    finish: str
    version: int
    temperature: float
    owner: str | None = None
    """Whose conversation it is (a hash, or "" for nobody) where the client names no session; None where it does."""
    version_spans: VersionSpans = ()
    """As in `Generation`."""
    at: float = 0.0
    """When it was written, as `Recorder` says; not part of `as_json`."""
    retry: bool = False
    """The client asked for the previous answer again, so that one is superseded."""

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "turn",
            "session": self.session,
            "main": self.main,
            "kept": self.kept,
            "messages": [message.as_json() for message in self.messages],
            "tools": None if self.tools is None else list(self.tools),
            "opens": self.opens,
            "prompt_ids": self.prompt_ids.tolist(),
            "ids": self.ids.tolist(),
            # by way of text: the shortest decimals of the float32, not the 17 digits of its float64
            "logprobs": [float(text) for text in self.logprobs.astype(str)],
            "reply": self.reply.as_json(),
            "text": self.text,
            "finish": self.finish,
            "version": self.version,
            "temperature": self.temperature,
            "retry": self.retry,
            **({} if self.owner is None else {"owner": self.owner}),
            **({"version_spans": [list(span) for span in self.version_spans]} if self.version_spans else {}),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TurnRecord:
        return cls(
            session=record["session"],
            main=record["main"],
            kept=record["kept"],
            messages=messages_from_json(record["messages"]),
            tools=None if record["tools"] is None else tuple(record["tools"]),
            opens=record["opens"],
            prompt_ids=np.array(record["prompt_ids"], np.int32),
            ids=np.array(record["ids"], np.int32),
            logprobs=np.array(record["logprobs"], np.float32),
            reply=ChatMessage.from_json(record["reply"]),
            text=record["text"],
            finish=record["finish"],
            version=record["version"],
            temperature=record["temperature"],
            retry=record["retry"],
            at=record.get("at", 0.0),
            owner=record.get("owner"),
            version_spans=tuple((version, start, end) for version, start, end in record.get("version_spans", ())),
        )


class Recorder:
    """Appends records to `folder/records.jsonl`; each is one write and one flush. Safe for several threads.

    Every record says `at` which time it was written, in seconds since 1970: for people, and for the age of
    turns.

    Raises ProxyError, which names the holder, where another process has the folder.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._now = now
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._lock, self._held = threading.Lock(), ExitStack()
        # before the end is looked at: another process may be in the middle of a line
        try:
            self._held.enter_context(locked_file(self.path))
        except FolderInUseError as error:
            raise ProxyError(str(error)) from None
        self._file = self.path.open("a+b")
        if rest := _last_line(self._file):
            # a torn line of a killed process stays one, instead of spoiling the next
            self._file.write(TORN if isinstance(_record(1, rest), RecordProblem) else b"\n")
            self._file.flush()

    def write(self, record: Mapping[str, Any]) -> float:
        """Append a record; when that was."""
        content = {"v": SCHEMA, **record, "at": round(self._now(), 3)}
        line = seal(json.dumps(content, ensure_ascii=True, separators=(",", ":"))).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()
        return float(content["at"])

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self._held.close()


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of `folder`, in order. Raises ProxyError for a newer schema."""
    return (item for item in iter_records(folder) if not isinstance(item, RecordProblem))


def iter_records(folder: Path) -> Iterator[dict[str, Any] | RecordProblem]:
    """Every record of `folder` in order, and each damaged line where it stands; what a kill tore off is skipped.

    Raises ProxyError for a newer schema.
    """
    path, sealed = folder / FILE, False
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            found = _record(number, line)
            if isinstance(found, RecordProblem):
                # older versions ended a torn line with a bare newline
                if line.endswith(TORN) or not line.endswith(b"\n") or not (sealed or line.endswith(b"}\n")):
                    continue
            elif found["v"] > SCHEMA:
                raise ProxyError(f"{path}, line {number}: records of version {found['v']}; this reads up to {SCHEMA}")
            sealed = sealed or is_sealed(line)
            yield found


def _record(number: int, line: bytes) -> dict[str, Any] | RecordProblem:
    try:
        check_seal(line)
        record = json.loads(line)
        if not isinstance(record["v"], int) or not isinstance(record["kind"], str):
            raise ValueError("its version or kind is not one")
    except KeyError as error:
        return RecordProblem(line=number, reason=f"the field {error} is missing")
    except (ValueError, TypeError) as error:
        return RecordProblem(line=number, reason=str(error))
    return record


def _last_line(file: IO[bytes]) -> bytes:
    """What stands behind the last newline."""
    size, block = file.seek(0, 2), 1 << 16
    while True:
        file.seek(max(size - block, 0))
        tail = file.read()
        if b"\n" in tail or block >= size:
            return tail.rpartition(b"\n")[2]
        block *= 4


def messages_from_json(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage.from_json(message) for message in messages)
