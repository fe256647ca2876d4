"""LUFFY's prefix ratios by step."""

from __future__ import annotations

import pytest

from turngym.trainers.config import ConfigError
from turngym.trainers.rollout_plan.demonstration_prefix import PrefixSchedule


def plan(strategy: str, **more: object) -> PrefixSchedule:
    return PrefixSchedule(strategy=strategy, **{"low": 0.2, "high": 0.8, "steps": 10, **more})  # type: ignore[arg-type]


def test_linear_strategies_by_hand() -> None:
    assert [plan("linear").ratios(step, 1)[0][0] for step in (1, 6, 11, 50)] == pytest.approx([0.8, 0.4, 0.0, 0.0])
    assert [plan("reverse_linear").ratios(step, 1)[0][0] for step in (1, 6, 11)] == pytest.approx([0.0, 0.4, 0.8])


def test_fixed_spreads_over_the_prefixed_episodes() -> None:
    assert plan("fixed", count=4).ratios(3, 2) == (pytest.approx((0.2, 0.4, 0.6, 0.8)),) * 2
    assert plan("fixed", count=1).ratios(3, 1) == ((0.8,),)


def test_random_stays_in_range_and_depends_on_the_step_alone() -> None:
    drawn = plan("random", count=3).ratios(5, 200)
    assert all(0.2 <= value <= 0.8 for row in drawn for value in row)
    assert drawn == plan("random", count=3).ratios(5, 200) != plan("random", count=3).ratios(6, 200)
    assert any(len(set(row)) > 1 for row in drawn)
    assert all(len(set(row)) == 1 for row in plan("random", count=3, share=True).ratios(5, 20))


def test_linear_max_lowers_its_ceiling_by_tenths() -> None:
    tops = [max(row[0] for row in plan("linear_max").ratios(step, 2000)) for step in (1, 6, 10, 99)]
    assert tops == pytest.approx([0.8, 0.4, 0.08, 0.08], abs=0.01)


def test_bad_ratios_are_named() -> None:
    with pytest.raises(ConfigError, match=r"prefix ratios are 0.9 to 0.5"):
        PrefixSchedule(low=0.9, high=0.5)
    with pytest.raises(ConfigError, match="prefix count is 0"):
        PrefixSchedule(count=0)
