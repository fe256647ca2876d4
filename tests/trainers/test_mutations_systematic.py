"""Every loss and advantage, broken in every small way: the tests with literal numbers notice each of them.

`mutants` makes the broken versions: operators and comparisons turned round, operands exchanged, minimum for maximum, a
clip or a detach left out, a minus dropped, a constant moved. What survives must be listed below with the reason why it
computes the same, and must indeed survive.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from turngym.trainers.losses import policy_gradient, policy_shaping, reverse_kl, token_losses, token_weights
from turngym.trainers.targets import critic, group_advantages, returns, teacher_reward

sys.path.append(str(Path(__file__).parent))
mutants = importlib.import_module("mutants").mutants

TESTED: dict[str, tuple[Any, ...]] = {
    "policy_gradient": (
        *(policy_gradient.clipped_surrogate, policy_gradient.clipped_objective),
        *(policy_gradient.kl_k1, policy_gradient.kl_k2, policy_gradient.kl_k3),
    ),
    "policy_shaping": (
        *(
            policy_shaping.Reshape.off_policy,
            policy_shaping.Reshape.on_policy,
            policy_shaping.off_policy_loss,
            policy_shaping.on_policy_loss,
        ),
    ),
    "group_advantages": (
        group_advantages.grpo_advantage,
        group_advantages.grpo_split_advantage,
        group_advantages.groups_with_spread,
    ),
    "returns": (returns.gae, returns.whiten, returns.at_last_token, returns._Grid.__init__),
    "reverse_kl": (
        *(reverse_kl.full_reverse_kl, reverse_kl.bin_reverse_kl, reverse_kl.raw_reverse_kl),
        *(reverse_kl.renorm_reverse_kl, reverse_kl.topk_reverse_kl, reverse_kl.sampled_advantage),
        *(reverse_kl.importance_weight, reverse_kl.tail_logp, reverse_kl.topk_entropy, reverse_kl._divergence),
    ),
    "token_weights": (
        *(
            token_weights.token_mean,
            token_weights.trajectory_weights,
            token_weights.turn_mean,
            token_weights.reliable_turns,
        ),
        *(
            token_weights.turn_weights,
            token_weights.blend_alpha,
            token_weights.blend_weights,
            token_weights._bucket_mean,
        ),
    ),
    "token_losses": (
        *(token_losses.NegativeLogLikelihood.__call__, token_losses.SupportKL.__call__),
        *(token_losses.ClippedAdvantage.__call__, token_losses.PolicyGradient.__call__),
        *(token_losses.MixedPolicyGradient.__call__, token_losses.Regularized.__call__),
        *(token_losses.known_behavior, token_losses.regularized),
    ),
    "teacher_reward": (
        *(teacher_reward.TeacherReward.__call__, teacher_reward.GroupTeacherAdvantage.__call__),
        *(teacher_reward.CriticAdvantage.__call__, critic.value_loss),
        critic.explained_variance,
        *(
            teacher_reward.mixture_weight,
            teacher_reward.MixtureWeighted.__call__,
            teacher_reward.mixed,
            teacher_reward.check_mix,
        ),
    ),
}
"""By the file of their tests."""

LAST_AXIS = "the last axis of [N, K] is axis 1"
SQUARED = "the difference is squared"
SAME = {
    "kl_k2: logp_N - reference_logp_N.detach() -> reference_logp_N.detach() - logp_N": SQUARED,
    "value_loss: value_N - return_N -> return_N - value_N": SQUARED,
    "value_loss: clipped_N - return_N -> return_N - clipped_N": SQUARED,
    "explained_variance: return_N - value_N -> value_N - return_N": SQUARED,
    "bin_reverse_kl: -1 -> 1": LAST_AXIS,
    "bin_reverse_kl: -1 -> 1 (2)": LAST_AXIS,
    "renorm_reverse_kl: -1 -> 1": LAST_AXIS,
    "renorm_reverse_kl: -1 -> 1 (2)": LAST_AXIS,
    "tail_logp: -1 -> 1": LAST_AXIS,
    "topk_entropy: -1 -> 1": LAST_AXIS,
    "topk_entropy: -1 -> 1 (2)": LAST_AXIS,
    "_divergence: -1 -> 1": LAST_AXIS,
    "turn_mean: 1 -> 2": "another numbering of the responses, as unique",
    "turn_mean: batch.episode_N * (int(batch.turn_N.max()) + 1) + batch.turn_N -> "
    "batch.episode_N * (int(batch.turn_N.max()) + 1) - batch.turn_N": "another numbering of the responses, as unique",
    "known_behavior: tokens.sampled_logp_n.detach() -> tokens.sampled_logp_n": "every loss detaches it once more",
}
"""Mutants that compute the same, and why."""


def literal_tests(file: str, request: pytest.FixtureRequest) -> list[Callable[[], None]]:
    """The tests of `file` that draw nothing, ready to be called."""
    found = []
    for name, test in vars(importlib.import_module(f"test_{file}")).items():
        if name.startswith("test_") and inspect.isfunction(test) and not hasattr(test, "hypothesis"):
            fixtures = {part: request.getfixturevalue(part) for part in _fixtures(test)}
            found += [partial(test, **fixtures, **given) for given in _parameters(test)]
    return found


def _fixtures(test: Callable[..., None]) -> set[str]:
    given = next(_parameters(test))
    return {name for name in inspect.signature(test).parameters if name not in given}


def _parameters(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for row in itertools.product(*(mark.args[1] for mark in marks)):
        given: dict[str, Any] = {}
        for mark, values in zip(marks, row, strict=True):
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            given |= dict(zip(names, values if len(names) > 1 else (values,), strict=True))
        yield given


def survives(tests: list[Callable[[], None]]) -> bool:
    for test in tests:
        try:
            test()
        except KeyboardInterrupt:
            raise
        except BaseException:  # a failed `pytest.raises` is no Exception
            return False
    return True


@pytest.mark.parametrize("file", TESTED)
@pytest.mark.filterwarnings("ignore")
def test_no_broken_formula_passes_its_literal_tests(
    file: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = literal_tests(file, request)
    assert survives(tests)
    alive, made = [], 0
    for function in map(inspect.unwrap, TESTED[file]):
        for name, code in mutants(function):
            made += 1
            # every importer shares the function object, so the code is what must change
            with monkeypatch.context() as patch:
                patch.setattr(function, "__code__", code)
                if survives(tests):
                    alive.append(name)
    assert made >= 10
    excused = [name for name in SAME if any(name.startswith(f"{f.__qualname__}: ") for f in TESTED[file])]
    assert sorted(alive) == sorted(excused), "\n".join(["survivors:", *alive])
