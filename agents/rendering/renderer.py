"""How a conversation becomes token ids: sampled ids are kept, and each turn tokenizes only its own suffix.

    prompt of turn 0            response 0    suffix of turn 1          response 1
    [system, user, assistant:]  [sampled]     [end, user, assistant:]   [sampled]     ...

`ChatRenderer` does this while an episode is played. `TextEpisodes` does it afterwards, for episodes that have text but
no ids (experts, endpoints, people).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.answer_messages import Message
from turngym.agents.rendering.chat_template import OBSERVATION, SYSTEM, ChatTemplate, ObservationRole, RenderError
from turngym.agents.rendering.memory import ALL, Example, Memory, by_category, of_category
from turngym.agents.rendering.skills import Skills
from turngym.agents.rendering.text_encoder import CACHE
from turngym.agents.rendering.token_history import IdBuffer, TokenHistory
from turngym.core.episode import Episode, Origin, Turn
from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.core.tools import Tools
from turngym.envs.channels import Channel, make_channel, split_thought
from turngym.envs.tool_calls import THINK, CallDialect, Thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
"""Token ids of the student; a tuple, so that jobs can be compared."""
CHANNELS = ("text", "tool")
BORDER = 64
"""Characters of a response that was cut, behind which the next prompt is tokenized."""
GENERATION_PROMPT = 64
"""More ids than any template writes between an observation and the answer."""
# samples of what templates may rewrite: line ends, quotes
PROBE_OBSERVATIONS = (OBSERVATION, "You arrive at shelf 1.\nOn the shelf 1, you see nothing.", "-= A =- 'b' \"c\"")


class ChatRenderer:
    """Token-in, token-out rendering with any Hugging Face chat template.

    A turn's prompt is the ids so far plus the newly tokenized suffix, as long as the template shows the conversation so
    far exactly as it was (text of the previous prompt, then the raw response). If it does not (Qwen3 drops earlier
    `<think>` blocks once a new user message arrives), a new segment opens with the whole history tokenized as its
    prompt. `history="append"` never rewrites: it appends what the template would write after any answer.

    Rendering everything at every turn would take time that grows with the square of the turns. So the template is
    probed once. If it is append-only, a turn renders its observation alone (cached by text), and each distinct response
    is checked once in a small conversation.

    Args:
        tokenizer, tool, thinking, observation_role, dialect, thoughts: see `ChatTemplate`.
        history: `template` lets the template rewrite the past; `append` keeps everything.
        memory: what a turn's prompt holds of the episode (`memory.Memory`); `ResponseWriter.present` applies it.

    Raises RenderError without a chat template, and for a role that it refuses.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool: Tools | None = None,
        thinking: bool | None = None,
        observation_role: ObservationRole = "user",
        history: Literal["template", "append"] = "template",
        stop_ids: Sequence[int] = (),
        dialect: CallDialect | None = None,
        thoughts: Thoughts = THINK,
        memory: Memory = ALL,
        examples: Sequence[Example] = (),
        skills: Skills | None = None,
    ) -> None:
        self.memory = memory
        self.skills = skills
        self.examples = by_category(examples)
        if history not in ("template", "append"):
            raise RenderError(f"history {history!r} is unknown; valid: 'template', 'append'")
        self.template = ChatTemplate(
            tokenizer,
            tool=tool,
            thinking=thinking,
            observation_role=observation_role,
            dialect=dialect,
            thoughts=thoughts,
        )
        self.stop_ids = tuple(dict.fromkeys((*self.template.stop_ids, *stop_ids)))
        """Ids that end a response."""
        self.describes_tool = self.template.describes_tool
        """Whether the template itself explains the tool, so that the system message need not."""
        self._stops = frozenset(self.stop_ids)
        self._append = history == "append"
        self._delta = lru_cache(CACHE)(self.template.delta_text)
        self._shown_unchanged = lru_cache(CACHE)(self._check_shown_unchanged)
        self.answer_ids = lru_cache(CACHE)(self._write_ids)
        """The ids of a response that nobody sampled, as they are in the whole conversation, and the end id."""
        self.append_only = self._append or self._probe()
        """Whether responses that the template leaves alone extend the ids without a full rendering."""
        try:
            for group in self.examples.values():
                self.template.render(self._opening(SYSTEM, OBSERVATION, group))
        except RenderError as error:
            # Mistral's allows no message of the user after the result of a call
            raise RenderError(
                f"examples cannot be shown as turns, show them as text (--examples.form text): {error}"
            ) from error

    def open(self, system: str, observation: str, category: str = "") -> TokenHistory:
        """A new conversation with its first prompt; `category` is the task's."""
        history = TokenHistory(appendable=self.append_only)
        self.restart(history, system, observation, category)
        return history

    def observe(self, history: TokenHistory, observation: str) -> None:
        """Append the next prompt: the template's closing of the last response, `observation`, the generation prompt."""
        previous = history.messages[-1]
        history.messages.append(self.template.observation(observation, previous))
        suffix = self._suffix(history, observation) if history.appendable else None
        if suffix is not None:
            self._extend(history, suffix)
            return
        history.appendable = False
        text = self._render_whole(history)
        before = "".join(history.pieces)
        if text.startswith(before):
            self._extend(history, text[len(before) :])
        else:
            self._open_segment(history, text)

    def _suffix(self, history: TokenHistory, observation: str) -> str | None:
        """What follows the last response; None if only rendering the whole conversation can tell."""
        response = history.response if self.template.form.structured and not self._append else None
        text = self._delta(observation, response)
        if text is None or history.last_id is None:
            return text
        # a sampled end id is already in the buffer, so the delta must not bring a second one
        end = self.template.text_of(history.last_id)
        if text.startswith(end):
            return text[len(end) :]
        # the response ended with another stop id than the template's own: only a full rendering can tell what follows
        return text if self._append else None

    def _render_whole(self, history: TokenHistory) -> str:
        try:
            return self.template.render(history.messages)
        except RenderError:
            # The answer holds special tokens and could not be split: GPT-OSS refuses its own channels as content.
            answer, observation = history.messages[-2:]
            plain = self.template.plain(answer)
            history.messages[-2:] = [plain, self.template.observation(observation["content"], plain)]
            return self.template.render(history.messages)

    def restart(self, history: TokenHistory, system: str, observation: str, category: str = "") -> None:
        """Open a segment whose prompt is a new conversation, without anything of the segments before."""
        if self.skills is not None:
            observation = self.skills.added_to(observation, category)
        history.messages = self._opening(system, observation, of_category(self.examples, category))
        self._open_segment(history, self.template.render(history.messages))

    def _opening(self, system: str, observation: str, examples: Sequence[Example]) -> list[Message]:
        """The messages of a first prompt."""
        if not examples:
            return self.template.opening(system, observation)
        messages: list[Message] = []
        for example in examples:
            for number, (seen, response) in enumerate(example.turns):
                if number:
                    messages.append(self.template.observation(seen, messages[-1]))
                else:
                    messages += [{"role": "user", "content": seen}] if messages else self.template.opening(system, seen)
                messages.append(self.template.answer(self.template.fit(response)))
            # a call needs its result; where observations are the user's, two of them must not follow each other
            closing = self.template.observation(example.final, messages[-1])
            messages += [closing] if closing["role"] == "tool" else []
        return [*messages, {"role": "user", "content": observation}]

    def respond(self, history: TokenHistory, ids: NDArray[np.int32]) -> str:
        """Record sampled `ids` int32 [R] unchanged; returns the response as text, without the stop id that ended it."""
        listed = ids.tolist()
        last = listed[-1] if listed and listed[-1] in self._stops else None
        answered = listed if last is None else listed[:-1]
        text = self.template.answer_text(answered)
        answer = self.template.said(answered, text)
        history.response_span = history.buffer.extend(ids)
        history.last_id = last
        history.awaiting = False
        history.response = answer
        history.messages.append(self.template.answer(answer))
        history.pieces.append(answer)
        if last is not None:
            history.pieces.append(self.template.text_of(last))
        if history.appendable and not self._append:
            history.appendable = self._shown_unchanged(answer)
        return text

    def write(self, history: TokenHistory, text: str) -> NDArray[np.int32]:
        """Record `text`, which the policy did not sample, as a response; returns `answer_ids`, int32 [R]."""
        ids = self.answer_ids(text)
        self.respond(history, ids)
        return ids

    def _write_ids(self, text: str) -> NDArray[np.int32]:
        template, encoder = self.template, self.template.encoder
        written = template.written(text)
        body_ids = encoder.encode_between(template.generation_prompt, written, template.end_text)
        if body_ids is None:
            warnings.warn(
                f"the tokenizer of {template.name!r} joins answers with the text around them: answers that nobody "
                f"sampled get other ids there than in the whole conversation, for one {excerpt(text, 40)!r}",
                stacklevel=4,
            )
            body_ids = template.encode(written, after=template.generation_prompt).tolist()
        end = () if template.end_id is None else (template.end_id,)
        return np.array((*body_ids, *end), np.int32)

    def _open_segment(self, history: TokenHistory, text: str) -> None:
        history.segments.append(IdBuffer())
        history.pieces = []
        self._extend(history, text)

    def _extend(self, history: TokenHistory, text: str) -> None:
        """Append `text` as the next prompt, tokenized as it stands behind what is there."""
        # an end token keeps apart what it stands between; behind an answer that was cut more may matter
        ended = history.last_id is not None and bool(history.pieces)
        after = "" if not history.pieces else history.pieces[-1] if ended else "".join(history.pieces[-2:])[-BORDER:]
        history.prompt_span = history.buffer.extend(self.template.encode(text, after))
        history.pieces.append(text)
        history.awaiting = True

    def _probe(self) -> bool:
        """Whether the template is append-only: each longer conversation is rendered as the shorter one plus a delta."""
        end = self.template.end_text
        samples = self.template.samples
        if end and not (self._delta(OBSERVATION, samples[0]) or "").startswith(end):
            return False
        # Turns 3 to 5 pair answers with other observations than turns 0 to 2. Six turns also show here, and not in the
        # middle of an episode, if a template refuses long conversations.
        turns = [(samples[i % len(samples)], PROBE_OBSERVATIONS[(i + i // 3) % 3]) for i in range(6)]
        return self._grows(turns)

    def _check_shown_unchanged(self, response: str) -> bool:
        """Whether the template shows `response` unchanged, both as the latest and as an earlier answer."""
        try:
            return self._grows([(response, OBSERVATION), (self.template.samples[0], OBSERVATION)])
        # special tokens inside content
        except RenderError:
            return False

    def _grows(self, turns: Sequence[tuple[str, str]]) -> bool:
        """Whether a conversation of these (answer, observation) turns is at each turn its prefix plus the delta."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One turn of a demonstration, as the student would have said it."""

    response: str
    """The response in the student's channel, thought included."""
    ids: Ids
    """The response as the student's ids, with the id that ended it if there was one."""
    exact: bool = False
    """Whether these are the very ids that the demonstrator drew."""
    origin: Origin = "demonstration"


def begun_response(renderer: ChatRenderer, shown: Shown, count: int, stops: Sequence[str]) -> tuple[Ids, bool]:
    """The first `count` ids of a response, and whether they hold a stop text, that is, the whole response.

    A response ends at the first of the texts `stops`. A cut inside a stop text moves in front of it, since engines look
    for stop texts in what they drew themselves and would miss one that was begun for them.
    """
    ids = shown.ids[:count]
    if any(stop in renderer.template.decode(ids) for stop in stops):
        return ids, True
    beginnings = tuple(stop[:cut] for stop in stops for cut in range(1, len(stop)))
    # ends at the latest with no ids at all, whose text ends in no stop text
    while renderer.template.decode(ids).endswith(beginnings):
        ids = ids[:-1]
    return ids, False


def read_exactly(renderer: ChatRenderer, ids: Sequence[int], response: str) -> bool:
    """Whether the renderer's tokenizer decodes `ids`, without one end id, to exactly `response`."""
    listed = [int(token) for token in ids]
    size = len(renderer.template.tokenizer)
    if not listed or not all(0 <= token < size for token in listed):
        return False
    response_ids = listed[:-1] if listed[-1] in renderer.stop_ids else listed
    return not set(response_ids) & set(renderer.stop_ids) and renderer.template.answer_text(response_ids) == response


def said_in(channel: Channel, tool: Tools, turn: Turn) -> str:
    """The response of `turn` in `channel`, its thought included; as it was written if the channel reads it."""
    read, thought = channel.parse(turn.response), split_thought(turn.response, tool.tags)[0]
    # a thought in the usual tags may not be a thought in this channel's style
    if turn.action is None or (read.action is not None and (read.thought is not None or thought is None)):
        return turn.response
    try:
        return channel.format(turn.action, thought or None)
    except TurngymError:
        # an action that this channel cannot express stays as it was written
        return turn.response


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEpisodes:
    """Gives ids to episodes that have none (experts, endpoints, people); others stay as they are.

    Each observation is rendered and each response tokenized as it stands, thought included, with the end id that the
    model would have to draw, unless it was cut. Nobody sampled these ids, so they have no log-probabilities. If
    `channel` does not read the recorded action in a response (bare actions, calls instead of tags), the action is
    written anew after the same thought. The system message is `system`, else the recorded one with the instructions of
    this channel. Turns from the first one that does not fit `max_context` ids are left out.
    """

    renderer: ChatRenderer
    channel: Channel
    tool: Tools
    system: str | None = None
    max_context: int | None = None

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [self.write(episode) for episode in episodes]

    def write(self, episode: Episode) -> Episode:
        """`episode` with segments and spans; unchanged if it has them."""
        return episode if episode.segments or not episode.turns else self.rewrite(episode)

    def rewrite(self, episode: Episode) -> Episode:
        """`episode` as if this model had played it: responses from `shown`, between this model's own prompts."""
        system = self._instructed(episode.system) if self.system is None else self.system
        history: TokenHistory | None = None
        turns: list[Turn] = []
        for turn in episode.turns:
            if history is None:
                history = self.renderer.open(system, turn.observation, episode.task.category)
            else:
                self.renderer.observe(history, turn.observation)
            demonstrated = self.shown(episode, turn)
            self.renderer.respond(history, np.array(demonstrated.ids, np.int32))
            if self.max_context is not None and history.buffer.size > self.max_context:
                break
            # without what was said of other ids
            written = replace(turn, logprobs=None, begun=0, version_spans=(), teacher=None, hint_prompt_ids=None)
            written = replace(written, response=demonstrated.response, segment=history.segment)
            if turn.is_cut and not turn.response:
                # a limit that thoughts used up leaves the end id alone, which would teach to say nothing
                written = replace(written, excluded=turn.excluded or "cut before it said anything")
            turns.append(replace(written, prompt_span=history.prompt_span, response_span=history.response_span))
        if history is None or not turns:
            return episode
        last = episode.final_observation if len(turns) == episode.depth else episode.turns[len(turns)].observation
        return replace(episode, system=system, turns=tuple(turns), segments=history.said(turns), final_observation=last)

    def fits(self, episode: Episode) -> bool:
        """Whether all turns of the rewritten `episode` fit `max_context` ids."""
        return self.max_context is None or self.rewrite(episode).depth == episode.depth

    def shown(self, episode: Episode, turn: Turn) -> Shown:
        """A turn of `episode` as this model would have said it.

        Sampled ids are kept if this tokenizer decodes them to the same text, this channel reads the text, and they
        followed the same generation prompt. Otherwise the response is tokenized, with the end id unless it was cut.
        """
        origin: Origin = "noise" if turn.origin == "noise" else "demonstration"
        response = said_in(self.channel, self.tool, turn)
        if response == turn.response and self._drawn_alike(episode, turn):
            ids = tuple(episode.response_ids(turn).tolist())
            return Shown(response=response, ids=ids, exact=True, origin=origin)
        # what was cut did not end: an end id behind it would teach to stop in mid-sentence
        cut = turn.is_cut and response == turn.response
        response = self.renderer.template.fit(response)
        ids = self.renderer.answer_ids(response).tolist()
        if cut and len(ids) > 1 and ids[-1] == self.renderer.template.end_id:
            del ids[-1]
        return Shown(response=response, ids=tuple(ids), origin=origin)

    def _drawn_alike(self, episode: Episode, turn: Turn) -> bool:
        # a turn without ids has no segment, either
        if not turn.response_length:
            return False
        if not read_exactly(self.renderer, episode.response_ids(turn).tolist(), turn.response):
            return False
        template = self.renderer.template
        before = episode.prompt_ids(turn)[-GENERATION_PROMPT:]
        if before.max(initial=0) >= len(template.tokenizer):
            return False
        # the end of a prompt is what the template writes before every answer
        return template.decode(before.tolist()).endswith(template.generation_prompt)

    def _instructed(self, system: str) -> str:
        """The recorded system message with this channel's instructions in place of another channel's."""
        for channel in (self.channel, *(make_channel(name, self.tool) for name in CHANNELS)):
            system = system.removesuffix(channel.instructions(self.tool)).rstrip()
        if self.renderer.describes_tool:
            return system
        return f"{system}\n\n{self.channel.instructions(self.tool)}".lstrip()
