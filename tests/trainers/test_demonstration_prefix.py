"""LUFFY's prefix ratios by step."""

from __future__ import annotations

import pytest

from turngym.core.errors import SettingsError
from turngym.trainers.algorithms.luffy import PrefixSchedule


def plan(strategy: str, **more: object) -> PrefixSchedule:
    return PrefixSchedule(strategy=strategy, **{"low": 0.2, "high": 0.8, "steps": 10, **more})  # type: ignore[arg-type]


def test_linear_strategies_by_hand() -> None:
    assert [plan("linear")(step, 1)[0][0] for step in (1, 6, 11, 50)] == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_fixed_spreads_over_the_prefixed_episodes() -> None:
    assert plan("fixed", count=4)(3, 2) == (pytest.approx((0.2, 0.4, 0.6, 0.8)),) * 2
    assert plan("fixed", count=2)(3, 1) == (pytest.approx((0.2, 0.8)),)
    assert plan("fixed", count=1)(3, 1) == ((0.8,),)


def test_random_stays_in_range_and_depends_on_the_step_alone() -> None:
    drawn = plan("random", count=3)(5, 200)
    assert all(0.2 <= value <= 0.8 for row in drawn for value in row)
    assert drawn == plan("random", count=3)(5, 200) != plan("random", count=3)(6, 200)
    assert any(len(set(row)) > 1 for row in drawn)
    assert all(len(set(row)) == 1 for row in plan("random", count=3, share=True)(5, 20))


def test_linear_max_lowers_its_ceiling_by_tenths() -> None:
    # 20 steps, two for each tenth, and a border that belongs to the earlier one: 0 1 2 | 3 4 | ... | 19
    steps = (1, 2, 3, 4, 5, 6, 19, 20, 99)
    drawn = {step: [row[0] for row in plan("linear_max", steps=20)(step, 2000)] for step in steps}
    wanted = [0.8, 0.8, 0.8, 0.72, 0.72, 0.64, 0.16, 0.08, 0.08]
    assert [max(drawn[step]) for step in steps] == pytest.approx(wanted, abs=0.01)
    assert [min(drawn[step]) for step in steps] == pytest.approx([0.0] * 9, abs=0.01)


def test_reverse_linear_raises_its_ceiling_by_tenths_and_begins_with_demonstrations() -> None:
    steps = (1, 2, 3, 4, 5, 6, 19, 20, 99)
    drawn = {step: [row[0] for row in plan("reverse_linear", steps=20)(step, 2000)] for step in steps}
    wanted = [0.08, 0.08, 0.08, 0.16, 0.16, 0.24, 0.72, 0.8, 0.8]
    assert [max(drawn[step]) for step in steps] == pytest.approx(wanted, abs=0.01)
    assert [min(drawn[step]) for step in steps] == pytest.approx([0.0] * 9, abs=0.01)


def test_bad_ratios_are_named() -> None:
    with pytest.raises(SettingsError, match=r"prefix ratios are 0.9 to 0.5"):
        PrefixSchedule(low=0.9, high=0.5)
    assert PrefixSchedule(low=0.0, steps=1)(1, 0) == ()
