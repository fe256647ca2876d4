"""The depth controller: every number of Table 7, each statistic by hand, whole runs step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.trainers.algorithm import DepthPlan, DepthState, FixedDepth
from turngym.trainers.algorithms.turnopd import (
    AdaptiveDepth,
    DepthConfig,
    DepthStats,
    covering_depth,
    divergence_mass,
    effective_depth,
)

repeatable = settings(derandomize=True)


def stats(kl=(1.0,), survivors=(8,), last=(), success=None, cut=None) -> DepthStats:
    """Survivors and last turns are given apart, so that each statistic can be tested alone."""
    return DepthStats(
        kl_T=np.array(kl, float),
        survivors_T=np.array(survivors, np.int64),
        last_turn_E=np.array(last, np.int64),
        success_E=np.array([True] * len(last) if success is None else success, bool),
        cut_E=np.array([False] * len(last) if cut is None else cut, bool),
    )


def test_defaults_are_table_7():
    config = DepthConfig()
    assert (config.h_min, config.h_max) == (2, 50)
    assert (config.warmup, config.probe_interval) == (3, 8)
    assert (config.rho, config.p, config.min_successes) == (0.7, 0.80, 8)
    assert (config.cov_base, config.use_success, config.probe_share) == (0, True, 1.0)


def test_mass_and_effective_depth_by_hand():
    # m = max(K, 0) n / n_0 = (2, 0, 1 * 1/2, 4 * 1/4); the turn without tokens has none
    kl, survivors = np.array([2.0, -3.0, 1.0, 4.0, np.nan]), np.array([8, 8, 4, 2, 1])
    np.testing.assert_allclose(divergence_mass(kl, survivors), [2, 0, 0.5, 1, 0])
    # (2 * 0.5 + 3 * 1) / 3.5 = 1.14
    assert effective_depth(kl, survivors) == 1
    assert effective_depth(np.array([0.0, 0.0, 1.0]), np.array([4, 4, 4])) == 2
    # 1e-8 is added to the mass: 4 * 4 / 5 = 3.2
    assert effective_depth(np.array([0, 0, 0, 0, 4e-8]), np.ones(5, np.int64)) == 3


def test_effective_depth_rounds_half_to_even():
    # the small constant in q_t must not outweigh the tie, hence a mass of 1e12
    mass = np.array([1.0, 1.0, 0.0, 0.0]) * 1e12
    assert effective_depth(mass, np.array([1, 1, 1, 1])) == 0  # centre 0.5
    assert effective_depth(mass[::-1].copy(), np.array([1, 1, 1, 1])) == 2  # centre 2.5


def test_no_mass_has_effective_depth_zero():
    for kl in ([0.0, 0.0], [-1.0, -2.0], [np.nan, np.nan], []):
        assert effective_depth(np.array(kl), np.ones(len(kl), np.int64)) == 0


def test_covering_depth_by_hand():
    # ten successes: 8 of 10 have ended by the 8th smallest last turn
    last = [30, 4, 4, 5, 6, 7, 8, 9, 12, 20]
    assert covering_depth(stats(last=last), DepthConfig()) == 12
    assert covering_depth(stats(last=last), DepthConfig(cov_base=1)) == 13
    assert covering_depth(stats(last=last), DepthConfig(p=0.4)) == 6
    assert covering_depth(stats(last=last), DepthConfig(p=0.6)) == 8
    assert covering_depth(stats(last=last), DepthConfig(p=1.0)) == 30
    assert covering_depth(stats(last=[7, 3, 9]), DepthConfig(p=0.3, min_successes=1)) == 3
    # 0.81 of 10 needs the 9th
    assert covering_depth(stats(last=last), DepthConfig(p=0.81)) == 20
    # 0.55 * 20 is 11.000000000000002 in binary floating point, but the 11th of 20 is 0.55
    assert covering_depth(stats(last=range(20)), DepthConfig(p=0.55)) == 10


def test_coverage_looks_at_successes_unless_told_otherwise():
    last, success = [3] * 8 + [40] * 8, [True] * 8 + [False] * 8
    assert covering_depth(stats(last=last, success=success), DepthConfig()) == 3
    assert covering_depth(stats(last=last, success=success), DepthConfig(use_success=False)) == 40
    assert covering_depth(stats(last=last, success=[False] * 16), DepthConfig()) is None


def test_an_episode_that_the_cap_cut_neither_succeeds_nor_ends():
    # six short failures and ten that the probe's own cap of 20 stopped, two of them at their goal
    last, cut = [4] * 6 + [19] * 10, [False] * 6 + [True] * 10
    probe = stats(last=last, cut=cut, success=[False] * 6 + [True] * 2 + [False] * 8)
    assert covering_depth(probe, DepthConfig(h_max=20)) is None
    assert covering_depth(probe, DepthConfig(h_max=20, min_successes=1)) is None
    everyone = DepthConfig(h_max=20, use_success=False)
    assert covering_depth(probe, everyone) == 19
    # 6 of 16 have ended by turn 4
    assert covering_depth(probe, DepthConfig(h_max=20, use_success=False, p=0.375)) == 4
    assert covering_depth(probe, DepthConfig(h_max=20, use_success=False, cov_base=1)) == 20
    # where it was cut does not matter: it did not end there
    assert covering_depth(stats(last=[4] * 8 + [2] * 8, cut=[False] * 8 + [True] * 8), everyone) == 19


def test_a_student_that_never_succeeds_is_measured():
    control, probe = AdaptiveDepth(DepthConfig(h_max=20)), DepthPlan(cap=20, probe=True)
    hopeless = stats(kl=[0.0] * 6 + [1.0] + [0.0] * 13, survivors=[8] * 20, last=[19] * 8, cut=[True] * 8)
    state = control.update(control.start(), probe, hopeless)
    assert (state.h_eff, state.h_cov, state.probes) == (6, 0, 1)
    assert state.hbar == pytest.approx(0.7 * 20 + 0.3 * 6)


def test_too_few_successes_keep_the_last_covering_depth():
    assert covering_depth(stats(last=[9] * 7), DepthConfig()) is None
    assert covering_depth(stats(last=[9] * 8), DepthConfig()) == 9
    control, probe = AdaptiveDepth(), DepthPlan(cap=50, probe=True)
    state = control.update(control.start(), probe, stats(last=[9] * 7))
    assert (state.h_cov, state.hbar) == (0, pytest.approx(35.0))
    state = control.update(state, probe, stats(last=[9] * 8))
    state = control.update(state, probe, stats(last=[20] * 7))
    assert state.h_cov == 9


def test_probes_are_steps_1_2_3_8_16():
    control = AdaptiveDepth()
    plans = [control.plan(control.start(), step) for step in range(1, 34)]
    assert [step for step, plan in enumerate(plans, 1) if plan.probe] == [1, 2, 3, 8, 16, 24, 32]


def test_cap_by_hand():
    control = AdaptiveDepth()

    def cap(hbar: float) -> int:
        return control.plan(DepthState(hbar=hbar), 5).cap

    # clip(round(hbar) + 1, 2, 50), round half to even
    assert [cap(h) for h in (0.0, 0.5, 1.5, 2.5, 12.4, 12.6, 49.0, 50.0)] == [2, 2, 3, 3, 13, 14, 50, 50]
    probe = control.plan(DepthState(hbar=10.0), 8)
    assert probe == DepthPlan(cap=50, probe=True, adaptive_cap=11, full_depth=True)
    assert not control.plan(DepthState(hbar=10.0), 9).full_depth


def test_a_partial_probe_stops_the_rest_at_the_cap():
    control = AdaptiveDepth(DepthConfig(probe_share=0.25))
    assert control.plan(DepthState(hbar=10.0), 8).short_share == 0.75
    assert control.plan(DepthState(hbar=10.0), 8).adaptive_cap == 11
    assert control.plan(DepthState(hbar=10.0), 9).short_share == 0.0


def test_ten_steps_by_hand():
    """Mass at turn 10, eight successes ending at turn index 12: Hbar decays from 50 towards 12."""
    control, state = AdaptiveDepth(), AdaptiveDepth().start()
    measured = stats(kl=[0.0] * 10 + [1.0], survivors=[8] * 11, last=[12] * 8)
    caps, hbars = [], []
    for step in range(1, 11):
        plan = control.plan(state, step)
        state = control.update(state, plan, measured)
        caps.append(plan.cap)
        hbars.append(state.hbar)
    # 0.7 * 50 + 0.3 * 12 = 38.6; 30.62; 25.034; then at step 8: 21.1238
    assert hbars == pytest.approx([38.6, 30.62, 25.034, 25.034, 25.034, 25.034, 25.034, 21.1238, 21.1238, 21.1238])
    assert caps == [50, 50, 50, 26, 26, 26, 26, 50, 22, 22]
    assert (state.h_eff, state.h_cov, state.probes) == (10, 12, 4)


def test_the_greater_of_both_depths_counts():
    control, probe = AdaptiveDepth(), DepthPlan(cap=50, probe=True)
    deep_mass = stats(kl=[0.0] * 20 + [1.0], survivors=[8] * 21, last=[12] * 8)
    assert control.update(DepthState(hbar=30.0), probe, deep_mass).hbar == pytest.approx(0.7 * 30 + 0.3 * 20)


def test_only_probes_with_episodes_change_the_state():
    control, state = AdaptiveDepth(), DepthState(hbar=17.25, h_eff=4, h_cov=9, probes=2)
    measured = stats(last=[12] * 8)
    assert control.update(state, control.plan(state, 5), measured) == state
    # every episode was lost to an error: nothing was measured
    assert control.update(state, control.plan(state, 8), stats(kl=[], survivors=[])) == state


def test_fixed_depth_stays():
    control = FixedDepth(h_max=30)
    state = control.start()
    assert control.plan(state, 7) == DepthPlan(cap=30, full_depth=True)
    assert control.learn(state, control.plan(state, 7)) == state


def test_bad_settings_are_errors():
    with pytest.raises(ValueError, match="h_max 8"):
        DepthConfig(h_min=9, h_max=8)
    edge = DepthConfig(h_min=1, h_max=1, probe_interval=1, warmup=0, min_successes=1, rho=1.0, p=1.0)
    assert AdaptiveDepth(edge).plan(AdaptiveDepth(edge).start(), 1).cap == 1
    assert DepthConfig(rho=0.0, cov_base=1).rho == 0.0


columns = st.lists(st.tuples(st.floats(-1, 5), st.integers(1, 64)), min_size=1, max_size=6)
probe_results = st.lists(st.tuples(columns, st.lists(st.integers(0, 49), max_size=12)), min_size=1, max_size=10)


@repeatable
@given(probe_results)
def test_depth_stays_within_its_range(results):
    control, state = AdaptiveDepth(), AdaptiveDepth().start()
    for step, (turns, last) in enumerate(results, 1):
        plan = control.plan(state, step)
        assert 2 <= plan.cap <= 50
        kl, survivors = zip(*turns, strict=True)
        after = control.update(state, plan, stats(kl=kl, survivors=sorted(survivors, reverse=True), last=last))
        assert 0 <= after.hbar <= 50
        if plan.probe and last:
            assert 0 <= after.h_eff < len(kl)
        else:
            assert after == state
        state = after
