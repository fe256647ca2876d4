"""The model agent over the local engine: a tiny random model plays ALFWorld the same way in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import turngym.envs
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.chat_settings import ChatSettings, build_phrase_tokenizer
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.channels import TextChannel
from turngym.envs.core.progress import ACTIVITY
from turngym.envs.core.protocols import Sampling
from turngym.scripts.main import main

assert turngym.envs

ACTIONS = ["<action>", "</action>", "look", "inventory", "go to ", "shelf 1", "bed 1", "<|x|>"]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    tokenizer = build_phrase_tokenizer(ACTIONS)
    set_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval(), tokenizer


def play(parts: tuple[Any, Any], slots: int, max_context: int = 4000) -> Any:
    model, tokenizer = parts
    engine = LocalEngine(model, tokenizer=tokenizer, max_batch=slots)
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    agent = ModelAgent(engine, ChatRenderer(tokenizer), TextChannel(), sampling, max_context=max_context)

    def make() -> Any:
        return gym.make("turngym/ALFWorld-v0", channel="text", max_turns=6, disable_env_checker=True)

    jobs = [Job(task_id=f"generated/small/eval/{n}", seed=1) for n in range(5)]
    return rollout(jobs, make, agent, slots=slots, system="play"), engine


def test_any_batch_gives_the_same_episodes_and_releases_every_session(parts: Any) -> None:
    before = ACTIVITY.tokens
    alone, _ = play(parts, 1)
    assert ACTIVITY.tokens - before == sum(len(e.response_ids(turn)) for e in alone for turn in e.turns)
    together, engine = play(parts, 5)
    assert engine.sessions == ()
    for a, b in zip(alone, together, strict=True):
        assert [s.tolist() for s in a.segments] == [s.tolist() for s in b.segments]
        assert [t.response for t in a.turns] == [t.response for t in b.turns]
    for episode in together:
        for turn in episode.turns:
            assert turn.logprobs is not None
            assert len(turn.logprobs) == turn.response_length > 0
            ends = turn.finish == "length" or episode.response_ids(turn)[-1] == 1 or "</action>" in turn.response
            assert ends


def test_a_full_context_ends_the_episode(parts: Any) -> None:
    episodes, _ = play(parts, 5, max_context=700)
    assert {e.status.value for e in episodes} <= {"truncated_tokens", "truncated_turns"}
    assert all(len(e.segments[0]) <= 700 for e in episodes if e.segments)
    assert any(e.status.value == "truncated_tokens" for e in episodes)


def test_a_model_folder_is_evaluated_as_it_was_trained(parts: Any, tmp_path: Path, capsys: Any) -> None:
    model, tokenizer = parts
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ChatSettings(system="play", max_new_tokens=4).save(folder)
    assert ChatSettings.load(folder) == ChatSettings(system="play", max_new_tokens=4)
    out = tmp_path / "t.jsonl"
    argv = ["--agent", f"model:{folder}", "--out", str(out), "--tasks", "2", "--max-turns", "2", "--device", "cpu"]
    assert main(["rollout", *argv]) == 0
    from turngym.envs.core.trace import read_trace

    episodes = read_trace(out)[0]
    assert [e.system for e in episodes] == ["play", "play"]
    assert max(t.response_length for e in episodes for t in e.turns) <= 4
    (folder / "turngym.json").write_text('{"sistem": ""}')
    assert main(["rollout", *argv, "--append", "--samples", "2"]) == 2
    assert "unknown setting 'sistem'; settings are channel, system" in capsys.readouterr().err
