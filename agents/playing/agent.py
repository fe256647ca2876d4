"""What an agent is: it sees waiting conversations and answers each of them.

`Conversation` is what it sees, `Reply` is what it answers, `ResponseWriter` turns a known action into a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.memory import ALL, Memory, PastTurn, chat_messages
from turngym.agents.rendering.renderer import ChatRenderer, Ids, Shown
from turngym.agents.rendering.token_history import TokenHistory
from turngym.core.episode import Origin, Status
from turngym.core.errors import AgentError
from turngym.core.protocols import Sampling
from turngym.core.task import Task, task_number
from turngym.core.tools import ToolSet
from turngym.envs.base import TextEnv
from turngym.envs.channels import Channel, ToolChannel
from turngym.envs.guard import ActionGuard


def reset_seed(task_id: str, seed: int) -> int:
    """The seed of an environment's reset, the same for all samples of a task."""
    return task_number(task_id) + seed


def system_message(env: ActionGuard | TextEnv, channel: Channel | None, renderer: ChatRenderer | None) -> str:
    """The default system message: the environment's instructions, and the channel's unless the chat template gives
    them."""
    if renderer is not None and renderer.describes_tool:
        return env.instructions
    parts = [env.instructions]
    # a text channel describes the tools itself; without a renderer, calls have them beside the messages
    untold = channel is None or (isinstance(channel, ToolChannel) and renderer is not None)
    if untold and isinstance(env.tool, ToolSet):
        parts.append(f"An action is {env.tool.said}")
    return "\n\n".join(parts if channel is None else (*parts, channel.instructions(env.tool)))


def with_stops(sampling: Sampling, channel: Channel | None, renderer: ChatRenderer | None) -> Sampling:
    """`sampling` with the renderer's stop ids and, unless it has stop texts of its own, the channel's."""
    ids = () if renderer is None else renderer.stop_ids
    text = sampling.stop_text or (() if channel is None else channel.stop_text)
    return replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *ids))), stop_text=text)


@dataclass(slots=True)
class Conversation:
    """One episode in progress, as its agent sees it. The driver owns and updates it."""

    task: Task
    seed: int
    sample: int
    system: str
    """The system message."""
    observation: str
    """The observation that waits for an answer."""
    admissible: tuple[str, ...] | None
    env: ActionGuard
    key: str
    """Unique among the conversations of one rollout."""
    turn: int = 0
    """Number of the turn that waits, 0-based."""
    played: str | None = None
    """The action that reached the environment in the turn before; None if there was none."""
    thread: TokenHistory | None = None
    """Token ids; None for text-only agents."""
    begun: Ids = ()
    """Ids with which the next answer has already begun; agents that sample ids continue them."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the agent keeps for the length of the episode."""
    statement: str = ""
    """The task in the environment's words: `TextEnv.statement`, else the first observation."""
    past: list[PastTurn] = field(default_factory=list)
    """The turns that were played."""
    listing: str = ""
    """The list of admissible actions that ends `observation`; "" if none does."""
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON values that the agent adds to `meta` of the episode's record."""

    @property
    def channel(self) -> Channel | None:
        """How the environment reads actions; None if the response is the action."""
        return self.env.channel

    @property
    def stream(self) -> tuple[int, int, int, int]:
        """Entropy of this turn's random stream: (seed, task number, sample, turn)."""
        return self.seed, task_number(self.task.task_id), self.sample, self.turn

    def messages(self, memory: Memory = ALL) -> list[dict[str, str]]:
        """The prompt of this turn as chat messages, for agents that take text."""
        return chat_messages(memory, self.system, self.statement, self.past, self.observation, self.admissible)

    def rng(self, *purpose: int) -> np.random.Generator:
        """This turn's own random stream (one per `purpose`); the same whatever else is being played."""
        return np.random.default_rng((*self.stream, *purpose))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An agent's answer to one conversation: a response, or the reason why the episode ends without one."""

    text: str = ""
    """The response as the environment reads it, without the end token."""
    logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the sampled ids under the sampling distribution, float32 [R]."""
    finish: str = "stop"
    policy_version: int = 0
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """(policy version, start, end) of stretches of the ids, if more than one version drew them."""
    origin: Origin = "policy"
    begun: int = 0
    """Number of first ids of the response that were given (`Conversation.begun`)."""
    ends: Status | None = None
    """Set if the agent cannot answer: the status of the episode, which ends before this turn. With `logprobs`, the
    response was aborted: its ids so far are recorded as the last turn, and the environment never sees it."""
    error: str = ""


class Agent(Protocol):
    """Answers conversations. An answer depends on its conversation alone, never on what else is waiting."""

    @property
    def name(self) -> str: ...

    @property
    def writer(self) -> ResponseWriter:
        """Writes actions that somebody else chose (demonstrations) into a conversation."""

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        """One reply per conversation, in order. Token ids of the response go into `conversation.thread`."""

    def release(self, conversation: Conversation) -> None:
        """Forget what is kept for `conversation`, which is over."""


@runtime_checkable
class ConcurrentAgent(Agent, Protocol):
    """An agent that waits for somebody else (a server, a person) and can answer other conversations meanwhile.

    Rollouts ask it through `submit`: every conversation goes on as soon as its own answer is there, and none waits for
    the slowest. Agents that compute their answers do better with batches, through `respond` alone.
    """

    def submit(self, waiting: Sequence[Conversation]) -> list[Future[Reply]]:
        """Begin to answer; one future per conversation, in order, whose result is what `respond` would have returned.

        Called from one thread, again and again, while earlier answers are outstanding. A conversation is not touched
        by anybody else until its future is done. A future that is cancelled is no longer wanted.
        """


def check_channel(name: str, channel: Channel | None, conversation: Conversation) -> None:
    """Raises AgentError where the agent `name` writes actions in another channel than the environment reads."""
    mine, theirs = (None if side is None else side.name for side in (channel, conversation.channel))
    if mine != theirs:
        raise AgentError(
            f"agent {name!r} writes actions in channel {mine!r}, but the environment reads {theirs!r}: make both with "
            "the same channel"
        )


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Turns a known action into a response: text in the environment's channel, and token ids if there is a renderer.

    A response that does not fit ends the episode as `truncated_tokens`, as it does where a model answers.
    """

    renderer: ChatRenderer | None = None
    max_context: int | None = None
    """Most ids of a segment, prompt and response together; None: no limit."""

    def present(self, conversation: Conversation) -> TokenHistory | None:
        """Render the waiting observation as the thread's next prompt. Does nothing the second time."""
        if self.renderer is None:
            return None
        thread = conversation.thread
        if thread is not None and thread.awaiting:
            return thread
        observation = conversation.observation
        prompt = self.renderer.memory.prompt(
            conversation.statement, conversation.past, observation, conversation.admissible
        )
        if thread is None:
            first = observation if prompt is None else prompt
            conversation.thread = self.renderer.open(conversation.system, first, conversation.task.category)
        elif prompt is None:
            self.renderer.observe(thread, observation)
        else:
            self.renderer.restart(thread, conversation.system, prompt, conversation.task.category)
        return conversation.thread

    def write(self, conversation: Conversation, action: str, origin: Origin = "policy") -> Reply:
        """Answer with `action`."""
        channel = conversation.channel
        return self.write_text(conversation, action if channel is None else channel.format(action), origin)

    def show(self, conversation: Conversation, turn: Shown) -> Reply:
        """Answer with a turn of a demonstration, keeping its ids."""
        thread = self.present(conversation)
        if thread is None or self.renderer is None:
            return Reply(text=turn.response, finish="scripted", origin=turn.origin)
        return self._record(thread, self.renderer, np.array(turn.ids, np.int32), turn.origin)

    def write_text(self, conversation: Conversation, text: str, origin: Origin = "policy") -> Reply:
        """Answer with `text` as it stands."""
        thread = self.present(conversation)
        if thread is None or self.renderer is None:
            return Reply(text=text, finish="scripted", origin=origin)
        text = self.renderer.template.fit(text)
        return self._record(thread, self.renderer, self.renderer.answer_ids(text), origin, text)

    def _record(
        self,
        thread: TokenHistory,
        renderer: ChatRenderer,
        ids: NDArray[np.int32],
        origin: Origin,
        text: str | None = None,
    ) -> Reply:
        """Record `ids` as the response; its text is `text`, by default what the ids say."""
        if self.max_context is not None and thread.buffer.size + len(ids) > self.max_context:
            return Reply(ends=Status.TRUNCATED_TOKENS)
        decoded = renderer.respond(thread, ids)
        return Reply(text=text or decoded, finish="scripted", origin=origin)
