"""Fixtures of the room: toy environments, tiny models, and tokenizers with real chat templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_of import bytes_alone
from transformers import PreTrainedTokenizerFast

from turngym.core.errors import EnvBackendError
from turngym.core.protocols import GenerateRequest, Generation
from turngym.core.task import Task, Verdict, content_hash
from turngym.core.tools import ToolSpec
from turngym.envs.base import Outcome, TextEnv
from turngym.envs.guard import ActionGuard

CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


class DoorEnv(TextEnv):
    """Task `doors/N` is won by opening door 1, 2, ... N in order. `doors/broken-N` fails at door 2."""

    env_id = "turngym/Doors-v0"
    tool = ToolSpec(name="door", description="Open a door.", argument="action", argument_description="what to do")
    instructions = "Open every door in order."

    def __init__(self) -> None:
        super().__init__()
        self._task = ""
        self._open = 0

    def task_ids(self) -> Sequence[str]:
        return tuple(f"doors/{n}" for n in range(1, 40)) + tuple(f"doors/broken-{n}" for n in (0, 3))

    def _begin(self, task_id: str) -> str:
        if task_id.endswith("broken-0"):
            raise EnvBackendError("the house is gone")
        self._task, self._open = task_id, 0
        self.last = int(task_id.split("/")[1].split("-")[-1])
        return f"You see {self.last} doors."

    def _apply(self, action: str) -> Outcome:
        if action == "wait":
            return Outcome(observation="Nothing changes.", verdict=Verdict.NO_EFFECT)
        if "broken" in self._task and self._open == 1:
            raise EnvBackendError("the lock melted")
        self._open += 1
        won = self._open == self.last
        return Outcome(observation=f"door {self._open} is open", reward=float(won), terminated=won)

    @property
    def task(self) -> Task:
        sha = content_hash({"doors": self._task})
        category = "even" if self.last % 2 == 0 else "odd"
        return Task(env_id=self.env_id, task_id=self._task, sha256=sha, split="toy", category=category)

    def admissible(self) -> tuple[str, ...]:
        return (f"open door {self._open + 1}", "wait")

    @property
    def success(self) -> bool:
        return self._open == self.last

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        return super().describe(verdict, action) | {"goal_rate": self._open / self.last}

    def expert_action(self) -> str | None:
        return None if self.success else f"open door {self._open + 1}"

    def _get_state(self) -> Any:
        return self._open

    def _set_state(self, state: Any) -> None:
        self._open = state


def breaking(make: Callable[[], Any], when: Callable[[DoorEnv], bool]) -> Callable[[], Any]:
    """Makes environments of `make` whose back end fails at a step for which `when` is true."""

    def made() -> Any:
        env = make()
        apply = env.base._apply

        def fails(action: str) -> Outcome:
            if when(env.base):
                raise EnvBackendError("no answer")
            return apply(action)  # type: ignore[no-any-return]

        env.base._apply = fails
        return env

    return made


class NoisyPolicy:
    """Writes `open door N` for a random N from the request's own stream; notes what it forgets."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_id: int, doors: int = 4) -> None:
        self.tokenizer, self.end_id, self.doors = tokenizer, end_id, doors
        self.released: list[str] = []
        self.batches: list[int] = []
        self.fail: Callable[[GenerateRequest], Exception | None] = lambda request: None

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.batches.append(len(requests))
        for request in requests:
            error = self.fail(request)
            if error is not None:
                raise error
        return [self._one(request) for request in requests]

    def _one(self, request: GenerateRequest) -> Generation:
        door = int(np.random.default_rng(request.stream).integers(1, self.doors + 1))
        ids = [
            *self.tokenizer(f"<action>open door {door}</action>", add_special_tokens=False)["input_ids"],
            self.end_id,
        ]
        ids = ids[: request.sampling.max_new_tokens]
        finish = "stop" if ids[-1] == self.end_id else "length"
        array = np.asarray(ids, np.int32)
        return Generation(ids=array, logprobs=np.full(len(ids), -0.5, np.float32), finish=finish)

    def release(self, session: str) -> None:
        self.released.append(session)


def byte_tokenizer(template: str | None = CHATML, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """One token per byte plus the ChatML tokens: lossless, and its ids are easy to read back."""
    tokenizer = bytes_alone(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@pytest.fixture(scope="session")
def make_doors() -> Callable[..., Callable[[], ActionGuard]]:
    """`make_doors(channel=..., max_turns=...)` gives a factory of guarded toy environments."""

    def options(channel: str | None = "text", max_turns: int | None = 10, **more: Any) -> Callable[[], ActionGuard]:
        return lambda: ActionGuard(DoorEnv(), channel=channel, max_turns=max_turns, **more)

    return options


@pytest.fixture(scope="session")
def make_policy() -> type[NoisyPolicy]:
    return NoisyPolicy


@pytest.fixture
def make_bench(make_tokenizer: Callable[..., PreTrainedTokenizerFast], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`make_bench(folder, **options)` gives a `proxy_tools.Bench`: a proxy's service, closed after the test."""
    import proxy_tools

    made: list[Any] = []

    def make(folder: str = "run", *, template: str | None = None, **options: Any) -> Any:
        tokenizer = make_tokenizer() if template is None else make_tokenizer(template)
        made.append(proxy_tools.Bench(tokenizer, tmp_path / folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.policy.flow()
        one.service.close()
