"""Published set-ups by name: what they set arrives, what is given beside them wins, and results say which it was."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.agents import ExpertAgent, Preset, evaluate, find_preset, load_world, play_episodes
from turngym.agents.evaluation.play_episodes import ROLLOUT_DEFAULTS as ROLLOUT
from turngym.agents.models import load_policy, load_tokenizer
from turngym.agents.named_agent import chat_settings, open_agent
from turngym.agents.playing.env_maker import probe
from turngym.agents.presets import in_file, preset_table, presets
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.resolve_play import make_arguments, resolve_agent, resolve_play
from turngym.core.errors import AgentError, SettingsError, TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.tables import markdown
from turngym.core.trace import read_specs, read_trace
from turngym.envs.panels import Panel, load_panel
from turngym.envs.registration import register
from turngym.scripts import main as command
from turngym.trainers import train
from turngym.trainers.open_demonstrations import open_demonstrations
from turngym.trainers.panel_evaluation import eval_spec
from turngym.trainers.run import build_algorithm, run_of
from turngym.trainers.student_player import PlayedModel, RunEnv, RunInfo, StudentPlayer
from turngym.trainers.student_sources import played_source
from turngym.trainers.train_config import train_config

ALFWORLD, WEBSHOP, SEARCH = "turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"
ROOT = Path(__file__).resolve().parents[2]
FEW: dict[str, Any] = {"samples": 1, "limit": 1, "progress": False}


def preset(name: str, env_id: str) -> Preset:
    found = find_preset(name, env_id)
    assert found is not None
    return found


def student(world: str = "alfworld") -> str:
    return f"model:{load_world(world).checkpoint('student')}"


def test_limits_of_table_7_and_the_others() -> None:
    limits = {(row.name, row.env_id): row.make()["max_turns"] for row in presets()}
    assert [limits["turnopd", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [80, 50, 30]
    assert [limits["verl-agent", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [50, 15, 4]
    assert [limits["react", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [49, 14, 7]
    # four searches, and a turn that can only answer
    assert limits["search-r1", SEARCH] == 5
    assert len(limits) == len(presets())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("= broken", "presets.toml"),
        ("", "'preset'"),
        (
            '[[preset]]\nname = "mine"\nabout = ""\nsources = []\ndiffers = []\nwhy = ""\n'
            '[preset.play.env]\nid = "a/B-v0"\n[preset.agent.chat]\nmemory = { kind = "all" }',
            "'max_turns'",
        ),
    ],
)
def test_a_package_s_file_that_lacks_something_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "presets.toml").write_text(text, encoding="utf-8")
    with pytest.raises(TurngymError, match=named):
        in_file(tmp_path / "presets.toml")
    assert in_file(tmp_path / "none.toml") == []


@pytest.mark.parametrize("row", presets(), ids=lambda row: f"{row.name}-{row.env_id}")
def test_every_preset_makes_its_environment_and_says_how_to_act(row: Preset) -> None:
    chat = row.beside({})["agent"]["chat"]
    settings = spoken_to(Path("nowhere"), env=row.env_id, preset=row.name)
    env: Any = gym.make(row.env_id, **row.make(), channel=chat["channel"])
    env.reset(seed=0)
    own = row.table["play"]["env"]
    assert (env.max_turns, env.on_invalid, env.tool.name) == (own["max_turns"], own["on_invalid"], own["tool_name"])
    assert ("\nAdmissible actions:\n- " in env.reset(seed=0)[0]) == own.get("show_admissible", False)
    system = chat.get("system", env.instructions + env.channel.instructions(env.tool))
    assert "{" not in system
    if settings.remembers.templates is not None:
        system += settings.remembers.templates.first
        assert chat["system"] == ""
    needed = [own["tool_name"]] if chat["channel"] == "tool" else [f"</{tag}>" for tag in env.tool.tags]
    assert all(word in system for word in needed)
    assert row.sources
    assert row.differs


def test_the_page_has_the_table() -> None:
    assert markdown(preset_table()) in (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")


def test_a_preset_arrives_whole(tmp_path: Path) -> None:
    row = preset("verl-agent", ALFWORLD)
    few = {"max_turns": 4, "threads": 1, "limit": 1, "progress": False, "max_new_tokens": 16}
    result = evaluate("alfworld-quickstart", student(), preset="verl-agent", out=tmp_path, **few)  # type: ignore[arg-type]
    assert result.spec.play.samples == 1
    (episode,) = result.episodes
    assert episode.system == row.table["agent"]["chat"]["system"] == ""
    assert len(episode.segments) == episode.depth == 4
    env = result.spec.play.env
    assert (env.max_turns, env.on_invalid) == (4, "noop")
    assert env.invalid_cost == 0.0, "evaluations have no cost of form"
    assert episode.meta["temperature"] == 0.4
    prompt = load_tokenizer(student().partition(":")[2]).decode(episode.segments[1][: episode.turns[1].prompt_span[1]])
    assert "You have taken 1 step(s) so far. The last 1 observations, and what you did: [Observation 1: '-=" in prompt
    assert "These actions are admissible now: ['go to " in prompt
    assert "<|system|>" not in prompt
    written = json.loads((tmp_path / "results.json").read_text())["spec"]
    assert written["preset"] == "verl-agent"
    assert written["agent"]["chat"]["memory"]["turns"] == 2
    said = "preset verl-agent but max_turns 4 (50), max_new_tokens 16 (512): 1 sample"
    assert said in result.title


def test_a_models_own_settings_stay_where_the_preset_says_nothing(tmp_path: Path) -> None:
    ChatSettings(thinking=True, max_new_tokens=9, system="mine", channel="tool", memory="react").save(tmp_path)
    play = {"env": SEARCH, "preset": "search-r1"}
    found = spoken_to(tmp_path, **play)
    assert (found.thinking, found.max_new_tokens, found.system) == (True, 500, "mine")
    assert (found.channel, found.memory) == ("text", "all")
    # what is given beside it
    given = spoken_to(tmp_path, **play, memory="window:3", thinking="off", max_new_tokens=7)
    assert (given.memory, given.thinking, given.max_new_tokens) == ("window:3", False, 7)
    with pytest.raises(SettingsError, match="prompts"):
        spoken_to(tmp_path, **play, prompts="own")


def test_another_channel_in_training_brings_its_own_message() -> None:
    """As in an evaluation: the preset's message demands a form of answers."""
    play = {"env": ALFWORLD, "preset": "turnopd"}
    own, other = (spoken_to(Path("nowhere"), **play, channel=one) for one in (None, "text"))
    assert own.system is not None
    assert (other.channel, other.system) == ("text", None)


def test_the_limit_of_a_preset_is_played(tmp_path: Path) -> None:
    played = play_episodes(
        ALFWORLD, "random", preset="react", tasks=1, out=tmp_path / "t.jsonl", env_kwargs={"split": "generated"}
    )
    (episode,) = played.episodes
    assert (episode.status.value, episode.depth) == ("truncated_turns", 49)
    assert (played.spec.preset, played.spec.play.env.max_turns) == ("react", 49)
    assert episode.turns[0].response.startswith("<action>")
    written = (tmp_path / "t.spec.toml").read_text()
    assert 'preset = "react"  # play_episodes()' in written
    assert "max_turns = 49  # preset react" in written


def edited(row: Preset, name: str, value: Any) -> Preset:
    """A preset with another argument of the environment."""
    table = deepcopy(dict(row.table))
    table["play"]["env"][name] = value
    return replace(row, table=table)


def test_the_list_is_part_of_an_evaluation(tmp_path: Path) -> None:
    evaluate("alfworld-quickstart", "expert", env_kwargs={"show_admissible": True}, out=tmp_path, **FEW)
    with pytest.raises(TurngymError, match=r"played with play\.env\.show_admissible True"):
        evaluate("alfworld-quickstart", "expert", out=tmp_path, **FEW)


def test_a_preset_of_ones_own_and_an_object() -> None:
    own = replace(edited(preset("react", ALFWORLD), "max_turns", 2), name="mine")
    result = evaluate("alfworld-quickstart", "random", preset=own, **FEW)
    assert (result.spec.preset, result.episodes[0].depth) == ("mine", 2)
    with pytest.raises(AgentError, match="preset 'mine' says how an agent is spoken to"):
        evaluate("alfworld-quickstart", ExpertAgent(), preset=own, **FEW)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("eval", "rollout", "train"):
        assert command.main([verb, "--preset", "list"]) == 0
        assert "search_r1/search(query)" in capsys.readouterr().out
    words = ["--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--out", str(tmp_path / "a")]
    assert command.main(["eval", "--preset", "turnopd", "--show-admissible", "off", *words]) == 0
    (episode,) = read_trace(tmp_path / "a" / "trace.jsonl")[0]
    assert "Admissible" not in episode.turns[0].observation
    assert episode.turns[0].response.startswith("<tool_call>")
    # the file beside a result repeats it
    again = ["eval", "--config", str(tmp_path / "a" / "spec.toml"), "--out", str(tmp_path / "b")]
    assert command.main(again) == 0
    (twin,) = read_trace(tmp_path / "b" / "trace.jsonl")[0]
    assert (twin.meta, twin.turns) == (episode.meta, episode.turns)
    out = ["--tasks", "1", "--out", str(tmp_path / "r.jsonl")]
    assert command.main(["rollout", "--env", WEBSHOP, "--show-admissible", "on", *out]) == 0
    assert "- search[<your keywords>]" in read_trace(tmp_path / "r.jsonl")[0][0].turns[0].observation
    capsys.readouterr()
    assert command.main(["eval", "--preset", "turnopt", *words]) == 2
    assert (
        "unknown preset 'turnopt'; presets are: react, search-r1, turnopd, verl-agent, verl-agent-put. Did you mean"
        in (capsys.readouterr().err)
    )
    with pytest.raises(TurngymError, match="'search-r1' has no set-up of turngym/WebShop-v0"):
        find_preset("search-r1", WEBSHOP)


def test_which_limit_an_evaluation_in_training_has() -> None:
    panel, bare = load_panel("alfworld-quickstart"), load_panel("alfworld-generated-eval")

    def made(panel: Panel, named: str | None, given: dict[str, Any], asked: int | None = None) -> dict[str, Any]:
        played = config(Path(), preset=named, panel=panel.full_name, env_kwargs=given, max_turns=asked)
        return make_arguments(eval_spec(panel, played).play)

    default = made(panel, None, {})
    assert (default["max_turns"], default["on_invalid"], default["part"]) == (24, "noop", "eval")
    assert made(bare, None, {"max_turns": 33})["max_turns"] == 33
    named = made(panel, "turnopd", {})
    assert (named["max_turns"], named["on_invalid"], named["part"]) == (80, "reject", "eval")
    assert made(panel, "turnopd", {}, asked=5)["max_turns"] == 5
    assert made(panel, None, {}, asked=50)["max_turns"] == 50
    # how the agent is spoken to is true of evaluations, what is trained on is not
    told = made(panel, None, {"show_admissible": True, "config": "full", "tool_name": "act"})
    assert (told["show_admissible"], told["config"], told["tool_name"]) == (True, "small", "act")
    assert made(bare, None, {"on_invalid": "noop"})["on_invalid"] == "noop"
    assert made(panel, "turnopd", {"on_invalid": "terminate"})["on_invalid"] == "terminate"


def config(tmp_path: Path, **given: Any) -> Any:
    return train_config("turnopd", {"student": str(tmp_path), "out": str(tmp_path), **given}, "test")


def spoken_to(folder: Path, **given: Any) -> ChatSettings:
    """How the student in `folder` is spoken to in training."""
    found = config(folder, **given)
    return chat_settings(found.chat, ChatSettings.load(folder), found.play.env.id)


def test_the_depth_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "short/Houses-v0", None)
    register("short/Houses-v0", "turngym.envs.alfworld.env:ALFWorldEnv", max_turns=9)
    depth = {name: run_of(config(tmp_path, **given)).full_depth for name, given in CASES.items()}
    assert depth == {"nothing": 50, "preset": 80, "given": 7, "shop": 50, "registered": 9, "deeper": 12}
    # TurnOPD's own horizon stays: 80 turns are the environment's limit
    own = build_algorithm(config(tmp_path, preset="turnopd", teacher=str(tmp_path))).settings["TurnOpdConfig"]
    assert own["depth"]["h_max"] == 50


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "preset": {"preset": "turnopd"},
    "given": {"preset": "turnopd", "max_turns": 7},
    "shop": {"preset": "turnopd", "env": WEBSHOP},
    "registered": {"env": "short/Houses-v0"},
    "deeper": {"env": "short/Houses-v0", "max_turns": 12},
}


@pytest.mark.long
def test_a_student_trains_and_is_evaluated_in_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = load_world("alfworld")
    settings = {name: value for name, value in world.settings().items() if name != "max_turns"}
    settings |= {"episodes": 2, "eval_every": 1, "eval_samples": 1, "eval_limit": 1, "threads": 1, "max_turns": 3}
    settings |= {"student": world.checkpoint("student"), "teacher": world.checkpoint("teacher"), "out": tmp_path}
    settings |= {"panel": "alfworld-quickstart", "tracker": None, "progress": False}
    result = train("opd", steps=1, preset="verl-agent", **settings)
    (episode,) = read_trace(tmp_path / "eval" / "step_000001.jsonl")[0]
    (spec,) = read_specs(tmp_path / "eval" / "step_000001.jsonl").values()
    assert (episode.depth, spec["preset"], spec["play"]["env"]["max_turns"]) == (3, "verl-agent", 3)
    assert episode.meta["temperature"] == 0.4
    saved = ChatSettings.load(result.model)
    assert (saved.memory, saved.system, saved.channel) == ("verl-agent:2", "", "text:verl-agent")
    assert saved.prompts is not None
    assert saved.prompts[0] == "alfworld"
    assert "evaluations: max_turns 3 instead of alfworld-quickstart-v1's 24" in capsys.readouterr().err
    written = (tmp_path / "config.toml").read_text()
    assert 'preset = "verl-agent"' in written
    assert "max_turns = 3" in written
    with pytest.raises(TurngymError, match="preset"):
        train("opd", steps=2, preset="react", resume=True, **settings)


def test_training_episodes_are_played_in_the_preset(tmp_path: Path) -> None:
    folder = load_world("alfworld").checkpoint("student")
    model, tokenizer = load_policy(folder)
    learner: Any = PlayedModel(model=model, tokenizer=tokenizer)
    run = RunInfo(out=tmp_path, learner=learner)
    settings = config(
        tmp_path, student=str(folder), preset="verl-agent", max_turns=3, env_kwargs={"on_invalid": "reject"}
    )
    env = RunEnv(config=settings, info=run, student=StudentPlayer(settings, run))
    request = RolloutRequest(step=1, episodes=1, group=1, max_turns=3, temperature=1.0)
    (episode,) = played_source(env, open_demonstrations(env))(request)
    env.student.close()
    assert (episode.depth, len(episode.segments)) == (3, 3)
    assert episode.system == ""
    assert not any(turn.observation.startswith("Nothing happens.") for turn in episode.turns)


@pytest.mark.parametrize("name", ["turnopd", "search-r1", "verl-agent", "react"])
def test_an_endpoint_plays_every_preset(name: str) -> None:
    asked = {"env": SEARCH, "preset": name, "agent": "openai:m", "base_url": "http://127.0.0.1:1/v1"}
    spec = resolve_play([("test", asked)], usual=ROLLOUT).spec
    opened = open_agent(spec.agent, lambda: probe(SEARCH, make_arguments(spec.play)))
    wanted = preset(name, SEARCH).beside({})["agent"]["chat"]
    assert (opened.channel, opened.system) == (wanted["channel"], wanted.get("system"))
    assert opened.agent.memory.name.partition(":")[0] == wanted["memory"]["kind"]  # type: ignore[attr-defined]
    with pytest.raises(TurngymError, match=r"memory: 'windw:2' is not known; valid: all, window, react, verl-agent"):
        resolve_agent({"agent": "openai:m", "memory": "windw:2"})
