"""TCOD's schedules on literal numbers."""

from __future__ import annotations

import pytest

from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import DepthPlan
from turngym.trainers.algorithms.tcod import Curriculum, DepthSchedule
from turngym.trainers.run import build_algorithm
from turngym.trainers.train_config import train_config


def test_schedule_by_hand():
    schedule = DepthSchedule(k_start=1, eta=6, k_max=4)
    assert [schedule.depth(n) for n in (0, 5, 6, 11, 12, 17, 18, 100)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [DepthSchedule(k_start=3, eta=1, k_max=5).depth(n) for n in range(4)] == [3, 4, 5, 5]


def test_defaults_are_the_published_ones_for_alfworld():
    schedule = DepthSchedule().for_env("turngym/ALFWorld-v0")
    assert (schedule.eta, schedule.k_max, schedule.k_start) == (6, 30, 1)
    assert schedule.depth(6 * 28) == 29
    assert schedule.depth(6 * 29) == schedule.depth(10_000) == 30


@pytest.mark.parametrize(
    ("env", "eta", "k_max"),
    [
        ("turngym/ALFWorld-v0", 6, 30),
        ("turngym/WebShop-v0", 4, 15),
        ("turngym.envs:turngym/WebShop-v0", 4, 15),
        ("turngym/Search-v0", 4, 15),
        ("mine:mine/Doors-v3", 6, 30),
        ("", 6, 30),
    ],
)
def test_each_environment_has_its_schedule(env, eta, k_max):
    assert DepthSchedule().for_env(env) == DepthSchedule(eta=eta, k_max=k_max)
    assert DepthSchedule(k_start=2, eta=9).for_env(env) == DepthSchedule(k_start=2, eta=9, k_max=k_max)
    assert DepthSchedule(k_max=8).for_env(env) == DepthSchedule(eta=eta, k_max=8)


@pytest.mark.parametrize(
    ("env", "caps"),
    [
        ("turngym/ALFWorld-v0", [1, 1, 2, 9, 18, 30]),
        ("turngym/WebShop-v0", [1, 2, 2, 13, 15, 15]),
        ("turngym/Search-v0", [1, 2, 2, 13, 15, 15]),
    ],
)
@pytest.mark.parametrize("direction", ["f2b", "b2f"])
def test_the_environment_of_a_run_reaches_its_curriculum(env, caps, direction):
    def turns(**settings):
        given = {"direction": direction, **settings}
        table = {"student": "S", "teacher": "T", "out": "o", "env": env, "tcod": given}
        depth = build_algorithm(train_config("tcod", table, "test")).depth
        plans = [depth.plan(depth.start(), step) for step in (1, 5, 8, 49, 103, 1000)]
        return [plan.cap if direction == "f2b" else plan.demonstration_turns for plan in plans]

    assert turns() == caps
    # what is said counts, whatever the environment
    assert turns(schedule={"eta": 1, "k_max": 40})[:4] == [1, 5, 8, 40]


@pytest.mark.parametrize(
    ("algorithm", "given", "said"),
    [
        ("tcod", {"schedule": {"k_start": 9}}, "k_start is 9"),
        ("tcod", {"schedule": {"k_max": 9}}, "k_max is 9"),
        ("turnopd", {"depth": {"h_max": 9}}, "h_max is 9"),
        ("turnopd", {"depth": {"h_min": 9}}, "h_min is 9"),
    ],
)
def test_a_depth_beyond_the_end_of_episodes_is_refused(algorithm, given, said):
    def made(max_turns):
        table = {"student": "S", "teacher": "T", "out": "o", "max_turns": max_turns, algorithm: given}
        return build_algorithm(train_config(algorithm, table, "test")).depth

    with pytest.raises(SettingsError, match=rf"^{said}; valid: at most 8, the turns of an episode \(--max-turns\)$"):
        made(8)
    assert made(9)


def test_front_to_back_caps_the_depth():
    control = Curriculum(schedule=DepthSchedule(eta=2, k_max=3), h_max=50)
    plans = [control.plan(control.start(), step) for step in range(1, 8)]
    assert [plan.cap for plan in plans] == [1, 1, 2, 2, 3, 3, 3]
    assert not any(plan.probe or plan.demonstration_turns for plan in plans)


def test_back_to_front_hands_the_end_to_the_student():
    control = Curriculum(schedule=DepthSchedule(eta=2, k_max=3), back_to_front=True, h_max=40)
    assert control.plan(control.start(), 1) == DepthPlan(cap=40, demonstration_turns=1)
    assert control.plan(control.start(), 2) == DepthPlan(cap=40, demonstration_turns=1)
    assert control.plan(control.start(), 3) == DepthPlan(cap=40, demonstration_turns=2)


def test_bad_settings_are_errors():
    with pytest.raises(ValueError, match="k_start is 9"):
        DepthSchedule(k_start=9, k_max=8)


@pytest.mark.parametrize("back_to_front", [False, True])
def test_no_step_plays_more_turns_than_the_run(back_to_front: bool) -> None:
    depth = Curriculum(schedule=DepthSchedule(k_max=30), back_to_front=back_to_front, h_max=8)
    plans = [depth.plan(depth.start(), step) for step in (1, 6 * 6 + 1, 6 * 7 + 1, 1000)]
    turns = [1, 7, 8, 8]
    if back_to_front:
        assert plans == [DepthPlan(cap=8, demonstration_turns=count) for count in turns]
    else:
        assert plans == [DepthPlan(cap=count, full_depth=count == 8) for count in turns]
