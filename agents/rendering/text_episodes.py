"""Episodes of text alone, written as a model's token ids: what another agent said, as something to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.shown import Shown, read_exactly
from turngym.agents.rendering.token_history import TokenHistory
from turngym.envs.channels import Channel, make_channel, split_thought
from turngym.envs.core import ToolSpec, TurngymError
from turngym.envs.episode import Episode, Origin, Turn

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
