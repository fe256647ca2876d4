"""Diagnostics from metrics, against runs that are small enough to do by hand, and a controller replayed exactly."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.core.episode import Episode, Status
from turngym.core.spec import changed
from turngym.trainers.algorithm import DepthState
from turngym.trainers.algorithms.turnopd import AdaptiveDepth, DepthConfig, probe_stats
from turngym.trainers.batch import pack
from turngym.trainers.diagnostics.controller_replay import NEEDED, ControllerReplay, probe_stats_of, run_controls
from turngym.trainers.diagnostics.curves import CurveSums, StepSums, kl_shares, smooth, step_bins
from turngym.trainers.diagnostics.diagnose import StepTimeSums, diagnose, horizon, regime_of, replayable
from turngym.trainers.diagnostics.run_metrics import ALL, PHASES, prefix_length, reliable_turns, run_shape
from turngym.trainers.metrics import iter_metrics
from turngym.trainers.step_metrics import depth_row, turn_row

NAN = float("nan")
EARLY, MIDDLE, LATE = PHASES


def row(step: int, kl: list[float | None], survivors: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
    turns = {"turn/kl_raw": kl, "turn/survivors": survivors, "turn/tokens": tokens}
    return {"step": step, "kind": "train", "depth/cap": 3, **turns, **more}


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Ten steps: 1 to 3 early, 4 to 6 middle, 7 to 10 late; step 10 is capped at one turn."""
    early = [row(step, [1.0, 2.0, 4.0], [20, 10, 5], [10, 10, 5]) for step in (1, 2, 3)]
    middle = [row(step, [1.0, 1.0, None], [20, 10, 1], [10, 10, 0]) for step in (4, 5, 6)]
    late = [row(step, [0.5, 0.25, 0.25], [20, 8, 8], [20, 10, 10]) for step in (7, 8)]
    shorter = row(9, [2.0], [20], [40])
    capped = row(10, [9.0], [20], [10], **{"depth/cap": 1})
    return [{"step": 0, "kind": "eval", "eval/avg": 0.5}, *early, *middle, *late, shorter, capped]


def summed(rows: list[dict[str, Any]]) -> Any:
    sums = CurveSums(run_shape(rows))
    for item in rows:
        sums.add(item)
    return sums.result()


def test_shape_by_hand(rows: list[dict[str, Any]]) -> None:
    shape = run_shape(rows)
    assert (shape.steps, shape.turns, shape.full_depth, shape.full_steps, shape.measured_steps) == (10, 3, 3, 9, 10)
    # nine full-depth steps: turn 1 is reliable in 8, turn 2 (8 survivors) only in the late 2
    assert shape.reliable == 2
    assert "turn/kl_raw" in shape.columns
    assert [shape.phase(item) for item in rows if item["kind"] == "train"] == [EARLY] * 3 + [MIDDLE] * 3 + [LATE] * 4


def test_reliable_needs_eight_survivors_and_a_tenth() -> None:
    np.testing.assert_array_equal(reliable_turns(np.array([100.0, 10, 9, 8])), [True, True, False, False])
    np.testing.assert_array_equal(reliable_turns(np.array([20.0, 8, 7])), [True, True, False])
    assert prefix_length(np.array([1.0, 0.6, 0.59, 1.0])) == 2


def test_curves_pool_over_tokens_of_full_depth_steps(rows: list[dict[str, Any]]) -> None:
    found = summed(rows)
    np.testing.assert_allclose(found.curves[EARLY]["kl"], [1, 2, 4])
    np.testing.assert_allclose(found.curves[MIDDLE]["kl"], [1, 1, NAN])
    # steps 7 and 8 have 20 tokens each in turn 0, step 9 has 40; step 10 is capped and counts nowhere
    np.testing.assert_allclose(found.curves[LATE]["kl"], [(2 * 20 * 0.5 + 40 * 2) / 80, 0.25, 0.25])
    assert [found.curves[phase].steps for phase in (EARLY, MIDDLE, LATE, ALL)] == [3, 3, 3, 9]
    # a turn that a full-depth step does not list had no survivors
    np.testing.assert_allclose(found.curves[LATE]["survivors"], [20, 16 / 3, 16 / 3])


def test_maps_show_every_step(rows: list[dict[str, Any]]) -> None:
    found = summed(rows).maps["kl"]
    assert found.last_step_B.tolist() == list(range(1, 11))
    np.testing.assert_allclose(found.value_TB[0], [1, 1, 1, 1, 1, 1, 0.5, 0.5, 2, 9])
    np.testing.assert_allclose(found.value_TB[2, [0, 3, 8, 9]], [4, NAN, NAN, NAN])


def test_long_runs_share_columns() -> None:
    assert step_bins(7, most=3).tolist() == [3, 6, 7]
    assert step_bins(6, most=3).tolist() == [2, 4, 6]
    assert len(step_bins(10_000)) <= 160


def test_smoothing_by_hand() -> None:
    np.testing.assert_allclose(smooth(np.array([1.0, 3, 8, NAN, 2])), [1, 4, 8, NAN, 2])
    # a line that falls stays one: neither its ends nor the places beside a gap are bent
    line = np.array([9.0, 8, 7, 6, NAN, 4, 3, 2, 1, 0])
    for window in (3, 5, 7):
        np.testing.assert_allclose(smooth(line, window), line)
    np.testing.assert_allclose(smooth(np.array([0.0, 0, 6, 0, 0, 0]), 5), [0, 2, 1.2, 1.2, 0, 0])
    assert len(smooth(np.zeros(0))) == 0


def test_table_1_by_hand(rows: list[dict[str, Any]]) -> None:
    curves = summed(rows).curves[EARLY]
    np.testing.assert_allclose(kl_shares(curves), [0.2, 0.4, 0.4])  # 10, 20 and 20 nats a step
    found = regime_of(curves)
    assert found is not None
    assert found.kl_ratio == pytest.approx(4.0)
    assert found.deep_share == pytest.approx(0.4)
    assert found.deep_mass == pytest.approx(1.0 / 3.0)  # m = 1, 2 * 10/20, 4 * 5/20
    assert found.deep_support == pytest.approx(0.25)
    assert found.entropy_ratio is None


def test_outcomes_are_told_apart(rows: list[dict[str, Any]]) -> None:
    outcomes = {"turn/kl_raw_success": [1.0, 1.0, None], "turn/kl_raw_failure": [2.0, 0.5, 1.0]}
    tokens = {"turn/tokens_success": [1, 1, 0], "turn/tokens_failure": [3, 3, 3]}
    heavier = {"turn/kl_raw_failure": [4.0, 0.5, 1.0], "turn/tokens_failure": [1, 1, 1]}
    given = [{**rows[1], **outcomes, **tokens}, {**rows[2], **outcomes, **tokens, **heavier}, *rows[3:]]
    # failures of turn 0: 3 tokens of 2 nats, 1 of 4
    np.testing.assert_allclose(summed(given).curves[EARLY].separation_T, [2.5 - 1, -0.5, NAN])


def batches(make_episode: Callable[..., Episode], steps: int, full: int, cap_of: Any) -> Iterator[tuple[int, Any, Any]]:
    """Random episodes: lengths and outcomes of `steps` steps, cut where `cap_of(step)` says."""
    random = np.random.default_rng(5)
    for step in range(1, steps + 1):
        cap, made = cap_of(step), []
        for number in range(24):
            length, won = int(random.integers(1, full + 3)), bool(random.random() < 0.6)
            cut = length > cap
            pieces = [([1], [2] * int(random.integers(1, 4))) for _ in range(min(length, cap))]
            status = Status.TRUNCATED_DEPTH if cut else Status.COMPLETED
            made.append(make_episode(pieces, number=number, status=status, success=won and not cut))
        batch = pack(made)
        yield step, batch, random.normal(0.3, 0.4, batch.tokens).astype(np.float32)


def written(make_episode: Callable[..., Episode], config: DepthConfig, steps: int) -> list[dict[str, Any]]:
    """What a run with this controller writes, through JSON; episodes outlast full depth now and then."""
    controller = AdaptiveDepth(config)
    state, rows, plans = controller.start(), [], {}

    def cap_of(step: int) -> int:
        plans[step] = controller.plan(state, step)
        return plans[step].cap

    for step, batch, kl_N in batches(make_episode, steps, config.h_max, cap_of):
        state = controller.update(state, plans[step], probe_stats(batch, kl_N))
        ones = np.ones(batch.tokens, np.float32)
        columns = {"loss": ones, "entropy": ones, "kl_bin": kl_N, "kl_raw": kl_N, "teacher_entropy": ones}
        turns = turn_row(batch, columns, np.full(batch.tokens, 1 / batch.tokens), full_depth=plans[step].full_depth)
        plain = {name: [None if value != value else value for value in values] for name, values in turns.items()}
        rows.append({"step": step, "kind": "train", **plain, **depth_row(plans[step], state)})
    return [json.loads(json.dumps(item)) for item in rows]


@pytest.mark.parametrize(
    "changes", [{}, {"use_success": False}, {"p": 0.4, "cov_base": 1}, {"rho": 0.5, "min_successes": 4}]
)
def test_a_replay_is_what_the_run_did(make_episode: Callable[..., Episode], changes: dict[str, Any]) -> None:
    config = DepthConfig(h_max=9, probe_interval=4, **changes)
    rows = written(make_episode, config, 40)
    assert any(sum(item["turn/ended_cut"]) for item in rows if item["depth/probe"]), "no probe cut an episode"
    runner = ControllerReplay(config)
    for item in rows:
        runner.add(item)
    assert (runner.compared, runner.differing, runner.hbar_error) == (40, 0, 0.0)
    assert runner.probes == 3 + 10
    # another controller on the same probes is seen to be another one
    seen = ControllerReplay(changed(config, rho=0.9))
    for item in rows:
        seen.add(item)
    assert seen.state.hbar != rows[-1]["depth/hbar"]
    assert seen.differing > 0
    assert seen.first.startswith("step 1: hbar")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("turn/kl_raw", lambda values: [20.0, *values[1:]]),
        ("turn/survivors", lambda values: [100 * values[0], *values[1:]]),
        ("turn/ended_success", lambda values: [*values[:4], *[0] * len(values[4:])]),
    ],
)
def test_what_was_recorded_decides(make_episode: Callable[..., Episode], column: str, change: Any) -> None:
    config = DepthConfig(h_max=9, probe_interval=4, p=0.9, use_success=column == "turn/ended_success")
    rows = written(make_episode, config, 24)
    wrong = ControllerReplay(config)
    for item in rows:
        wrong.add(item | {column: change(item[column])})
    assert wrong.probes == 3 + 6
    assert wrong.differing > 0


@pytest.mark.parametrize("column", NEEDED)
def test_a_probe_without_a_column_measures_nothing(make_episode: Callable[..., Episode], column: str) -> None:
    config = DepthConfig(h_max=9, probe_interval=4)
    rows = written(make_episode, config, 8)
    without = [{name: value for name, value in item.items() if name != column} for item in rows]
    assert probe_stats_of(without[0]) is None
    runner = ControllerReplay(config)
    for item in without:
        runner.add(item)
    assert runner.state.hbar == config.h_max


def test_probe_statistics_by_hand() -> None:
    """Four start: one wins in turn 0, one loses in turn 1, one wins and one is cut in turn 2."""
    item = {"turn/kl_raw": [1.0, None, 3.0], "turn/survivors": [4, 3, 2]}
    stats = probe_stats_of({**item, "turn/ended_success": [1, 0, 1], "turn/ended_cut": [0, 0, 1]})
    assert stats is not None
    ends = sorted(zip(stats.last_turn_E.tolist(), stats.success_E.tolist(), stats.cut_E.tolist(), strict=True))
    assert ends == [(0, True, False), (1, False, False), (2, False, True), (2, True, False)]
    np.testing.assert_allclose(stats.kl_T, [1, NAN, 3])
    assert stats.survivors_T.tolist() == [4, 3, 2]
    torn = {**item, "turn/ended_success": [2, 0, 0], "turn/ended_cut": [0, 0, 0]}
    assert probe_stats_of(torn) is None, "two won in turn 0, but only one episode ended there"


def test_what_can_be_replayed(make_episode: Callable[..., Episode]) -> None:
    config = DepthConfig(h_max=9, probe_interval=4)
    rows = written(make_episode, config, 12)
    shape = run_shape(rows)
    assert replayable(shape, config, controlled=True)
    assert not replayable(shape, None, controlled=False), "a curriculum's capped steps are no probes"
    assert not replayable(shape, changed(config, probe_share=0.5), controlled=True)
    found = diagnose(lambda: rows, depth=config, controlled=True)
    assert found.replay is not None
    assert (found.replay.differing, found.variants[0].name, found.variants[0].state.hbar) == (
        0,
        "as set",
        rows[-1]["depth/hbar"],
    )
    assert {item.name for item in found.variants} == {
        *("as set", "p = 0.4", "p = 0.6", "rho = 0.5", "rho = 0.9", "CDF of all episodes")
    }


def test_turns_that_caps_would_play() -> None:
    runner = ControllerReplay(DepthConfig(h_max=4, warmup=0, probe_interval=100))
    runner.controller = AdaptiveDepth(changed(runner.controller.config, h_max=2))
    runner.state = DepthState(hbar=1.0)
    for step in (1, 2):
        runner.add({"step": step, "kind": "train"})
    # caps of 2: 10 + 6 of 10 + 6 + 3 + 1 turns
    assert runner.turns_played(np.array([10.0, 6, 3, 1])) == pytest.approx(16 / 20)


def test_horizon_by_hand(rows: list[dict[str, Any]]) -> None:
    curves = summed(rows).curves[EARLY]
    sums = StepTimeSums()
    for step, turns in enumerate((99.0, 1.0, 2.0, 3.0), start=1):
        sums.add(
            {"step": step, "kind": "train", "turns_mean": turns, "episodes": 10, "time/step_s": 2 + 0.1 * 10 * turns}
        )
    time = sums.result()
    assert (time.intercept, time.slope, time.steps, time.fitted) == (pytest.approx(2), pytest.approx(0.1), 3, True)
    found = horizon(curves, time, episodes=10)
    assert found is not None
    np.testing.assert_allclose(found.covered_H, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(found.seconds_H, [3, 3.5, 3.75])  # 10, 15, 17.5 turns
    np.testing.assert_allclose(found.rho_H, [1.25 / 3, 7.5 / 10.5, 1])
    assert found.best == 3
    cheap = horizon(curves, replace(time, intercept=0.0), episodes=10)
    assert cheap is not None
    np.testing.assert_allclose(cheap.rho_H, [1.75 / 3, 35 / 45, 1])


def test_a_time_that_does_not_grow_is_proportional() -> None:
    sums = StepTimeSums()
    for step in (2, 3):
        sums.add({"step": step, "kind": "train", "turns_mean": 5.0, "episodes": 2, "time/step_s": 3.0})
    assert sums.result().fitted is False
    assert sums.result().slope == pytest.approx(0.3)


def test_over_steps_by_hand() -> None:
    base = {"kind": "train", "depth/cap": 3, "turn/survivors": [4, 3, 2], "turn/weight": [0.5, 0.25, 0.25]}
    rows = [
        {**base, "step": 1, "time/step_s": 2.0, "gap_max": 0.5, "cost/turns": 8, "episodes": 4, "weight/alpha": 0.9},
        {"step": 1, "kind": "eval", "time/eval_s": 7.0},
        {**base, "step": 2, "time/step_s": 4.0, "turn/weight": [1.0], "cost/turns": 4, "episodes": 4},
    ]
    sums = StepSums(run_shape(rows), alpha=lambda step: step / 10)
    for item in rows:
        sums.add(item)
    found = sums.result()
    np.testing.assert_allclose(found.value["deep_weight"], [0.25, 0.0])
    np.testing.assert_allclose(found.value["alpha"], [0.9, 0.2])
    np.testing.assert_allclose(found.value["gap_max"], [0.5, NAN])
    assert (found.total["time/step_s"], found.total["time/eval_s"], found.total["turns"]) == (6.0, 7.0, 12.0)
    assert found.by_phase[MIDDLE]["time/step_s"] == 2.0
    assert found.by_phase[LATE]["time/step_s"] == 4.0
    assert found.by_phase[ALL]["time/step_s"] == 3.0
    assert found.episodes == 4.0


@pytest.mark.long
def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    peaks = []
    for steps in (300, 3000):
        line = row(1, [0.5] * 30, [64] * 30, [200] * 30, **{"depth/cap": 30})
        folder = tmp_path / str(steps)
        folder.mkdir()
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                file.write(json.dumps(line | {"step": step}) + "\n")
        tracemalloc.start()
        diagnose(lambda folder=folder: iter_metrics(folder))  # type: ignore[misc]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_settings_of_a_run_folder(tmp_path: Path) -> None:
    assert "no config.toml" in run_controls(tmp_path).note
    text = 'algorithm = "turnopd"\nstudent = "s"\nout = "o"\nsteps = 50\nmax_turns = 12\nenv = "turngym/ALFWorld-v0"\n'
    (tmp_path / "config.toml").write_text(text + "[turnopd.depth]\nrho = 0.6\n")
    found = run_controls(tmp_path)
    assert found.note == ""
    assert found.depth is not None
    assert (found.depth.rho, found.depth.h_max) == (0.6, 12)
    assert found.alpha is not None
    assert found.alpha(20) == pytest.approx(0.4)
    (tmp_path / "config.toml").write_text(text + "[turnopd]\ndepth = 'none'\nweight = 'trajectory'\n")
    assert (run_controls(tmp_path).depth, run_controls(tmp_path).alpha) == (None, None)
    (tmp_path / "config.toml").write_text(text.replace("turnopd", "opd"))
    assert run_controls(tmp_path).note == ""
    (tmp_path / "config.toml").write_text(text + "[turnopd]\nunheard_of = 1\n")
    assert "unheard_of" in run_controls(tmp_path).note
