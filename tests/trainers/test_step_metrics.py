"""A step's row of metrics, against batches whose means can be done in the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.core.episode import Episode, Status
from turngym.core.task import Verdict
from turngym.trainers import step_metrics
from turngym.trainers.algorithm import DepthPlan, DepthState, Targets
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.checked_parts import with_own_numbers
from turngym.trainers.group_advantage import ComparableGroups
from turngym.trainers.optimizer_step import Epochs, UpdateResult
from turngym.trainers.token_weights import Blend, Static, trajectory_weights
from turngym.trainers.turn_stats import turn_row

Make = Callable[..., Episode]
NAN = float("nan")


def turned(episode: Episode, *changes: dict[str, Any]) -> Episode:
    turns = [replace(turn, **change) for turn, change in zip(episode.turns, changes, strict=True)]
    return replace(episode, turns=tuple(turns))


@pytest.fixture
def episodes(make_episode: Make) -> list[Episode]:
    """A: two turns of 1 and 2 tokens, solved. B: a refused action, cut by the depth. C: an error. D: left out."""
    a = make_episode([([1], [2]), ([3], [4, 5])], success=True, episode_return=1.0)
    b = make_episode([([1], [6])], number=1, status=Status.TRUNCATED_DEPTH, episode_return=0.25)
    c = make_episode([([1], [7])], number=2, status=Status.ERROR_ENV)
    d = make_episode([([1], [8])], number=3, episode_return=0.0)
    return [
        replace(a, timings={"env": 0.5, "policy": 9.0}),
        replace(turned(b, {"verdict": Verdict.INADMISSIBLE}), timings={"env": 0.25}),
        replace(c, timings={"env": 9.0}),
        d,
    ]


@pytest.fixture
def batch(episodes: list[Episode]) -> RolloutBatch:
    return pack(episodes[:2])  # labels 2 | 4 5 | 6


def column(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_what_the_rollouts_were_like(episodes: list[Episode], batch: RolloutBatch) -> None:
    row = step_metrics.rollout_row(episodes, batch)
    assert row == {
        "episodes": 2,
        "episodes_failed": 1,
        "episodes_dropped": 1,
        "tokens": 4,
        "success": pytest.approx(1 / 3),
        "turns_mean": pytest.approx(4 / 3),
        "valid_actions": 0.75,
        "truncated": pytest.approx(1 / 3),
        "time/env_s": 0.75,
    }


def test_what_was_spent_whatever_became_of_it(episodes: list[Episode]) -> None:
    """The lost episode and the one that was left out cost as much; a demonstration's tokens nobody drew."""
    assert step_metrics.spent_row(episodes) == {"cost/turns": 5, "cost/sampled": 6}
    shown = turned(episodes[0], {"origin": "demonstration"}, {})
    assert step_metrics.spent_row([shown]) == {"cost/turns": 2, "cost/sampled": 2}


def test_demonstrations_count_apart(episodes: list[Episode], batch: RolloutBatch) -> None:
    shown = turned(
        episodes[0], {"origin": "demonstration", "verdict": Verdict.INADMISSIBLE}, {"origin": "demonstration"}
    )
    row = step_metrics.rollout_row([shown], pack([shown], origins=("demonstration",)))
    assert row["off/refused"] == 1
    assert row["valid_actions"] is None


def test_a_filter_may_say_what_it_left_out(episodes: list[Episode]) -> None:
    for select, found in (
        (None, {}),
        (list, {}),
        (ComparableGroups(spread=False), {"groups/kept": 1, "groups/lost": 0}),
    ):
        algorithm: Any = SimpleNamespace(name="mine", select=select)
        assert with_own_numbers({"tokens": 1}, algorithm, episodes, {"own": 2}) == {"tokens": 1, **found, "own": 2}


def test_how_old_the_policy_was(episodes: list[Episode], make_episode: Make) -> None:
    a, b, _, d = episodes
    drawn = column(-1.0, -1.0, -1.0)
    a = turned(
        a,
        {"logprobs": drawn[:1], "policy_version": 4},
        {"logprobs": drawn[:2], "version_spans": ((3, 0, 1), (1, 1, 2)), "policy_version": 0},
    )
    b = turned(b, {"policy_version": 0, "logprobs": None})  # nobody drew it
    d = turned(d, {"policy_version": 0, "logprobs": drawn[:1], "origin": "demonstration"})
    e = turned(make_episode([([1], [2, 3, 4])]), {"logprobs": drawn, "policy_version": 3})
    f = turned(make_episode([([1], [2, 3, 4])]), {"logprobs": drawn, "policy_version": 2, "begun": 2})
    # lags 1 | 2, 4 | 2, 2, 2 | 3, for two ids of f were begun
    found = step_metrics.staleness_row([a, b, d, e, f], 5)
    assert found == {"staleness_mean": pytest.approx(16 / 7), "staleness_max": 4}
    assert step_metrics.staleness_row([b, d], 5) == {"staleness_mean": None, "staleness_max": None}


def test_means_over_tokens(batch: RolloutBatch) -> None:
    batch = replace(batch, behavior_logp_N=column(-1.0, -2.0, NAN, -1.5))
    columns = {
        "sampled_logp": column(-1.5, -2.25, -9.0, -8.0),
        "entropy": column(1.0, 2.0, 3.0, 6.0),
        "kl_bin": column(0.5, 0.5, 0.5, 1.5),
        "kl_raw": column(0.5, 0.5, 0.5, -0.5),
        "kl_reference": column(0.0, 0.0, 0.0, 2.0),
        "clipped": column(0.0, 1.0, 0.0, 0.0),
        "ratio": column(1.0, 3.0, NAN, 2.0),
        "truncated": column(1.0, 0.0, NAN, 0.0),
        "own": column(5.0, NAN, 7.0, NAN),
    }
    fresh_N = np.array([True, True, True, False])
    row = step_metrics.token_row(batch, columns, fresh_N)
    assert row == {
        "entropy": 3.0,
        "kl_bin": 0.75,
        "kl_raw": 0.25,
        "kl_reference": 0.5,
        "clip_fraction": 0.25,
        "importance/ratio": 2.0,
        "importance/truncated": pytest.approx(1 / 3),
        "gap_mean": 0.375,
        "gap_max": 0.5,
        "token/own": 6.0,
    }
    few = {name: columns[name] for name in ("sampled_logp", "entropy")}
    row = step_metrics.token_row(batch, few, ~np.array([True, True, False, True]))
    assert row == {"entropy": 3.0} | dict.fromkeys(("kl_bin", "kl_raw", "clip_fraction", "gap_mean", "gap_max"))
    lost = {"sampled_logp": columns["sampled_logp"], "own": column(NAN, NAN, NAN, NAN)}
    assert step_metrics.token_row(batch, lost, fresh_N)["token/own"] is None


def test_demonstrated_tokens_and_the_policys_own(episodes: list[Episode], make_episode: Make) -> None:
    a, b, _, d = episodes
    a = turned(a, {"origin": "demonstration"}, {})
    columns = {
        "sampled_logp": column(-1.0, -1.0, -1.0, -1.0, -1.0),
        "logp": np.log(column(0.5, 0.25, 0.75, 0.5, 1.0)),
        "entropy": column(4.0, 1.0, 2.0, 3.0, 0.0),
        "off_shaped": column(0.125, 9.0, 9.0, 9.0, 9.0),
    }
    batch = pack([a, b, d], origins=("policy", "demonstration"))
    assert batch.off_policy_N.tolist() == [True, False, False, False, False]
    row = step_metrics.token_row(batch, columns, np.ones(5, np.bool_))
    assert {name: row[name] for name in row if name.startswith(("off/", "on/"))} == {
        "off/tokens": 1,
        "off/prob": pytest.approx(0.5),
        "off/entropy": 4.0,
        "off/reward": 1.0,
        "on/prob": pytest.approx(0.625),
        "on/entropy": 1.5,
        "on/reward": pytest.approx(1.25 / 3),
        "off/shaped": 0.125,
    }
    plain = step_metrics.token_row(batch, {k: v for k, v in columns.items() if k != "off_shaped"}, np.ones(5, np.bool_))
    assert "off/shaped" not in plain
    alone = turned(a, {}, {"origin": "demonstration"})
    shown = pack([turned(alone, {"origin": "demonstration"}, {})], origins=("demonstration",))
    row = step_metrics.token_row(shown, {k: v[:3] for k, v in columns.items()}, np.ones(3, np.bool_))
    assert "off/tokens" not in row


def test_columns_by_turn(episodes: list[Episode], make_episode: Make) -> None:
    solved, lost = episodes[0], make_episode([([1], [6])], number=1)
    batch = pack([solved, lost])  # labels 2 | 4 5 | 6
    weight_N = np.array([0.25, 0.125, 0.125, 0.5])
    columns = {
        "loss": column(1.0, 2.0, 4.0, 1.0),
        "kl_bin": column(1.0, 2.0, 4.0, 3.0),
        "kl_raw": column(-1.0, 2.0, 2.0, 3.0),
        "entropy": column(1.0, 0.5, 1.5, 2.0),
        "teacher_entropy": column(0.0, 0.25, 0.75, 1.0),
    }
    row = turn_row(batch, columns, weight_N, full_depth=False)
    assert row == {
        "turn/loss_share": [0.5, 0.5],
        "turn/weight": [0.75, 0.25],
        "turn/survivors": [2, 1],
        "turn/ended_success": [0, 1],
        "turn/ended_cut": [0, 0],
        "turn/entropy": [1.5, 1.0],
        "turn/tokens": [2, 2],
        "turn/kl": [2.0, 3.0],
        "turn/kl_raw": [1.0, 2.0],
        "turn/teacher_entropy": [0.5, 0.5],
        "turn/kl_success": [1.0, 3.0],
        "turn/kl_failure": [3.0, pytest.approx(NAN, nan_ok=True)],
        "turn/kl_raw_success": [-1.0, 2.0],
        "turn/kl_raw_failure": [3.0, pytest.approx(NAN, nan_ok=True)],
        "turn/kl_share": [pytest.approx(2 / 6), pytest.approx(4 / 6)],
        "turn/teacher_entropy_success": [0.0, 0.5],
        "turn/teacher_entropy_failure": [1.0, pytest.approx(NAN, nan_ok=True)],
        "turn/tokens_success": [1, 2],
        "turn/tokens_failure": [1, 0],
    }
    bare = turn_row(batch, {"loss": columns["loss"], "entropy": columns["entropy"]}, weight_N, full_depth=False)
    ended = {"turn/survivors", "turn/ended_success", "turn/ended_cut"}
    tokens = {"turn/tokens", "turn/tokens_success", "turn/tokens_failure"}
    assert set(bare) == {"turn/loss_share", "turn/weight", "turn/entropy"} | ended | tokens
    cut = pack([solved, replace(lost, status=Status.TRUNCATED_DEPTH)])
    assert turn_row(cut, columns, weight_N, full_depth=False)["turn/tokens_failure"] == [0, 0]
    assert turn_row(cut, columns, weight_N, full_depth=True)["turn/tokens_failure"] == [1, 0]


def test_who_ended_where(episodes: list[Episode], batch: RolloutBatch) -> None:
    """A is solved in its second turn, B cut after its first."""
    row = turn_row(batch, {"loss": column(1, 1, 1, 1)}, np.ones(4), full_depth=False)
    assert (row["turn/survivors"], row["turn/ended_success"], row["turn/ended_cut"]) == ([2, 1], [0, 1], [1, 0])


def result(**changes: Any) -> UpdateResult:
    given = {"loss": 1.0, "grad_norm": 2.0, "skipped": False, "columns": {}, "terms": {"lpt": 4.0}}
    return UpdateResult(**{**given, **changes})


def test_the_whole_row(episodes: list[Episode], batch: RolloutBatch) -> None:
    columns = {
        "loss": column(1.0, 2.0, 2.0, 1.0),
        "sampled_logp": column(-1, -1, -1, -1),
        "entropy": column(1, 1, 1, 1),
    }
    again = result(loss=3.0, grad_norm=5.0, skipped=True, terms={"lpt": 8.0})
    done = Epochs(
        results=[result(), result(loss=2.0, grad_norm=3.5, terms={"lpt": 6.0}), again],
        columns=columns,
        weight_N=np.full(4, 0.25),
        fresh_N=np.ones(4, np.bool_),
        lr=0.125,
        critic_losses=(1.0, 2.0),
        critic_explained=0.75,
    )
    plan, state = DepthPlan(cap=7, probe=True), DepthState(hbar=3.5, h_eff=2, h_cov=4)
    targets = Targets(advantage_N=column(1, 1, -1, -1))
    row = step_metrics.step_row(episodes, batch, targets, done, plan, state)
    wanted = {
        "loss": 2.0,
        "grad_norm": 3.5,
        "term/lpt": 6.0,
        "critic_loss": 1.5,
        "critic_explained": 0.75,
        "updates": 2,
        "updates_skipped": 1,
        "lr": 0.125,
        "tokens": 4,
        "entropy": 1.0,
        "advantage/std": 1.0,
        "loss_deep_share": pytest.approx(step_metrics.deep_third(np.array(row["turn/loss_share"]))),
        "depth/cap": 7,
        "depth/probe": 1,
        "depth/hbar": 3.5,
        "depth/h_eff": 2,
        "depth/h_cov": 4,
        "turn/loss_share": [pytest.approx(1 / 3), pytest.approx(2 / 3)],
    }
    assert {name: row[name] for name in wanted} == wanted
    assert not any(name.startswith("judge/") for name in row)
    raw = {"kl_bin": column(1, 2, 3, 4), "kl_raw": column(1, 2, 3, 4)}
    shares = step_metrics.step_row(episodes, batch, targets, replace(done, columns={**columns, **raw}), plan, state)
    assert (shares["kl_deep_share"], shares["weight_deep_share"]) == (
        pytest.approx(step_metrics.deep_third(np.array(shares["turn/kl_share"]))),
        pytest.approx(step_metrics.deep_third(np.array(shares["turn/weight"]))),
    )
    once = step_metrics.step_row(episodes, batch, targets, replace(done, results=[again]), plan, state)
    assert (once["loss"], once["term/lpt"]) == (3.0, 8.0)
    assert step_metrics.critic_row(replace(done, critic_losses=())) == {}
    # of the two episodes one left its loop, and one was cut at full depth
    left = replace(batch, truncated_E=np.array([True, True]), short_E=np.array([False, True]))
    looped = step_metrics.step_row(episodes, left, targets, done, replace(plan, loop_share=0.75), state)
    assert (looped["depth/left_loops"], "depth/left_loops" in row, "depth/loop_ratio" in row) == (0.5, False, False)
    assert step_metrics.depth_row(plan, replace(state, loop_ratio=0.25))["depth/loop_ratio"] == 0.25


def test_how_far_the_weights_have_moved() -> None:
    schedule: Any = SimpleNamespace(step=1, total_steps=4)
    assert step_metrics.weight_row(Blend(), schedule) == {"weight/alpha": 0.25}
    assert step_metrics.weight_row(Static(trajectory_weights), schedule) == {}
