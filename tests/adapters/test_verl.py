"""verl's agent loop: its own worker where TURNGYM_VERL_PYTHON names its interpreter, the pure parts everywhere."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.agents.playing.episode_session import SessionPool
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.core.trace import TraceWriter
from turngym.trainers.adapters import verl as adapter
from turngym.trainers.adapters.token_session import Trajectory

REQUEST = GenerateRequest(
    session="0:a:0/0",
    prompt_ids=np.arange(6, dtype=np.int32),
    sampling=Sampling(max_new_tokens=12, stop_ids=(1,), stop_text=("</action>",)),
    stream=(0,),
)


def test_verls_own_worker_plays_the_recorded_episodes(
    recorded: list[Episode], student: SimpleNamespace, assert_same: Callable[..., None], tmp_path: Path
) -> None:
    python = os.environ.get("TURNGYM_VERL_PYTHON")
    if not python:
        pytest.skip("TURNGYM_VERL_PYTHON does not name an interpreter with turngym[train,verl]")
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        for episode in recorded:
            writer.write(episode)
    script = Path(__file__).with_name("verl_run.py")
    out = tmp_path / "out.json"
    command = [python, str(script), str(tmp_path / "trace.jsonl"), str(student.folder), "3", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(out.read_text())
    assert len(rows) == len(recorded) == 6
    for row, episode in zip(rows, recorded, strict=True):
        ours = Trajectory.of(episode)
        assert_same(ours, row)
        assert row["status"] == episode.status.value
        assert row["turns"] == 2 * episode.depth
        assert row["reward_at"] == (len(ours.response_ids) - 1 if episode.episode_return else None)


def test_a_turn_asks_for_no_more_than_is_left_of_the_response() -> None:
    base = {"temperature": 0.5, "stop_token_ids": [7], "logprobs": True}
    assert adapter.server_params(base, REQUEST, 5, "sglang") == {
        "temperature": 0.5,
        "logprobs": True,
        "max_tokens": 5,
        "stop_token_ids": [7, 1],
        "stop": ["</action>"],
        "no_stop_trim": True,
    }
    on_vllm = adapter.server_params(base, REQUEST, 50, "vllm")
    assert (on_vllm["max_tokens"], on_vllm["include_stop_str_in_output"]) == (12, True)
    assert "stop" not in adapter.server_params(base, REQUEST, 5, "trtllm")
    # a single text was taken for its letters
    assert adapter.server_params({"stop": "END"}, REQUEST, 5, "vllm")["stop"] == ["END", "</action>"]


def test_answers_of_the_server_become_generations() -> None:
    said = SimpleNamespace(token_ids=[4, 5], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={})
    generation = adapter.generation(said)
    assert generation.ids.tolist() == [4, 5]
    assert generation.logprobs.tolist() == [-1.0, -2.0]
    assert generation.policy_version == 0
    said.log_probs = None
    assert np.isnan(adapter.generation(said).logprobs).all()
    said.token_ids, said.stop_reason = [], "aborted"
    assert adapter.generation(said) is Status.ERROR_ENGINE


def loop(sessions: SessionPool, answers: Any, prompt: int = 64, response: int = 512) -> adapter.TurngymAgentLoop:
    rollout = SimpleNamespace(prompt_length=prompt, response_length=response, name="sglang")
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    tokenizer = SimpleNamespace(eos_token_id=1)
    return adapter.TurngymAgentLoop(
        trainer_config=config, server_manager=answers, tokenizer=tokenizer, sessions=lambda tokenizer: sessions
    )


def test_a_prompt_that_verl_would_cut_is_an_error(sessions: SessionPool) -> None:
    session = sessions.open(sessions.task_ids()[0])
    with pytest.raises(TurngymError, match=r"29 tokens, but rollout\.prompt_length is 8"):
        loop(sessions, None, prompt=8)._generate({}, session.request)
    session.close()


async def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is left to ask for")


def test_a_full_response_ends_the_episode_as_truncated(sessions: SessionPool) -> None:
    import asyncio

    session = sessions.open(sessions.task_ids()[0])
    playing = loop(sessions, SimpleNamespace(generate=refuse), response=0)
    episode = asyncio.run(adapter.play_async(session, playing._generate({}, session.request)))
    assert episode.status is Status.TRUNCATED_TOKENS
    fields = adapter.output(Trajectory.of(episode).filled(1))
    assert (fields["prompt_ids"], fields["response_ids"], fields["response_mask"]) == ([1], [1], [0])
    assert (fields["response_logprobs"], fields["reward_score"], fields["num_turns"]) == ([0.0], 0.0, 0)


def test_sessions_are_made_once_for_a_tokenizer_although_a_loop_is_made_for_every_episode() -> None:
    made: list[Any] = []

    def make(tokenizer: Any) -> Any:
        made.append(tokenizer)
        return SimpleNamespace()

    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None)))
    tokenizer = SimpleNamespace()
    for _ in range(3):
        adapter.TurngymAgentLoop(trainer_config=config, server_manager=None, tokenizer=tokenizer, sessions=make)
    assert made == [tokenizer]
