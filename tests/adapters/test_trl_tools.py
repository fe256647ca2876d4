"""The class that TRL's environment_factory gets, without TRL: its tool, its reward, its end."""

from __future__ import annotations

from typing import Any

import pytest

from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.episode import Episode
from turngym.core.errors import AgentError, EnvBackendError, TurngymError
from turngym.core.tools import Tool, ToolSet, tool_call
from turngym.envs.guard import ActionGuard
from turngym.trainers.adapters import trl as adapter


@pytest.fixture(scope="module")
def tools() -> SessionPool:
    settings = ChatSettings(channel="tool", system="Go.")
    return SessionPool.of("turngym/ALFWorld-v0", None, settings, split="generated", config="small", max_turns=12)


def test_the_tool_is_described_as_the_environment_describes_it(tools: SessionPool) -> None:
    from transformers.utils import get_json_schema

    playing = adapter.environment_factory(tools)()
    assert get_json_schema(playing.alfworld_step) == tools.tool.schemas()[0]


def test_a_won_episode_is_worth_what_the_environment_says(tools: SessionPool, recorded: list[Episode]) -> None:
    won = next(episode for episode in recorded if episode.success)
    playing = adapter.environment_factory(tools, seed=3)()
    row = adapter.tool_rows(tools, [won.task.task_id])[0]
    assert row["prompt"][0] == {"role": "system", "content": tools.open(won.task.task_id).messages[0]["content"]}
    assert playing.reset(**row) == won.turns[0].observation
    for turn in won.turns:
        assert playing.get_reward() == 0.0
        said = playing.alfworld_step(action=turn.action)
    assert said == won.final_observation
    assert playing.alfworld_step(action="look") == adapter.OVER
    assert playing.get_reward() == won.episode_return == 1.0


@pytest.mark.parametrize(("row", "seed"), [({}, 3), ({"seed": 0}, 0), ({"seed": None}, 3), ({"seed": 5}, 5)])
def test_a_rows_seed_replaces_that_of_all(
    tools: SessionPool, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], seed: int
) -> None:
    opened, asked = SessionPool.open, []
    monkeypatch.setattr(SessionPool, "open", lambda *args, **more: asked.append(more) or opened(*args, **more))
    adapter.environment_factory(tools, seed=3)().reset(task_id=tools.task_ids()[0], **row)
    assert asked == [{"seed": seed}]


def test_arguments_that_are_no_action_are_told_to_the_model(tools: SessionPool) -> None:
    playing = adapter.environment_factory(tools)()
    playing.reset(task_id=tools.task_ids()[0])
    assert playing.alfworld_step(move="look").startswith("No action could be read")
    assert playing.alfworld_step(action=7).startswith("No action could be read")
    assert playing.alfworld_step(action="</tool_call>").startswith(("No action could be read", "Invalid action"))


def test_a_failed_environment_has_no_reward(tools: SessionPool, monkeypatch: pytest.MonkeyPatch) -> None:
    playing = adapter.environment_factory(tools)()
    with pytest.raises(TurngymError, match=r"before reset\(\)"):
        playing.alfworld_step(action="look")
    playing.reset(task_id=tools.task_ids()[0])

    def gone(self: Any, action: str) -> Any:
        raise EnvBackendError("the house is gone")

    monkeypatch.setattr(ActionGuard, "step", gone)
    assert playing.alfworld_step(action="look") == adapter.OVER
    assert playing.get_reward() is None


OVEN = "turngym.scripts.examples.oven:example/Oven-v0"


def test_several_tools_are_several_methods() -> None:
    from transformers.utils import get_json_schema

    sessions = SessionPool.of(OVEN, None, ChatSettings(channel="tool"))
    playing = adapter.environment_factory(sessions)()
    assert [get_json_schema(getattr(playing, tool.name)) for tool in sessions.tool.tools] == sessions.tool.schemas()
    playing.reset(task_id="cake/200/fan")
    assert '"degrees" of heat must be an integer' in playing.heat(degrees="200")
    assert playing.heat(degrees=200, fan=True) == "The oven is hot."
    assert playing.bake(dish="cake") == "Delicious."
    assert playing.get_reward() == 0.75, "nobody read the recipe"


def test_a_tool_that_is_called_as_a_method_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = SessionPool.of(OVEN, None, ChatSettings(channel="tool"))
    tools = ToolSet(tools=(Tool(name="reset", description=""),), examples=(tool_call("reset"),))
    monkeypatch.setattr(sessions, "tool", tools)
    with pytest.raises(TurngymError, match="'reset' is a method of TRL"):
        adapter.environment_factory(sessions)


def test_calls_need_a_channel_of_calls() -> None:
    session = SessionPool.of(OVEN, None, ChatSettings(channel="text")).open("cake/200/fan")
    with pytest.raises(AgentError, match="channel 'text' and no calls"):
        session.step_call("bake", {"dish": "cake"})
