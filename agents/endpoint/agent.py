"""The agent behind an OpenAI-compatible chat endpoint: `EndpointAgent`, and `open_endpoint`, which makes it.

Each turn of an episode is one chat completion. The messages grow with the episode (`Transcript`), and what the endpoint
answers becomes the response that the environment reads (`messages`).
"""

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
from turngym.agents.endpoint.messages import (
    NOTE,
    Answer,
    Prices,
    Transcript,
    Usage,
    add_ids,
    content_of,
    example_messages,
    response_of,
)
from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter
from turngym.agents.rendering.conversation import ALL, Example, Memory, memory_of
from turngym.envs.channels import Channel
from turngym.envs.core.episode import Origin, Status
from turngym.envs.core.errors import AgentError
from turngym.envs.core.settings import json_object
from turngym.envs.core.task import ToolSpec
from turngym.retrieval.outgoing import LoopThread

# random streams; the scripted agents use 0 to 2
SEED_STREAM, PAUSE_STREAM = 3, 4
CLOSING = 5.0
"""Seconds that connections get to close."""
LEAST_TOKENS = 64
"""Fewest tokens to ask for when the context is nearly full."""
TRANSCRIPT, TOKENS, USED = "endpoint.transcript", "endpoint.tokens", "endpoint.usage"
"""Keys in a conversation's memory: its messages, the tokens of the last request and answer, and the usage so far."""


@dataclass(frozen=True, slots=True)
class TranscriptWriter(ResponseWriter):
    """Writes a response that the endpoint did not choose into the messages of a conversation."""

    examples: Sequence[dict[str, Any]] = ()

    def write_text(self, conversation: Conversation, text: str, origin: Origin = "policy") -> Reply:
        transcript = transcript_of(conversation, examples=self.examples)
        transcript.answer(Answer(content=text), text)
        return Reply(text=text, finish="scripted", origin=origin)


class EndpointAgent:
    """Asks the endpoint about all waiting conversations at the same time.

    A request that fails for good ends its episode as `error_engine`, one without an answer by the deadline as
    `error_timeout`; a full context ends it as `truncated_tokens`. Failures before the first answer are raised instead,
    since an endpoint that never worked is probably a wrong setting. Turns are marked as demonstrations, because the
    sampled ids are unknown; with `token_ids` they are the policy's own.

    Args:
        address: address of the endpoint.
        parameters: fields of every request.
        channel: how the model writes actions; must be the environment's channel. With `tool` the environment's tool is
            offered and structured calls are read; with `text` actions are part of the text.
        tool: the environment's tool.
        deadline, retries: see `EndpointOptions`.
        parallel: most requests in flight.
        prices: prices for computing the cost.
        examples: episodes that stand as earlier messages in front of every episode.

    Raises AgentError if httpx is not installed, and from `respond` if the endpoint never worked.
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
        examples: Sequence[Example] = (),
    ) -> None:
        for name, value, least in (("deadline", deadline, 0.001), ("retries", retries, 0), ("slots", parallel, 1)):
            if value < least:
                raise AgentError(f"{name} of an endpoint is {value:g}; it must be at least {least:g}")
        try:
            import httpx  # noqa: F401
        except ImportError as error:
            raise AgentError("an endpoint needs httpx: pip install 'turngym[endpoint]'") from error
        self.address, self.parameters, self.channel, self.tool = address, parameters, channel, tool
        self.name = f"openai {parameters.model}"
        self._examples = example_messages(examples, channel, tool)
        self.writer = TranscriptWriter(examples=self._examples)
        self._deadline, self._retries, self._parallel = deadline, retries, parallel
        self._prices = prices
        self._memory = memory_of(parameters.memory)
        self._started: tuple[LoopThread, EndpointClient] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # connections and threads stay in this process; a copy in another process opens its own
        return {**self.__dict__, "_started": None}

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        """One request for each waiting conversation."""
        if not waiting:
            return []
        for conversation in waiting:
            theirs = None if conversation.channel is None else conversation.channel.name
            if theirs != self.channel.name:
                raise AgentError(
                    f"agent {self.name!r} writes actions in channel {self.channel.name!r}, but the environment reads "
                    f"{theirs!r}: make both with the same channel"
                )
            transcript_of(conversation, self._memory, self._examples)
        loop, client = self._open()

        async def ask_all() -> list[Sent | EndpointError]:
            return await asyncio.gather(*(self._ask(client, conversation) for conversation in waiting))

        results = loop.run(ask_all())
        failures = [result for result in results if isinstance(result, EndpointError)]
        if len(failures) == len(results) and not client.worked:
            failure = failures[0]
            if isinstance(failure, ContextOverflow):
                hint = "The first prompt alone fills the context, or --max-context is too small"
                failure = EndpointError(f"{failure}. {hint}")
            raise failure
        return [self._reply(conversation, result) for conversation, result in zip(waiting, results, strict=True)]

    def release(self, conversation: Conversation) -> None:
        """Forget the messages of `conversation`."""
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

    async def _ask(self, client: EndpointClient, conversation: Conversation) -> Sent | EndpointError:
        """The answer, requested with fewer tokens if history and answer together do not fit the context."""
        where = f"{conversation.task.task_id} sample {conversation.sample}, turn {conversation.turn}"
        tokens, context = self.parameters.max_tokens, self.parameters.max_context
        if context is not None:
            tokens = min(tokens, context - int(conversation.memory.get(TOKENS, 0)))
        if tokens < 1:
            return ContextOverflow(f"{where}: the context of {context} tokens is full")
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

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        asked = self.parameters
        body: dict[str, Any] = {
            "model": asked.model,
            "messages": conversation.memory[TRANSCRIPT].messages,
            "temperature": asked.temperature,
        }
        if asked.send_seed:
            # llama.cpp's seeds have 32 bits, and it takes the largest of them as a request for a random seed
            body["seed"] = int(conversation.rng(SEED_STREAM).integers(1 << 31))
        stops = self.channel.stop_text
        if self.channel.name == "tool":
            body["tools"] = [self.tool.schema()]
            # the server finds the end of a call itself
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
        # with a limited memory the next prompt does not contain the answer, and is about as long as this one
        grown = used.completion_tokens if self.parameters.memory == "all" else 0
        conversation.memory[TOKENS] = used.prompt_tokens + grown
        total = conversation.memory.get(USED, Usage()) + used
        conversation.memory[USED] = total
        conversation.notes[NOTE] = total.to_json()


def transcript_of(
    conversation: Conversation, memory: Memory = ALL, examples: Sequence[dict[str, Any]] = ()
) -> Transcript:
    """The messages of the next request: what `memory` shows of the episode, then the current observation."""
    transcript: Transcript = conversation.memory.setdefault(TRANSCRIPT, Transcript(examples=examples))
    if transcript.observed == conversation.turn:
        prompt = memory.prompt(conversation.statement, conversation.past, conversation.observation)
        if prompt is not None:
            transcript.forget()
        transcript.observe(conversation.system, conversation.observation if prompt is None else prompt)
    return transcript


def _close(loop: LoopThread, client: EndpointClient) -> None:
    # connections belong to their loop and can only be closed there
    with suppress(TimeoutError):
        loop.start(client.close()).result(CLOSING)
    loop.close()


MAX_TOKENS = 4096
"""Most tokens of an answer by default: enough for a thought, and a limit for an answer that does not end."""
RESERVED = ("model", "messages", "tools", "stream", "n", "temperature", "seed", "max_tokens", "max_completion_tokens")


def open_endpoint(
    model: str,
    options: EndpointOptions,
    tool: ToolSpec,
    *,
    channel: Channel,
    examples: Sequence[Example] = (),
    temperature: float,
    thinking: Literal["auto", "on", "off"],
    max_tokens: int | None,
    max_context: int | None,
    memory: str,
    slots: int,
) -> EndpointAgent:
    """The agent that `openai:MODEL` names; nothing is sent yet. Raises AgentError for invalid settings."""
    if max_tokens is not None and max_tokens < 1:
        raise AgentError(f"--max-new-tokens is {max_tokens}; an answer needs at least 1")
    extra = json_object("--extra-body", options.extra_body)
    if taken := [name for name in RESERVED if name in extra]:
        raise AgentError(f"--extra-body sets {', '.join(taken)}: other options, or the agent itself, set that")
    if thinking != "auto":
        # vLLM and SGLang read variables of the chat template from this field
        given = extra.get("chat_template_kwargs")
        known = given if isinstance(given, dict) else {}
        extra["chat_template_kwargs"] = {**known, "enable_thinking": thinking == "on"}
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
        extra=extra,
    )
    return EndpointAgent(
        Address.of(options.base_url, options.key_env),
        parameters,
        channel,
        tool,
        deadline=options.request_deadline,
        retries=options.request_retries,
        parallel=slots,
        prices=Prices.of(options.price_in, options.price_cached, options.price_out),
        examples=examples,
    )
