"""TCOD's schedules on literal numbers."""

from __future__ import annotations

import pytest

from turngym.trainers.rollout_plan.curriculum import BackToFront, DepthSchedule, FrontToBack
from turngym.trainers.rollout_plan.depth import DepthPlan


def test_schedule_by_hand():
    schedule = DepthSchedule(k_start=1, eta=6, k_max=4)
    assert [schedule.depth(n) for n in (0, 5, 6, 11, 12, 17, 18, 100)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [DepthSchedule(k_start=3, eta=1, k_max=5).depth(n) for n in range(4)] == [3, 4, 5, 5]


def test_defaults_are_the_published_ones_for_alfworld():
    schedule = DepthSchedule()
    assert (schedule.eta, schedule.k_max, schedule.k_start) == (6, 30, 1)
    assert schedule.depth(6 * 28) == 29
    assert schedule.depth(6 * 29) == schedule.depth(10_000) == 30


def test_front_to_back_caps_the_depth():
    control = FrontToBack(schedule=DepthSchedule(eta=2, k_max=3))
    plans = [control.plan(control.start(), step) for step in range(1, 8)]
    assert [plan.cap for plan in plans] == [1, 1, 2, 2, 3, 3, 3]
    assert not any(plan.probe or plan.demonstration_turns for plan in plans)


def test_back_to_front_hands_the_end_to_the_student():
    control = BackToFront(schedule=DepthSchedule(eta=2, k_max=3), h_max=40)
    assert control.plan(control.start(), 1) == DepthPlan(cap=40, demonstration_turns=1)
    assert control.plan(control.start(), 2) == DepthPlan(cap=40, demonstration_turns=1)
    assert control.plan(control.start(), 3) == DepthPlan(cap=40, demonstration_turns=2)


def test_bad_settings_are_errors():
    with pytest.raises(ValueError, match="eta 0"):
        DepthSchedule(eta=0)
    with pytest.raises(ValueError, match="k_start 9"):
        DepthSchedule(k_start=9, k_max=8)
    with pytest.raises(ValueError, match="n is -1"):
        DepthSchedule().depth(-1)
