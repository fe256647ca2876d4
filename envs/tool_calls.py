"""How models write thoughts and tool calls, and how these are read.

Each class below is one form of call, with a family's markers as its fields (`turngym.envs.dialects` has the table):

    JsonCalls      <tool_call>{"name": "search", "arguments": {"query": "Hamlet"}}</tool_call>
    NamedCalls     [TOOL_CALLS]search[ARGS]{"query": "Hamlet"}
    TaggedCalls    <function=search><parameter=query>Hamlet</parameter></function>
    PythonicCalls  [search(query="Hamlet")]
    GemmaCalls     call:search{query:<|"|>Hamlet<|"|>}
    HarmonyCalls    to=functions.search<|channel|>commentary json<|message|>{"query": "Hamlet"}

Reading never raises and takes time linear in the text: every search is for a fixed string or has bounded repeats, so
that no response can make it slow.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from turngym.core.redaction import excerpt
from turngym.core.tools import Untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """The markers around a thought, and the white space that a family's chat template puts between them."""

    opening: str = "<think>"
    closing: str = "</think>"
    before: str = "\n"
    """Text between the opening marker and the thought."""
    after: str = "\n"
    """Text between the thought and the closing marker."""
    gap: str = "\n\n"
    """Text between the closing marker and what follows."""
    spoken: str = ""
    """Marks plain text, in families that mark it (GPT-OSS: the final channel)."""
    aside: str = ""
    """Marks what is said to the user before a call, in families that mark it (GPT-OSS: the commentary channel)."""
    may_be_open: bool = True
    """Whether a chat template may open a thought in the prompt, so that a response may begin inside it."""

    def write(self, thought: str | None) -> str:
        """The thought as the beginning of a response; empty for None."""
        if thought is None:
            return ""
        return f"{self.opening}{self.before}{thought.strip()}{self.after}{self.closing}{self.gap}"

    def split(self, response: str, begins: Callable[[str], bool]) -> tuple[str | None, str, str | None]:
        """Splits a response into (thought, the rest, why the rest cannot be read).

        Several thoughts are joined by a newline. A last thought that is never closed makes a response unreadable,
        except if an action `begins` outside the thoughts, because what follows an action does not matter.
        """
        if self.opening not in response and not (self.may_be_open and self.closing in response):
            return None, response, None
        thoughts: list[str] = []
        body: list[str] = []
        # a closing marker without an opening one ends a thought that the prompt had opened
        position = 0
        end = response.find(self.closing) if self.may_be_open else -1
        if end >= 0 and not 0 <= response.find(self.opening) < end:
            thoughts.append(response[:end].strip())
            position = end + len(self.closing)
        while True:
            start = response.find(self.opening, position)
            body.append(response[position:] if start < 0 else response[position:start])
            if start < 0:
                return "\n".join(thoughts), "".join(body), None
            start += len(self.opening)
            end = response.find(self.closing, start)
            thoughts.append((response[start:] if end < 0 else response[start:end]).strip())
            if end < 0:
                readable = any(begins(part) for part in body)
                reason = None if readable else f"the thought is not closed with {self.closing}"
                return "\n".join(thoughts), "".join(body), reason
            position = end + len(self.closing)


THINK = Thoughts()
"""Tags of Qwen, DeepSeek, GLM, Nemotron and most others."""
HARMONY = Thoughts(
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    before="",
    after="",
    gap="<|start|>assistant",
    spoken="<|channel|>final<|message|>",
    aside="<|channel|>commentary<|message|>",
    may_be_open=False,
)
"""Tags of GPT-OSS: the analysis channel."""
COHERE = Thoughts(
    opening="<|START_THINKING|>",
    closing="<|END_THINKING|>",
    before="",
    after="",
    gap="",
    spoken="<|START_RESPONSE|>",
)
GEMMA = Thoughts(opening="<|channel>thought", closing="<channel|>", gap="")
MISTRAL = Thoughts(opening="[THINK]", closing="[/THINK]", before="", after="", gap="")
SEED = Thoughts(opening="<seed:think>", closing="</seed:think>", before="", after="", gap="\n")
MINIMAX = Thoughts(opening="<mm:think>", closing="</mm:think>", gap="\n")
KIMI = Thoughts(opening="◁think▷", closing="◁/think▷", before="", after="", gap="")
STYLES = {"harmony": HARMONY, "cohere": COHERE, "gemma": GEMMA, "mistral": MISTRAL, "seed": SEED}
STYLES |= {"minimax": MINIMAX, "kimi": KIMI}
"""Ways to write thoughts that differ from THINK, by name."""
_GATEWAYS = [Thoughts(opening=f"<{tag}>", closing=f"</{tag}>") for tag in ("thought", "reasoning")]
EVERY_STYLE = (THINK, *STYLES.values(), *_GATEWAYS)
"""All ways to mark thoughts, with those of gateways in front of Gemini and GPT-OSS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call as it was written, before it is judged."""

    name: Any
    arguments: Any
    """A dict of arguments (those without a type are `Untyped`), a string that holds one as JSON, or anything else that
    stood there."""
    id: str | None = None
    """The call's id, in dialects that write one."""


class CallDialect(Protocol):
    """One way to write a tool call, named after the family of models that introduced it."""

    @property
    def name(self) -> str: ...

    @property
    def thoughts(self) -> Thoughts:
        """How thoughts are written around a call."""

    @property
    def stop_text(self) -> tuple[str, ...]:
        """Strings that end a call; empty if only the end of the response does."""

    def find(self, text: str) -> int:
        """Where the first call begins, readable or not; -1 if there is none."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts with one of which every call begins."""

    def read(self, text: str) -> ParsedCall | str:
        """The call at the start of `text`, or a clause that says why it cannot be read. Never raises."""

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        """The call, or list of calls, that stands whole at `start` of `text`, and where it ends; None if there is none.
        Never raises.

        For those who pass calls on and must lose nothing (`read_calls`); `read` is lenient, and reads the first call.
        """

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """A call of `tool`, as the family's chat template writes it. Values are strings, numbers or truth values."""


MOST_CALLS = 64
"""Most calls that are read in one response."""


def read_calls(dialect: CallDialect, text: str) -> list[ParsedCall] | None:
    """The calls that `text` is made of from beginning to end; None if it is not."""
    calls: list[ParsedCall] = []
    position = _after_space(text, 0)
    while position < len(text):
        taken = dialect.take(text, position) if len(calls) < MOST_CALLS else None
        if taken is None:
            return None
        calls += taken[0]
        position = _after_space(text, taken[1])
    return calls or None


def read_json(text: str, start: int = 0) -> tuple[Any, int] | None:
    """The JSON value at `start` of `text` and where it ends; None if there is none."""
    try:
        # not up to a closing marker, which may stand inside a JSON string
        return json.JSONDecoder().raw_decode(text, start)
    # a few thousand open brackets are enough for a RecursionError
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """Calls between two markers; without an opening one, a call begins where `bare` does."""

    name: str
    opening: str = ""
    """Begins a call; if empty, the call itself does, perhaps after one of `prefixes`."""
    closing: str = ""
    """Ends a call; empty if the family writes nothing there."""
    prefixes: tuple[str, ...] = ()
    first: ClassVar[tuple[str, ...]] = ()
    """Letters with which a call without an opening marker begins."""
    bare: ClassVar[re.Pattern[str]]

    @property
    def stop_text(self) -> tuple[str, ...]:
        return (self.closing,) if self.closing else ()

    def find(self, text: str) -> int:
        if self.opening:
            return text.find(self.opening)
        bare = self.bare.search(text)
        positions = [*map(text.find, self.prefixes), -1 if bare is None else bare.start()]
        return min((position for position in positions if position >= 0), default=-1)

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.opening,) if self.opening else (*self.prefixes, *self.first)

    def _inside(self, text: str, start: int) -> int:
        """Where the call at `start` begins behind its opening marker or prefixes; -1 without the marker."""
        if not text.startswith(self.opening, start):
            return -1
        start = _after_space(text, start + len(self.opening))
        for prefix in self.prefixes:
            start = _after_space(text, start + len(prefix)) if text.startswith(prefix, start) else start
        return start

    def _outside(self, text: str, end: int) -> int | None:
        """Where a call whose content ends at `end` ends with its closing marker; None if something else stands there.
        At the end of a response, where a stop text may have taken the place of the marker, nothing need."""
        end = _after_space(text, end)
        if text.startswith(self.closing, end):
            return end + len(self.closing)
        return end if end == len(text) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Headed:
    """Calls that begin with the tool's name among markers."""

    name: str
    starts: tuple[str, ...]
    """Any of these begins a call."""
    head: str
    """Regular expression of everything before the arguments, with the group `name`, and `id` if calls have one."""
    form: str
    """The whole call: `%n` stands for the tool's name, `%s` for its arguments."""
    stop_text: tuple[str, ...] = ()
    thoughts: Thoughts = THINK

    def find(self, text: str) -> int:
        return min((position for position in map(text.find, self.starts) if position >= 0), default=-1)

    @property
    def begins(self) -> tuple[str, ...]:
        return self.starts


_GEMMA_HEAD = re.compile(r"\s*+call:\s*+(?P<name>[^{\s]++)\s*+\{")
_GEMMA_KEY = re.compile(r"\s*+,?\s*+(?P<key>[^:{}\s]{1,80}+)\s*+:\s*+")
_GEMMA_BARE = re.compile(r"[^,}]*")
MOST_ARGUMENTS = 32
DEEPEST = 32
"""Most lists and objects inside each other in an argument."""


class Bare(Untyped):
    """A value without the marks of a string: a number, a truth value, or a string whose marks a model forgot."""

    __slots__ = ()

    @property
    def typed(self) -> Any:
        """The value for a chat template, which writes it in the same way as the model wrote it."""
        parsed = read_json(self)
        return str(self) if parsed is None or parsed[1] < len(self) else parsed[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(_Marked):
    """FunctionGemma, Gemma 4: a name and arguments in braces; strings stand between two equal marks."""

    quote: str
    thoughts: Thoughts = GEMMA

    def read(self, text: str) -> ParsedCall | str:
        rest = text.removeprefix(self.opening)
        head = _GEMMA_HEAD.match(rest)
        if head is None:
            return f"the tool call must look like {self.write('NAME', {'argument': 'value'})}"
        arguments: dict[str, str] = {}
        position = head.end()
        for _ in range(MOST_ARGUMENTS):
            key = _GEMMA_KEY.match(rest, position)
            if key is None:
                break
            value, position = self._value(rest, key.end())
            arguments.setdefault(key["key"], value)
        return ParsedCall(name=head["name"], arguments=arguments)

    def _value(self, text: str, start: int) -> tuple[str, int]:
        if text.startswith(self.quote, start):
            start += len(self.quote)
            end = text.find(self.quote, start)
            return (text[start:], len(text)) if end < 0 else (text[start:end], end + len(self.quote))
        bare = _GEMMA_BARE.match(text, start)
        # the pattern matches nothing at all, too
        assert bare is not None
        return Bare(bare[0].strip()), bare.end()

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        inside = self._inside(text, start)
        head = _GEMMA_HEAD.match(text, inside) if inside >= 0 else None
        arguments = None if head is None else self._whole(text, head.end() - 1, 0)
        end = None if arguments is None else self._outside(text, arguments[1])
        if head is None or arguments is None or end is None:
            return None
        return [ParsedCall(name=head["name"], arguments=arguments[0])], end

    def _whole(self, text: str, start: int, depth: int) -> tuple[Any, int] | None:
        """The value at `start` and where it ends: a text between quotes, an object or a list of values, or JSON."""
        if text.startswith(self.quote, start):
            start += len(self.quote)
            end = text.find(self.quote, start)
            return None if end < 0 else (text[start:end], end + len(self.quote))
        closing = {"{": "}", "[": "]"}.get(text[start : start + 1])
        if closing is None:
            return read_json(text, start)
        pairs: list[tuple[str, Any]] = []
        start = _after_space(text, start + 1)
        while not text.startswith(closing, start):
            if pairs:
                if not text.startswith(",", start):
                    return None
                start = _after_space(text, start + 1)
            key = _GEMMA_KEY.match(text, start) if closing == "}" else None
            if closing == "}" and key is None:
                return None
            value = self._whole(text, start if key is None else key.end(), depth + 1) if depth < DEEPEST else None
            if value is None:
                return None
            pairs.append(("" if key is None else key["key"], value[0]))
            start = _after_space(text, value[1])
        if closing == "]":
            return [value for _, value in pairs], start + 1
        return (dict(pairs), start + 1) if len(dict(pairs)) == len(pairs) else None

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        written = ",".join(f"{name}:{self._written(value)}" for name, value in arguments.items())
        return f"{self.opening}call:{tool}{{{written}}}{self.closing}"

    def _written(self, value: Any) -> str:
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)


CALL_ID = "turngym00"
"""Mistral's templates accept only ids of nine letters and digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(_Marked):
    """Hermes, Llama, Mistral, Granite, Cohere: `OPENING {"name": ..., "arguments": {...}} CLOSING`, alone or listed."""

    form: str = "%s"
    """The whole call around its JSON, white space included, as the template writes it."""
    keys: tuple[str, ...] = ("name", "arguments")
    """Keys of the object, in the order in which the template writes them."""
    listed: bool = False
    """Whether the template writes a list of calls."""
    indent: int | None = None
    thoughts: Thoughts = THINK
    first: ClassVar[tuple[str, ...]] = ("{", "[")
    # bounded white space, because a search for any amount of it takes quadratic time in a long run
    bare: ClassVar[re.Pattern[str]] = re.compile(
        r'(?:\[\s{0,20})?\{\s{0,20}"(?:name|parameters|arguments|type|function)"\s{0,20}:'
    )

    @property
    def _name_key(self) -> str:
        return next(key for key in self.keys if key.endswith("name"))

    @property
    def _arguments_key(self) -> str:
        return next(key for key in self.keys if key in ("arguments", "parameters"))

    def read(self, text: str) -> ParsedCall | str:
        inner = text.removeprefix(self.opening).lstrip()
        for prefix in self.prefixes:
            inner = inner.removeprefix(prefix).lstrip()
        parsed = read_json(inner)
        if parsed is None:
            return "the tool call is not valid JSON"
        value, end = parsed
        tail = inner[end:].lstrip() if self.closing else ""
        if tail and not tail.startswith(self.closing):
            return "the tool call has text after its JSON"
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, dict) or not isinstance(value.get(self._name_key), str):
            return f'the tool call must be an object with "{self._name_key}" and "{self._arguments_key}"'
        return self._call(value)

    def _call(self, value: dict[str, Any]) -> ParsedCall:
        # models write either word
        arguments = value.get(self._arguments_key, value.get("arguments", value.get("parameters")))
        call_id = value.get("id")
        call_id = call_id if isinstance(call_id, str) else None
        return ParsedCall(name=value[self._name_key], arguments=arguments, id=call_id)

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        inside = self._inside(text, start)
        parsed = read_json(text, inside) if inside >= 0 else None
        end = None if parsed is None else self._outside(text, parsed[1]) if self.closing else parsed[1]
        if parsed is None or end is None:
            return None
        values = parsed[0] if isinstance(parsed[0], list) else [parsed[0]]
        if not all(isinstance(value, dict) and isinstance(value.get(self._name_key), str) for value in values):
            return None
        # a semicolon stands between Llama's calls
        end += not self.opening and text.startswith(";", end)
        return [self._call(value) for value in values], end

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        parts = {self._name_key: tool, self._arguments_key: arguments, "id": CALL_ID, "tool_call_id": "0"}
        call = {key: parts[key] for key in self.keys}
        text = json.dumps([call] if self.listed else call, ensure_ascii=False, indent=self.indent)
        if self.closing.startswith("</"):
            # "<\/" is "</" in JSON: a closing tag inside the action must not end the call or the generation
            text = text.replace("</", "<\\/")
        return self.form.replace("%s", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(_Headed):
    """DeepSeek, newer Mistral, Kimi: `OPENING NAME SEPARATOR {"argument": value} CLOSING`."""

    def read(self, text: str) -> ParsedCall | str:
        head = _compiled(self.head).match(text)
        if head is None:
            return f"the tool call must look like {self.form.replace('%n', 'NAME').replace('%s', '{...}')}"
        parsed = read_json(text[head.end() :].lstrip())
        if parsed is None:
            return "the arguments of the tool call are not valid JSON"
        return self._call(head, parsed[0])

    @staticmethod
    def _call(head: re.Match[str], arguments: Any) -> ParsedCall:
        return ParsedCall(name=head["name"].strip(), arguments=arguments, id=head.groupdict().get("id"))

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        head = _compiled(self.head).match(text, start)
        parsed = None if head is None else read_json(text, _after_space(text, head.end()))
        if head is None or parsed is None:
            return None
        # what the family writes behind the arguments; the last of it closes all calls of a response
        end = parsed[1]
        for mark in _MARK.findall(self.form.partition("%s")[2]):
            after = _after_space(text, end)
            end = after + len(mark) if text.startswith(mark, after) else end
        return [self._call(head, parsed[0])], end

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        return self.form.replace("%n", tool).replace("%s", json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCalls(NamedCalls):
    """GPT-OSS's harmony: a message to `functions.NAME` whose content is JSON; the stop token `<|call|>` ends it."""

    name: str = "harmony"
    starts: tuple[str, ...] = ("<|channel|>", " to=", "to=")
    # the recipient stands before the channel in templates, but after it in what models write
    head: str = r"(?:<\|channel\|>\w{1,20})?\s{0,4}to=(?:functions\.)?(?P<name>[\w./:-]{1,80})[^{}]{0,60}?<\|message\|>"
    form: str = " to=functions.%n<|channel|>commentary json<|message|>%s"
    stop_text: tuple[str, ...] = ("<|call|>",)
    thoughts: Thoughts = HARMONY

    def find(self, text: str) -> int:
        head = _compiled(self.head).search(text)
        return -1 if head is None else head.start()


_MARK = re.compile(r"```|<[^<>]+>")


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_PYTHONIC_HEAD = re.compile(r"\s*+\[?\s*+(?P<name>[A-Za-z_][\w./-]{0,80}+)\s*+\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls(_Marked):
    """LFM2, Llama 3.2 and 4, Gemma 3 with a tool template: a list of Python calls with keyword arguments."""

    double_quotes: bool = False
    """Whether the family's template writes `"value"` rather than `'value'`."""
    thoughts: Thoughts = THINK
    first: ClassVar[tuple[str, ...]] = ("[",)
    bare: ClassVar[re.Pattern[str]] = re.compile(r"\[\s{0,20}[A-Za-z_][\w./-]{0,80}\s{0,20}\(")

    def read(self, text: str) -> ParsedCall | str:
        head = _PYTHONIC_HEAD.match(text.removeprefix(self.opening))
        if head is None:
            return 'the tool call is not a list such as [NAME(argument="value")]'
        arguments = head.string[head.end() - 1 :]
        call = _python_call(arguments[: _end_of_bracket(arguments)])
        if call is None:
            return "the arguments of the tool call are not written as Python writes them"
        values = {word.arg: _value(word.value) for word in call.keywords if word.arg is not None}
        return ParsedCall(name=head["name"], arguments=values)

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        inside = self._inside(text, start)
        if inside < 0 or not text.startswith("[", inside):
            return None
        calls: list[ParsedCall] = []
        position = _after_space(text, inside + 1)
        while not text.startswith("]", position):
            position = position + 1 if calls and text.startswith(",", position) else position
            head = _PYTHONIC_HEAD.match(text, position) if len(calls) < MOST_CALLS else None
            if head is None or "[" in head[0]:
                return None
            arguments = text[head.end() - 1 :]
            end = _end_of_bracket(arguments)
            call = _python_call(arguments[:end])
            if call is None or call.args or any(word.arg is None for word in call.keywords):
                return None
            try:
                values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            except (ValueError, RecursionError, TypeError):
                return None
            calls.append(ParsedCall(name=head["name"], arguments=values))
            position = _after_space(text, head.end() - 1 + end)
        closed = self._outside(text, position + 1)
        return None if closed is None else (calls, closed)

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        written = ", ".join(f"{name}={self._written(value)}" for name, value in arguments.items())
        return f"{self.opening}[{tool}({written})]{self.closing}"

    def _written(self, value: Any) -> str:
        if not isinstance(value, str):
            return repr(value)
        quote = '"' if self.double_quotes else "'"
        escaped = value.replace("\\", "\\\\").replace(quote, f"\\{quote}").replace("\n", "\\n").replace("\r", "\\r")
        return f"{quote}{escaped}{quote}"


_JSON_WORDS = {"true": True, "false": False, "null": None}


def _python_call(arguments: str) -> ast.Call | None:
    """Arguments in brackets as Python reads them; None if it does not."""
    try:
        # without the tool's name, which may hold characters that Python's names may not
        call = ast.parse(f"_{arguments}", mode="eval").body
    # what ast raises for deep nesting and null bytes, too
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return call if isinstance(call, ast.Call) else None


def _end_of_bracket(text: str) -> int:
    """The position after the bracket that closes the first one, ignoring strings; the length of `text` if none does."""
    depth, quote, position = 0, "", 0
    while position < len(text):
        letter = text[position]
        if quote:
            position += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
            if depth <= 0:
                return position + 1
        position += 1
    return len(text)


def _value(node: ast.expr) -> Any:
    # models write JSON's words, too
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls(_Headed):
    """Qwen3-Coder, Qwen3.5, Nemotron 3, GLM: a name, then every argument without quotes between tags of its own."""

    key: tuple[str, str]
    """The texts before and after the name of an argument."""
    value: tuple[str, str]
    """The texts before and after its value; white space around the value does not belong to it."""
    argument: str
    """One argument: `%k` stands for its name, `%s` for its value, `%t` for `true` if that is a text, else `false`."""
    ends: tuple[str, ...]
    """Any of these ends the arguments, and a value that was never closed."""
    python: bool = False
    """Whether the family's template writes `True` as Python does, and not `true`."""
    stop_text: tuple[str, ...] = ("</tool_call>",)

    def read(self, text: str) -> ParsedCall | str:
        head = _compiled(self.head).match(text)
        if head is None:
            example = self.write("NAME", {"ARGUMENT": "VALUE"}).replace("\n", " ")
            return f"the tool call must look like {example}"
        ends = [end for mark in self.ends if (end := text.find(mark, head.end())) >= 0]
        arguments = self._arguments(text[head.end() : min(ends, default=None)])
        return arguments if isinstance(arguments, str) else ParsedCall(name=head["name"].strip(), arguments=arguments)

    def _arguments(self, text: str) -> dict[str, str] | str:
        arguments: dict[str, str] = {}
        position = 0
        # bounded, so that a long run of opening tags cannot make reading quadratic
        for _ in range(MOST_ARGUMENTS):
            start = text.find(self.key[0], position)
            if start < 0:
                break
            key, position = self._key(text, start)
            opened = text.find(self.value[0], position)
            # nothing but white space may stand between an argument's name and its value
            if opened < 0 or text[position:opened].strip():
                return f"the tool call has an argument {excerpt(key, 80)!r} without a value"
            value, position = _until(text, opened + len(self.value[0]), self.value[1])
            arguments.setdefault(key, Untyped(value.strip()))
        return arguments

    def _key(self, text: str, start: int) -> tuple[str, int]:
        """The name of the argument that begins at `start`, without further attributes, and where reading goes on."""
        key, end = _until(text, start + len(self.key[0]), self.key[1])
        return key.partition('"')[0].strip(), end

    def take(self, text: str, start: int) -> tuple[list[ParsedCall], int] | None:
        """The call at `start`: a value keeps its white space, but for the line end that some families write at each
        side of it."""
        head = _compiled(self.head).match(text, start)
        if head is None:
            return None
        arguments: dict[str, str] = {}
        position = _after_space(text, head.end())
        while text.startswith(self.key[0], position):
            key, position = self._key(text, position)
            opened = _after_space(text, position) if self.value[0] else position
            end = text.find(self.value[1], opened)
            if not text.startswith(self.value[0], opened) or end < 0 or key in arguments:
                return None
            arguments[key] = text[opened + len(self.value[0]) : end].removeprefix("\n").removesuffix("\n")
            position = _after_space(text, end + len(self.value[1]))
        *inner, last = self.ends
        for mark in inner:
            if not text.startswith(mark, position):
                return None
            position = _after_space(text, position + len(mark))
        if text.startswith(last, position):
            position += len(last)
        # MiniMax closes several calls together, and a stop text may have taken the place of the last marker of several
        elif not inner or (position < len(text) and not text.startswith(self.starts, position)):
            return None
        return [ParsedCall(name=head["name"].strip(), arguments=arguments)], position

    def write(self, tool: str, arguments: Mapping[str, Any]) -> str:
        written = "".join(
            self.argument.replace("%k", name)
            .replace("%t", json.dumps(isinstance(value, str)))
            .replace("%s", self._written(value))
            for name, value in arguments.items()
        )
        return self.form.replace("%n", tool).replace("%s", written)

    def _written(self, value: Any) -> str:
        return str(value) if isinstance(value, str) or self.python else json.dumps(value)


_SPACE = re.compile(r"\s*+")


def _after_space(text: str, start: int) -> int:
    """The position of the first character from `start` on that is not white space."""
    match = _SPACE.match(text, start)
    # the pattern matches nothing at all, too
    assert match is not None
    return match.end()


def _until(text: str, start: int, mark: str) -> tuple[str, int]:
    """The text from `start` to `mark`, or to the end if there is none, and where reading goes on."""
    end = text.find(mark, start)
    return (text[start:], len(text)) if end < 0 else (text[start:end], end + len(mark))
