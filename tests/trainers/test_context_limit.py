"""One function knows how many ids a model reads: who plays, scores and trains keeps to it, stretched positions too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import torch
import transformers
from engine_requests import tiny
from tiny_runs import command, save_tiny

from turngym.agents.local_engine.engine import EngineError, LocalEngine
from turngym.agents.local_engine.positions import position_limit
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.servers import open_servers
from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.policy import ServerScorer
from turngym.agents.servers.server_connection import ClientLimits, ServerError
from turngym.core.episode import Status
from turngym.core.errors import ModelError, SettingsError, TurngymError
from turngym.core.trace import read_episodes
from turngym.scripts.main import main
from turngym.trainers import models
from turngym.trainers.microbatch import check_packing
from turngym.trainers.recorded_source import within_limit
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.teacher import teachers_length

THETA = {"rope_theta": 1e4}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        **THETA,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0, 16.0, 32.0, 64.0],
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 512,
}


def config(family: str, **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**changes)


def test_what_models_know() -> None:
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, **THETA}
    known = {"max_position_embeddings": 32_768}
    assert position_limit(config("Qwen2", **known)) == 32_768
    # as Qwen2.5's card says, which leaves max_position_embeddings as it is
    assert position_limit(config("Qwen2", **known, rope_parameters=card)) == 131_072
    done = {"max_position_embeddings": 131_072}
    assert position_limit(config("Qwen2", **done, rope_parameters=card)) == 131_072
    assert position_limit(config("Phi3", **LONGROPE, hidden_size=32, num_attention_heads=4)) == 64
    dynamic = {"rope_type": "dynamic", "factor": 4.0, **THETA}
    assert position_limit(config("Llama", max_position_embeddings=64, rope_parameters=dynamic)) == 64
    # positions that are stretched evenly: Vicuna 16k says those of the plain model first, others say the stretched ones
    even = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}
    assert position_limit(config("Llama", max_position_embeddings=4096, max_sequence_length=16_384, **even)) == 16_384
    assert position_limit(config("Llama", max_position_embeddings=16_384, **even)) == 16_384
    assert position_limit(config("GPTBigCode", n_positions=256)) == 256
    assert position_limit(config("Mpt", max_seq_len=300)) == 300
    assert position_limit(config("XLNet", d_model=32, n_head=4)) is None
    assert position_limit(config("Gemma3", text_config={"max_position_embeddings": 700})) == 700
    assert position_limit(config("Mamba")) is None


def rows_of(*sizes: int) -> list[Any]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 60, size).astype(np.int32) for size in sizes]


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "rotary", "learned"])
def test_a_row_is_worth_the_same_beside_any_other_or_is_refused(kind: str) -> None:
    """A row of 40 ids was 5.2 nats off beside one of 150: beyond a border its frequencies were others."""
    sizes: dict[str, Any] = {"max_position_embeddings": 64}
    if kind == "longrope":
        sizes = LONGROPE
    if kind == "dynamic":
        sizes |= {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}
    if kind == "learned":
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "max_position_embeddings": 64}
    family = {"longrope": "Phi3", "learned": "GPTBigCode"}.get(kind, "Llama")
    model = tiny(family, **sizes)
    short, whole, long = rows_of(40, 64, 65)
    scorer = LocalScorer(model=model)
    alone = scorer.logprobs([short], [np.arange(1, 40)])[0]
    beside = scorer.logprobs([short, whole], [np.arange(1, 40), np.arange(1, 64)])[0]
    np.testing.assert_allclose(alone, beside, atol=1e-5)
    with pytest.raises(ModelError, match="64 positions"):
        scorer.logprobs([short, long], [np.arange(1, 40), np.arange(1, 65)])
    assert LocalEngine(model, cache="recompute").max_length == 64
    with pytest.raises(EngineError):
        LocalEngine(model, max_length=65)


def test_episodes_end_where_the_teacher_reads_no_further(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were scored all the same, at positions that the teacher never learned."""
    save_tiny(tmp_path / "student", length=512)
    save_tiny(tmp_path / "teacher", length=60, seed=1)
    out = tmp_path / "run"
    more = ["--steps", "1", "--keep-rollouts", "1", "--checkpoint-every", "1", "--max-turns", "12"]
    assert main(["train", *command(tmp_path, out, "opd", *more)]) == 0
    assert "60 ids" in capfd.readouterr().err
    played = read_episodes(out / "rollouts" / "step_000001.jsonl")
    longest = max(len(ids) for episode in played for ids in episode.segments)
    assert 50 < longest <= 60
    # the student itself keeps its own limit
    settings = json.loads((out / "checkpoints" / "step_000001" / "model" / "turngym.json").read_text())
    assert settings["max_context"] == 512


def test_what_a_teachers_servers_hold_counts(tmp_path: Path) -> None:
    """They may be started with less than its positions; the first update found out."""
    algorithm: Any = SimpleNamespace(needs_teacher=True)
    with fake.FakeServer() as server:
        fleet = Fleet(urls=[server.url], settings=ClientLimits(backoff=0.01)).open()
        teacher = ServerScorer(fleet=fleet, vocabulary=fake.VOCABULARY)
        longest = teachers_length(algorithm, teacher, None)
        assert longest == server.max_prompt - 1
        teacher.logprobs([np.ones(longest, np.int32)], [np.array([longest - 1])])
        with pytest.raises(ServerError, match=f"at most {longest}"):
            teacher.logprobs([np.ones(longest + 1, np.int32)], [np.array([longest])])
        assert teachers_length(algorithm, teacher, save_tiny(tmp_path / "teacher", length=40)) == 40
        fleet.close()


def test_servers_play_no_further_than_the_student_is_scored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be started with a longer context than the model has positions: longrope's change in between."""
    save_tiny(tmp_path / "student", length=96)
    ChatSettings(system="Do the task.", max_new_tokens=3).save(tmp_path / "student")

    def policy(options: Any, model: Any, tokenizer: Any, max_length: int | None, *more: Any, **rest: Any) -> Any:
        raise TurngymError(f"servers may hold {max_length} ids")

    monkeypatch.setattr(open_servers, "train_policy", policy)
    words = command(tmp_path, tmp_path / "run", "grpo", "--steps", "1", "--policy-server", "http://127.0.0.1:9")
    assert main(["train", *words]) != 0
    assert "servers may hold 96 ids" in capfd.readouterr().err
    assert main(["train", *words, "--max-context", "97"]) != 0
    assert "--max-context is 97; valid: 1 to 96" in capfd.readouterr().err


@pytest.mark.parametrize("players", [[], ["--sft.players", "expert:1"]])
def test_an_experts_episodes_end_where_the_student_reads_no_further(players: list[str], tmp_path: Path) -> None:
    """They were written to their end, and the first update refused them."""
    save_tiny(tmp_path / "student", length=60)
    out = tmp_path / "run"
    more = ["--steps", "1", "--keep-rollouts", "1", "--max-turns", "12", *players]
    assert main(["train", *command(tmp_path, out, "sft", *more)]) == 0
    played = read_episodes(out / "rollouts" / "step_000001.jsonl")
    assert 50 < max(len(ids) for episode in played for ids in episode.segments) <= 60
    assert {episode.status for episode in played} == {Status.TRUNCATED_TOKENS}


def test_recorded_episodes_that_are_too_long_are_refused(make_episode: Any) -> None:
    episode = make_episode([([1, 2, 3, 4], [5, 6]), ([7, 8], [9])])
    size = max(len(ids) for ids in episode.segments)
    # hints that were recorded where more could be read ended the run at their step
    told = [
        replace(turn, hint_prompt_ids=np.arange(n)) for turn, n in zip(episode.turns, (size - 2, size), strict=True)
    ]
    (read,) = within_limit([replace(episode, turns=tuple(told))], "t.jsonl", size)
    assert [turn.hint_prompt_ids is None for turn in read.turns] == [False, True]
    with pytest.raises(TurngymError, match="student and its teachers"):
        within_limit([episode], "t.jsonl", size - 1)


def test_the_trial_of_packed_rows_is_longer_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of seven ids said nothing of a window of sixteen."""
    more = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
    model = tiny("Qwen3", head_dim=8, initializer_range=0.3, **more)
    check_packing(model)
    attend = models._attend_rows

    def all_of_it(*args: Any, sliding_window: int | None = None, **rest: Any) -> Any:
        return attend(*args, **rest)

    monkeypatch.setattr(models, "_attend_rows", all_of_it)
    with pytest.raises(SettingsError, match="see each other"):
        check_packing(model)


torch.set_num_threads(1)
