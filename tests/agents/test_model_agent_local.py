"""A tiny random model plays ALFWorld the same way in any batch; answers that break off are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import turngym.envs
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.episode import Episode, Status
from turngym.core.progress import ACTIVITY
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure, Sampling
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.channels import TextChannel, make_channel
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
    from turngym.core.trace import read_trace

    episodes = read_trace(out)[0]
    assert [e.system for e in episodes] == ["play", "play"]
    assert max(t.response_length for e in episodes for t in e.turns) <= 4
    for wrong, why in (
        ('{"sistem": ""}', "there is no setting 'sistem'. Did you mean"),
        ('{"memory": 3}', "memory is 3; valid: a text"),
        ('{"thinking": "on"}', "thinking is 'on'; valid: true or false"),
        ('{"history": "short"}', "history is 'short'; valid: template, append"),
    ):
        (folder / "turngym.json").write_text(wrong)
        assert main(["rollout", *argv, "--append", "--samples", "2"]) == 2
        assert f"turngym.json: {why}" in capsys.readouterr().err


class Breaking:
    """Plays turn 0 of every episode as `inner` does; later turns go wrong in the way that `later` says."""

    def __init__(self, inner: Any, later: Callable[[Generation], Generation | Exception]) -> None:
        self.inner, self.later, self.calls = inner, later, 0

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.calls += 1
        results: list[Any] = self.inner.generate(requests)
        for place, request in enumerate(requests):
            if request.stream[-1] > 0:
                results[place] = self.later(results[place])
        if any(isinstance(result, Exception) for result in results):
            raise PartialFailure(results)
        return results

    def release(self, session: str) -> None:
        return


@pytest.fixture
def play_on(make_tokenizer: Any, make_doors: Any, make_policy: Any) -> Callable[..., tuple[list[Episode], Breaking]]:
    def run(later: Callable[[Generation], Any], games: int = 3) -> tuple[list[Episode], Breaking]:
        tokenizer = make_tokenizer()
        renderer = ChatRenderer(tokenizer)
        policy = Breaking(make_policy(tokenizer, tokenizer.eos_token_id), later)
        make = make_doors(max_turns=3, on_invalid="noop")
        channel = make_channel("text", make().base.tool)
        agent = ModelAgent(policy, renderer, channel, Sampling(max_new_tokens=64))
        jobs = [Job(task_id="doors/9", sample=sample) for sample in range(games)]
        return rollout(jobs, make, agent), policy

    return run


def test_what_was_drawn_before_the_break_is_the_last_turn(play_on: Any, tmp_path: Path) -> None:
    def cut(whole: Generation) -> Generation:
        spans = ((3, 0, 2), (4, 2, 5))
        return Generation(
            ids=whole.ids[:5], logprobs=whole.logprobs[:5], finish="aborted", policy_version=3, version_spans=spans
        )

    episodes, _ = play_on(cut)
    for episode in episodes:
        assert episode.status is Status.ERROR_ENGINE
        assert "broken off" in episode.meta["error"]
        first, last = episode.turns
        assert (first.finish, first.excluded) == ("stop", None)
        assert (last.finish, last.excluded, last.action) == ("aborted", "broken off", None)
        assert last.response_length == 5
        assert last.logprobs is not None
        assert len(last.logprobs) == 5
        assert episode.response_ids(last).tolist() == episode.segments[0][-5:].tolist()
        assert (last.policy_version, last.version_spans) == (3, ((3, 0, 2), (4, 2, 5)))
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        for episode in episodes:
            writer.write(episode)
    for episode, again in zip(episodes, read_trace(tmp_path / "trace.jsonl")[0], strict=True):
        assert again.turns[1].version_spans == ((3, 0, 2), (4, 2, 5))
        assert again.turns[0].version_spans == ()
        np.testing.assert_array_equal(again.segments[0], episode.segments[0])


def test_a_break_before_the_first_id_is_no_turn(play_on: Any) -> None:
    nothing = Generation(ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish="aborted")
    episodes, _ = play_on(lambda whole: nothing)
    assert [(episode.status, len(episode.turns)) for episode in episodes] == [(Status.ERROR_ENGINE, 1)] * 3
    assert "before its first id" in episodes[0].meta["error"]


def test_requests_that_failed_alone_end_their_episodes_alone(play_on: Any) -> None:
    count = iter(range(100))

    def sometimes(whole: Generation) -> Any:
        return [ConnectionError("gone"), TimeoutError("late"), whole][next(count) % 3]

    episodes, policy = play_on(sometimes)
    statuses = [episode.status for episode in episodes]
    assert statuses[:2] == [Status.ERROR_ENGINE, Status.ERROR_TIMEOUT]
    assert "gone" in episodes[0].meta["error"]
    assert policy.calls == 3  # nothing is asked twice, however many failed


def test_a_failure_that_is_no_accident_is_raised(play_on: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        play_on(lambda whole: ZeroDivisionError("a mistake"))


def test_an_engine_that_never_worked_is_a_mistake(make_tokenizer: Any, make_doors: Any) -> None:
    class Broken:
        def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
            raise PartialFailure([ConnectionError("nobody is there")] * len(requests))

        def release(self, session: str) -> None:
            return

    tokenizer = make_tokenizer()
    make = make_doors(max_turns=3)
    agent = ModelAgent(Broken(), ChatRenderer(tokenizer), make_channel("text", make().base.tool))
    with pytest.raises(ConnectionError):
        rollout([Job(task_id="doors/2")], make, agent)
