"""slime's contract: its `Sample`, its router, partial rollouts, and its rollout function."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import slime_contract as contract

from turngym.agents.playing.episode_session import SessionPool
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.trainers.adapters import slime as adapter
from turngym.trainers.adapters.slime import rollout_function
from turngym.trainers.adapters.token_session import Trajectory

PARAMS = {"temperature": 1.0, "max_new_tokens": 2000, "stop": None, "stop_token_ids": None}
SEED = 3


def run(sessions: SessionPool, args: Any, sample: Any, **params: Any) -> Any:
    generate = adapter.generate_function(sessions, post=args.post)
    return asyncio.run(generate(args, sample, {**PARAMS, **params}))


def new_sample(episode: Episode) -> Any:
    return contract.Sample(index=episode.sample, prompt="played", metadata={"task_id": episode.task.task_id})


def server(replay: Any, episode: Episode, **more: Any) -> Any:
    return contract.SlimeArgs(replay, f"{episode.task.task_id}:{episode.sample}", seed=SEED, **more)


def test_every_field_of_a_sample(sessions: SessionPool, recorded: list[Episode], replay: Any) -> None:
    for episode in recorded:
        sample, ours = run(sessions, server(replay, episode), new_sample(episode)), Trajectory.of(episode)
        assert sample.tokens == [*ours.prompt_ids.tolist(), *ours.response_ids.tolist()]
        assert (
            sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == len(ours.response_ids)
        )
        assert sample.weight_versions == ["5"] * episode.depth
        expected = "completed" if episode.status.value == "completed" else "truncated"
        assert sample.status is contract.Status(expected)
        assert (sample.reward, sample.remove_sample) == (episode.episode_return, False)
        assert sample.metadata["task_id"] == episode.task.task_id
        assert sample.response.split("\n") == [turn.response for turn in episode.turns]
        assert sample.teacher_log_probs is None


def test_an_aborted_sample_goes_on_where_it_was(sessions: SessionPool, recorded: list[Episode], replay: Any) -> None:
    """Aborted at turn 2 and given back: the two turns before are played again, not sampled again."""
    episode = max(recorded, key=lambda one: one.depth)
    first = server(replay, episode, abort_at=2)
    sample = run(sessions, first, new_sample(episode))
    assert sample.status is contract.Status.ABORTED
    assert (len(first.asked), len(sample.weight_versions), sample.reward) == (3, 2, None)
    second = server(replay, episode)
    second.mask_offpolicy_in_partial_rollout = True
    done = run(sessions, second, sample)
    ours = Trajectory.of(episode)
    assert len(second.asked) == episode.depth - 2
    assert done.status is not contract.Status.ABORTED
    assert done.tokens == [*ours.prompt_ids.tolist(), *ours.response_ids.tolist()]
    assert done.rollout_log_probs == ours.logprobs.tolist()  # type: ignore[union-attr]
    assert done.weight_versions == ["5"] * episode.depth
    begin = ours.turn_spans[2][0]
    assert done.loss_mask == [0] * begin + ours.response_mask[begin:].astype(int).tolist()


def test_a_sample_that_is_aborted_again_at_once(sessions: SessionPool, recorded: list[Episode], replay: Any) -> None:
    """Nothing new was said: the observation that waits is part of the prompt, not of the response and its mask."""
    episode = max(recorded, key=lambda one: one.depth)
    sample = run(sessions, server(replay, episode, abort_at=2), new_sample(episode))
    again = server(replay, episode, abort_at=0)
    again.mask_offpolicy_in_partial_rollout = True
    sample = run(sessions, again, sample)
    assert sample.status is contract.Status.ABORTED
    assert sample.loss_mask == [0] * sample.response_length


def test_a_world_that_changed_since_the_abort_is_an_error(
    sessions: SessionPool, recorded: list[Episode], replay: Any
) -> None:
    episode = max(recorded, key=lambda one: one.depth)
    sample = run(sessions, server(replay, episode, abort_at=2), new_sample(episode))
    sample.tokens[3] += 1
    with pytest.raises(TurngymError, match="says other things at turn 0"):
        run(sessions, server(replay, episode), sample)


def test_the_budget_is_that_of_the_whole_response(sessions: SessionPool, recorded: list[Episode], replay: Any) -> None:
    episode = max(recorded, key=lambda one: one.depth)
    ours = Trajectory.of(episode)
    budget = ours.turn_spans[3][0]  # nothing is left for turn 3
    args = server(replay, episode)
    sample = run(sessions, args, new_sample(episode), max_new_tokens=budget)
    assert sample.status is contract.Status.TRUNCATED
    assert sample.response_length == ours.turn_spans[2][1]
    assert [body["sampling_params"]["max_new_tokens"] for body in args.asked] == [
        min(12, budget - start) for start, _ in ours.turn_spans[:3]
    ]


def test_a_failed_environment_is_neither_rewarded_nor_trained_on(
    sessions: SessionPool, recorded: list[Episode], replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turngym.core.errors import EnvBackendError
    from turngym.envs.guard import ActionGuard

    step, calls = ActionGuard.step, []

    def breaks(self: Any, action: str) -> Any:
        calls.append(action)
        if len(calls) == 2:
            raise EnvBackendError("the house is gone")
        return step(self, action)

    monkeypatch.setattr(ActionGuard, "step", breaks)
    sample = run(sessions, server(replay, recorded[0]), new_sample(recorded[0]))
    assert sample.status is contract.Status.FAILED
    assert (sample.reward, sample.remove_sample) == (0.0, True)
    assert sample.response_length == len(sample.loss_mask) == recorded[0].turns[0].response_length


def test_sticky_sessions_and_stop_strings(sessions: SessionPool) -> None:
    request = sessions.open(sessions.task_ids()[0]).request
    assert request is not None
    body = importlib.import_module("turngym.trainers.adapters.slime").payload(
        request, {"stop": "###", "stop_token_ids": [9], "max_new_tokens": 99, "top_p": 1.0}, 40
    )
    assert body["input_ids"] == request.prompt_ids.tolist()
    assert body["sampling_params"] == {
        "stop": ["###", "</action>"],
        "stop_token_ids": [9, 1],
        "max_new_tokens": 12,
        "top_p": 1.0,
        "no_stop_trim": True,
    }


class Source:
    """slime's data source: groups of samples of one task."""

    def __init__(self, groups: list[list[Any]]) -> None:
        self.groups = groups

    def get_samples(self, number: int) -> list[list[Any]]:
        return self.groups[:number]


def test_the_rollout_function_plays_all_groups_of_a_step(
    sessions: SessionPool, recorded: list[Episode], replay: Any
) -> None:
    source = Source([[new_sample(recorded[n]), new_sample(recorded[n + 1])] for n in (0, 2, 4)])
    args = contract.SlimeArgs(replay, None, seed=SEED)
    generate = by_task(sessions, replay)
    groups = rollout_function(generate)(args, 0, source)
    assert isinstance(groups, list)
    assert [[sample.reward for sample in group] for group in groups] == [
        [recorded[0].episode_return, recorded[1].episode_return],
        [recorded[2].episode_return, recorded[3].episode_return],
    ]
    with pytest.raises(TurngymError, match="--eval-function-path"):
        rollout_function(generate)(args, 0, source, evaluation=True)
    source.get_eval_samples = lambda: source.groups  # type: ignore[attr-defined]
    for group in source.groups:
        group[:] = [new_sample(e) for e in recorded if e.task.task_id == group[0].metadata["task_id"]]
    scored = rollout_function(generate)(args, 0, source, evaluation=True)
    assert isinstance(scored, dict)
    assert scored["turngym"]["rewards"] == [episode.episode_return for episode in recorded]
    assert scored["turngym"]["truncated"] == [episode.status.value != "completed" for episode in recorded]


def by_task(sessions: SessionPool, replay: Any) -> Callable[..., Any]:
    """A generate function whose server knows which attempt asks."""

    async def generate(args: Any, sample: Any, params: dict[str, Any], evaluation: bool = False) -> Any:
        named = contract.SlimeArgs(replay, f"{sample.metadata['task_id']}:{sample.index}", seed=SEED)
        return await adapter.generate_function(sessions, post=named.post)(named, sample, params)

    return generate


def test_a_sample_without_a_task(sessions: SessionPool) -> None:
    with pytest.raises(TurngymError, match="sample 4 names no task"):
        run(sessions, contract.SlimeArgs(None, None, seed=0), contract.Sample(index=4, prompt=[]))
