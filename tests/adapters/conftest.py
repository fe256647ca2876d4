"""A real tiny model on a small house, its recorded episodes, and servers that can only say what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.episode import Episode
from turngym.core.protocols import GenerateRequest, Generation
from turngym.trainers.adapters.token_session import Trajectory

STUDENT = Path(__file__).resolve().parents[2] / "agents" / "worlds" / "checkpoints" / "alfworld" / "student"
HOUSE = {"split": "generated", "config": "small", "on_invalid": "noop", "max_turns": 12}
SEED = 3


class Replay:
    """A policy that answers a prompt with what was sampled after exactly these ids, and knows nothing else."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.said: dict[tuple[str, tuple[int, ...]], Generation] = {}
        self.released: list[str] = []
        for episode in episodes:
            for turn in episode.turns:
                assert turn.logprobs is not None
                prompt = tuple(episode.prompt_ids(turn).tolist())
                self.said[f"{episode.task.task_id}:{episode.sample}", prompt] = Generation(
                    ids=episode.response_ids(turn),
                    logprobs=turn.logprobs,
                    finish=turn.finish,
                    policy_version=turn.policy_version,
                )

    def after(self, name: str, prompt: Sequence[int]) -> Generation:
        """What attempt `name` (`task:sample`) said after `prompt`."""
        return self.said[name, tuple(int(token) for token in prompt)]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        names = [request.session.split(":", 1)[1].rpartition("/")[0] for request in requests]
        return [self.after(name, request.prompt_ids) for name, request in zip(names, requests, strict=True)]

    def release(self, session: str) -> None:
        self.released.append(session)


def assert_same(ours: Trajectory, theirs: dict[str, Any]) -> None:
    """Ids, mask, log-probabilities and reward are equal; `theirs` has them under the names of Trajectory."""
    assert list(theirs["prompt_ids"]) == ours.prompt_ids.tolist()
    assert list(theirs["response_ids"]) == ours.response_ids.tolist()
    assert [int(m) for m in theirs["response_mask"]] == ours.response_mask.astype(int).tolist()
    if "logprobs" in theirs:
        assert ours.logprobs is not None
        assert np.array_equal(np.asarray(theirs["logprobs"], np.float32), ours.logprobs)
    assert theirs["reward"] == ours.reward


@pytest.fixture(scope="session")
def student() -> SimpleNamespace:
    """`folder`, `tokenizer`, `settings` and `load()`, which gives the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return SimpleNamespace(
        folder=STUDENT,
        tokenizer=AutoTokenizer.from_pretrained(STUDENT),
        settings=ChatSettings.load(STUDENT),
        load=lambda: AutoModelForCausalLM.from_pretrained(STUDENT),
    )


@pytest.fixture(scope="session")
def sessions(student: SimpleNamespace) -> SessionPool:
    return SessionPool.of("turngym/ALFWorld-v0", student.tokenizer, student.settings, **HOUSE)


@pytest.fixture(scope="session")
def recorded(student: SimpleNamespace, sessions: SessionPool) -> list[Episode]:
    """Six episodes that our own rollout driver played with the student: won, lost, with refused actions in them."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.model_agent import ModelAgent
    from turngym.agents.playing.rollout import Job, rollout
    from turngym.envs.channels import TextChannel

    engine = LocalEngine(student.load(), tokenizer=student.tokenizer, max_length=1024, policy_version=5)
    agent = ModelAgent(engine, sessions.renderer, TextChannel(), sessions.sampling, max_context=1024)
    jobs = [Job(task_id=sessions.task_ids()[n], sample=sample, seed=SEED) for n in (1, 3, 4) for sample in range(2)]
    return rollout(jobs, sessions.make_env, agent, system=student.settings.system)


@pytest.fixture
def replay(recorded: list[Episode]) -> Replay:
    return Replay(recorded)


@pytest.fixture(scope="session", name="assert_same")
def assert_same_fixture() -> Any:
    return assert_same
