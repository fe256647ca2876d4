"""The example with three typed tools: its contract, its refusals by every reading, and that a model learns it."""

from __future__ import annotations

import pytest

from turngym.agents import play_episodes
from turngym.core.errors import AgentError, TurngymError
from turngym.core.tools import tool_call
from turngym.envs.registration import make_env
from turngym.envs.testing import EnvContract
from turngym.scripts.examples.oven import OvenEnv

ENV = "turngym.scripts.examples.oven:example/Oven-v0"
BAKE = tool_call("bake", dish="cake")


class TestOven(EnvContract):
    env_id = ENV


@pytest.mark.parametrize("channel", [None, "text", "tool", "tool:qwen-coder"])
def test_an_invalid_call_is_data_by_every_door(channel: str | None) -> None:
    env = make_env(OvenEnv, channel=channel)
    env.reset(options={"task": "cake/200/fan"})
    for action, named in (
        (tool_call("heat", degrees="hot"), '"degrees"'),
        (tool_call("bake", dish="soup"), '"soup"'),
        (tool_call("stir"), '"stir"'),
        (BAKE, "the oven is cold"),
    ):
        observation, reward, _, _, info = env.step(action if env.channel is None else env.channel.format(action))
        assert (info["verdict"], info["env_steps"], reward, info["action"]) == ("inadmissible", 0, 0.0, action)
        assert named in observation


@pytest.mark.parametrize(
    ("reading", "response", "verdict"),
    [
        ("strict", f"<Action>{BAKE}</Action>", "malformed"),
        ("folded", f"<Action>{BAKE.upper()}</Action>", "ok"),
        ("lenient", f"I bake it now:\\n{BAKE}", "ok"),
        ("lenient", f"<tool_call>{BAKE}</tool_call>", "ok"),
        ("lenient", "I bake it now.", "malformed"),
    ],
)
def test_readings_forgive_calls_as_they_forgive_words(reading: str, response: str, verdict: str) -> None:
    env = make_env(OvenEnv, channel="text", reading=reading)  # type: ignore[arg-type]
    env.reset(options={"task": "cake/200/fan"})
    env.step(f"<action>{tool_call('heat', degrees=200, fan=True)}</action>")
    assert env.step(response)[4]["verdict"] == verdict


@pytest.mark.parametrize(("agent", "settings"), [("random", {}), ("expert", {"noise": 0.9})])
def test_no_agent_that_draws_actions_plays_where_none_are_listed(agent: str, settings: dict[str, float]) -> None:
    with pytest.raises(AgentError, match="example/Oven-v0"):
        play_episodes(ENV, agent, tasks=4, progress=False, **settings)


def test_each_right_step_pays_once() -> None:
    """A beginner who never bakes right is told which of his attempts came further; nothing pays twice."""
    env = make_env(OvenEnv)
    env.reset(options={"task": "cake/200/fan"})
    right = tool_call("heat", degrees=200, fan=True)
    steps = (
        (tool_call("read_recipe", dish="pizza"), 0.0),
        (tool_call("read_recipe", dish="cake"), 0.25),
        (tool_call("read_recipe", dish="cake"), 0.0),
        (tool_call("heat", degrees=180, fan=True), 0.0),
        (right, 0.25),
        (tool_call("heat", degrees=180), 0.0),
        (right, 0.0),
        (BAKE, 0.5),
    )
    assert [env.step(action)[1] for action, _ in steps] == [reward for _, reward in steps]
    assert env.unwrapped.score == 1.0  # type: ignore[attr-defined]


def test_what_asks_for_one_text_is_refused() -> None:
    for options in ({"tool_name": "oven"}, {"tool_argument": "action"}, {"channel": "text:verl-agent"}):
        with pytest.raises(TurngymError, match=r"read_recipe, heat, bake|text:verl-agent"):
            make_env(OvenEnv, **options)  # type: ignore[arg-type]
