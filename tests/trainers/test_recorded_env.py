"""`--traces` say of which environment they are: the run is of it in words and settings, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_runs import save_tiny

import turngym.envs
from turngym.agents import play_episodes
from turngym.agents.models import trained_on
from turngym.core.episode import Episode
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.trace import TraceWriter
from turngym.envs.channels import make_channel
from turngym.scripts import train
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run import build_trainer, run_training
from turngym.trainers.several_envs import ENVIRONMENT

torch.set_num_threads(1)
SHOP, HOUSE, LAMPS = "turngym/WebShop-v0", "turngym/ALFWorld-v0", "tests/Lamps-v0"
KWARGS: dict[str, dict[str, Any]] = {SHOP: {}, HOUSE: {"config": "small"}, LAMPS: {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that reads and writes single bytes; its folder says nothing about what it is told."""
    words = ("<action>", "</action>", "<search>", "</search>")
    return save_tiny(tmp_path_factory.mktemp("model"), words=words, width=16, length=16384, new_tokens=2, system=None)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What an expert did, in each environment; the last is another package's."""
    import lamps_env  # noqa: F401

    folder, found = tmp_path_factory.mktemp("traces"), {}
    for env, kwargs in KWARGS.items():
        found[env] = folder / f"{env.rpartition('/')[2]}.jsonl"
        more = {"max_turns": 3} if env == HOUSE else {}
        play_episodes(env, "expert", tasks=2, env_kwargs={**kwargs, **more}, out=found[env], progress=False)
    return found


def options(model: Path, out: Path, algorithm: str, *more: str) -> Any:
    words = [algorithm, "--student", str(model), "--out", str(out), "--episodes", "2", "--steps", "1"]
    words += ["--tracker", "none", "--threads", "1", "--device", "cpu", "--eval-every", "0"]
    words += [] if algorithm == "sft" else ["--max-turns", "3"]
    return train.resolved([*words, *more]).spec


def collected(config: Any, episodes: int = 2) -> list[Episode]:
    made = build_trainer(config).source(RolloutRequest(step=1, episodes=episodes, max_turns=3))
    return sorted(made, key=lambda episode: (episode.task.env_id, episode.task.task_id))


@pytest.mark.parametrize("env", KWARGS)
def test_an_experts_actions_are_written_in_the_words_of_their_environment(
    model: Path, traces: dict[str, Path], tmp_path: Path, env: str, capfd: Any
) -> None:
    alone = collected(options(model, tmp_path / "a", "sft", "--traces", str(traces[env])))
    said = capfd.readouterr().err
    assert f"environment: {env}, as recorded in {traces[env]}" in said
    assert "another system message" not in said
    named = collected(options(model, tmp_path / "b", "sft", "--traces", str(traces[env]), "--env", env))
    assert "as recorded" not in capfd.readouterr().err
    room = gym.make(env, **KWARGS[env]).unwrapped
    wanted = f"{room.instructions}\n\n{make_channel('text', room.tool).instructions(room.tool)}"  # type: ignore[attr-defined]
    for one, other in zip(alone, named, strict=True):
        assert one.system == other.system == wanted
        assert np.array_equal(one.segments[0], other.segments[0])


def test_the_run_is_of_the_recorded_environment_to_its_end(
    model: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    """Its configuration, what it says to be trained on, and a run that is repeated from its folder."""
    config = options(model, tmp_path / "run", "sft", "--traces", str(traces[SHOP]))
    result = run_training(config, SINGLE, progress=False)
    assert 'id = "turngym/WebShop-v0"' in (tmp_path / "run" / "config.toml").read_text(encoding="utf-8")
    assert trained_on(result.model) == (SHOP,)
    again = train.resolved(["--config", str(tmp_path / "run" / "config.toml"), "--out", str(tmp_path / "again")]).spec
    assert again.play.env.id == SHOP


def test_another_environment_than_the_recorded_one_is_refused(
    model: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    for algorithm in ("sft", "grpo"):
        with pytest.raises(TurngymError, match=f"Lamps-v0.jsonl: 2 of its 2 episodes are of {LAMPS}"):
            build_trainer(options(model, tmp_path / "x", algorithm, "--traces", str(traces[LAMPS]), "--env", SHOP))
    # one stranger among them is enough
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(traces[SHOP].read_bytes() + traces[HOUSE].read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(TurngymError, match=f"1 of its 3 episodes are of {HOUSE}, the run has {SHOP}"):
        build_trainer(options(model, tmp_path / "y", "sft", "--traces", str(mixed)))
    with pytest.raises(TurngymError, match=f"episodes of {SHOP} .*, {HOUSE} "):
        build_trainer(options(model, tmp_path / "z", "sft", "--traces", str(traces[SHOP]), str(traces[HOUSE])))


def test_an_environment_that_nobody_registered_is_named_with_its_module(
    model: Path, traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gym.registry[LAMPS]
    monkeypatch.delitem(gym.registry, LAMPS)
    with pytest.raises(TurngymError, match=f"of {LAMPS}, .* --env package:{LAMPS}"):
        build_trainer(options(model, tmp_path / "a", "sft", "--traces", str(traces[LAMPS])))
    monkeypatch.setitem(gym.registry, LAMPS, spec)
    found = collected(
        options(model, tmp_path / "b", "sft", "--traces", str(traces[LAMPS]), "--env", f"lamps_env:{LAMPS}")
    )
    assert found[0].system.startswith("There are four rooms.")


def test_several_environments_in_one_trace_have_each_their_own_words(
    model: Path, traces: dict[str, Path], tmp_path: Path
) -> None:
    # a run in which the shop was a further environment recorded its episodes
    head, *lines = traces[SHOP].read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    shop = tmp_path / "shop.jsonl"
    for row in rows:
        del row["crc"]
        row["meta"][ENVIRONMENT] = "ALFWorld-v0"
    shop.write_text("\n".join([head, *map(json.dumps, rows)]) + "\n")
    both = [str(shop), str(traces[HOUSE])]
    also = ("--also", f"{HOUSE},split=generated")
    config = options(model, tmp_path / "run", "sft", "--traces", *both, "--env", SHOP, *also)
    found = collected(config, 4)
    assert [episode.task.env_id for episode in found] == [HOUSE, HOUSE, SHOP, SHOP]
    assert [episode.meta.get(ENVIRONMENT) for episode in found] == ["ALFWorld-v0"] * 2 + [None] * 2
    for env, part in ((HOUSE, found[:2]), (SHOP, found[2:])):
        alone = collected(options(model, tmp_path / env.replace("/", "_"), "sft", "--traces", str(traces[env])))
        for one, other in zip(part, alone, strict=True):
            assert one.system == other.system
            assert np.array_equal(one.segments[0], other.segments[0])
    result = run_training(config, SINGLE, progress=False)
    assert trained_on(result.model) == (SHOP, HOUSE)
    # without --env the first file's, as long as --also names the rest
    short = options(model, tmp_path / "s", "sft", "--traces", *both, *also)
    assert [episode.system for episode in collected(short, 4)] == [episode.system for episode in found]
    shares = ("--also", f"{HOUSE},split=generated,share=2")
    with pytest.raises(SettingsError, match=r"share= is given, \[1.0, 2.0\], with --traces"):
        build_trainer(options(model, tmp_path / "t", "sft", "--traces", *both, "--env", SHOP, *shares))


def test_another_preset_than_the_recorded_one_is_refused(model: Path, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "preset.jsonl"
    play_episodes(HOUSE, "expert", preset="react", tasks=1, env_kwargs={"config": "small"}, out=path, progress=False)
    words = ("--traces", str(path), "--env-kwargs", '{"config": "small"}')
    with pytest.raises(TurngymError, match="played with --preset react, the run has verl-agent"):
        build_trainer(options(model, tmp_path / "a", "sft", *words, "--preset", "verl-agent"))
    with pytest.raises(TurngymError, match="played with --preset react, the run has none"):
        build_trainer(options(model, tmp_path / "b", "sft", *words))
    trainer = build_trainer(options(model, tmp_path / "c", "sft", *words, "--preset", "react"))
    (episode,) = trainer.source(RolloutRequest(step=1, episodes=1, max_turns=3))
    assert episode.system
    assert "another system message" not in capfd.readouterr().err


def test_another_system_message_is_said(model: Path, traces: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    """Episodes of a policy keep the ids that they were sampled from; nobody reads their message otherwise."""
    path = tmp_path / "own.jsonl"
    play_episodes(
        HOUSE,
        f"model:{model}",
        tasks=2,
        env_kwargs={"config": "small", "max_turns": 2},
        system="Go.",
        out=path,
        progress=False,
    )
    for more, count in (((), 1), (("--system", "Go."), 0)):
        build_trainer(options(model, tmp_path / "x", "grpo", "--grpo.n", "2", "--traces", str(path), *more))
        assert (
            capfd.readouterr().err.count("2 of 2 episodes have another system message than the student gets") == count
        )


def test_sessions_of_the_proxy_are_of_no_environment(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    played = play_episodes(
        HOUSE, f"model:{model}", tasks=2, env_kwargs={"config": "small", "max_turns": 2}, progress=False
    )
    with TraceWriter(path) as writer:
        for episode in played.episodes:
            writer.write(replace(episode, task=replace(episode.task, env_id="proxy")))
    assert len(collected(options(model, tmp_path / "x", "opd-hints", "--traces", str(path), "--env", HOUSE))) == 2
    with pytest.raises(TurngymError, match="are of proxy, which"):
        build_trainer(options(model, tmp_path / "y", "opd-hints", "--traces", str(path)))


def test_every_environment_of_ours_is_known() -> None:
    assert {SHOP, HOUSE} < {name for name in gym.registry if name.startswith("turngym/")}
    assert turngym.envs
