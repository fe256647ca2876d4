"""skyrl-gym's own registry makes our environment and plays it as SkyRL does: chat messages in, chat messages out."""

from __future__ import annotations

from typing import Any

import pytest

from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.trainers.adapters import skyrl as adapter
from turngym.trainers.adapters.token_session import Trajectory


@pytest.fixture(scope="module")
def gym(sessions: SessionPool) -> Any:
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs the extra turngym[skyrl]")
    skyrl_gym.register(id="turngym", entry_point=adapter.environment(sessions))
    yield skyrl_gym
    from skyrl_gym.envs.registration import deregister

    deregister("turngym")


def test_the_recorded_episodes_through_skyrl_gym(gym: Any, recorded: list[Episode]) -> None:
    for episode in recorded:
        extras = {"task_id": episode.task.task_id, "seed": 3, "sample": episode.sample, "max_turns": 12}
        env = gym.make("turngym", env_config={}, extras=extras)
        messages, _ = env.init([{"role": "user", "content": "whatever the data set said"}])
        assert [message["role"] for message in messages] == ["system", "user"]
        rewards, done = 0.0, False
        for turn, following in zip(episode.turns, [*episode.turns[1:], None], strict=True):
            assert not done
            step = env.step(turn.response)
            rewards, done = rewards + step["reward"], step["done"]
            assert step["metadata"]["verdict"] == turn.verdict.value
            told = [] if following is None else [{"role": "user", "content": following.observation}]
            assert step["observations"] == told
        assert done
        assert rewards == episode.episode_return
        assert env.get_metrics() == {"success": float(episode.success), "turns": episode.depth}
        assert env.episode().episode_return == episode.episode_return
        env.close()


def test_it_works_without_a_tokenizer_and_has_no_ids_then(gym: Any) -> None:
    plain = SessionPool.of("turngym/ALFWorld-v0", None, ChatSettings(), split="generated", config="small", max_turns=1)
    env = adapter.environment(plain)(extras={"task_id": plain.task_ids()[0]})
    messages, _ = env.init([])
    assert "<action>" in messages[0]["content"]
    assert env.step("I would rather not.")["metadata"] == {
        "verdict": "malformed",
        "success": False,
        "status": "truncated_turns",
    }
    with pytest.raises(TurngymError, match="played without a tokenizer"):
        Trajectory.of(env.episode())


def test_stepping_before_init_is_an_error(gym: Any, sessions: SessionPool) -> None:
    with pytest.raises(TurngymError, match=r"before init\(prompt\)"):
        adapter.environment(sessions)().step("look")
