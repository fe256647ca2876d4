"""What stands in the prompt of a turn: responses as chat messages, what is remembered of past turns, and their ids.

- `ContentAnswers` and `StructuredAnswers`: a response becomes a message of the chat template, either as plain content
  or split into thought, content and tool call.
- `Memory`: which part of an episode is shown at a turn; the whole conversation (`all`), or one prompt a turn that holds
  the last N turns (`window:N`, `verl-agent:N`) or a transcript (`react`).
- `TokenHistory`: the token ids of one conversation, an append-only buffer per segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.prompt_templates import PromptTemplates
from turngym.core.episode import Span, Turn
from turngym.core.errors import AgentError, TurngymError, did_you_mean
from turngym.envs.tool_calls import CALL_ID, THINK, Bare, CallDialect, ParsedCall, Thoughts

Message = dict[str, Any]
T = TypeVar("T")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message keys under which templates look for a thought."""
WINDOW = re.compile(r"(?:window|verl-agent):[0-9]{1,6}")
NO_ACTION = "(no action could be read)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentAnswers:
    """The response is the content of the message, unchanged."""

    prefill: str = ""
    """Text that the generation prompt has already put into the message."""
    structured: ClassVar = False
    """The template writes calls and thoughts itself, so that its output depends on the response."""

    def answer(self, text: str) -> Message:
        return {"role": "assistant", "content": self.prefill + text}

    def observation(self, text: str, role: str, previous: Message | None) -> Message:
        """The message that follows `previous`."""
        return {"role": role, "content": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredAnswers:
    """The response is split into thought, content and call, for templates that show tool results only after a call.

    The template may write these parts differently from what was sampled (other spaces, other quotes). The renderer
    compares the two and opens a new segment if they differ.
    """

    dialect: CallDialect | None
    thoughts: Thoughts = THINK
    opened: bool = False
    """Whether the generation prompt opens a thought, so that a response begins inside it."""
    special: Sequence[str] = ()
    """Special tokens of the tokenizer, which templates may refuse inside content."""
    arguments_as_text: bool = False
    """Whether the template expects arguments as JSON text."""
    structured: ClassVar = True

    def answer(self, text: str) -> Message:
        if self.opened:
            text = self.thoughts.opening + text
        thought, body, _ = self.thoughts.split(text, lambda part: False)
        start = -1 if self.dialect is None else self.dialect.find(body)
        call = self.dialect.read(body[start:]) if self.dialect is not None and start >= 0 else None
        content = body.removeprefix(self.thoughts.gap).removeprefix(self.thoughts.spoken)
        message: Message = {"role": "assistant", "content": self._plain(content)}
        if isinstance(call, ParsedCall) and isinstance(call.name, str):
            said, tags = body[:start].removeprefix(self.thoughts.gap), self.thoughts
            if tags.aside and tags.aside in said:
                said = said.replace(tags.aside, "").replace(tags.closing + tags.gap, "")
            return message_with_calls(self._plain(said).strip(), thought, [self._call(call)], tags)
        return message | dict.fromkeys(THOUGHT_KEYS if thought else (), thought)

    def observation(self, text: str, role: str, previous: Message | None) -> Message:
        calls = (previous or {}).get("tool_calls")
        if role != "tool" or not calls:
            # a result without a call is refused by most of these templates
            return {"role": "user", "content": text}
        return {"role": "tool", "content": text, "name": calls[0]["function"]["name"], "tool_call_id": calls[0]["id"]}

    def _call(self, call: ParsedCall) -> dict[str, Any]:
        arguments = call.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        arguments = arguments if isinstance(arguments, dict) else {}
        arguments = {name: value.typed if isinstance(value, Bare) else value for name, value in arguments.items()}
        shown = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments
        return {"type": "function", "id": call.id or CALL_ID, "function": {"name": call.name, "arguments": shown}}

    def _plain(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text


def message_with_calls(content: str, thought: str | None, calls: Sequence[Any], tags: Thoughts) -> Message:
    if tags.aside and content and thought:
        # GPT-OSS's template takes either beside a call, and writes both as a thought
        content, thought = "", f"{thought}\n{content}"
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return message | dict.fromkeys(THOUGHT_KEYS if thought else (), thought)


AnswerForm = ContentAnswers | StructuredAnswers
"""How a response of the model is passed to its chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A turn that was played."""

    observation: str
    """The observation that the agent was shown."""
    response: str
    action: str | None
    """The action read from the response; None if there was none."""
    listing: str = ""
    """The list of admissible actions at the end of the observation. It holds for its own turn only."""
    thought: str = ""
    """The agent's thought; "" if there was none."""

    @property
    def bare(self) -> str:
        """The observation without its list."""
        return without(self.observation, self.listing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An episode in front of the task, as the agent is shown it."""

    turns: tuple[tuple[str, str], ...]
    """(observation, response) pairs."""
    final: str
    """The observation after the last response."""
    category: str = ""
    """The category of the tasks in whose prompts it stands; empty: in all."""

    @property
    def text(self) -> str:
        return "\n".join(part for turn in self.turns for part in turn)


def by_category(examples: Iterable[Example]) -> dict[str, tuple[Example, ...]]:
    """Category -> its examples; "" -> those of all tasks."""
    found: dict[str, tuple[Example, ...]] = {"": ()}
    for example in examples:
        found[example.category] = (*found.get(example.category, ()), example)
    return found


def of_category(groups: Mapping[str, T], category: str) -> T:
    """What `groups` (by category, "" for all tasks) hold for a task. Raises AgentError if all of it is for others."""
    known = sorted(groups.keys() - {""})
    if known and category not in groups:
        raise AgentError(
            f"--examples.shown-for category: no example is of category {category!r}; there are {', '.join(known)}"
        )
    return groups[category if known else ""]


def without(observation: str, listing: str) -> str:
    """`observation` without the `listing` in it. Text that a wrapper wrote behind the listing stays."""
    before, found, after = observation.rpartition(listing) if listing else ("", "", "")
    return before + after if found else observation


def require_memory(name: str) -> None:
    """Raises TurngymError for a `name` that is none of a `Memory`'s."""
    if name not in ("all", "react") and WINDOW.fullmatch(name) is None:
        hint = did_you_mean(name, ("all", "window:2", "react", "verl-agent:2"))
        raise TurngymError(f"memory {name!r} is unknown; valid: all, window:N, react, verl-agent:N.{hint}")


@dataclass(frozen=True, slots=True)
class Memory:
    """Which part of an episode stands in the prompt of a turn. Raises TurngymError for a `name` that is none of these.

    - `all`: the whole conversation, every observation and every response in a message of its own.
    - `window:N`: one user message a turn, with the task, the last N observations and their actions, and the current
      observation.
    - `verl-agent:N`: one user message a turn, `templates` filled with the task, the last N observations and their
      actions, the current observation, and the actions that are admissible now.
    - `react`: one user message a turn, with the first observation, then every thought, action and observation under its
      number. The form is that of ReAct's prompts for questions (docs/presets.md).

    One message a turn has no earlier lists of admissible actions; with `window:N` and `react` the first turn's is the
    first observation alone.
    """

    name: str
    templates: PromptTemplates | None = None
    """Templates of the memory `verl-agent:N`."""

    def __post_init__(self) -> None:
        require_memory(self.name)
        if self.templated != (self.templates is not None):
            said = "needs templates" if self.templated else "takes no templates"
            raise TurngymError(
                f"memory {self.name!r} {said}: --memory verl-agent:N goes with --prompts own|CHECKOUT, which "
                "--preset verl-agent sets, too"
            )

    @property
    def templated(self) -> bool:
        return self.name.startswith("verl-agent:")

    def prompt(
        self, task: str, past: Sequence[PastTurn], observation: str, admissible: Sequence[str] | None = None
    ) -> str | None:
        """The only user message of this turn, or None if the conversation goes on with `observation`.

        Args:
            task: the environment's statement of the task, or the first observation if it has none.
            admissible: possible actions; None for an environment with open ones.
        """
        if self.name == "all":
            return None
        length = self.name.partition(":")[2]
        if self.templates is not None:
            said = [(turn.bare, turn.action or "") for turn in past]
            return self.templates.prompt(int(length), task, said, observation, admissible)
        if not past:
            return observation
        if self.name == "react":
            return _transcript(past, observation)
        return _window(int(length), task, past, observation)


def _window(length: int, task: str, past: Sequence[PastTurn], observation: str) -> str:
    shown = past[max(0, len(past) - length) :]
    lines = [task, "", f"Turns taken: {len(past)}." + (f" The last {len(shown)}, oldest first:" if shown else "")]
    for number, turn in enumerate(shown, start=len(past) - len(shown) + 1):
        lines += [f"Observation {number}: {turn.bare}", f"Action {number}: {_one_line(turn)}"]
    return "\n".join((*lines, "", f"Now turn {len(past) + 1}. Observation {len(past) + 1}: {observation}"))


def _transcript(past: Sequence[PastTurn], observation: str) -> str:
    lines = [past[0].bare]
    for number, turn in enumerate(past, start=1):
        lines += [f"Thought {number}: {turn.thought}"] if turn.thought else []
        lines.append(f"Action {number}: {_one_line(turn)}")
        following = past[number].bare if number < len(past) else observation
        lines.append(f"Observation {number}: {following.strip()}")
    return "\n".join(lines)


ALL = Memory("all")


def chat_messages(
    memory: Memory,
    system: str,
    task: str,
    past: Sequence[PastTurn],
    observation: str,
    admissible: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """The prompt of a turn as chat messages (system, user, assistant, user, ...), for agents that take text."""
    opening = [{"role": "system", "content": system}] if system else []
    prompt = memory.prompt(task, past, observation, admissible)
    if prompt is not None:
        return [*opening, {"role": "user", "content": prompt}]
    said = [
        {"role": role, "content": text}
        for turn in past
        for role, text in (("user", turn.observation), ("assistant", turn.response))
    ]
    return [*opening, *said, {"role": "user", "content": observation}]


def _one_line(turn: PastTurn) -> str:
    return NO_ACTION if turn.action is None else " ".join(turn.action.split())


class IdBuffer:
    """Token ids that are only appended to. `view()` copies nothing and stays valid while the buffer grows."""

    __slots__ = ("_data", "size")

    def __init__(self, capacity: int = 256) -> None:
        self._data = np.empty(capacity, np.int32)
        self.size = 0

    def extend(self, ids: NDArray[np.int32]) -> Span:
        """Append `ids`; returns their half-open range of positions."""
        start, stop = self.size, self.size + len(ids)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * len(self._data)), np.int32)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:stop] = ids
        self.size = stop
        return start, stop

    def view(self) -> NDArray[np.int32]:
        """All ids so far, int32 [n], as a read-only view."""
        view = self._data[: self.size]
        view.setflags(write=False)
        return view

    def array(self) -> NDArray[np.int32]:
        """A copy of all ids so far, int32 [n]."""
        return self._data[: self.size].copy()


@dataclass(slots=True)
class TokenHistory:
    """The token side of one conversation, written by a `ChatRenderer` and read by the rollout driver."""

    segments: list[IdBuffer] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The current segment as text, joined only when it must be compared with a full rendering."""
    prompt_span: Span = (0, 0)
    response_span: Span = (0, 0)
    response: str = ""
    """The last response as text, without the id that ended it."""
    last_id: int | None = None
    """The stop id that ended the last response; None if it was cut."""
    awaiting: bool = False
    """Whether the last prompt has no response yet."""
    appendable: bool = True
    """Whether the template has shown every response so far unchanged."""

    def said(self, turns: Sequence[Turn]) -> tuple[NDArray[np.int32], ...]:
        """The ids of each segment up to its last response among `turns`; a prompt without a response is left out."""
        ends = {turn.segment: turn.response_span[1] for turn in turns}
        kept = self.segments[: max(ends, default=-1) + 1]
        return tuple(buffer.array()[: ends[number]] for number, buffer in enumerate(kept))

    @property
    def segment(self) -> int:
        return len(self.segments) - 1

    @property
    def buffer(self) -> IdBuffer:
        return self.segments[-1]
