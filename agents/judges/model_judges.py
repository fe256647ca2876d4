"""How a model judges: the prompts (`SCORE`, `HINT`), and a judge behind an endpoint or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from turngym.agents.endpoint.client import Address, EndpointClient, EndpointError
from turngym.agents.endpoint.handshake import fit
from turngym.agents.judges.judge_settings import UrlJudge
from turngym.agents.model_agent import generate_apart
from turngym.agents.rendering.chat_template import ChatTemplate
from turngym.core.clean_keys import clean_address
from turngym.core.errors import AgentError
from turngym.core.http_client import LoopThread
from turngym.core.plugins import need
from turngym.core.protocols import GenerateRequest, Generation, JudgeRequest, Judgment, Policy, Sampling
from turngym.core.redaction import without_keys
from turngym.core.task import task_number

LONGEST_PART = 6000
"""Most characters of each part of the prompt; the middle of longer ones is left out."""
KEY = "TURNGYM_JUDGE_KEY"
"""Environment variable with the bearer key; none is sent without it."""
JUDGE_STREAM = 3
SCORE = """You judge one reply of an assistant by what happened right after it.
You see what the assistant had in front of it, its reply, and the message that came next. The next message is either \
from the user or the result of a tool that the assistant called.
- A tool result is there because the assistant acted. That it exists says nothing; what it says does.
- 1: the next message shows that the reply moved the task forward: the action worked, new facts came in, the user \
goes on or is content.
- -1: it shows that the reply failed: an error, a refused or useless action, the same state as before, or a user who \
asks to redo, correct or rephrase it.
- 0: it does not tell. A user who merely changes or extends the request is not unhappy with the reply.
Reason in a few sentences, then end with \\boxed{1}, \\boxed{-1} or \\boxed{0}."""
HINT = """You look back at one reply of an assistant, knowing what happened right after it.
You see what the assistant had in front of it, its reply, and the message that came next: a user's message, or the \
result of a tool that the assistant called (the result is there because the assistant acted).
Does the next message teach something that would have made the reply better, had the assistant known it?
- If so, write it as a hint to the assistant, one to three sentences, concrete, without quoting the next message: \
[HINT_START]your hint[HINT_END], and end with \\boxed{1}.
- If not (the reply was fine, or the next message says nothing about it), end with \\boxed{-1}."""


def messages(request: JudgeRequest) -> tuple[str, str]:
    """(system message, user message) of the judge for `request`."""
    speaker = "result of the assistant's action (role tool)" if request.next_role == "tool" else "next message"
    if request.next_role not in ("tool", "user"):
        speaker = f"next message (role {request.next_role})"
    parts = [("what the assistant had in front of it", request.before), ("reply", request.response)]
    parts.append((speaker, request.next_state))
    sections = "\n\n".join(f"## {title}\n{_short(text)}" for title, text in parts if text or title != parts[0][0])
    return (SCORE if request.kind == "score" else HINT), sections


def _short(text: str) -> str:
    text = without_keys(text)
    if len(text) <= LONGEST_PART:
        return text
    half = LONGEST_PART // 2
    first, last = text[:half], text[-half:]
    return f"{first}\n[... {len(text) - 2 * half} characters left out ...]\n{last}"


@dataclass(slots=True, kw_only=True)
class HttpJudge:
    """A `Judge` behind an OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp, hosted models).

    Each vote is a chat completion in the form that the endpoint takes; `EndpointClient` says what is retried. A vote
    without an answer is None. One that
    `judge_max_tokens` cut is counted, and is "" if only reasoning had been written. The
    request's name and the vote's number fix its `seed`; whether that repeats a vote is up to the server. Safe to call
    from several threads.

    Raises MissingExtra if httpx is not installed.
    """

    options: UrlJudge
    seed: int = 0
    _loop: LoopThread = field(init=False)
    _client: EndpointClient = field(init=False)

    def __post_init__(self) -> None:
        need("httpx", "a judge behind a url", "serve")
        address = Address(base_url=clean_address("--judge", self.options.url, AgentError), key_env=KEY)
        self._client = EndpointClient(
            address=address,
            model=self.options.judge_model,
            deadline=self.options.judge_timeout,
            retries=self.options.judge_tries - 1,
            parallel=self.options.judge_parallel,
            advise=False,
        )
        self._loop = LoopThread("turngym-judge")

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        votes = self.options.judge_votes

        async def ask_all() -> list[_Vote]:
            jobs = [self._vote(request, vote) for request in requests for vote in range(votes)]
            return list(await asyncio.gather(*jobs))

        answers = self._loop.run(ask_all())
        rows = [answers[start : start + votes] for start in range(0, len(answers), votes)]
        return [
            Judgment(
                votes=tuple(vote.text for vote in row),
                error=next((vote.error for vote in row if vote.error), ""),
                cut=sum(vote.cut for vote in row),
            )
            for row in rows
        ]

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    async def _vote(self, request: JudgeRequest, vote: int) -> _Vote:
        system, user = messages(request)
        number = task_number(f"{self.seed} {request.kind} {request.name} {vote}")
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {
            "model": self.options.judge_model,
            "messages": prompt,
            "temperature": self.options.judge_temperature,
            "max_tokens": self.options.judge_max_tokens,
            # llama.cpp's seeds have 32 bits, and the largest of them asks for a random one
            "seed": number % (1 << 31),
        }
        try:
            answer = await fit(self._client, body, np.random.default_rng(number), request.name)
        except EndpointError as error:
            return _Vote(None, error=str(error))
        cut = answer.finish == "length"
        # a reasoning model that ran out of tokens; asking again would cost as much and likely give as little
        if not answer.content and not cut:
            return _Vote(None, error=f"{request.name}: {self.options.url}: the answer has no text")
        return _Vote(answer.content, cut=cut)


class _Vote(NamedTuple):
    text: str | None
    error: str = ""
    """Why there is no text."""
    cut: bool = False
    """Whether it ended at `max_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudge:
    """A `Judge` that samples from a `Policy`: a model in this process, or any engine that continues token ids.

    All votes of all requests are one call of the policy. A vote's random stream is fixed by (`seed`, the request's
    name, the number of the vote). If the policy fails (RuntimeError, OSError), the votes are tried again in halves; one
    that fails alone, or whose prompt leaves no room for an answer, is None.
    """

    policy: Policy
    template: ChatTemplate
    votes: int = 3
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, max_new_tokens=1024))
    """Stop ids are filled in from the template."""
    seed: int = 0

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        sampling = replace(self.sampling, stop_ids=(*self.sampling.stop_ids, *self.template.stop_ids))
        prompts = []
        for number, request in enumerate(requests):
            ids = self.template.encode(self.template.render(self.template.opening(*messages(request))))
            for vote in range(self.votes):
                prompts.append(
                    GenerateRequest(
                        session=f"judge/{number}/{vote}",
                        prompt_ids=ids,
                        sampling=sampling,
                        stream=(JUDGE_STREAM, self.seed, task_number(f"{request.kind} {request.name}"), vote),
                    )
                )
        generations = generate_apart(self.policy, prompts)
        for item in prompts:
            self.policy.release(item.session)
        rows = [generations[start : start + self.votes] for start in range(0, len(generations), self.votes)]
        return [self._judgment(request, row) for request, row in zip(requests, rows, strict=True)]

    def _judgment(self, request: JudgeRequest, row: Sequence[Generation | Exception]) -> Judgment:
        opened = self.template.thoughts.opening if self.template.opens_thought else ""
        votes: list[str | None] = []
        errors: list[str] = []
        for item in row:
            if isinstance(item, Generation) and len(item.ids):
                ids = item.ids.tolist()
                decoded = self.template.decode(ids[:-1] if ids[-1] in self.template.stop_ids else ids)
                votes.append(f"{opened}{decoded}")
                continue
            votes.append(None)
            why = "the judge's prompt leaves no room for an answer"
            if isinstance(item, Exception):
                why = f"{type(item).__name__}: {item}"
            errors.append(f"{request.name}: {why}")
        cut = sum(isinstance(item, Generation) and item.finish == "length" for item in row)
        return Judgment(votes=tuple(votes), error=errors[0] if errors else "", cut=cut)
