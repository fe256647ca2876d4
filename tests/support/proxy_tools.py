"""An engine whose answers and timing a test decides, and a service around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from servers import until as until

from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.openai_api import read_request
from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.turn_records import ChatMessage, TurnRecord
from turngym.core.episode import Episode, Status, Turn
from turngym.core.protocols import GenerateRequest, Generation, Watch
from turngym.core.task import Task, Verdict


class EchoPolicy:
    """Answers `answer(request)`, by default how often it was asked; waits while `gate` is closed."""

    def __init__(self, tokenizer: Any, end_id: int) -> None:
        self.tokenizer, self.end_id = tokenizer, end_id
        self.answer: Callable[[GenerateRequest], str] = lambda request: f"answer {self.asked}"
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.asked = 0
        self.version = 0
        self.prompts: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.batches: list[int] = []
        self.released: list[str] = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.entered.set()
        assert self.gate.wait(20)
        self.batches.append(len(requests))
        return [self._one(request) for request in requests]

    def _one(self, request: GenerateRequest) -> Generation:
        self.asked += 1
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        ids = [*self.tokenizer(self.answer(request), add_special_tokens=False)["input_ids"], self.end_id]
        ids = ids[: request.sampling.max_new_tokens]
        finish = "stop" if ids[-1] == self.end_id else "length"
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
        return Generation(ids=np.array(ids, np.int32), logprobs=logprobs, finish=finish, policy_version=self.version)

    def release(self, session: str) -> None:
        self.released.append(session)

    def flow(self) -> None:
        """Answer everything from now on."""
        self.gate.set()


class StreamingEcho(EchoPolicy):
    """Says every id when it is drawn; while `paced`, each step of the batch waits until a test says `step`."""

    def __init__(self, tokenizer: Any, end_id: int) -> None:
        super().__init__(tokenizer, end_id)
        self.paced = False
        self.steps = threading.Semaphore(0)
        self.drawn = 0
        """Ids that were said."""
        self.fail_after: int | None = None
        """Steps of a batch of several after which the engine breaks, once."""

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps.release()

    def flow(self) -> None:
        """No more steps; one that waits goes on."""
        super().flow()
        self.paced = False
        self.step()

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        generations = self.generate(requests)
        ends: list[int | None] = [None] * len(generations)
        for step in range(max(len(generation.ids) for generation in generations)):
            if None not in ends:
                break
            if self.paced:
                assert self.steps.acquire(timeout=20)
            if len(generations) > 1 and step == self.fail_after:
                self.fail_after = None
                raise RuntimeError("out of memory")
            for row, (generation, watch) in enumerate(zip(generations, watches, strict=True)):
                if ends[row] is None and step < len(generation.ids):
                    self.drawn += 1
                    token, logprob = int(generation.ids[step]), float(generation.logprobs[step])
                    if watch is not None and not watch(token, logprob):
                        ends[row] = step + 1
        return [_cut(generation, end) for generation, end in zip(generations, ends, strict=True)]


def _cut(generation: Generation, end: int | None) -> Generation:
    if end is None or end == len(generation.ids):
        return generation
    return replace(generation, ids=generation.ids[:end], logprobs=generation.logprobs[:end], finish="aborted")


class Bench:
    """A service over an `EchoPolicy`, with a clock that a test moves."""

    def __init__(self, tokenizer: Any, folder: Path, *, policy: type[EchoPolicy] = EchoPolicy, **options: Any) -> None:
        self.now = 100.0
        self.episodes: list[Episode] = []
        self.renderer = ChatListRenderer(tokenizer)
        self.policy = policy(tokenizer, self.renderer.template.end_id or 0)
        # tests that are not about them: a request without a session is a side turn
        options.setdefault("unnamed", "side")
        names = ("temperature", "seed", "resumed_from", "max_context", "share")
        service = {name: options.pop(name) for name in names if name in options}
        service.setdefault("max_context", 4096)
        self.service = ProxyService(
            self.policy, self.renderer, folder, ProxySettings(**options), learns=True, clock=lambda: self.now, **service
        )
        self.service.on_session = self.note

    def note(self, episode: Episode) -> None:
        """Keep a session that has ended."""
        if episode.meta["ended"] != "open":
            self.episodes.append(episode)

    def request(self, messages: Sequence[Any], session: str | None = None, client: str = "", **fields: Any) -> Any:
        body = {"messages": [as_dict(m) for m in messages], **fields}
        if session is not None:
            body["session_id"] = session
        return read_request(body, {}, self.service.settings, self.service.name, client)

    def begin(self, messages: Sequence[Any], session: str | None = None, **fields: Any) -> Any:
        return self.service.begin(self.request(messages, session, **fields))

    def ask(self, messages: Sequence[Any], session: str | None = None, **fields: Any) -> TurnRecord:
        record = self.begin(messages, session, **fields).wait(20)
        assert isinstance(record, TurnRecord)
        return record

    def talk(self, session: str, turns: int, first: str = "hello", **fields: Any) -> list[Any]:
        """`turns` turns; the messages afterwards, the last answer included."""
        messages: list[Any] = [user(first)]
        for turn in range(turns):
            if turn:
                messages.append(user(f"{session} says {turn}"))
            messages.append(self.ask(messages, session, **fields).reply)
        return messages


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def message(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def as_dict(message: Any) -> dict[str, Any]:
    return message.as_json() if isinstance(message, ChatMessage) else message


def session(number: int, *versions: int, meta: dict[str, Any] | None = None, **fields: Any) -> Episode:
    """An ended session whose turns, of one id of prompt and one of answer, these versions drew."""
    turns = tuple(
        Turn(
            index=index,
            observation="o",
            admissible=None,
            response="r",
            action="r",
            verdict=Verdict.OK,
            reward=0.0,
            prompt_span=(2 * index, 2 * index + 1),
            response_span=(2 * index + 1, 2 * index + 2),
            logprobs=np.zeros(1, np.float32),
            policy_version=version,
            **fields,
        )
        for index, version in enumerate(versions)
    )
    return Episode(
        task=Task(env_id="proxy", task_id=f"s-{number}", sha256="", split="live", category="session"),
        seed=0,
        sample=0,
        group=number,
        segments=(np.arange(2 * len(versions), dtype=np.int32),) if versions else (),
        turns=turns,
        status=Status.COMPLETED,
        success=False,
        episode_return=0.0,
        meta=meta or {},
    )
