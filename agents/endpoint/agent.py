"""The agent behind an OpenAI-compatible chat endpoint, which `openai:MODEL` names.

Each turn of an episode is one chat completion. The messages grow with the episode (`Transcript`), and what the endpoint
answers becomes the response that the environment reads (`messages`).
"""

from __future__ import annotations

import asyncio
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from turngym.agents.endpoint.answer_reader import ChatAnswer, Expected
from turngym.agents.endpoint.client import (
    Address,
    ContextOverflow,
    EndpointClient,
    EndpointError,
    EndpointTimeout,
    RequestRefused,
)
from turngym.agents.endpoint.handshake import LEAST_TOKENS, check_needs, shake_hands
from turngym.agents.endpoint.logprob_check import SampledCheck, sampled_fields
from turngym.agents.endpoint.messages import Transcript, add_ids, content_of, example_messages, response_of
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.endpoint.profile import EndpointProfile
from turngym.agents.endpoint.usage import NOTE, PROFILE, Prices, Usage
from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter, check_channel
from turngym.agents.rendering.memory import ALL, Example, Memory, by_category, of_category
from turngym.core.episode import Origin, Status
from turngym.core.errors import AgentError
from turngym.core.http_client import LoopThread
from turngym.core.plugins import need
from turngym.core.spec import changed
from turngym.core.strict_json import json_object
from turngym.core.tools import Tools
from turngym.envs.channels import Channel

# random streams; the scripted agents use 0 to 2
SEED_STREAM, PAUSE_STREAM, HANDSHAKE_STREAM = 3, 4, 5
CLOSING = 5.0
"""Seconds that connections get to close."""
MAX_TOKENS = 4096
"""Most tokens of an answer by default: enough for a thought, and a limit for an answer that does not end."""
RESERVED = ("model", "messages", "tools", "stream", "n", "temperature", "seed", "max_tokens", "max_completion_tokens")
TRANSCRIPT, TOKENS, USED, SEEN = "endpoint.transcript", "endpoint.tokens", "endpoint.usage", "endpoint.seen"
"""Keys in a conversation's memory: its messages, the tokens of the last request and answer, the usage so far, and how
long the server counted its prompts to be (`Seen`)."""
STALLED = 3
"""So many prompts in a row that grew while the server's count of them did not are no accident."""


@dataclass(frozen=True, slots=True)
class TranscriptWriter(ResponseWriter):
    """Writes a response that the endpoint did not choose into the messages of a conversation."""

    examples: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=lambda: {"": ()})

    def write_text(self, conversation: Conversation, text: str, origin: Origin = "policy") -> Reply:
        transcript = transcript_of(conversation, ALL, self.examples)
        transcript.answer(ChatAnswer(content=text), text)
        return Reply(text=text, finish="scripted", origin=origin)


@dataclass(slots=True)
class Seen:
    """The longest prompt of a conversation by the server's count: a server that cuts prompts may say nothing of it.

    Ollama does so at its `num_ctx`. A count that stands still once is no proof: routers change servers, and some
    servers count only what they had not cached. So prompts must have grown several times, and by a tenth.
    """

    tokens: int = 0
    characters: int = 0
    stalled: int = 0
    """Prompts in a row since then that had more characters and no more tokens."""

    def cut(self, tokens: int, characters: int) -> bool:
        """Take in the next prompt; whether the server seems to have cut the latest ones."""
        # a server that drops the oldest messages counts some more or less each time
        if tokens > 1.02 * self.tokens:
            self.tokens, self.characters, self.stalled = tokens, characters, 0
            return False
        self.stalled += tokens > 0 and characters > self.characters
        return self.stalled >= STALLED and characters > 1.1 * self.characters


@dataclass(slots=True)
class SubmittedRows:
    """Rows that were submitted together. A failure before the endpoint's first answer is judged when all rows are
    known: if all failed, the endpoint is wrong; if one has an answer, the others are failed episodes."""

    open: int
    """Rows of which nothing is known."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether the endpoint works."""

    def one_less(self, works: bool) -> None:
        self.open -= 1
        if works or not self.open:
            self.known.set()


class EndpointAgent:
    """A `ConcurrentAgent` that asks the endpoint: one request for each waiting conversation.

    A request that fails for good ends its episode as `error_engine`, one without an answer by the deadline as
    `error_timeout`; a full context ends it as `truncated_tokens`. Failures before the first answer are raised instead,
    since an endpoint that never worked is probably a wrong setting. Turns are marked as demonstrations, because the
    sampled ids are unknown; with `token_ids` they are the policy's own.

    Args:
        channel: how the model writes actions; must be the environment's channel. With `tool` the environment's tool is
            offered and structured calls are read; with `text` actions are part of the text.
        thinking: `on` and `off` set `enable_thinking` of the chat template, which vLLM and SGLang read; `auto` says
            nothing.
        max_tokens: most tokens of an answer; None: `MAX_TOKENS`.
        max_context: most tokens of history and answer together, by the server's count; None: what the server takes.
        examples: episodes that stand as earlier messages in front of every episode, or of those of their category.

    Nothing is sent before `respond`. Raises AgentError for invalid settings, and from `respond` if the endpoint
    never worked; MissingExtra if httpx is not installed.
    """

    def __init__(
        self,
        model: str,
        options: EndpointOptions,
        channel: Channel,
        tool: Tools,
        *,
        temperature: float = 0.85,
        thinking: Literal["auto", "on", "off"] = "auto",
        max_tokens: int | None = None,
        max_context: int | None = None,
        memory: Memory = ALL,
        parallel: int = 64,
        examples: Sequence[Example] = (),
    ) -> None:
        need("httpx", "an endpoint", "endpoint")
        self._thinking = thinking
        self.extra = json_object("--extra-body", options.extra_body)
        if reserved := [name for name in RESERVED if name in self.extra]:
            raise AgentError(f"--extra-body sets {', '.join(reserved)}: other options, or the agent itself, set that")
        # read at once: what cannot be meant is refused before anything is sent
        self._sampled_fields = sampled_fields(self.extra) if options.token_ids else {}
        if thinking != "auto":
            # vLLM and SGLang read variables of the chat template from this field
            template_kwargs = self.extra.get("chat_template_kwargs")
            kwargs = template_kwargs if isinstance(template_kwargs, dict) else {}
            self.extra["chat_template_kwargs"] = {**kwargs, "enable_thinking": thinking == "on"}
        self.address = Address.of(options.base_url, options.key_env)
        self.model, self.options, self.channel, self.tool = model, options, channel, tool
        self.temperature, self.memory, self.max_context = temperature, memory, max_context
        self.max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
        self.name = f"openai {model}"
        self._parallel = parallel
        self._prices = Prices.of(options.price_in, options.price_cached, options.price_out)
        groups = by_category(examples)
        if options.reasoning_back == "send" and memory != ALL:
            raise AgentError(
                f"--reasoning-back send needs a prompt that holds the whole conversation: with --memory {memory.name} "
                "earlier turns are text, without reasoning; leave one of the two out"
            )
        self._examples = {name: example_messages(group, channel, tool) for name, group in groups.items()}
        self.writer = TranscriptWriter(examples=self._examples)
        self._sampled = SampledCheck(self.name, temperature) if options.token_ids else None
        self.profile: EndpointProfile | None = None
        """What the handshake has found; None before it, and without one."""
        self._started: tuple[LoopThread, EndpointClient] | None = None
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # connections and threads stay in this process; a copy in another process opens its own, and asks for itself
        sampled = None if self._sampled is None else SampledCheck(self.name, self.temperature)
        return {**self.__dict__, "_started": None, "_sampled": sampled}

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        """The answers to all of `waiting`, once the last of them is there."""
        futures = self.submit(waiting)
        try:
            # ends: each request has a deadline
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def submit(self, waiting: Sequence[Conversation]) -> list[Future[Reply]]:
        """Send one request for each waiting conversation; at most `parallel` are under way, the others queue.

        The first call shakes hands before it does.
        """
        for conversation in waiting:
            check_channel(self.name, self.channel, conversation)
            transcript_of(conversation, self.memory, self._examples)
        if waiting and self.options.handshake and self.profile is None:
            self.shake_hands()
        loop, client = self._open()
        submitted = SubmittedRows(len(waiting))
        return [loop.start(self._answer(client, conversation, submitted)) for conversation in waiting]

    def release(self, conversation: Conversation) -> None:
        """Forget the messages of `conversation`."""
        conversation.memory.pop(TRANSCRIPT, None)

    def shake_hands(self) -> EndpointProfile:
        """Find out what the server takes and what it answers, with two short requests, and keep to it.

        Says on standard error how it differs from most. Raises AgentError for a server that cannot be played so.
        """
        loop, client = self._open()
        rng = np.random.default_rng(HANDSHAKE_STREAM)
        tokens = self.max_tokens if self.max_context is None else min(self.max_tokens, self.max_context)
        fields = {**self._fields(rng), "max_tokens": tokens}
        profile, used, findings = loop.run(shake_hands(client, fields, self.channel, self.tool, rng, self._sampled))
        priced, capped = self._prices is not None, self.max_context is not None
        check_needs(profile, used, name=self.name, prices=priced, max_context=capped, token_ids=self.options.token_ids)
        if findings:
            print(f"{self.name}: the server {'; '.join(findings)}", file=sys.stderr)
        used = used if self._prices is None else changed(used, cost=self._prices.cost(used))
        self.profile = replace(profile, used=used.to_json())
        return self.profile

    def _open(self) -> tuple[LoopThread, EndpointClient]:
        if self._started is None:
            loop = LoopThread("turngym-endpoint")
            tools = tuple(tool.name for tool in self.tool.tools) if self.channel.name == "tool" else ()
            client = EndpointClient(
                address=self.address,
                model=self.model,
                deadline=self.options.request_deadline,
                retries=self.options.request_retries,
                parallel=self._parallel,
                expected=Expected(
                    model=self.model,
                    tools=tools,
                    thoughts=self._thinking != "off",
                    logprobs=self.options.token_ids,
                ),
                ids=self.options.token_ids,
                # a copy in another process keeps to what was found
                profile=self.profile or EndpointProfile(reasoning=self.options.reasoning_back == "send"),
            )
            weakref.finalize(self, _close, loop, client)
            self._started = loop, client
        return self._started

    async def _answer(self, client: EndpointClient, conversation: Conversation, submitted: SubmittedRows) -> Reply:
        """The reply to `conversation`. Raises EndpointError if the endpoint never worked, for no row of `submitted`."""
        try:
            result = await self._ask(client, conversation)
        finally:
            submitted.one_less(client.worked)
        if isinstance(result, EndpointError):
            await submitted.known.wait()  # ends: with the last of those that were asked together
            if not client.worked and isinstance(result, ContextOverflow):
                hint = "The first prompt alone fills the context, or --max-context is too small"
                raise EndpointError(f"{result}. {hint}")
            if not client.worked:
                raise result
        return self._reply(conversation, result)

    async def _ask(self, client: EndpointClient, conversation: Conversation) -> ChatAnswer | EndpointError:
        """The answer, requested with fewer tokens if history and answer together do not fit the context."""
        where = f"{conversation.task.task_id} sample {conversation.sample}, turn {conversation.turn}"
        tokens, context = self.max_tokens, self.max_context
        if context is not None:
            tokens = min(tokens, context - int(conversation.memory.get(TOKENS, 0)))
        if tokens < 1:
            return ContextOverflow(f"{where}: the context of {context} tokens is full")
        body: dict[str, Any] = {"messages": conversation.memory[TRANSCRIPT].messages}
        body |= self._fields(conversation.rng(SEED_STREAM))
        rng = conversation.rng(PAUSE_STREAM)
        while True:
            try:
                answer = await client.ask({**body, "max_tokens": tokens}, rng, where)
                if self._sampled is not None:
                    await self._sampled(client, body, answer, rng, where)
                return answer
            except ContextOverflow as error:
                if tokens <= LEAST_TOKENS:
                    return error
                tokens = max(tokens // 4, LEAST_TOKENS)
            except EndpointError as error:
                return error

    def _fields(self, rng: np.random.Generator) -> dict[str, Any]:
        """The fields of a request beside its messages and its limit of tokens; `rng` draws the seed."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        if self.options.send_seed:
            # llama.cpp's seeds have 32 bits, and it takes the largest of them as a request for a random seed
            body["seed"] = int(rng.integers(1 << 31))
        stops = self.channel.stop_text
        if self.channel.name == "tool":
            body["tools"] = self.tool.schemas()
            # the server finds the end of a call itself
            stops = tuple(stop for stop in stops if stop != "</tool_call>")
        if self.options.send_stop and stops:
            body["stop"] = list(stops)
        return body | self.extra | self._sampled_fields

    def _reply(self, conversation: Conversation, result: ChatAnswer | EndpointError) -> Reply:
        if isinstance(result, ContextOverflow):
            return Reply(ends=Status.TRUNCATED_TOKENS, error=str(result))
        if isinstance(result, RequestRefused):
            self._count(conversation, Usage(refused=1))
            hint = ". If its context is full, --max-context N ends such episodes as full, so that they count"
            self._say(
                "refused",
                f"the endpoint refused a request midway, so that its episode ends with an error and is left out of the "
                f"score ({result}){hint if result.unclear else ''}. Said once; the results count them under usage",
            )
        if isinstance(result, EndpointError):
            late = isinstance(result, EndpointTimeout)
            return Reply(ends=Status.ERROR_TIMEOUT if late else Status.ERROR_ENGINE, error=str(result))
        self._note(conversation, result)
        text = content_of(result, self.channel)
        conversation.memory[TRANSCRIPT].answer(result, text)
        origin: Origin = "demonstration"
        logprobs = None
        if self._sampled is not None and result.ids is not None:
            origin, logprobs = "policy", result.ids.logprobs if self._sampled.holds else None
            conversation.thread = add_ids(conversation.thread, result.ids)
        response = response_of(result, text, self.channel)
        return Reply(text=response, logprobs=logprobs, finish=result.finish, origin=origin)

    def _note(self, conversation: Conversation, answer: ChatAnswer) -> None:
        used, counters = answer.usage, {"length": "cut_off", "content_filter": "filtered"}
        counted: dict[str, Any] = {counters[answer.finish]: 1} if answer.finish in counters else {}
        used = changed(used, **counted, noticed=dict.fromkeys(answer.noticed, 1))
        if used.unreported and (self.max_context is not None or self._prices is not None):
            self._say(
                "unreported",
                "the endpoint did not report the usage of an answer, so that --max-context and the cost do not count "
                "it. Said once; the results count such answers as unreported",
            )
        # with a limited memory the next prompt does not contain the answer, and is about as long as this one
        grown = used.completion_tokens if self.memory == ALL else 0
        conversation.memory[TOKENS] = used.prompt_tokens + grown
        seen = conversation.memory.setdefault(SEEN, Seen())
        if seen.cut(used.prompt_tokens, conversation.memory[TRANSCRIPT].characters):
            used = changed(used, stalled=1)
            self._say(
                "stalled",
                f"prompts seem to be cut by the server: those of {conversation.task.task_id} grew, and it counted no "
                f"more than {seen.tokens:,} tokens of them in {STALLED} turns. Is its context that small (Ollama: "
                "num_ctx, OLLAMA_CONTEXT_LENGTH)? The model may have lost its task; --max-context N ends episodes as "
                "full instead",
            )
        self._count(conversation, used + answer.lost)

    def _count(self, conversation: Conversation, used: Usage) -> None:
        if self._prices is not None:
            used = changed(used, cost=self._prices.cost(used))
        total = conversation.memory.get(USED, Usage()) + used
        conversation.memory[USED] = total
        conversation.notes[NOTE] = total.to_json()
        if self.profile is not None:
            conversation.notes[PROFILE] = self.profile.to_json()

    def _say(self, topic: str, text: str) -> None:
        """A warning, once in the life of this agent."""
        if topic not in self._said:
            self._said.add(topic)
            warnings.warn(text, stacklevel=2)


def transcript_of(
    conversation: Conversation, memory: Memory, examples: Mapping[str, Sequence[dict[str, Any]]]
) -> Transcript:
    """The messages of the next request: what `memory` shows of the episode, then the current observation."""
    transcript: Transcript | None = conversation.memory.get(TRANSCRIPT)
    if transcript is None:
        transcript = Transcript(examples=of_category(examples, conversation.task.category))
        conversation.memory[TRANSCRIPT] = transcript
    if transcript.observed == conversation.turn:
        prompt = memory.prompt(
            conversation.statement, conversation.past, conversation.observation, conversation.admissible
        )
        if prompt is not None:
            transcript.messages, transcript.open_calls = [], ()
        transcript.observe(conversation.system, conversation.observation if prompt is None else prompt)
    return transcript


def _close(loop: LoopThread, client: EndpointClient) -> None:
    # connections belong to their loop and can only be closed there
    with suppress(TimeoutError):
        loop.start(client.close()).result(CLOSING)
    loop.close()
