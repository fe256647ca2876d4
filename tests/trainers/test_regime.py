"""Table 1's quantities by hand on a run of six turns, and which rows of a run they are read from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from turngym.trainers.diagnostics.depth_regime import Regime, full_depth_rows, measure_regime, sign_intervals, turn_sums

NAN = None


def row(**changes: Any) -> dict[str, Any]:
    """Ten episodes, six turns; from turn 4 on only four still play. Two tokens a turn and episode."""
    given: dict[str, Any] = {
        "kind": "train",
        "depth/cap": 6,
        "turn/tokens": [20, 20, 20, 20, 8, 8],
        "turn/survivors": [10, 10, 10, 10, 4, 4],
        "turn/kl_raw": [0.5, 0.3, 0.2, 0.1, 0.05, 0.15],
        "turn/tokens_failure": [8, 8, 8, 8, 8, 8],
        "turn/tokens_success": [12, 12, 12, 12, 0, 0],
        "turn/kl_raw_failure": [0.8, 0.6, 0.2, 0.1, 0.05, 0.15],
        "turn/kl_raw_success": [0.3, 0.1, 0.2, 0.1, NAN, NAN],
        "turn/teacher_entropy_failure": [1.0, 0.6, 0.5, 0.5, 0.2, 0.4],
    }
    return {**given, **changes}


def test_one_step_by_hand() -> None:
    found = measure_regime(turn_sums([row()]))
    # shallow turns 0, 1; deep turns 4, 5
    assert (found.episodes, found.turns) == (10, 6)
    assert found.kl_shallow == pytest.approx(0.4)
    assert found.kl_deep == pytest.approx(0.1)
    assert found.kl_ratio == pytest.approx(0.25)
    # m_t = K_t n_t / n_0 = .5 .3 .2 .1 .02 .06, sum 1.18
    assert found.deep_mass == pytest.approx(0.08 / 1.18)
    assert found.first_mass == pytest.approx(1.0 / 1.18)
    # the same times 20 tokens here, since every turn of an episode has two
    assert found.deep_share == pytest.approx(0.08 / 1.18)
    assert found.entropy_ratio == pytest.approx(0.3 / 0.8)
    assert found.deep_support == pytest.approx(0.4)
    # failed: (.8 + .6 + .2 + .1 + .05 + .15) / 6; solved: .7 / 4
    assert found.separation == pytest.approx(1.9 / 6 - 0.7 / 4)
    # (.3 + .4 + .3 + .08 + .3) / 1.18 = 1.17
    assert found.h_eff == 1
    assert (found.passes, found.failures) == (True, [])


def test_steps_are_pooled_over_tokens() -> None:
    # the second step has three times the tokens, but as many episodes
    second = row(**{"turn/tokens": [60, 60, 60, 60, 24, 24], "turn/kl_raw": [0.1] * 6})
    found = measure_regime(turn_sums([row(), second]))
    assert found.episodes == 20
    assert found.kl_shallow == pytest.approx((20 * 0.8 + 60 * 0.2) / 160)
    # with unequal tokens the mass (per episode) and eq. 11's share (per token) differ
    assert found.deep_share == pytest.approx((8 * 0.2 + 24 * 0.2) / (20 * 1.1 + 60 * 0.4 + 8 * 0.2 + 24 * 0.2))


def test_thirds_belong_to_full_depth_and_not_to_the_longest_episode() -> None:
    short = row(**{name: values[:4] for name, values in row().items() if name.startswith("turn/")})
    found = measure_regime(turn_sums([short]))
    assert (found.turns, found.deep_mass, found.deep_support) == (6, 0.0, 0.0)
    # nobody got to the deep turns: their KL is unknown, which is no sign
    assert (found.kl_deep, found.kl_ratio, found.entropy_ratio) == (None, None, None)
    assert found.failures == [
        "deep / shallow KL was not measured",
        "teacher entropy deep / shallow in failed episodes was not measured",
    ]


def test_every_sign_is_asked_for() -> None:
    good = measure_regime(turn_sums([row()]))

    def missing(**changes: float) -> list[str]:
        return replace(good, **changes).failures

    assert missing(kl_ratio=0.6) == ["deep / shallow KL is 60.0 %, below 60 % is wanted"]
    assert missing(kl_ratio=0.599) == []
    assert missing(deep_mass=0.12) == []
    assert missing(deep_mass=0.121) == ["deep third's share of the KL mass is 12.1 %, at most 12 % is wanted"]
    assert missing(entropy_ratio=1.0) == [
        "teacher entropy deep / shallow in failed episodes is 100.0 %, below 100 % is wanted"
    ]
    assert isinstance(good, Regime)


def test_only_steps_of_full_depth_are_read() -> None:
    rows = [row(), {"kind": "eval"}, row(**{"depth/cap": 3}), {"kind": "train", "episodes": 0}, row()]
    assert full_depth_rows(rows) == [row(), row()]
    with pytest.raises(ValueError, match="no full-depth step"):
        turn_sums([])
    with pytest.raises(ValueError, match="no divergence from a teacher"):
        turn_sums([{"kind": "train", "depth/cap": 6, "turn/survivors": [1]}])


def test_a_negative_turn_has_no_mass() -> None:
    found = measure_regime(turn_sums([row(**{"turn/kl_raw": [0.5, 0.5, -1.0, 0.0, 0.0, 0.0]})]))
    assert (found.first_mass, found.deep_mass) == (1.0, 0.0)
    np.testing.assert_allclose(turn_sums([row()]).kl_T, [10, 6, 4, 2, 0.4, 1.2])


def test_intervals_leave_out_a_step_at_a_time() -> None:
    rows = [row(**{"turn/kl_raw": [1.0, 1.0, 1.0, 1.0, deep, deep]}) for deep in (0.1, 0.3, 0.5)]
    found = sign_intervals(rows)
    # deep / shallow is 0.3; without a step 0.4, 0.3 and 0.2; t of two degrees of freedom is 4.303
    wide = 4.302653 * (2 / 3 * (0.01 + 0.01)) ** 0.5
    assert found["kl_ratio"] == pytest.approx((0.3 - wide, 0.3 + wide))
    # the others are alike in all steps
    assert set(found) == {"kl_ratio", "deep_mass"}
    assert sign_intervals(rows[:2]) == sign_intervals([]) == {}
    # no episode was won in two of three steps: without the third the difference cannot be measured
    lost = {"turn/tokens_success": [0] * 6, "turn/kl_raw_success": [NAN] * 6}
    other = {"turn/kl_raw_failure": [0.5] * 6}
    assert "separation" in sign_intervals([row(), row(**other), row(**other)])
    assert "separation" not in sign_intervals([row(**other), row(**lost), row(**lost)])


@pytest.mark.long
def test_intervals_of_a_ratio_cover() -> None:
    rng, hit = np.random.default_rng(0), 0
    for _ in range(200):
        parts = rng.gamma(4.0, 0.1, size=(12, 2))
        rows = [row(**{"turn/kl_raw": [a, a, a, b / 2, b / 2, b / 2]}) for a, b in parts]
        low, high = sign_intervals(rows)["kl_ratio"]
        hit += low <= 0.5 <= high
    assert hit >= 0.92 * 200
