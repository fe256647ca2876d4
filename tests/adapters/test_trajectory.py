"""Trajectories by hand, and against the model that sampled them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.agents.playing.episode_session import SessionPool
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import AgentError
from turngym.core.protocols import Generation, PartialFailure
from turngym.core.task import Task, Verdict
from turngym.core.trace import TraceWriter
from turngym.trainers.adapters import datasets
from turngym.trainers.adapters.token_session import Trajectory, TrajectoryError, play


def turn(index: int, prompt: tuple[int, int], response: tuple[int, int], **more: Any) -> Turn:
    logprobs = np.full(response[1] - response[0], -0.5 - index, np.float32)
    return Turn(
        index=index,
        observation="",
        admissible=None,
        response="",
        action="look",
        verdict=Verdict.OK,
        prompt_span=prompt,
        response_span=response,
        **{"reward": float(index), "logprobs": logprobs, "policy_version": 7 + index, **more},
    )


def episode(turns: list[Turn], *segments: list[int], status: Status = Status.COMPLETED) -> Episode:
    return Episode(
        task=Task(env_id="fake-v0", task_id="t", sha256="0" * 64, split="train", category="c"),
        seed=1,
        sample=2,
        group=3,
        segments=tuple(np.array(ids, np.int32) for ids in segments),
        turns=tuple(turns),
        status=status,
        success=True,
        episode_return=3.0,
    )


#           prompt    R0      said   R1   said  R2   never answered
IDS = [1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14, 99]
TURNS = [turn(0, (0, 3), (3, 5)), turn(1, (5, 7), (7, 8)), turn(2, (8, 9), (9, 11))]


def test_a_trajectory_by_hand() -> None:
    row = Trajectory.of(episode(TURNS, IDS))
    assert row.prompt_ids.tolist() == [1, 2, 3]
    assert row.response_ids.tolist() == [10, 11, 4, 5, 12, 6, 13, 14]
    assert row.response_mask.tolist() == [True, True, False, False, True, False, True, True]
    assert row.logprobs is not None
    assert row.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -1.5, 0.0, -2.5, -2.5]
    assert row.policy_versions.tolist() == [7, 7, -1, -1, 8, -1, 9, 9]
    assert row.turn_spans == ((0, 2), (4, 5), (6, 8))
    assert row.turn_rewards == (0.0, 1.0, 2.0)
    assert (row.reward, row.seed, row.sample, row.group, row.task_id) == (3.0, 1, 2, 3, "t")
    assert not row.failed
    assert not row.truncated


def test_weights_that_changed_in_the_middle_of_a_response() -> None:
    torn = replace(TURNS[0], version_spans=((6, 0, 1), (7, 1, 2)))
    row = Trajectory.of(episode([torn, TURNS[1], TURNS[2]], IDS))
    assert row.policy_versions.tolist() == [6, 7, -1, -1, 8, -1, 9, 9]


def test_what_the_policy_did_not_choose_is_not_trained_on() -> None:
    shown = turn(0, (0, 3), (3, 5), origin="demonstration", logprobs=None)
    bad = turn(2, (8, 9), (9, 11), excluded="the judge failed")
    row = Trajectory.of(episode([shown, TURNS[1], bad], IDS))
    assert row.response_mask.tolist() == [False, False, False, False, True, False, False, False]
    assert row.logprobs is not None  # nothing that is trained on lacks them
    assert row.turn_spans == ((0, 2), (4, 5), (6, 8))
    unknown = Trajectory.of(episode([TURNS[0], replace(TURNS[1], logprobs=None), TURNS[2]], IDS))
    assert unknown.logprobs is None


def test_a_rewritten_history_is_several_rows() -> None:
    again = turn(1, (0, 4), (4, 5), segment=1)
    torn = episode([TURNS[0], again], IDS[:5], [1, 2, 3, 4, 12])
    with pytest.raises(TrajectoryError, match="episode t sample 2 has 2 token segments"):
        Trajectory.of(torn)
    first, second = Trajectory.segments_of(torn)
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([1, 2, 3], [10, 11])
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([1, 2, 3, 4], [12])
    assert (first.turn_rewards, second.turn_rewards) == ((0.0,), (1.0,))


def test_empty_rows_are_filled_with_one_masked_token() -> None:
    nothing = Trajectory.of(episode([], status=Status.ERROR_ENV)).filled(1)
    assert (nothing.prompt_ids.tolist(), nothing.response_ids.tolist()) == ([1], [1])
    assert (nothing.response_mask.tolist(), nothing.policy_versions.tolist()) == ([False], [-1])
    assert nothing.failed
    row = Trajectory.of(episode(TURNS, IDS))
    assert row.filled(1) is row


def test_log_probabilities_stand_beside_the_ids_that_the_model_gave_them(
    recorded: list[Episode], student: SimpleNamespace
) -> None:
    """A plain forward pass over prompt and response: the shift, the spans and the mask agree to 1e-4."""
    import torch

    model = student.load().eval()
    for one in recorded:
        row = Trajectory.of(one)
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids])[None].astype(np.int64))
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        start = len(row.prompt_ids)
        ours = logp[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].numpy()
        assert row.logprobs is not None
        np.testing.assert_allclose(row.logprobs[row.response_mask], ours[row.response_mask], atol=1e-4)


def test_rows_without_ids_say_so(sessions: SessionPool) -> None:
    plain = SessionPool(sessions.make_env).open(sessions.task_ids()[0], seed=0)
    while not plain.done:
        plain.step_text("<action>look</action>")
    (row,) = datasets.rows([plain.episode()])
    assert row["prompt_ids"] is None
    assert [message["role"] for message in row["messages"][:3]] == ["system", "user", "assistant"]
    with pytest.raises(Exception, match="has no token ids: text-only episode"):
        datasets.trajectory_of(row)
    with pytest.raises(TrajectoryError):
        Trajectory.of(plain.episode())


def test_an_existing_parquet_file_is_kept(tmp_path: Any) -> None:
    path = tmp_path / "rows.parquet"
    assert datasets.write_parquet([episode(TURNS, IDS)], path) == 1
    with pytest.raises(Exception, match="exists already"):
        datasets.write_parquet([], path)


def test_a_session_ends_once_and_gives_its_environment_back(sessions: SessionPool) -> None:
    session = sessions.open(sessions.task_ids()[0], seed=1)
    with pytest.raises(AgentError, match="still in progress"):
        session.episode()
    session.end(Status.ERROR_ENGINE, "the server died")
    assert session.request is None
    assert session.episode().status is Status.ERROR_ENGINE
    assert session.episode().meta["error"] == "the server died"
    with pytest.raises(AgentError, match="open another session"):
        session.step(Generation(ids=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), finish="stop"))
    session.close()
    session.close()


def test_ids_and_log_probabilities_that_do_not_fit_are_refused_at_once(sessions: SessionPool) -> None:
    session = sessions.open(sessions.task_ids()[0])
    with pytest.raises(AgentError, match="2 sampled ids with 1 log-probabilities"):
        session.step(Generation(ids=np.array([5, 6], np.int32), logprobs=np.zeros(1, np.float32), finish="stop"))
    session.close()


def test_a_full_context_ends_the_episode(student: SimpleNamespace, sessions: SessionPool) -> None:
    small = SessionPool(sessions.make_env, sessions.renderer, system="Go.", sampling=sessions.sampling, max_context=48)
    session = small.open(small.task_ids()[0])
    depth = 0
    while (request := session.request) is not None:
        assert request.sampling.max_new_tokens == min(12, 48 - len(request.prompt_ids))
        ids = sessions.renderer.template.encode("<action>look</action>")  # type: ignore[union-attr]
        session.step(Generation(ids=ids, logprobs=np.zeros(len(ids), np.float32), finish="stop"))
        depth += 1
    assert session.episode().status is Status.TRUNCATED_TOKENS
    assert session.episode().depth == depth > 0
    session.close()


class Faulty:
    """A policy that draws `look` for every request but those of the attempts that it fails."""

    def __init__(self, ids: Any, failures: dict[int, Exception], finish: str = "stop") -> None:
        self.ids, self.failures, self.finish = ids, failures, finish

    def generate(self, requests: Any) -> list[Generation]:
        zeros = np.zeros(len(self.ids), np.float32)
        results = [
            self.failures.get(request.stream[2]) or Generation(ids=self.ids, logprobs=zeros, finish=self.finish)
            for request in requests
        ]
        if any(isinstance(result, Exception) for result in results):
            raise PartialFailure(results)
        return results  # type: ignore[return-value]

    def release(self, session: str) -> None: ...


def test_a_request_that_fails_ends_its_own_episode_only(sessions: SessionPool) -> None:
    ids = sessions.renderer.template.encode("<action>look</action>")  # type: ignore[union-attr]
    opened = [sessions.open(sessions.task_ids()[0], sample=sample) for sample in range(3)]
    failures: dict[int, Exception] = {0: RuntimeError("the server died"), 2: TimeoutError("too late")}
    first, second, third = play(opened, Faulty(ids, failures))
    assert (first.status, third.status) == (Status.ERROR_ENGINE, Status.ERROR_TIMEOUT)
    assert first.meta["error"] == "the server died"
    assert second.status is Status.TRUNCATED_TURNS
    alone = sessions.open(sessions.task_ids()[0], sample=0)
    with pytest.raises(PartialFailure):
        play([alone], Faulty(ids, failures))


def test_a_response_that_was_broken_off_never_reaches_the_environment(sessions: SessionPool) -> None:
    ids = sessions.renderer.template.encode("<action>lo")  # type: ignore[union-attr]
    (episode,) = play([sessions.open(sessions.task_ids()[0])], Faulty(ids, {}, finish="aborted"))
    assert episode.status is Status.ERROR_ENGINE
    assert episode.meta["error"] == "the response was broken off"
    assert all(turn.finish == "aborted" for turn in episode.turns)


def test_the_trace_verb_writes_trajectories(recorded: list[Episode], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from turngym.scripts import trace

    source, out = str(tmp_path / "episodes.jsonl"), str(tmp_path / "t.parquet")
    with TraceWriter(source) as writer:
        for one in recorded:
            writer.write(one)
    assert trace.main(["parquet", source, "--rows", "trajectories", "--out", out]) == 0
    assert pq.read_table(out).to_pylist() == list(datasets.rows(recorded))


def test_every_adapter_is_named_in_the_table() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "adapters.md").read_text(encoding="utf-8")
    adapters = {path.stem for path in (root / "trainers" / "adapters").glob("*.py")}
    assert all(f"`{name}`" in text for name in adapters - {"__init__", "token_session"})
