"""The agent behind an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from turngym.agents.endpoint.client import (
    Address,
    ChatParameters,
    ContextOverflow,
    EndpointClient,
    EndpointError,
    EndpointOptions,
    EndpointTimeout,
    Sent,
)
from turngym.agents.endpoint.messages import NOTE, Answer, Prices, Transcript, Usage, add_ids, content_of, response_of
from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter
from turngym.agents.rendering.conversation import ALL, Memory, memory_of
from turngym.envs.channels import Channel, make_channel
from turngym.envs.core.episode import Origin, Status
from turngym.envs.core.errors import AgentError
from turngym.envs.core.event_loop import LoopThread
from turngym.envs.core.settings import json_object
from turngym.envs.core.task import ToolSpec

# streams beside those of the scripted agents
SEED_STREAM, PAUSE_STREAM = 3, 4
CLOSING = 5.0
"""Seconds that connections get to close."""
LEAST_TOKENS = 64
"""Below which an answer is not worth asking for, where the context is nearly full."""


@dataclass(frozen=True, slots=True)
class TranscriptWriter(ResponseWriter):
    """Writes what somebody else chose into the messages of a conversation."""

    def write_text(self, conversation: Conversation, text: str, origin: Origin = "policy") -> Reply:
        transcript = shown(conversation)
        transcript.answer(Answer(content=text), text)
        return Reply(text=text, finish="scripted", origin=origin)


class EndpointAgent:
    """Sends each waiting conversation to the endpoint as messages; all that wait are asked at once.

    Args:
        address: where the endpoint is.
        parameters: what is asked of it.
        channel: how the model writes actions; must be the environment's own. `tool`: the environment's tool is offered
            and structured calls are read; `text`: actions stand in the text.
        tool: the environment's tool.
        deadline, retries: see `EndpointOptions`.
        parallel: requests under way at a time.
        prices: for the cost.

    A request that fails for good ends its episode as `error_engine`, one without an answer by the deadline as
    `error_timeout`; a context that is full ends it as `truncated_tokens`. Failures before the first answer are raised:
    an endpoint that never worked is a mistake, not an accident. Turns are marked as demonstrations, for nobody knows
    the ids that were sampled; with `token_ids` they are the policy's own.

    Raises:
        AgentError: openai is not installed; from `respond`: an endpoint that never worked.
    """

    def __init__(
        self,
        address: Address,
        parameters: ChatParameters,
        channel: Channel,
        tool: ToolSpec,
        *,
        deadline: float = 600.0,
        retries: int = 6,
        parallel: int = 64,
        prices: Prices | None = None,
    ) -> None:
        for name, value, least in (("deadline", deadline, 0.001), ("retries", retries, 0), ("slots", parallel, 1)):
            if value < least:
                raise AgentError(f"{name} of an endpoint is {value:g}; it must be at least {least:g}")
        check_installed()
        self.address, self.parameters, self.channel, self.tool = address, parameters, channel, tool
        self.name = f"openai {parameters.model}"
        self.writer = TranscriptWriter()
        self._deadline, self._retries, self._parallel = deadline, retries, parallel
        self._prices = prices
        self._memory = memory_of(parameters.memory)
        self._started: tuple[LoopThread, EndpointClient] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # connections and threads stay where they are: a copy in another process opens its own
        return {**self.__dict__, "_started": None}

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        """One request for each that waits."""
        if not waiting:
            return []
        for conversation in waiting:
            self._check_channel(conversation)
            shown(conversation, self._memory)
        loop, client = self._open()
        results = loop.run(self._ask_all(client, waiting))
        failures = [result for result in results if isinstance(result, EndpointError)]
        if len(failures) == len(results) and not client.worked:
            raise _explained(failures[0])
        return [self._reply(conversation, result) for conversation, result in zip(waiting, results, strict=True)]

    def release(self, conversation: Conversation) -> None:
        conversation.memory.pop(TRANSCRIPT, None)

    def _open(self) -> tuple[LoopThread, EndpointClient]:
        if self._started is None:
            loop = LoopThread("turngym-endpoint")
            client = EndpointClient(
                address=self.address,
                model=self.parameters.model,
                deadline=self._deadline,
                retries=self._retries,
                parallel=self._parallel,
                tools=self.channel.name == "tool",
                ids=self.parameters.token_ids,
            )
            weakref.finalize(self, _close, loop, client)
            self._started = loop, client
        return self._started

    async def _ask_all(self, client: EndpointClient, waiting: Sequence[Conversation]) -> list[Sent | EndpointError]:
        return list(await asyncio.gather(*(self._ask(client, conversation) for conversation in waiting)))

    async def _ask(self, client: EndpointClient, conversation: Conversation) -> Sent | EndpointError:
        """The answer, asked for with fewer tokens where history and answer together do not fit the context."""
        where = f"{conversation.task.task_id} sample {conversation.sample}, turn {conversation.turn}"
        tokens = min(self.parameters.max_tokens, self._room(conversation))
        if tokens < 1:
            return ContextOverflow(f"{where}: the context of {self.parameters.max_context} tokens is full")
        body, rng = self._body(conversation), conversation.rng(PAUSE_STREAM)
        while True:
            try:
                return await client.ask({**body, "max_tokens": tokens}, rng, where)
            except ContextOverflow as error:
                if tokens <= LEAST_TOKENS:
                    return error
                tokens = max(tokens // 4, LEAST_TOKENS)
            except EndpointError as error:
                return error

    def _room(self, conversation: Conversation) -> int:
        most = self.parameters.max_context
        used = int(conversation.memory.get(TOKENS, 0))
        return self.parameters.max_tokens if most is None else most - used

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        asked = self.parameters
        body: dict[str, Any] = {
            "model": asked.model,
            "messages": conversation.memory[TRANSCRIPT].messages,
            "temperature": asked.temperature,
        }
        if asked.send_seed:
            # llama.cpp's seeds have 32 bits, and the largest of them asks for a random one
            body["seed"] = int(conversation.rng(SEED_STREAM).integers(1 << 31))
        stops = self.channel.stop_text
        if self.channel.name == "tool":
            body["tools"] = [self.tool.schema()]
            # the end of a call is the server's to find
            stops = tuple(stop for stop in stops if stop != "</tool_call>")
        if asked.send_stop and stops:
            body["stop"] = list(stops)
        if asked.token_ids:
            body |= {"return_token_ids": True, "logprobs": True}
        return body | dict(asked.extra)

    def _reply(self, conversation: Conversation, result: Sent | EndpointError) -> Reply:
        if isinstance(result, ContextOverflow):
            return Reply(ends=Status.TRUNCATED_TOKENS, error=str(result))
        if isinstance(result, EndpointError):
            late = isinstance(result, EndpointTimeout)
            return Reply(ends=Status.ERROR_TIMEOUT if late else Status.ERROR_ENGINE, error=str(result))
        answer = result.answer
        self._note(conversation, answer, result.retries)
        text = content_of(answer, self.channel)
        conversation.memory[TRANSCRIPT].answer(answer, text, reasoning=self.parameters.reasoning_back == "send")
        origin: Origin = "demonstration"
        if self.parameters.token_ids and answer.ids is not None:
            origin, conversation.thread = "policy", add_ids(conversation.thread, answer.ids)
        return Reply(
            text=response_of(answer, text),
            logprobs=answer.ids.logprobs if origin == "policy" and answer.ids is not None else None,
            finish=answer.finish,
            origin=origin,
        )

    def _note(self, conversation: Conversation, answer: Answer, retries: int) -> None:
        used = replace(answer.usage, retries=retries, cut_off=int(answer.finish == "length"))
        if self._prices is not None:
            used = replace(used, cost=self._prices.cost(used))
        # where the next prompt is written anew it is about as long as this one, whatever was answered
        grown = used.completion_tokens if self.parameters.memory == "all" else 0
        conversation.memory[TOKENS] = used.prompt_tokens + grown
        total = conversation.memory.get(USED, Usage()) + used
        conversation.memory[USED] = total
        conversation.notes[NOTE] = total.to_json()

    def _check_channel(self, conversation: Conversation) -> None:
        theirs = None if conversation.channel is None else conversation.channel.name
        if theirs != self.channel.name:
            raise AgentError(
                f"agent {self.name!r} writes actions in channel {self.channel.name!r}, but the environment reads "
                f"{theirs!r}: make both with the same channel"
            )


TRANSCRIPT, TOKENS, USED = "endpoint.transcript", "endpoint.tokens", "endpoint.usage"
"""What a conversation's memory holds: its messages, the size of the last request and answer, and all that was used."""


def shown(conversation: Conversation, memory: Memory = ALL) -> Transcript:
    """The messages that are sent: what `memory` shows of the episode, the waiting observation last."""
    transcript: Transcript = conversation.memory.setdefault(TRANSCRIPT, Transcript())
    if transcript.observed == conversation.turn:
        prompt = memory.prompt(conversation.statement, conversation.past, conversation.observation)
        if prompt is not None:
            transcript.forget()
        transcript.observe(conversation.system, conversation.observation if prompt is None else prompt)
    return transcript


def _explained(failure: EndpointError) -> EndpointError:
    """The failure of an endpoint that never worked."""
    if not isinstance(failure, ContextOverflow):
        return failure
    return EndpointError(f"{failure}. The first prompt alone fills the context, or --max-context is too small")


def _close(loop: LoopThread, client: EndpointClient) -> None:
    # connections belong to their loop and can only be closed there
    with suppress(TimeoutError):
        loop.start(client.close()).result(CLOSING)
    loop.close()


def check_installed() -> None:
    """Raises AgentError without the client library."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise AgentError("an endpoint needs the openai package: pip install 'turngym[endpoint]'") from error


# Opens the agent that `openai:MODEL` names, from the options of agents.

MAX_TOKENS = 4096
"""Where the caller does not say: room for a thought, and an end to an answer that has none."""
RESERVED = ("model", "messages", "tools", "stream", "n", "temperature", "seed", "max_tokens", "max_completion_tokens")


def open_endpoint(
    model: str,
    options: EndpointOptions,
    tool: ToolSpec,
    *,
    channel: str,
    temperature: float,
    thinking: Literal["auto", "on", "off"],
    max_tokens: int | None,
    max_context: int | None,
    memory: str,
    slots: int,
) -> EndpointAgent:
    """The agent; nothing is sent yet. Raises AgentError for settings that cannot be."""
    if max_tokens is not None and max_tokens < 1:
        raise AgentError(f"--max-new-tokens is {max_tokens}; an answer needs at least 1")
    parameters = ChatParameters(
        model=model,
        temperature=temperature,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        max_context=max_context,
        send_stop=options.send_stop,
        send_seed=options.send_seed,
        reasoning_back=options.reasoning_back,
        token_ids=options.token_ids,
        memory=memory,
        extra=_extra(options.extra_body, thinking),
    )
    return EndpointAgent(
        Address.of(options.base_url, options.key_env),
        parameters,
        # text: it works at every endpoint, and a trace of it reads the same whoever played
        make_channel("text" if channel == "auto" else channel, tool),
        tool,
        deadline=options.request_deadline,
        retries=options.request_retries,
        parallel=slots,
        prices=Prices.of(options.price_in, options.price_cached, options.price_out),
    )


def _extra(text: str, thinking: str) -> dict[str, Any]:
    extra = json_object("--extra-body", text)
    taken = [name for name in RESERVED if name in extra]
    if taken:
        raise AgentError(f"--extra-body sets {', '.join(taken)}: agents and their other options say that")
    if thinking != "auto":
        # where vLLM and SGLang take variables of the chat template
        given = extra.get("chat_template_kwargs")
        known = given if isinstance(given, dict) else {}
        extra["chat_template_kwargs"] = {**known, "enable_thinking": thinking == "on"}
    return extra
