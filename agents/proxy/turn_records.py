"""Chat messages and the records of turns: what the proxy reads, writes and reads again after a restart.

1. `ChatMessage`, `ToolCall`: the OpenAI form, the chat template's form, and equality of messages.
2. `TurnRecord`, `TurnRecorder`, `iter_records`: records as JSON lines with a checksum, each flushed when it is written.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from turngym.agents.proxy.api_errors import ProxyError
from turngym.core.files import FolderInUseError, locked_file
from turngym.core.line_file import LineFile
from turngym.core.protocols import Judgment
from turngym.core.strict_json import JsonError, strict_json
from turngym.core.trace import TraceProblem, add_checksum, array_of, check_checksum, has_checksum, plain_value
from turngym.core.user_files import json_of
from turngym.envs.dialects import HERMES
from turngym.envs.tool_calls import EVERY_STYLE, CallDialect, TaggedCalls, read_calls

Tools = tuple[Mapping[str, Any], ...]
"""Functions in the OpenAI form."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One function call; `arguments` is JSON text, as OpenAI clients have it."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @classmethod
    def from_json(cls, call: Mapping[str, Any]) -> ToolCall:
        """Reads what `as_json` wrote."""
        return cls(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])

    @property
    def values(self) -> Any:
        """The arguments as data; text that is not JSON stays text."""
        return _value(self.arguments)

    def as_text(self) -> str:
        """The call as Qwen2.5's, Qwen3's and Hermes's templates write it."""
        call = {"name": self.name, "arguments": self.values}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message with its content as plain text."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    end: str = ""
    """A stop text of its request that an earlier answer ends with, as its client sends it back."""

    def as_json(self) -> dict[str, Any]:
        """The OpenAI form without empty fields, and `end`."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.as_json() for call in self.tool_calls]}
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.end:
            message["end"] = self.end
        return message

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ChatMessage:
        """Reads what `as_json` wrote."""
        return cls(
            role=message["role"],
            content=message["content"] or "",
            tool_calls=tuple(map(ToolCall.from_json, message.get("tool_calls", ()))),
            tool_call_id=message.get("tool_call_id", ""),
            end=message.get("end", ""),
        )

    @property
    def text(self) -> str:
        """Content and calls as one text, calls in the Hermes form."""
        return "\n".join(part for part in (self.content, *(call.as_text() for call in self.tool_calls)) if part)

    @property
    def characters(self) -> int:
        """Characters of content and calls, without those that a template puts around them."""
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for messages that say the same.

        Clients trim what they were sent, write JSON anew, and put back the stop text at which an answer was cut.
        """
        calls = tuple((call.name, json.dumps(_whole(call.values), sort_keys=True)) for call in self.tool_calls)
        return self.role, self.content.strip().removesuffix(self.end).strip(), calls

    @property
    def spoken(self) -> tuple[Any, ...]:
        """`identity` without the thoughts of an answer, as clients have it who show them apart or not at all."""
        role, text, calls = self.identity
        if role == "assistant":
            for style in EVERY_STYLE:
                text = style.split(text, bool)[1]
        return role, text.strip(), calls

    def repeats(self, answer: ChatMessage) -> bool:
        """Whether this message of a later request is `answer`: as it was, or with all of its thoughts left out."""
        return self.identity in (answer.identity, answer.spoken)


def common_prefix(left: Sequence[ChatMessage], right: Sequence[ChatMessage]) -> int:
    """Number of leading messages that two conversations share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a is not b and a.identity != b.identity), min(len(left), len(right)))


def as_observation(messages: Sequence[ChatMessage]) -> str:
    """Messages as one text to read: a single one as it stands, several with their roles."""
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(f"[{message.role}]\n{message.text}" for message in messages)


def _value(arguments: str) -> Any:
    """Arguments as data; text that is not JSON stays text."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _whole(value: Any) -> Any:
    """JSON with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [*map(_whole, value)]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


# Tool calls, and tools for chat templates that have none.

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ID = re.compile(r"[\w.:/-]{1,64}")
"""A call's id as models write one."""


def tool_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text of a system message about `tools`, for chat templates that do not show them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n"
        f'To call one, write {OPEN}\n{{"name": the function, "arguments": an object}}\n{CLOSE}'
    )


def check_arguments(arguments: str) -> None:
    """Raises JsonError for JSON in a text that the body of a request could not hold: NaN, half a surrogate pair, a deep
    nest. Text that is no JSON stays text, as models write it."""
    if arguments.lstrip()[:1] not in ("{", "[", '"'):
        return
    try:
        strict_json(arguments.encode("utf-8", "surrogatepass"))
    except JsonError:
        try:
            json.loads(arguments)
        except ValueError:
            return
        except RecursionError:
            pass
        raise


def is_tagged(dialect: CallDialect) -> bool:
    """Whether every call of this dialect stands between the two tags."""
    if isinstance(dialect, TaggedCalls):
        return OPEN in dialect.starts and dialect.ends[-1] == CLOSE
    return dialect is HERMES


def tool_calls(text: str, salt: str, first: int, dialect: CallDialect = HERMES, tools: Tools = ()) -> list[ToolCall]:
    """The calls that `text` is, from beginning to end; empty where it is none.

    Args:
        salt: makes ids where the model wrote none; the same salt gives the same ids.
        tools: the request's tools. In dialects without quotes they say which values are text.
    """
    parsed = read_calls(dialect, text) or []
    if not all(isinstance(call.name, str) and call.name for call in parsed):
        return []
    ids = [call.id for call in parsed]
    calls = []
    for number, call in enumerate(parsed, first):
        arguments: Any = {} if call.arguments is None else call.arguments
        if isinstance(dialect, TaggedCalls):
            arguments = _typed(arguments, next((tool for tool in tools if tool["function"]["name"] == call.name), {}))
        try:
            # Python's bytes and sets are no JSON
            arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            check_arguments(arguments_text)
            # half of a surrogate pair is no name
            call.name.encode()
        except (TypeError, ValueError, RecursionError, JsonError):
            return []
        # Hermes's calls are text for templates, which read those of others
        if dialect is not HERMES and not isinstance(_value(arguments_text), dict):
            return []
        id = call.id if call.id and ID.fullmatch(call.id) and ids.count(call.id) == 1 else ""
        id = id or f"call_{hashlib.sha256(f'{salt}/{number}'.encode()).hexdigest()[:24]}"
        calls.append(ToolCall(id=id, name=call.name, arguments=arguments_text))
    return calls


def _typed(arguments: Mapping[str, str], tool: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, where those that `tool` declares to be of other types than text become JSON values if they are."""
    schema = tool.get("function", {}).get("parameters")
    declared = schema.get("properties") if isinstance(schema, Mapping) else None
    typed: dict[str, Any] = dict(arguments)
    for name, text in arguments.items():
        kinds = _kinds(declared.get(name)) if isinstance(declared, Mapping) else set()
        if not kinds or "string" in kinds:
            continue
        # templates write Python's words
        words = {word: literal for word, (literal, kind) in WORDS.items() if kind in kinds}
        text = words.get(text.strip().lower(), text)
        with suppress(JsonError, UnicodeEncodeError):
            typed[name] = strict_json(text.encode())
    return typed


WORDS = {"true": ("true", "boolean"), "false": ("false", "boolean"), "none": ("null", "null"), "null": ("null", "null")}
"""Words of Python and JSON, in small letters -> (the JSON value, its type)."""


def _kinds(schema: Any) -> set[str]:
    """Types that a JSON schema allows, those of its alternatives included; none where it does not say all of them."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, (str, list)):
        return {kind} if isinstance(kind, str) else {option for option in kind if isinstance(option, str)}
    # optional arguments, as Pydantic writes them; one level, for schemas may be as deep as their client likes
    options = schema.get("anyOf", schema.get("oneOf"))
    options = options if isinstance(options, list) else []
    kinds = [option.get("type") if isinstance(option, Mapping) else None for option in options]
    return {kind for kind in kinds if isinstance(kind, str)} if all(isinstance(kind, str) for kind in kinds) else set()


# Records of turns and session ends, as JSON lines with a checksum. After a restart open sessions are rebuilt from them.

SCHEMA = 1
RECORDS_FILE = "records.jsonl"
VersionSpans = tuple[tuple[int, int, int], ...]
"""(policy version, start, end) of each stretch of an answer's ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One finished turn."""

    session: str
    """The session's key, never the client's own id; empty for side turns without a session."""
    main: bool
    kept: int
    """How many messages of the session, from its start, the request repeated."""
    messages: tuple[ChatMessage, ...]
    """The request's messages after those."""
    tools: Tools | None
    """None: the tools of the session's turn before."""
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
    """A hash of the conversation's user, or "", where the client names no session; None where it names one."""
    version_spans: VersionSpans = ()
    """Spans of weights' versions, as in `Generation`."""
    at: float = 0.0
    """When `TurnRecorder` wrote it, seconds since 1970; 0.0 before."""
    retry: bool = False
    """The client asked for the previous answer again, so that one is superseded."""

    @property
    def finish_reason(self) -> str:
        """The reason that clients read: `stop`, `length` or `tool_calls`."""
        return "tool_calls" if self.reply.tool_calls else self.finish

    def as_json(self) -> dict[str, Any]:
        return {"kind": "turn", **msgspec.to_builtins(self, enc_hook=plain_value)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TurnRecord:
        return msgspec.convert(record, cls, dec_hook=array_of)


class TurnRecorder:
    """Appends records to `folder/records.jsonl`, each whole or not at all. Safe for several threads.

    Every record has the time when it was written as `at`, in seconds since 1970.

    Raises ProxyError, which names the holder, where another process has the folder.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._now = now
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RECORDS_FILE
        self._lock, self._held = threading.Lock(), ExitStack()
        # locked before the end is looked at: another process may be in the middle of a line
        try:
            self._held.enter_context(locked_file(self.path))
        except FolderInUseError as error:
            raise ProxyError(str(error)) from None
        self._lines = LineFile(self.path)
        last_line = _last_line(self._lines.file)
        if last_line and _record(last_line) is None:
            # a killed process did not complete it: its turn was never answered, so nothing is missing without it
            self._lines.file.truncate(self._lines.file.seek(0, 2) - len(last_line))

    def write(self, record: Mapping[str, Any]) -> float:
        """Append a record; returns the time that it got. Raises OSError; nothing of the record is in the file then."""
        content = {"v": SCHEMA, **record, "at": round(self._now(), 3)}
        line = add_checksum(json.dumps(content, ensure_ascii=True, separators=(",", ":"))).encode() + b"\n"
        with self._lock:
            self._lines.append(line)
        return float(content["at"])

    def close(self) -> None:
        with self._lock:
            self._lines.close()
            self._held.close()


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of `folder`, in order. Raises ProxyError for a newer schema."""
    return (item for item in iter_records(folder) if not isinstance(item, TraceProblem))


def iter_records(folder: Path) -> Iterator[dict[str, Any] | TraceProblem]:
    """Every record of `folder` in order, and each damaged line in its place; one that a kill has cut is skipped.

    Raises ProxyError for a newer schema.
    """
    path = folder / RECORDS_FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if (record := _record(line)) is not None:
                if record["v"] > SCHEMA:
                    problem = f"records of version {record['v']}; this reads up to {SCHEMA}"
                    raise ProxyError(f"{path}, line {number}: {problem}")
                yield record
            elif line.strip() and line.endswith(b"\n"):
                yield TraceProblem(line=number, reason="it was changed or cut off: its checksum does not fit")


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None for a damaged one. Unlike an episode, a record is not edited: it has a checksum."""
    with suppress(ValueError):
        check_checksum(line)
        if has_checksum(line):
            record: dict[str, Any] = json_of(line)
            return record
    return None


def _last_line(file: IO[bytes]) -> bytes:
    """The bytes behind the last newline."""
    size, block = file.seek(0, 2), 1 << 16
    while True:
        file.seek(max(size - block, 0))
        tail = file.read()
        if b"\n" in tail or block >= size:
            return tail.rpartition(b"\n")[2]
        block *= 4


def messages_from_json(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage.from_json(message) for message in messages)


def votes_record(key: str, turn: int, judgment: Judgment) -> dict[str, Any]:
    """The record of what a judge said about one turn."""
    return {"kind": "judged", "session": key, "turn": turn, "votes": list(judgment.votes), "cut": judgment.cut}


def usage_record(kind: str, step: int, episodes: Any = ()) -> dict[str, Any]:
    """The record of what happened to sessions: `trained`, `unused`; or `resumed` from the checkpoint of `step`."""
    return {"kind": kind, "step": step, "sessions": [episode.task.task_id for episode in episodes]}
