"""Conversations as token ids that only grow: sampled ids are kept, and each turn tokenizes its own suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.chat_template import (
    CACHE,
    OBSERVATION,
    SYSTEM,
    ChatTemplate,
    ObservationRole,
    RenderError,
)
from turngym.agents.rendering.conversation import ALL, IdBuffer, Memory, TokenHistory
from turngym.envs.channels import Channel, make_channel, split_thought
from turngym.envs.core.episode import Episode, Origin, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import ToolSpec
from turngym.envs.tool_calls import THINK, Dialect, Thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
# samples of what templates may rewrite: line ends, quotes
PROBE_OBSERVATIONS = (OBSERVATION, "You arrive at shelf 1.\nOn the shelf 1, you see nothing.", "-= A =- 'b' \"c\"")


class ChatRenderer:
    """Token-in, token-out rendering with any Hugging Face chat template.

    A turn's prompt is the ids so far plus the freshly tokenized suffix, as long as the template shows the conversation
    so far exactly as it was (text of the previous prompt, then the raw response). Where it does not (Qwen3 drops
    earlier `<think>` blocks once a new user message arrives) a new segment opens and the whole history is tokenized as
    its prompt. `history="append"` never rewrites: it appends what the template would write after any answer.

    Rendering everything at every turn costs time that grows with the square of the turns. So the template is probed
    once: where it is append-only, a turn renders its observation alone (cached by text) and each distinct response is
    checked once, in a small conversation. `strict=True` compares every turn with the full rendering all the same.

    Args:
        tokenizer, tool, thinking, observation_role, variables, dialect, thoughts: see `ChatTemplate`.
        history: `template` follows the template's own idea of the past; `append` keeps everything.
        strict: compare the fast path with the full rendering at every turn.
        stop_ids: further ids that end a response (a model's generation config may name some).
        memory: what a turn's prompt holds of the episode (see `memory`); kept here for whoever presents observations.

    Raises:
        RenderError: no chat template, a role that the template refuses, or (strict) a fast path that differs.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool: ToolSpec | None = None,
        thinking: bool | None = None,
        observation_role: ObservationRole = "user",
        variables: Mapping[str, Any] | None = None,
        history: Literal["template", "append"] = "template",
        strict: bool = False,
        stop_ids: Sequence[int] = (),
        dialect: Dialect | None = None,
        thoughts: Thoughts = THINK,
        memory: Memory = ALL,
    ) -> None:
        self.memory = memory
        if history not in ("template", "append"):
            raise RenderError(f"history {history!r} is unknown; valid: 'template', 'append'")
        self.template = ChatTemplate(
            tokenizer,
            tool=tool,
            thinking=thinking,
            observation_role=observation_role,
            variables=variables,
            dialect=dialect,
            thoughts=thoughts,
        )
        self.stop_ids = tuple(dict.fromkeys((*self.template.stop_ids, *stop_ids)))
        """Ids that end a response."""
        self.describes_tool = self.template.describes_tool
        """Whether the template itself explains the tool, so that the system message need not."""
        self._stops = frozenset(self.stop_ids)
        self._append = history == "append"
        self._strict = strict
        self._delta = lru_cache(CACHE)(self.template.delta_text)
        self._shown_unchanged = lru_cache(CACHE)(self._check_shown_unchanged)
        self.append_only = self._append or self._probe()
        """Whether responses that the template leaves alone extend the ids without a full rendering."""

    def open(self, system: str, observation: str) -> TokenHistory:
        """A new conversation whose first prompt stands and waits for a response."""
        history = TokenHistory(appendable=self.append_only)
        history.messages = self.template.opening(system, observation)
        self._open_segment(history, self.template.render(history.messages))
        return history

    def observe(self, history: TokenHistory, observation: str) -> None:
        """Append the next prompt: the template's closing of the last response, `observation`, the generation prompt."""
        previous = history.messages[-1]
        history.messages.append(self.template.observation(observation, previous))
        suffix = self._suffix(history, observation) if history.appendable else None
        if suffix is not None:
            if self._strict and not self._append:
                self._compare(history, suffix)
            self._extend(history, self.template.encode(suffix), suffix)
            return
        history.appendable = False
        full = self._render_whole(history)
        before = "".join(history.pieces)
        if full.startswith(before):
            suffix = full[len(before) :]
            self._extend(history, self.template.encode(suffix), suffix)
        else:
            self._open_segment(history, full)

    def _suffix(self, history: TokenHistory, observation: str) -> str | None:
        """What follows the last response, without rendering all that came before; None where only that can tell."""
        response = history.response if self.template.form.structured and not self._append else None
        text = self._delta(observation, response)
        if text is None or history.last_id is None:
            return text
        # a sampled end id already stands in the buffer: the delta must not bring a second one
        end = self.template.decode([history.last_id])
        if text.startswith(end):
            return text[len(end) :]
        # after another stop id than the template's own the two differ, and only a full rendering can tell how
        return text if self._append else None

    def _render_whole(self, history: TokenHistory) -> str:
        try:
            return self.template.render(history.messages)
        except RenderError:
            # special tokens inside an answer that could not be taken apart: GPT-OSS refuses its own channels as content
            said, told = history.messages[-2:]
            plain = self.template.plain(said)
            history.messages[-2:] = [plain, self.template.observation(told["content"], plain)]
            return self.template.render(history.messages)

    def restart(self, history: TokenHistory, system: str, observation: str) -> None:
        """Open a segment whose prompt is a conversation of its own: nothing of the segments before stands in it."""
        history.messages = self.template.opening(system, observation)
        self._open_segment(history, self.template.render(history.messages))

    def respond(self, history: TokenHistory, ids: NDArray[np.int32]) -> str:
        """Record sampled `ids` int32 [R] as they are; the response as text, without the stop id that ended it."""
        listed = ids.tolist()
        last = listed[-1] if listed and listed[-1] in self._stops else None
        text = self.template.decode(listed if last is None else listed[:-1])
        history.response_span = history.buffer.extend(ids)
        history.last_id = last
        history.awaiting = False
        history.response = text
        history.messages.append(self.template.answer(text))
        history.pieces.append(text)
        if last is not None:
            history.pieces.append(self.template.decode([last]))
        if history.appendable and not self._append:
            history.appendable = self._shown_unchanged(text)
        return text

    def write(self, history: TokenHistory, text: str) -> NDArray[np.int32]:
        """Record `text`, which the policy did not sample, as a response: its ids plus the end id, int32 [R]."""
        ids = self.template.encode(text)
        if self.template.end_id is not None:
            ids = np.append(ids, np.int32(self.template.end_id)).astype(np.int32)
        self.respond(history, ids)
        return ids

    def _open_segment(self, history: TokenHistory, text: str) -> None:
        history.segments.append(IdBuffer())
        history.pieces = []
        self._extend(history, self.template.encode(text), text)

    @staticmethod
    def _extend(history: TokenHistory, ids: NDArray[np.int32], text: str) -> None:
        history.prompt_span = history.buffer.extend(ids)
        history.pieces.append(text)
        history.awaiting = True

    def _probe(self) -> bool:
        """Whether full renderings of conversations of growing depth are their own prefixes plus the deltas."""
        end = self.template.end_text
        samples = self.template.samples
        if end and not (self._delta(OBSERVATION, samples[0]) or "").startswith(end):
            return False
        # the second three depths pair answers with other observations than the first three
        turns = [(samples[i % len(samples)], PROBE_OBSERVATIONS[(i + i // 3) % 3]) for i in range(6)]
        # a template that refuses long conversations is found out here, and not in the midst of an episode
        return self._grows(turns)

    def _check_shown_unchanged(self, response: str) -> bool:
        """Whether the template shows `response` unchanged, both as the latest and as an earlier answer."""
        try:
            return self._grows([(response, OBSERVATION), (self.template.samples[0], OBSERVATION)])
        except RenderError:  # special tokens inside content
            return False

    def _grows(self, turns: Sequence[tuple[str, str]]) -> bool:
        """Whether a conversation of these answers and observations is at every turn its own prefix plus the delta."""
        messages = self.template.opening(SYSTEM, OBSERVATION)
        text = self.template.render(messages)
        for answer, observation in turns:
            message = self.template.answer(answer)
            messages += [message, self.template.observation(observation, message)]
            delta = self._delta(observation, answer if self.template.form.structured else None)
            text += answer + (delta or "")
            if delta is None or self.template.render(messages) != text:
                return False
        return True

    def _compare(self, history: TokenHistory, suffix: str) -> None:
        fast = "".join(history.pieces) + suffix
        full = self.template.render(history.messages)
        if fast != full:
            at = next(
                (i for i, (a, b) in enumerate(zip(fast, full, strict=False)) if a != b), min(len(fast), len(full))
            )
            raise RenderError(
                f"the chat template of {self.template.name!r} is not append-only: at character {at} it shows "
                f"{full[at : at + 40]!r} where {fast[at : at + 40]!r} was said"
            )


# A turn of a demonstration as a student would have said it, and a response that a demonstrator only begins.

Ids = tuple[int, ...]
"""Token ids of the student; a tuple, so that jobs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One turn that is replayed."""

    response: str
    """In the student's channel, thought included."""
    ids: Ids
    """The response as the student's ids, with the id that ended it if there was one."""
    exact: bool = False
    """Whether these are the ids that the demonstrator drew."""
    origin: Origin = "demonstration"


def begun_response(renderer: ChatRenderer, shown: Shown, count: int, stops: Sequence[str]) -> tuple[Ids, bool]:
    """The first `count` ids of a response, and whether nothing of it is missing but how it ends.

    A response ends at the first of the texts `stops`. A cut through one of them moves in front of it: engines look for
    a stop text in what they drew, and would miss one that was begun for them.
    """
    ids = shown.ids[:count]
    text = _text(renderer, ids)
    if any(stop in text for stop in stops):
        return ids, True
    # nothing at all ends in no stop text
    sizes = (size for size in range(len(ids), -1, -1) if not _within(_text(renderer, ids[:size]), stops))
    return ids[: next(sizes)], False


def _within(text: str, stops: Sequence[str]) -> bool:
    """Whether `text` ends where one of `stops` has begun."""
    return any(text.endswith(stop[:cut]) for stop in stops for cut in range(1, len(stop)))


def _text(renderer: ChatRenderer, ids: Ids) -> str:
    return renderer.template.decode(list(ids))


def read_exactly(renderer: ChatRenderer, ids: Sequence[int], response: str) -> bool:
    """Whether the renderer's tokenizer reads `ids` as `response`, letter by letter, and by no more than an end id."""
    listed = [int(token) for token in ids]
    size = len(renderer.template.tokenizer)
    if not listed or not all(0 <= token < size for token in listed):
        return False
    said = listed[:-1] if listed[-1] in renderer.stop_ids else listed
    return not set(said) & set(renderer.stop_ids) and _text(renderer, tuple(said)) == response


# Episodes of text alone, written as a model's token ids: what another agent said, as something to train on.

CHANNELS = ("text", "tool")
GENERATION_PROMPT = 64
"""More ids than any template writes between an observation and the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEpisodes:
    """Gives ids to episodes that have none (experts, endpoints, people); others stay as they are.

    Each observation is rendered and each response tokenized as it stands, thought included, with the end id that the
    model would have to draw. Nobody sampled these ids, so they have no log-probabilities. Where `channel` does not read
    the recorded action in a response (bare actions, calls in place of tags), the action is written anew, after the same
    thought. The system message is `system`, else the recorded one with the instructions of this channel. A turn that
    does not fit `max_context` ids, and what follows it, is left out.
    """

    renderer: ChatRenderer
    channel: Channel
    tool: ToolSpec
    system: str | None = None
    max_context: int | None = None

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [self.write(episode) for episode in episodes]

    def write(self, episode: Episode) -> Episode:
        """`episode` with segments and spans."""
        return episode if episode.segments or not episode.turns else self.rewrite(episode)

    def rewrite(self, episode: Episode) -> Episode:
        """`episode` as if this model had lived it: responses as by `shown`, between this model's own prompts."""
        system = self._instructed(episode.system) if self.system is None else self.system
        history: TokenHistory | None = None
        turns: list[Turn] = []
        for turn in episode.turns:
            if history is None:
                history = self.renderer.open(system, turn.observation)
            else:
                self.renderer.observe(history, turn.observation)
            shown = self.shown(episode, turn)
            self.renderer.respond(history, np.array(shown.ids, np.int32))
            if self.max_context is not None and history.buffer.size > self.max_context:
                break
            spans = (history.prompt_span, history.response_span)
            written = replace(turn, response=shown.response, segment=history.segment, logprobs=None)
            turns.append(replace(written, prompt_span=spans[0], response_span=spans[1]))
        if history is None or not turns:
            return episode
        ends = {turn.segment: turn.response_span[1] for turn in turns}
        segments = tuple(buffer.array()[: ends[n]] for n, buffer in enumerate(history.segments[: max(ends) + 1]))
        last = episode.final_observation if len(turns) == episode.depth else episode.turns[len(turns)].observation
        return replace(episode, system=system, turns=tuple(turns), segments=segments, final_observation=last)

    def fits(self, episode: Episode) -> bool:
        """Whether all turns of `episode`, written so, fit `max_context` ids."""
        return self.max_context is None or self.rewrite(episode).depth == episode.depth

    def shown(self, episode: Episode, turn: Turn) -> Shown:
        """A turn of `episode` as this model would have said it.

        Where a model drew it, this tokenizer reads the same ids as the same text, this channel reads it, and it went on
        from the same generation prompt, the ids stay as they were drawn. Else it is tokenized, with the end id.
        """
        origin: Origin = "noise" if turn.origin == "noise" else "demonstration"
        response = self.response(turn)
        if response == turn.response and self._drawn_alike(episode, turn):
            ids = tuple(episode.response_ids(turn).tolist())
            return Shown(response=response, ids=ids, exact=True, origin=origin)
        template = self.renderer.template
        response = template.fit(response)
        end = () if template.end_id is None else (int(template.end_id),)
        return Shown(response=response, ids=(*template.encode(response).tolist(), *end), origin=origin)

    def _drawn_alike(self, episode: Episode, turn: Turn) -> bool:
        if not turn.response_length or not read_exactly(
            self.renderer, episode.response_ids(turn).tolist(), turn.response
        ):
            return False
        size, before = len(self.renderer.template.tokenizer), episode.prompt_ids(turn)[-GENERATION_PROMPT:]
        if before.max(initial=0) >= size:
            return False
        # its last part is what the template writes before every answer
        return self.renderer.template.decode(before.tolist()).endswith(self.renderer.template.generation_prompt)

    def response(self, turn: Turn) -> str:
        """The recorded response in this channel, its thought included."""
        read, thought = self.channel.parse(turn.response), split_thought(turn.response, self.tool.tags)[0]
        # a thought in the usual tags is none in the words of some families
        if turn.action is None or (read.action is not None and (read.thought is not None or thought is None)):
            return turn.response
        try:
            return self.channel.format(turn.action, thought or None)
        except TurngymError:
            # an action that this channel cannot carry stays what it was
            return turn.response

    def _instructed(self, system: str) -> str:
        """The recorded message, with the instructions of this channel in the place of another's."""
        for channel in (self.channel, *(make_channel(name, self.tool) for name in CHANNELS)):
            system = system.removesuffix(channel.instructions(self.tool)).rstrip()
        if self.renderer.describes_tool:
            return system
        return f"{system}\n\n{self.channel.instructions(self.tool)}".lstrip()
