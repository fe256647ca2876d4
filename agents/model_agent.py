"""The agent that samples its responses from a policy, token in and token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter, check_channel, with_stops
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.memory import Example
from turngym.agents.rendering.open_renderer import complete_settings, renderer_of
from turngym.agents.rendering.renderer import ChatRenderer, Ids
from turngym.agents.rendering.skills import Skills
from turngym.agents.rendering.token_history import TokenHistory
from turngym.core.episode import Status, wrong_numbers
from turngym.core.errors import AgentError
from turngym.core.protocols import Engine, GenerateRequest, Generation, PartialFailure, Policy, Sampling
from turngym.core.tools import Tools
from turngym.envs.channels import Channel, make_channel


class ModelAgent:
    """Renders what is waiting, asks the policy for all of it at once, and hands back text for the environment.

    Args:
        channel: how the model writes actions; must be the environment's own. Its stop strings end a response.
        sampling: temperature and length; stop ids and stop strings are filled in from renderer and channel.
        max_context: most ids of a segment, prompt and response together; None leaves the limit to the policy.

    A request whose policy call fails with an operational error (RuntimeError, OSError and their kin: out of memory, a
    lost connection) is tried again in smaller batches; one that fails alone ends its episode as `error_engine` (a
    TimeoutError: `error_timeout`). A policy that knows which requests of a batch failed says so with PartialFailure,
    and nothing is tried again. Other exceptions are programming errors and propagate, and so does any failure before
    the policy has answered once: an engine that never worked is a mistake, not an accident.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: ChatRenderer,
        channel: Channel | None = None,
        sampling: Sampling | None = None,
        *,
        max_context: int | None = None,
        name: str = "model",
    ) -> None:
        self.policy = policy
        self.renderer = renderer
        self.name = name
        self.writer = ResponseWriter(renderer, max_context)
        self.channel = channel
        self.sampling = with_stops(sampling or Sampling(), channel, renderer)
        self._max_context = max_context
        self._worked = False

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        """One generation for all that wait; a conversation whose context is full ends as `truncated_tokens`."""
        replies: list[Reply | None] = [None] * len(waiting)
        rows: list[int] = []
        requests: list[GenerateRequest] = []
        for row, conversation in enumerate(waiting):
            request = self._request(conversation)
            if request is None:
                replies[row] = Reply(ends=Status.TRUNCATED_TOKENS)
            else:
                rows.append(row)
                requests.append(request)
        results = generate_apart(self.policy, requests, worked=self._worked)
        self._worked = self._worked or any(isinstance(result, Generation) for result in results)
        for row, result in zip(rows, results, strict=True):
            replies[row] = self._reply(waiting[row], result)
        return [reply for reply in replies if reply is not None]

    def release(self, conversation: Conversation) -> None:
        if conversation.thread is not None:
            self.policy.release(_session(conversation, conversation.thread))

    def _request(self, conversation: Conversation) -> GenerateRequest | None:
        thread = conversation.thread
        if thread is None:
            check_channel(self.name, self.channel, conversation)
        segment = -1 if thread is None else thread.segment
        thread = self.writer.present(conversation)
        assert thread is not None
        # a rewritten history opens a segment and with it a session; nobody will continue the one before
        if 0 <= segment < thread.segment:
            self.policy.release(f"{conversation.key}/{segment}")
        begun = len(conversation.begun)
        # the ids that were begun count toward the length of the response
        sampling = replace(self.sampling, max_new_tokens=max(self.sampling.max_new_tokens - begun, 1))
        if self._max_context is not None:
            room = self._max_context - thread.buffer.size - begun
            if room < 1:
                return None
            if room < sampling.max_new_tokens:
                sampling = replace(sampling, max_new_tokens=room)
        prompt = thread.buffer.view()
        return GenerateRequest(
            session=_session(conversation, thread),
            prompt_ids=np.append(prompt, np.array(conversation.begun, np.int32)) if begun else prompt,
            sampling=sampling,
            stream=conversation.stream,
        )

    def _reply(self, conversation: Conversation, result: Generation | Exception) -> Reply:
        if isinstance(result, Exception):
            status = Status.ERROR_TIMEOUT if isinstance(result, TimeoutError) else Status.ERROR_ENGINE
            return Reply(ends=status, error=f"{type(result).__name__}: {result}")
        if not len(result.ids):
            if result.finish == "aborted":
                return Reply(ends=Status.ERROR_ENGINE, error="the request was broken off before its first id")
            return Reply(ends=Status.TRUNCATED_TOKENS)
        # a teacher may have chosen some of the ids; what comes from a server was checked where it arrived
        if (problem := wrong_numbers(result.ids, result.logprobs, known=False)) is not None:
            return Reply(ends=Status.ERROR_ENGINE, error=f"the policy's answer cannot be: {problem}")
        thread = conversation.thread
        assert thread is not None
        begun = len(conversation.begun)
        if begun:
            result = _after(conversation.begun, result)
        text = self.renderer.respond(thread, result.ids)
        broken = result.finish == "aborted"
        return Reply(
            text=text,
            logprobs=result.logprobs,
            begun=begun,
            finish=result.finish,
            policy_version=result.policy_version,
            version_spans=result.version_spans,
            origin=result.origin,
            ends=Status.ERROR_ENGINE if broken else None,
            error="the response was broken off" if broken else "",
        )


def generate_apart(
    policy: Policy, requests: Sequence[GenerateRequest], *, worked: bool = True
) -> list[Generation | Exception]:
    """Returns the answer or the error of each request. A batch that fails is tried again in halves.

    Raises errors other than operational ones (RuntimeError, OSError), and all if the policy has not `worked` before.
    """
    if not requests:
        return []
    results: Sequence[Generation | BaseException]
    try:
        results = policy.generate(requests)
    except PartialFailure as failure:
        results = failure.results
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, (RuntimeError, OSError)):
                raise error from None
        if len(errors) == len(results) and not worked:
            raise errors[0] from None
    except (RuntimeError, OSError) as error:
        # subclasses of RuntimeError that are programming errors
        if isinstance(error, (NotImplementedError, RecursionError)):
            raise
        if len(requests) > 1:
            half = len(requests) // 2
            first = generate_apart(policy, requests[:half], worked=worked)
            worked = worked or any(isinstance(result, Generation) for result in first)
            return [*first, *generate_apart(policy, requests[half:], worked=worked)]
        if not worked:
            raise
        return [error]
    if len(results) != len(requests):
        raise AgentError(f"the policy answered {len(results)} of {len(requests)} requests; it must answer every one")
    return [result for result in results if isinstance(result, (Generation, Exception))]


def _after(begun: Ids, result: Generation) -> Generation:
    """Puts the ids in `begun` before those of `result`. Nobody drew them, so their log-probabilities are NaN."""
    count = len(begun)
    return replace(
        result,
        ids=np.concatenate((np.array(begun, np.int32), result.ids)),
        logprobs=np.concatenate((np.full(count, np.nan, np.float32), result.logprobs)),
        version_spans=tuple((version, start + count, end + count) for version, start, end in result.version_spans),
    )


def _session(conversation: Conversation, thread: TokenHistory) -> str:
    return f"{conversation.key}/{thread.segment}"


# A model in training as rollouts and evaluations see it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlayer:
    """A model as rollouts and evaluations see it: it has the trainer's weights, in this process or on servers."""

    engine: Engine
    renderer: ChatRenderer
    settings: ChatSettings
    tool: Tools

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        settings: ChatSettings,
        tool: Tools,
        *,
        slots: int = 64,
        dtype: str | None = None,
        vocab_size: int | None = None,
        engine: Engine | None = None,
        examples: Sequence[Example] = (),
        skills: Skills | None = None,
    ) -> ModelPlayer:
        """Makes the player of a model, which is prompted as it was trained.

        Args:
            slots: most requests that the model generates at a time; not read with `engine`.
            engine: what generates, such as servers that have the model's weights; None: the model, in this process.
        """
        if engine is None:
            from turngym.agents.local_engine.engine import LocalEngine

            room = settings.max_context
            engine = LocalEngine(
                model, tokenizer=tokenizer, max_length=room, max_batch=slots, dtype=dtype, vocab_size=vocab_size
            )
        settings = complete_settings(settings, tokenizer, tool)
        renderer = renderer_of(model, tokenizer, settings, tool, examples, skills)
        return cls(engine=engine, renderer=renderer, settings=settings, tool=tool)

    def agent(self, temperature: float, name: str = "student") -> ModelAgent:
        return ModelAgent(
            self.engine,
            self.renderer,
            make_channel(self.settings.channel, self.tool),
            Sampling(temperature=temperature, max_new_tokens=self.settings.max_new_tokens),
            max_context=self.engine.max_length,
            name=name,
        )
