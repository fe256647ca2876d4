"""Every loss, target and plan, broken in every small way: the tests with literal numbers notice each of them.

`mutants` makes the broken versions: operators and comparisons turned round, operands and arguments exchanged, minimum
for maximum, a clip or a detach left out, a minus dropped, a constant moved, the other branch taken, another word. What
survives must be listed below with the reason why it computes the same, and must indeed survive.
"""

from __future__ import annotations

from types import ModuleType

import mutants as tools
import pytest

from turngym.agents.judges import env_judges, votes
from turngym.trainers import (
    batch,
    critic,
    group_advantage,
    judged_episodes,
    learning_rate,
    lm_head,
    lm_loss,
    losses,
    microbatch,
    optimizer_step,
    privileged,
    returns,
    rewards,
    step_metrics,
    targets,
    token_losses,
    token_weights,
    train_loop,
    turn_stats,
)
from turngym.trainers.algorithms import (
    gigpo,
    judge_targets,
    kd_reward,
    luffy,
    ppo,
    prm_opd,
    reinforce_pp,
    rloo,
    tcod,
    turnopd,
)
from turngym.trainers.contrib import (
    agent_opsd,
    atod,
    grpo_opd,
    guided_opd,
    loopstop,
    opid,
    other_vocabulary,
    privileged_group,
    rlsd,
    sage_opd,
    sdar,
    skill_sd,
    sod,
)

pytestmark = pytest.mark.long

TESTED: dict[ModuleType, tuple[str, ...]] = {
    batch: ("batch", "group_filter", "targets"),
    microbatch: ("batch", "packing"),
    lm_head: ("lm_head", "weight_head", "tails"),
    losses: ("policy_gradient", "reverse_kl", "token_losses", "guided", "tails"),
    token_losses: ("policy_gradient", "reverse_kl", "token_losses", "guided", "tails"),
    luffy: ("policy_shaping", "demonstration_prefix", "token_losses"),
    lm_loss: ("lm_loss",),
    token_weights: ("token_weights",),
    targets: ("targets", "combined"),
    group_advantage: ("targets", "group_advantages", "group_filter"),
    returns: ("returns", "ppo"),
    rewards: ("targets", "group_filter", "gigpo"),
    kd_reward: ("teacher_reward",),
    gigpo: ("gigpo",),
    rloo: ("rloo",),
    reinforce_pp: ("reinforce_pp",),
    ppo: ("ppo",),
    sage_opd: ("intervention",),
    grpo_opd: ("turn_reweighting", "combined", "prm_opd"),
    atod: ("turn_reweighting",),
    sod: ("step_weights",),
    guided_opd: ("guided",),
    critic: ("teacher_reward",),
    turnopd: ("depth", "token_weights", "turn_stats"),
    loopstop: ("loopstop",),
    tcod: ("curriculum",),
    turn_stats: ("turn_stats", "step_metrics"),
    votes: ("judge_votes",),
    judged_episodes: ("judge_episodes", "judge_targets", "judge_both", "judge_stats", "judge_unread"),
    judge_targets: ("judge_targets", "prm_opd"),
    privileged: ("privileged", "privileged_group", "judge_targets"),
    privileged_group: ("privileged_group",),
    sdar: ("privileged_group",),
    rlsd: ("privileged_group",),
    skill_sd: ("privileged_group",),
    opid: ("privileged_group",),
    agent_opsd: ("privileged_group",),
    prm_opd: ("prm_opd",),
    env_judges: ("judge_rules",),
    step_metrics: ("step_metrics", "research_metrics"),
    optimizer_step: ("train_step",),
    learning_rate: ("train_step", "lr_suits"),
    train_loop: ("train_step",),
    other_vocabulary: ("other_vocabulary",),
}
"""Every function of these modules is broken in every small way, and the literal tests of these files must notice."""
ELSEWHERE = (
    *("ValueCritic.", "_Values.", "_head"),
    *("make_optimizer", "update", "_return_freed_memory", "accumulate", "_forward", "_drawn", "_project", "_tensor"),
    *("Trainer.", "TrainLoop.run", "TrainLoop._save", "TrainLoop._write"),
    *("micro_batches", "check_packing", "_trial_rows", "packing_for", "Pass.states", "MicroBatch.states"),
    *("build", "distillation", "support_kl", "depth_controller", "token_weight", "in_a_row", "phase_row"),
    "of_other_vocabulary",
    *(
        "AtodConfig.",
        "LuffyConfig.",
        "GrpoOpdConfig.",
        "GuidedOpdConfig.",
        "PrmOpdConfig.",
        "GigpoConfig.",
        "LoopStopConfig.",
        "SodConfig.",
    ),
    *("privileged_group", "told_in_groups", "combination"),
    *("LoopStopConfig.", "ExpertJudge.", "_expert_judge", "RewardedSource.", "JudgedSource.", "Interrupts."),
)
"""What needs a model, a run or several processes: `test_algorithms`, `test_every_algorithm`, `test_train_loop`,
`test_checkpoint` and `test_distributed`."""
WITH_MODELS = {
    "packing": "packed_|a_run|the_loop|models_whose|auto_leaves",
    "gigpo": "the_rollout_notes|out_of_range",
    **dict.fromkeys(("rloo", "reinforce_pp", "ppo"), "two_steps_move"),
    "tails": "a_sure_teacher",
    "loopstop": "a_run_leaves|out_of_range",
    "lr_suits": "recipes_of_the_worlds|a_run_says",
    "other_vocabulary": "equal_tokenizers|asked_for|settings_reach|changes_nothing|cannot_be_had",
}
"""Tests of these files that run a model: seconds each, for hundreds of mutants."""

LAST_AXIS = "the last axis of [N, K] is axis 1"
SQUARED = "the difference is squared"
SAME: dict[str, tuple[int, str]] = {
    "votes._behind_last": (1, "neither is a box or a hint"),
    "votes._said": (1, "neither is a box or a hint"),
    "unmoved_loss": (1, "the difference has no sign"),
    "step_weights": (1, "a distance has no sign"),
    "BatchAdvantage.__call__": (1, "whatever is not std divides by nothing"),
    "_softmax": (4, LAST_AXIS),
    "_slope": (1, LAST_AXIS),
    "topk": (3, LAST_AXIS),
    "_chunk": (3, LAST_AXIS),
    "_shifted": (2, f"{LAST_AXIS}; what is taken off all logits has no gradient in the end"),
    "_tail": (1, LAST_AXIS),
    "renorm_reverse_kl": (2, LAST_AXIS),
    "bin_forward_kl": (1, LAST_AXIS),
    "JensenShannon.__call__": (1, LAST_AXIS),
    "with_tail": (1, LAST_AXIS),
    "tail_logp": (1, LAST_AXIS),
    "topk_entropy": (1, LAST_AXIS),
    "_divergence": (1, LAST_AXIS),
    "KnownPlaces.__call__": (2, f"{LAST_AXIS}; both or none are None"),
    "kl_k2": (1, SQUARED),
    "value_loss": (2, SQUARED),
    "gae": (1, "what is carried to the last token of all is not read"),
    "rewards_to_go": (1, "where values are 0 only the product of gamma and lambda counts"),
    "explained_variance": (1, SQUARED),
    "Believed.__call__": (1, "only the product of lam and eps counts: 1 + lam eps clip(z, -1, 1)"),
    "belief_moves": (2, "a belief is cut long before 50"),
    "ByWeight.forward": (1, "a gradient of zeros for what has none"),
    "TurnAdvantage._situations": (1, "a turn that was broken off is in no comparison, whatever its mark"),
    "clusters": (1, "only equal texts have a ratio of 1"),
    "_line": (1, "what two rows both begin with has no order"),
    "pack": (3, "a row is replaced before it is read, and neither -1 nor -2 is a segment; what nobody knows is longer"),
    "regularized": (1, "only the shape is read"),
    "known_behavior": (1, "every loss detaches it once more"),
    "TruncatedImportance.__call__": (1, "where() with NaN makes it a float"),
    "RolloutBatch.tokens": (1, "one label and one predictor per supervised token"),
    "RolloutBatch.episodes": (1, "one reward and one success per episode"),
    "learning_rate": (1, "the divisor only guards a warm-up as long as the run, after which nothing falls"),
    "_stack": (1, "any negative length is the one to be worked out"),
    "probe_stats": (1, "at least one episode of a probe has full depth"),
    "covering_depth": (1, "the last episode always covers: the range ends before it matters"),
    "Intervention.__call__": (1, "what divides factors that are all 0"),
    "gate": (1, "a score of 0 was dealt with before"),
    "UnreadVotes.check": (1, "which line a warning names"),
    "judge_row": (1, "either row of the distinct turns is as long"),
    "staleness_row": (1, "the quotient's both sides change their sign"),
    "token_row": (1, "the gap is absolute"),
    "turn_row": (1, "it multiplies the two"),
    "LmLoss.backward": (2, "the same number; and memory alone"),
    "LmLoss.rows": (1, "to begin again more often reads the same"),
    "majority": (1, "only the first two are looked at"),
    "_names": (1, "two tokens before do as well as one"),
    "_Reading._check": (1, "equality has no direction"),
    "OtherVocabulary.__init__": (1, "the first id of these tokenizers is no text"),
    "OtherVocabulary._cuts": (3, "nobody reads the text of a shared token, nor where it ends"),
    "Pieces.by_text": (1, "nobody reads what is left of no pieces"),
}
"""Functions of which so many mutants compute the same, and why."""


@pytest.mark.parametrize("module", TESTED, ids=lambda module: module.__name__.removeprefix("turngym."))
@pytest.mark.filterwarnings("ignore")
def test_every_mutant_fails_a_literal_test(
    module: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TESTED[module]
    tests = [test for file in files for test in tools.literal_tests(file, request, WITH_MODELS.get(file, "$^"))]
    functions = [
        found
        for found in tools.functions(module)
        # what is unread is held by test_unread_options
        if not found.__qualname__.startswith(ELSEWHERE) and not found.__qualname__.endswith(".unread")
    ]
    tools.assert_noticed(functions, tests, SAME, monkeypatch)
