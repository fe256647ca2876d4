"""Evaluating and playing from Python: names and objects as agents, other people's environments, agents and players."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import (
    ChatSettings,
    ExpertAgent,
    InProcess,
    ModelAgent,
    OpenedAgent,
    evaluate,
    open_agent,
    open_workers,
    play_episodes,
)
from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS
from turngym.agents.named_agent import opened_object
from turngym.agents.play_spec import EvalSpec, ModelChat, Own
from turngym.agents.playing.env_maker import env_class, env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import named_player
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.service import ProxyService
from turngym.agents.rendering.open_renderer import complete_settings
from turngym.agents.resolve_play import resolve_agent, resolve_play
from turngym.core.episode import Episode
from turngym.core.errors import AgentError, SettingsError, TurngymError
from turngym.core.plugins import PluginError
from turngym.core.protocols import Sampling
from turngym.core.spec import changed
from turngym.core.trace import read_trace
from turngym.envs.channels import make_channel
from turngym.envs.panels import Panel, make_panel

TOY = """
import gymnasium
from turngym.agents.playing.agent import Reply, ResponseWriter
from turngym.envs.base import Outcome, TextEnv
from turngym.core.task import Task, content_hash
from turngym.core.tools import ToolSpec
from turngym.envs.registration import register


class CountEnv(TextEnv):
    env_id = "toy_counting/Count-v0"
    tool = ToolSpec(name="say", description="Say a number.", argument="number", argument_description="a number")
    instructions = "Count to the number."

    def __init__(self, first=1):
        super().__init__()
        self._first, self._said, self._goal = first, 0, 0

    def task_ids(self):
        return tuple(f"to/{n}" for n in range(self._first, 9))

    def _begin(self, task_id):
        self._goal, self._said = int(task_id[3:]), 0
        return f"Count to {self._goal}."

    def _apply(self, action):
        self._said = self._said + 1 if action == str(self._said + 1) else 0
        return Outcome(observation=f"You are at {self._said}.", reward=0.0, terminated=self._said == self._goal)

    @property
    def task(self):
        sha = content_hash({"goal": self._goal})
        return Task(env_id=self.env_id, task_id=f"to/{self._goal}", sha256=sha, split="all", category="count")

    def admissible(self):
        return ("1", "2", "3", "4", "5", "6", "7", "8")

    @property
    def success(self):
        return self._said == self._goal

    def expert_action(self):
        return str(self._said + 1)

    def _get_state(self):
        return self._said

    def _set_state(self, state):
        self._said = state


class Stubborn:
    def __init__(self, base):
        self.base = base

    def act(self):
        return "1"

    def observe(self, action):
        pass


class Fast:
    def __init__(self, name):
        self.name, self.writer = name, ResponseWriter()

    def respond(self, waiting):
        return [self.writer.write(one, str(one.turn + 1)) for one in waiting]

    def release(self, conversation):
        pass


def stubborn(guard):
    return Stubborn(guard.base)


def fast_agent(env, options):
    return Fast(f"fast in {env.env_id} at {options.temperature:g}")


if "toy_counting/Count-v0" not in gymnasium.registry:
    register("toy_counting/Count-v0", CountEnv, max_turns=12)
"""
ENV = "toy_counting:toy_counting/Count-v0"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `toy_counting`, importable here and in processes that start from here, and not imported yet."""
    import gymnasium as gym

    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "toy_counting.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_counting", raising=False)
    yield folder
    gym.registry.pop("toy_counting/Count-v0", None)
    sys.modules.pop("toy_counting", None)


def panel_of(env_id: str, count: int = 3, **kwargs: Any) -> Panel:
    from turngym.envs.panels import collect_tasks

    env = env_maker(env_id, **kwargs)()
    tasks = collect_tasks(env, list(env.unwrapped.task_ids())[:count])  # type: ignore[attr-defined]
    env.close()
    return make_panel("few", 1, env_id.rpartition(":")[2], kwargs, tasks)


@pytest.fixture(scope="module")
def panel() -> Panel:
    return panel_of("turngym/ALFWorld-v0", split="generated", part="eval")


def untimed(episodes: Any) -> list[Episode]:
    return [replace(episode, timings={}) for episode in episodes]


def test_evaluate_in_a_few_lines(panel: Panel, tmp_path: Path) -> None:
    result = evaluate(panel, samples=2, limit=2, out=tmp_path, progress=False)
    assert (result.scores.overall.avg.mean, len(result.episodes), result.resumed) == (1.0, 4, 0)
    assert "few-v1, 2 tasks over all categories, on_invalid reject (noop): 2 samples" in str(result)
    assert "Avg@2" in str(result)
    header, rows = result.table()
    assert header == ["", "expert"]
    assert ["errors", "0"] in rows
    written = json.loads((tmp_path / "results.json").read_text())
    play = written["spec"]["play"]
    assert (play["samples"], play["seed"]) == (2, 0)
    assert play["tasks"] == {
        "kind": "panel",
        "panel": "few-v1",
        "sha256": panel.sha256,
        "size": 3,
        "sampling": {"kind": "part", "limit": 2, "spread": True},
    }
    assert written["scores"]["overall"]["avg"]["mean"] == 1.0
    assert evaluate(panel, samples=2, limit=2, out=tmp_path, progress=False).resumed == 4
    with pytest.raises(TurngymError, match=r"play\.env\.max_turns 50, this evaluation has 7"):
        evaluate(panel, samples=2, limit=2, out=tmp_path, max_turns=7, progress=False)


def test_an_agent_object_plays_what_its_name_plays(panel: Panel) -> None:
    named = evaluate(panel, "expert", samples=1, noise=0.5, seed=3, progress=False)
    given = evaluate(panel, ExpertAgent(noise=0.5, name="expert (noise 0.5)"), samples=1, seed=3, progress=False)
    assert named.agent == given.agent == "expert (noise 0.5)"
    # an object is nobody's word: its code is named beside what it calls itself
    assert isinstance(given.spec.agent, Own)
    assert (given.spec.agent.name, given.spec.agent.temperature) == (
        "turngym.agents.playing.scripted:ExpertAgent",
        None,
    )
    assert untimed(named.episodes) == untimed(given.episodes)
    other = evaluate(panel, ExpertAgent(noise=0.5), samples=1, seed=4, progress=False)
    assert [e.turns for e in other.episodes] != [e.turns for e in given.episodes]


def test_settings_of_agents_reach_them(make_tokenizer: Any, make_policy: Any, make_doors: Any) -> None:
    env: Any = make_doors()().base
    spoken = open_agent(resolve_agent({"agent": "random", "channel": "text", "system": "Go."}), lambda: env)
    assert (spoken.channel, spoken.system, spoken.temperature) == ("text", "Go.", None)
    tokenizer = make_tokenizer()
    from turngym.agents.rendering.renderer import ChatRenderer

    renderer = ChatRenderer(tokenizer)
    model = ModelAgent(make_policy(tokenizer, 1), renderer, make_channel("text", env.tool), Sampling(temperature=0.3))
    player = Own(name="turngym.agents.model_agent:ModelAgent", temperature=0.3, chat=ModelChat(channel="text"))
    assert opened_object(model, Own(name="")) == OpenedAgent(agent=model, channel="text", temperature=0.3, spec=player)
    opened = OpenedAgent(agent=model, channel="tool", system="Go.")
    again = opened_object(opened, Own(name=""))
    assert (again.agent, again.channel, again.system) == (model, "tool", "Go.")
    assert again.spec.chat == ModelChat(channel="tool", system="Go.")
    with pytest.raises(AgentError, match="noise, device: settings of agents"):
        play_episodes(agent=ExpertAgent(), noise=0.5, device="cpu", channel="text")
    with pytest.raises(SettingsError, match=r"no setting 'temprature'\. Did you mean 'temperature'"):
        resolve_agent({"agent": "random", "temprature": 1.0})


class NoWriter:
    name = "half"

    def respond(self, waiting: Any) -> Any: ...

    def release(self, conversation: Any) -> None: ...


class NoText:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("agent", "wrong"),
    [
        (NoWriter(), "has no writer;"),
        (5, "has no name, writer, respond, release;"),
        (NoText(), "has no name, writer, respond, release;"),
        (ExpertAgent, "is a class;"),
    ],
    ids=["half", "5", "no text", "class"],
)
def test_what_is_no_agent_is_named_before_it_plays(agent: Any, wrong: str) -> None:
    with pytest.raises(AgentError, match=wrong):
        play_episodes(agent=agent, tasks=1, channel="text")


def test_an_agent_that_fails_at_anything_is_named(make_doors: Any) -> None:
    class Fails(ExpertAgent):
        at = ""

        def release(self, conversation: Any) -> None:
            assert self.at != "release"

    Fails.__module__ = "theirs"
    agent = Fails()
    for agent.at, name, said in (
        ("release", "expert", "agent 'expert' failed: AssertionError"),
        ("", 5, "an agent's name is 5"),
    ):
        agent.name = name
        with pytest.raises(AgentError, match=said):
            rollout([Job(task_id="doors/2")], make_doors(), agent)
    agent.name, agent.writer = "expert", None  # type: ignore[assignment]
    with pytest.raises(AgentError, match="the writer of agent 'expert' is None"):
        rollout([Job(task_id="doors/2")], make_doors(), agent)


def test_play_episodes_gives_and_writes_them(tmp_path: Path) -> None:
    kwargs = {"split": "generated"}
    out = tmp_path / "t.jsonl"
    played = play_episodes(agent="random", tasks=2, samples=2, depth=5, out=out, env_kwargs=kwargs, progress=False)
    assert [(e.task.task_id[-1], e.sample) for e in played.episodes] == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert all(episode.depth <= 5 for episode in played.episodes)
    assert len(read_trace(out)[0]) == 4
    assert played.errors == 0
    *_, written, departs = str(played).splitlines()
    assert written == f"4 episodes in {out}"
    assert departs.startswith("Not as the original: on_invalid reject (noop); episodes end after 5 turns; ")
    with pytest.raises(TurngymError, match=r"add to it with --append \(append=True\)"):
        play_episodes(tasks=1, out=out, env_kwargs=kwargs, progress=False)
    more = play_episodes(
        agent="random", tasks=3, samples=2, depth=5, out=out, append=True, env_kwargs=kwargs, progress=False
    )
    assert [(e.task.task_id[-1], e.sample) for e in more.episodes] == [("2", 0), ("2", 1)]
    drawn = [play_episodes(tasks=3, draw=True, seed=seed, env_kwargs=kwargs, progress=False) for seed in (1, 1, 2)]
    ids = [[episode.task.task_id for episode in one.episodes] for one in drawn]
    assert ids[0] == ids[1] != ids[2]
    named = play_episodes(task=[ids[0][0]], env_kwargs=kwargs, progress=False)
    assert [episode.task.task_id for episode in named.episodes] == ids[0][:1]


def test_another_packages_environment_is_played_here_and_by_workers(toy: Path) -> None:
    here = play_episodes(ENV, tasks=3, samples=2, seed=5, noise=0.5, progress=False)
    assert [episode.task.env_id for episode in here.episodes] == ["toy_counting/Count-v0"] * 6
    there = play_episodes(ENV, tasks=3, samples=2, seed=5, noise=0.5, workers=2, progress=False)
    assert untimed(there.episodes) == untimed(here.episodes)


def test_an_agent_and_a_player_of_another_package(toy: Path) -> None:
    result = play_episodes(ENV, "toy_counting:fast_agent", tasks=3, temperature=0.5, progress=False)
    assert result.agent == "fast in toy_counting/Count-v0 at 0.5"
    assert [episode.success for episode in result.episodes] == [True] * 3
    stubborn = ExpertAgent(expert=named_player("toy_counting:stubborn"), name="stubborn")
    for workers in (0, 1):
        played = play_episodes(ENV, stubborn, tasks=2, workers=workers, progress=False)
        assert [(episode.success, episode.depth) for episode in played.episodes] == [(True, 1), (False, 12)]
    with pytest.raises(PluginError, match=r"'fast_agnt'\. Did you mean 'fast_agent'"):
        play_episodes(ENV, "toy_counting:fast_agnt", tasks=1, progress=False)
    with pytest.raises(PluginError, match="toy_counting has no 'nobody'"):
        named_player("toy_counting:nobody")


def no_samples() -> EvalSpec:
    spec = resolve_play([("test", {"panel": "alfworld-quickstart"})], usual=EVAL_DEFAULTS).spec
    return changed(spec, play=changed(spec.play, samples=0))


MADE_IN_PYTHON: list[tuple[str, Callable[[], Any]]] = [
    ("samples", lambda: evaluate(no_samples())),
    ("samples", lambda: play_episodes(no_samples())),
    ("step_timeout", lambda: open_workers(InProcess(step_timeout=0)).__enter__()),
    ("max_context", lambda: complete_settings(ChatSettings(max_context=-1), None, env_class("turngym/Search-v0").tool)),
    ("deadline", lambda: ProxyService(None, None, Path(), ProxySettings(deadline=0), max_context=8)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "use"), MADE_IN_PYTHON)
def test_settings_made_in_python_are_read_before_anything_is_played(name: str, use: Callable[[], Any]) -> None:
    with pytest.raises(SettingsError, match=f": {name} is "):
        use()
