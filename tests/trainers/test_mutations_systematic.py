"""Every loss, target and plan, broken in every small way: the tests with literal numbers notice each of them.

`mutants` makes the broken versions: operators and comparisons turned round, operands and arguments exchanged, minimum
for maximum, a clip or a detach left out, a minus dropped, a constant moved, the other branch taken, another word. What
survives must be listed below with the reason why it computes the same, and must indeed survive.
"""

from __future__ import annotations

from types import ModuleType

import mutants as tools
import pytest

from turngym.trainers.judge import votes
from turngym.trainers.losses import policy_gradient, policy_shaping, reverse_kl, token_losses, token_weights
from turngym.trainers.losses import truncated_importance as truncated
from turngym.trainers.rollout_plan import curriculum, demonstration_prefix, depth, group_filter, turn_stats
from turngym.trainers.run import epochs, optimizer_step, train_loop
from turngym.trainers.targets import critic, group_advantages, returns, targets, teacher_reward

TESTED: dict[ModuleType, tuple[str, ...]] = {
    policy_gradient: ("policy_gradient",),
    policy_shaping: ("policy_shaping",),
    reverse_kl: ("reverse_kl",),
    token_losses: ("token_losses",),
    token_weights: ("token_weights",),
    truncated: ("truncated_importance",),
    targets: ("targets",),
    teacher_reward: ("teacher_reward",),
    group_advantages: ("group_advantages",),
    returns: ("returns",),
    critic: ("teacher_reward",),
    depth: ("depth",),
    curriculum: ("curriculum",),
    demonstration_prefix: ("demonstration_prefix",),
    group_filter: ("targets", "group_advantages"),
    turn_stats: ("turn_stats",),
    votes: ("judge_votes",),
    epochs: ("train_step",),
    optimizer_step: ("train_step",),
    train_loop: ("train_step",),
}
"""Every function of these modules is broken in every small way, and the literal tests of these files must notice."""
ELSEWHERE = (
    *("Critic.", "_Values.", "_head"),
    *("make_optimizer", "update", "accumulate", "_forward", "_project", "_tensor"),
    *("TrainLoop.run", "TrainLoop._write"),
)
"""What needs a model or a run: `test_algorithms`, `test_every_algorithm`, `test_train_loop` and `test_checkpoint`."""

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
    "mixture_weight: np.clip(teacher_logp_N - student_logp_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) -> "
    "np.clip(-LOG_RATIO_LIMIT, teacher_logp_N - student_logp_N, LOG_RATIO_LIMIT)": "the middle one of three numbers",
    "TruncatedImportance.__call__: (tokens.behavior_logp_n < least_n).float() -> tokens.behavior_logp_n < least_n": (
        "where() with NaN makes it a float"
    ),
    "learning_rate: 1 -> 2 (3)": "the divisor only guards a warm-up as long as the run, after which nothing falls",
    "_stack: 1 -> 2": "any negative length is the one to be worked out",
    "DropUniformGroups.__call__: True -> False": "both have one entry per episode",
    "_bucket_mean: np.unique(bucket_N, return_inverse=True, return_counts=True) -> "
    "np.unique(bucket_N, return_inverse=True, return_counts=True)": "both are True",
    "covering_depth: 1 -> 2 (2)": "the last episode always covers: the range ends before it matters",
    "majority: 2 -> 3": "only the first two are looked at",
}
"""Mutants that compute the same, and why."""


@pytest.mark.parametrize("module", TESTED, ids=lambda module: module.__name__.removeprefix("turngym.trainers."))
@pytest.mark.filterwarnings("ignore")
def test_no_broken_formula_passes_its_literal_tests(
    module: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [test for file in TESTED[module] for test in tools.literal_tests(file, request)]
    functions = [found for found in tools.functions(module) if not found.__qualname__.startswith(ELSEWHERE)]
    alive = tools.survivors(functions, tests, monkeypatch)
    names = tuple(f"{function.__qualname__}: " for function in functions)
    excused = [name for name in SAME if name.startswith(names)]
    assert sorted(alive) == sorted(excused), "\n".join(["survivors:", *sorted(set(alive) - set(excused))])
