"""Published set-ups by name: what they set arrives, what is given beside them wins, and results say which it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.agents import ExpertAgent, Preset, evaluate, find_preset, load_world, play_episodes
from turngym.agents import presets as published
from turngym.agents.agent_options import AgentOptions
from turngym.agents.endpoint.client import EndpointOptions
from turngym.agents.evaluation.training_evaluation import eval_note
from turngym.agents.models import load_policy, load_tokenizer
from turngym.agents.named_agent import open_agent
from turngym.agents.playing.env_maker import probe
from turngym.agents.presets import PRESETS, preset_table
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.errors import AgentError, TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.tables import markdown
from turngym.core.trace import read_trace
from turngym.envs.panels import load_panel
from turngym.envs.registration import register
from turngym.scripts import main as command
from turngym.trainers import train
from turngym.trainers.open_demonstrations import open_demonstrations
from turngym.trainers.panel_evaluation import eval_make
from turngym.trainers.run import build_algorithm, run_of
from turngym.trainers.student_player import PlayedModel, RunEnv, RunInfo, StudentPlayer
from turngym.trainers.student_sources import played_source
from turngym.trainers.train_config import PlayConfig, RolloutConfig, train_config

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
    limits = {(row.name, row.env_id): row.max_turns for row in PRESETS}
    assert [limits["turnopd", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [80, 50, 30]
    assert [limits["verl-agent", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [50, 15, 4]
    assert [limits["react", env] for env in (ALFWORLD, WEBSHOP, SEARCH)] == [49, 14, 7]
    # four searches, and a turn that can only answer
    assert limits["search-r1", SEARCH] == 5
    assert len(limits) == len(PRESETS)


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: f"{row.name}-{row.env_id}")
def test_every_preset_makes_its_environment_and_says_how_to_act(row: Preset) -> None:
    chat = row.chat(row.make())
    settings = row.settings(ChatSettings(), row.make())
    env: Any = gym.make(row.env_id, **row.make(), channel=chat["channel"])
    env.reset(seed=0)
    assert (env.max_turns, env.on_invalid, env.tool.name) == (row.max_turns, row.on_invalid, row.tool)
    assert ("\nAdmissible actions:\n- " in env.reset(seed=0)[0]) == row.show_admissible
    system = chat.get("system", env.instructions + env.channel.instructions(env.tool))
    assert "{" not in system
    if settings.remembers.templates is not None:
        system += settings.remembers.templates.first
        assert chat["system"] == ""
    needed = [row.tool] if row.channel == "tool" else [f"</{tag}>" for tag in env.tool.tags]
    assert all(word in system for word in needed)
    assert row.sources
    assert row.differs


def test_the_page_has_the_table() -> None:
    assert markdown(preset_table()) in (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")


def test_a_preset_arrives_whole(tmp_path: Path) -> None:
    row = preset("verl-agent", ALFWORLD)
    few = {"max_turns": 4, "threads": 1, "limit": 1, "progress": False, "max_new_tokens": 16}
    result = evaluate("alfworld-quickstart", student(), preset="verl-agent", out=tmp_path, **few)  # type: ignore[arg-type]
    assert result.settings["samples"] == 1
    (episode,) = result.episodes
    assert episode.system == row.system
    assert len(episode.segments) == episode.depth == 4
    made = result.settings["make"]
    assert (made["max_turns"], made["on_invalid"]) == (4, "noop")
    assert "invalid_cost" not in made, "evaluations have no cost of form"
    assert episode.meta["temperature"] == 0.4
    prompt = load_tokenizer(student().partition(":")[2]).decode(episode.segments[1][: episode.turns[1].prompt_span[1]])
    assert "You have taken 1 step(s) so far. The last 1 observations, and what you did: [Observation 1: '-=" in prompt
    assert "These actions are admissible now: ['go to " in prompt
    assert "<|system|>" not in prompt
    written = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert (written["preset"], written["preset_values"]["make"]["max_turns"]) == ("verl-agent", 50)
    assert written["preset_values"]["chat"]["memory"] == "verl-agent:2"
    assert read_trace(tmp_path / "trace.jsonl")[0][0].meta["preset_sha256"] == row.identity["preset_sha256"]
    said = (
        "preset verl-agent but 4 turns (50), max_new_tokens 16 (512), max_turns 4 instead of the panel's 24: 1 sample"
    )
    assert said in result.title


def test_what_is_given_takes_the_place_of_a_value() -> None:
    row = preset("turnopd", SEARCH)
    made = row.make({"max_turns": 3, "tool_name": "find", "topk": 1})
    assert (made["max_turns"], made["tool_name"], made["topk"], made["on_invalid"]) == (3, "find", 1, "noop")
    assert "call the tool find once" in row.chat(made)["system"]
    given = {"channel": "tool:qwen", "memory": "react", "observation_role": "auto", "max_new_tokens": 7}
    player = row.player(given, made)
    assert (player["channel"], player["memory"], player["observation_role"]) == ("tool:qwen", "react", "tool")
    assert player["max_new_tokens"] == 7
    assert AgentOptions(**player).system == row.chat(made)["system"]
    assert row.player({"memory": "all", "system": ""}, made)["memory"] == "all"
    assert row.player({"memory": "all", "system": ""}, made)["system"] == ""


def test_another_channel_brings_its_own_instructions_and_role() -> None:
    row = preset("turnopd", ALFWORLD)
    text = row.player({"channel": "text", "system": None, "observation_role": "auto"}, row.make())
    assert (text["channel"], text["system"], text["observation_role"], text["memory"]) == ("text", None, "auto", "all")
    named = {"channel": "text", "system": "Be brief.", "observation_role": "tool"}
    assert row.player(named, row.make()) == {**named, "memory": "all", "temperature": 0.85}
    react = preset("react", ALFWORLD)
    assert react.player({"channel": "tool", "system": None}, react.make()) == {
        "channel": "tool",
        "system": None,
        "memory": "react",
        "max_new_tokens": 100,
        "temperature": 0.0,
    }


def test_a_models_own_settings_stay_where_the_preset_says_nothing() -> None:
    own = ChatSettings(thinking=True, max_new_tokens=9, system="mine", channel="tool", memory="react")
    found = preset("search-r1", SEARCH).settings(own, {})
    assert (found.thinking, found.max_new_tokens, found.system) == (True, 500, "mine")
    assert (found.channel, found.memory) == ("text", "all")


def test_the_limit_of_a_preset_is_played(tmp_path: Path) -> None:
    played = play_episodes(
        ALFWORLD, "random", preset="react", tasks=1, out=tmp_path / "t.jsonl", env_kwargs={"split": "generated"}
    )
    (episode,) = played.episodes
    assert (episode.status.value, episode.depth) == ("truncated_turns", 49)
    assert episode.meta["preset"] == "react"
    assert episode.turns[0].response.startswith("<action>")
    config = (tmp_path / "t.config.toml").read_text()
    assert 'preset = "react"' in config
    assert "max_turns" not in config


def test_another_preset_is_another_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate("alfworld-quickstart", "expert", preset="react", out=tmp_path, **FEW)
    for other in (None, "turnopd"):
        with pytest.raises(TurngymError, match="played with"):
            evaluate("alfworld-quickstart", "expert", preset=other, out=tmp_path, **FEW)
    assert evaluate("alfworld-quickstart", "expert", preset="react", out=tmp_path, **FEW).resumed == 1
    corrected = replace(preset("react", ALFWORLD), system="Another text.")
    monkeypatch.setattr(published, "PRESETS", (corrected,))
    with pytest.raises(TurngymError, match="played with preset_sha256"):
        evaluate("alfworld-quickstart", "expert", preset="react", out=tmp_path, **FEW)


def test_the_list_is_part_of_an_evaluation(tmp_path: Path) -> None:
    evaluate("alfworld-quickstart", "expert", env_kwargs={"show_admissible": True}, out=tmp_path, **FEW)
    with pytest.raises(TurngymError, match="played with make"):
        evaluate("alfworld-quickstart", "expert", out=tmp_path, **FEW)


def test_a_preset_of_ones_own_and_an_object() -> None:
    own = replace(preset("react", ALFWORLD), name="mine", max_turns=2)
    result = evaluate("alfworld-quickstart", "random", preset=own, **FEW)
    assert (result.settings["preset"], result.episodes[0].depth) == ("mine", 2)
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
    again = ["eval", "--config", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "b")]
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


def of_run(**given: Any) -> RunInfo:
    return RunInfo(folder=Path(), out=Path(), learner=PlayedModel(model=None, tokenizer=None), **given)


def test_which_limit_an_evaluation_in_training_has(capsys: pytest.CaptureFixture[str]) -> None:
    panel, bare = load_panel("alfworld-quickstart"), load_panel("alfworld-generated-eval")
    default = eval_make(panel, None, {}, of_run())
    assert (default["max_turns"], default["on_invalid"], default["part"]) == (24, "noop", "eval")
    assert eval_note(panel, None, default) == {}
    assert eval_make(bare, None, {}, of_run(max_turns=33))["max_turns"] == 33
    named = eval_make(panel, "turnopd", {}, of_run(max_turns=80))
    assert (named["max_turns"], named["on_invalid"], named["part"]) == (80, "reject", "eval")
    capsys.readouterr()
    asked = eval_make(panel, "turnopd", {}, of_run(max_turns=5, explicit_turns=True))
    assert asked["max_turns"] == 5
    assert eval_make(panel, None, {}, of_run(max_turns=50, explicit_turns=True))["max_turns"] == 50
    assert eval_note(panel, None, asked)["max_turns"] == 5
    assert capsys.readouterr().err == "evaluations: max_turns 5 instead of alfworld-quickstart-v1's 24\n"
    quiet = eval_make(bare, None, {"on_invalid": "noop", "data": "d"}, of_run(max_turns=9))
    # without the limit nobody could play it again, nor tell it from an evaluation with another
    assert eval_note(bare, None, quiet) == {"max_turns": 9, "make": {"on_invalid": "noop"}}
    assert eval_note(bare, None, {**quiet, "max_turns": 50}) == {"make": {"on_invalid": "noop"}}
    preset = eval_make(panel, "turnopd", {}, of_run(max_turns=24, explicit_turns=True))
    assert eval_note(panel, "turnopd", preset)["max_turns"] == 24
    # how the agent is spoken to is true of evaluations, what is trained on is not
    told = eval_make(panel, None, {"show_admissible": True, "config": "full", "tool_name": "act"}, of_run())
    assert (told["show_admissible"], told["config"], told["tool_name"]) == (True, "small", "act")


def config(tmp_path: Path, **given: Any) -> Any:
    return train_config("turnopd", {"student": str(tmp_path), "out": str(tmp_path), **given}, "test")


def test_the_depth_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, "short/Houses-v0", None)
    register("short/Houses-v0", "turngym.envs.alfworld.env:ALFWorldEnv", max_turns=9)
    depth = {name: run_of(config(tmp_path, **given)).max_turns for name, given in CASES.items()}
    assert depth == {"nothing": 50, "preset": 80, "given": 7, "shop": 50, "registered": 9, "deeper": 12}
    # TurnOPD's own horizon stays: 80 turns are the environment's limit
    assert build_algorithm(config(tmp_path, preset="turnopd", teacher=str(tmp_path))).settings["depth.h_max"] == 50


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
    settings |= {"panel": "alfworld-quickstart", "tensorboard": False, "progress": False}
    result = train("opd", steps=1, preset="verl-agent", **settings)
    (episode,) = read_trace(tmp_path / "eval" / "step_000001.jsonl")[0]
    assert (episode.depth, episode.meta["preset"], episode.meta["max_turns"]) == (3, "verl-agent", 3)
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
    run = RunInfo(folder=Path(folder), out=tmp_path, learner=learner, max_turns=3)
    play = PlayConfig(preset="verl-agent", env_kwargs='{"on_invalid": "reject"}')
    config = RolloutConfig(play=play)
    env = RunEnv(config=config, info=run, student=StudentPlayer(config, run))
    request = RolloutRequest(step=1, episodes=1, group=1, max_turns=3, temperature=1.0)
    (episode,) = played_source(env, open_demonstrations(env)[0])(request)
    env.student.close()
    assert (episode.depth, len(episode.segments)) == (3, 3)
    assert episode.system == preset("verl-agent", ALFWORLD).system
    assert not any(turn.observation.startswith("Nothing happens.") for turn in episode.turns)


@pytest.mark.parametrize("name", ["turnopd", "search-r1", "verl-agent", "react"])
def test_an_endpoint_plays_every_preset(name: str) -> None:
    pytest.importorskip("httpx")
    row = preset(name, SEARCH)
    endpoint: Any = EndpointOptions(base_url="http://127.0.0.1:1/v1")
    options = AgentOptions(agent="openai:m", endpoint=endpoint, **row.chat(row.make()))
    opened = open_agent(options, lambda: probe(SEARCH, row.make()))
    assert (opened.channel, opened.system) == (row.channel, row.chat(row.make()).get("system"))
    assert opened.agent.memory.name == row.memory  # type: ignore[attr-defined]
    other = open_agent(replace(options, memory="window:3", prompts=None), lambda: probe(SEARCH, row.make()))
    assert other.fingerprint != opened.fingerprint
    with pytest.raises(TurngymError, match="memory 'windw:2' is unknown"):
        open_agent(replace(options, memory="windw:2", prompts=None), lambda: probe(SEARCH, row.make()))
