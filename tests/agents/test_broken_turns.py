"""Responses that were broken off, batches that failed in part, and weights that changed: what episodes keep of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.channels import make_channel
from turngym.envs.core.episode import Episode, Status
from turngym.envs.core.protocols import GenerateRequest, Generation, PartialFailure, Sampling
from turngym.envs.core.trace import TraceWriter, read_trace


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
def play(make_tokenizer: Any, make_doors: Any, make_policy: Any) -> Callable[..., tuple[list[Episode], Breaking]]:
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


def test_what_was_drawn_before_the_break_is_the_last_turn(play: Any, tmp_path: Path) -> None:
    def cut(whole: Generation) -> Generation:
        spans = ((3, 0, 2), (4, 2, 5))
        return Generation(
            ids=whole.ids[:5], logprobs=whole.logprobs[:5], finish="aborted", policy_version=3, version_spans=spans
        )

    episodes, _ = play(cut)
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


def test_a_break_before_the_first_id_is_no_turn(play: Any) -> None:
    nothing = Generation(ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish="aborted")
    episodes, _ = play(lambda whole: nothing)
    assert [(episode.status, len(episode.turns)) for episode in episodes] == [(Status.ERROR_ENGINE, 1)] * 3
    assert "before its first id" in episodes[0].meta["error"]


def test_requests_that_failed_alone_end_their_episodes_alone(play: Any) -> None:
    count = iter(range(100))

    def sometimes(whole: Generation) -> Any:
        return [ConnectionError("gone"), TimeoutError("late"), whole][next(count) % 3]

    episodes, policy = play(sometimes)
    statuses = [episode.status for episode in episodes]
    assert statuses[:2] == [Status.ERROR_ENGINE, Status.ERROR_TIMEOUT]
    assert "gone" in episodes[0].meta["error"]
    assert policy.calls == 3  # nothing is asked twice, however many failed


def test_a_failure_that_is_no_accident_is_raised(play: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        play(lambda whole: ZeroDivisionError("a mistake"))


def test_an_engine_that_never_worked_is_a_mistake(make_tokenizer: Any, make_doors: Any) -> None:
    class Broken:
        def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
            raise PartialFailure([ConnectionError("nobody is there")] * len(requests))

        def release(self, session: str) -> None:
            return

    tokenizer = make_tokenizer()
    make = make_doors(max_turns=3)
    agent = ModelAgent(Broken(), ChatRenderer(tokenizer), make_channel("text", make().base.tool))
    with pytest.raises(ConnectionError, match="nobody is there"):
        rollout([Job(task_id="doors/2")], make, agent)
