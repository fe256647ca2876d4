"""Every loss, target and plan, broken in every small way: the tests with literal numbers notice each of them.

`mutants` makes the broken versions: operators and comparisons turned round, operands and arguments exchanged, minimum
for maximum, a clip or a detach left out, a minus dropped, a constant moved, the other branch taken, another word. What
survives must be listed below with the reason why it computes the same, and must indeed survive.
"""

from __future__ import annotations

from types import ModuleType

import mutants as tools
import pytest

from turngym.agents.judges import env_judges
from turngym.trainers import (
    batch,
    critic,
    group_advantage,
    judge_votes,
    lm_head,
    lm_loss,
    losses,
    microbatch,
    optimizer_step,
    other_vocabulary,
    returns,
    rewards,
    step_metrics,
    targets,
    token_weights,
    told,
    train_loop,
    turn_stats,
)
from turngym.trainers.algorithms import (
    agent_opsd,
    atod,
    gigpo,
    grpo_opd,
    guided_opd,
    judge_targets,
    kd_reward,
    loopstop,
    luffy,
    opid,
    prm_opd,
    rlsd,
    sage_opd,
    sdar,
    skill_sd,
    tcod,
    turnopd,
)

pytestmark = pytest.mark.long

TESTED: dict[ModuleType, tuple[str, ...]] = {
    batch: ("batch", "group_filter", "targets"),
    microbatch: (
        "batch",
        "packing",
    ),
    lm_head: (
        "lm_head",
        "weight_head",
        "tails",
    ),
    losses: (
        "policy_gradient",
        "reverse_kl",
        "token_losses",
        "guided",
        "tails",
    ),
    luffy: (
        "policy_shaping",
        "demonstration_prefix",
        "token_losses",
    ),
    lm_loss: ("lm_loss",),
    token_weights: ("token_weights",),
    targets: ("targets",),
    group_advantage: ("targets", "group_advantages", "group_filter"),
    returns: ("returns",),
    rewards: ("targets", "group_filter"),
    kd_reward: ("teacher_reward",),
    gigpo: ("gigpo",),
    sage_opd: ("intervention",),
    grpo_opd: (
        "turn_reweighting",
        "combined",
        "prm_opd",
    ),
    atod: ("turn_reweighting",),
    guided_opd: ("guided",),
    critic: ("teacher_reward",),
    turnopd: ("depth", "token_weights", "turn_stats"),
    loopstop: ("loopstop",),
    tcod: ("curriculum",),
    turn_stats: ("turn_stats",),
    judge_votes: (
        "judge_votes",
        "judge_episodes",
        "judge_targets",
        "judge_both",
        "judge_stats",
        "judge_unread",
    ),
    judge_targets: ("judge_targets", "prm_opd"),
    told: ("told", "told_group", "judge_targets"),
    sdar: ("told_group",),
    rlsd: ("told_group",),
    skill_sd: ("told_group",),
    opid: ("told_group",),
    agent_opsd: ("told_group",),
    prm_opd: ("prm_opd",),
    env_judges: ("judge_rules",),
    step_metrics: (
        "step_metrics",
        "research_metrics",
    ),
    optimizer_step: (
        "train_step",
        "lr_suits",
    ),
    train_loop: ("train_step",),
    other_vocabulary: ("other_vocabulary",),
}
"""Every function of these modules is broken in every small way, and the literal tests of these files must notice."""
ELSEWHERE = (
    *("ValueCritic.", "_Values.", "_head"),
    *("make_optimizer", "update", "_return_freed_memory", "accumulate", "_forward", "_drawn", "_project", "_tensor"),
    *("Trainer.", "TrainLoop.run", "TrainLoop._save", "TrainLoop._write"),
    *("micro_batches", "check_packing", "packing_for", "Pass.states", "MicroBatch.states"),
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
    ),
    "told_group",
    *("LoopStopConfig.", "ExpertJudge.", "_expert_judge", "RewardedSource.", "JudgedSource.", "Interrupts."),
)
"""What needs a model, a run or several processes: `test_algorithms`, `test_every_algorithm`, `test_train_loop`,
`test_checkpoint` and `test_distributed`."""
WITH_MODELS = {
    "packing": "packed_|a_run|the_loop|models_whose|auto_leaves",
    "gigpo": "the_rollout_notes|out_of_range",
    "tails": "a_sure_teacher",
    "loopstop": "a_run_leaves|out_of_range",
    "lr_suits": "recipes_of_the_worlds|a_run_says",
    "other_vocabulary": "equal_tokenizers|asked_for|settings_reach|changes_nothing|cannot_be_had",
}
"""Tests of these files that run a model: seconds each, for hundreds of mutants."""

LAST_AXIS = "the last axis of [N, K] is axis 1"
SQUARED = "the difference is squared"
MIDDLE = "the middle one of three numbers"
SAME = {
    "score_turns: np.array_equal(prompt[:len(ids[-1])], ids[-1]) -> np.array_equal(ids[-1], prompt[:len(ids[-1])])": (
        "equality has no direction"
    ),
    "directed_advantage: np.clip(factor_N, 1.0 - eps, 1.0 + eps) -> np.clip(1.0 - eps, factor_N, 1.0 + eps)": MIDDLE,
    "directed_advantage: np.clip(np.sign(advantage_N) * gap_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) -> "
    "np.clip(-LOG_RATIO_LIMIT, np.sign(advantage_N) * gap_N, LOG_RATIO_LIMIT)": MIDDLE,
    "turn_factors: np.clip(1.0 + eps * sign * z_T, 1.0 - eps, 1.0 + eps) -> "
    "np.clip(1.0 - eps, 1.0 + eps * sign * z_T, 1.0 + eps)": f"agent_opsd only: {MIDDLE}",
    "belief_moves: np.clip(1.0 / (1.0 + np.exp(-np.clip(logit_T, -50.0, 50.0))), BELIEF_LEAST, 1.0 - BELIEF_LEAST) -> "
    "np.clip(BELIEF_LEAST, 1.0 / (1.0 + np.exp(-np.clip(logit_T, -50.0, 50.0))), 1.0 - BELIEF_LEAST)": MIDDLE,
    "belief_moves: np.clip(logit_T, -50.0, 50.0) -> np.clip(-50.0, logit_T, 50.0)": MIDDLE,
    "Believed.__call__: turn_factors(move_T, sign, lam=self.lam, eps=self.eps) -> "
    "turn_factors(move_T, sign, lam=self.eps, eps=self.lam)": "only their product counts: 1 + lam eps clip(z, -1, 1)",
    "belief_moves: 50.0 -> 51.0": "a belief is cut long before",
    "belief_moves: 50.0 -> 51.0 (2)": "a belief is cut long before",
    "_softmax: -1 -> 1": LAST_AXIS,
    "_softmax: -1 -> 1 (2)": LAST_AXIS,
    "_softmax: -1 -> 1 (3)": LAST_AXIS,
    "_slope: -1 -> 1": LAST_AXIS,
    "ByWeight.forward: False -> True (2)": "a gradient of zeros for what has none",
    "kl_k2: logp_N - reference_logp_N.detach() -> reference_logp_N.detach() - logp_N": SQUARED,
    "value_loss: value_N - return_N -> return_N - value_N": SQUARED,
    "value_loss: clipped_N - return_N -> return_N - clipped_N": SQUARED,
    "explained_variance: return_N - value_N -> value_N - return_N": SQUARED,
    "_Chunk.__call__: -1 -> 1": LAST_AXIS,
    "_entropy: -1 -> 1": LAST_AXIS,
    "_entropy: -1 -> 1 (2)": LAST_AXIS,
    "_logits: -1 -> 1": f"lm_head only: {LAST_AXIS}",
    "topk: -1 -> 1": LAST_AXIS,
    "topk: -1 -> 1 (2)": LAST_AXIS,
    "topk: -1 -> 1 (3)": LAST_AXIS,
    "renorm_reverse_kl: -1 -> 1": LAST_AXIS,
    "renorm_reverse_kl: -1 -> 1 (2)": LAST_AXIS,
    "tail_logp: -1 -> 1": LAST_AXIS,
    "with_tail: -1 -> 1": LAST_AXIS,
    "_shifted: -1 -> 1": LAST_AXIS,
    "_shifted: logits.detach() -> logits": "what is taken off all logits has no gradient in the end",
    "_tail: -1 -> 1": LAST_AXIS,
    "_softmax: -1 -> 1 (4)": LAST_AXIS,
    "topk_entropy: -1 -> 1": LAST_AXIS,
    "_divergence: -1 -> 1": LAST_AXIS,
    "bin_forward_kl: -1 -> 1": LAST_AXIS,
    "JensenShannon.__call__: -1 -> 1": LAST_AXIS,
    "JensenShannon.__call__: torch.logaddexp(student + math.log1p(-self.beta), teacher + math.log(self.beta)) -> "
    "torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))": "a sum",
    "TurnAdvantage._situations: '' -> '_'": "a turn that was broken off is in no comparison, whatever its mark",
    "centered: np.unique(group_t, return_inverse=True, return_counts=True) -> "
    "np.unique(group_t, return_inverse=True, return_counts=True)": "both are True",
    "clusters: 1.0 -> 2.0": "only equal texts have a ratio of 1",
    "judge_episodes: True -> False": "as many answers as requests, and requests as episodes",
    "packed_pass: True -> False": "as many shares as rows",
    "_line: True -> False": "as many shares as rows",
    "_line: shared_tokens(longest, rows[row]) -> shared_tokens(rows[row], longest)": "what both begin with",
    "_Columns.add_turn: r1 - r0 -> r1 + r0": "more than is read of what nobody knows",
    "_add_episode: 0 -> 1": "replaced before it is read: the first turn begins a row",
    "_add_episode: 1 -> 2": "neither -1 nor -2 is a segment",
    "regularized: tokens.logp_n -> tokens.sampled_logp_n": "only its shape is read",
    "known_behavior: tokens.sampled_logp_n.detach() -> tokens.sampled_logp_n": "every loss detaches it once more",
    "mixture_weight: np.clip(teacher_logp_N - student_logp_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) -> "
    "np.clip(-LOG_RATIO_LIMIT, teacher_logp_N - student_logp_N, LOG_RATIO_LIMIT)": "the middle one of three numbers",
    "TruncatedImportance.__call__: (tokens.behavior_logp_n < least_n).float() -> tokens.behavior_logp_n < least_n": (
        "where() with NaN makes it a float"
    ),
    "RolloutBatch.tokens: self.label_N -> self.predictor_N": "one of each per supervised token",
    "RolloutBatch.episodes: self.reward_E -> self.success_E": "one of each per episode",
    "learning_rate: 1 -> 2 (3)": "the divisor only guards a warm-up as long as the run, after which nothing falls",
    "_stack: 1 -> 2": "any negative length is the one to be worked out",
    "_bucket_mean: np.unique(bucket_N, return_inverse=True, return_counts=True) -> "
    "np.unique(bucket_N, return_inverse=True, return_counts=True)": "both are True",
    "AdaptiveDepth.plan: DepthPlan(cap=cap, adaptive_cap=cap) -> DepthPlan(cap=cap, adaptive_cap=cap)": "both are cap",
    "LoopDepth.plan: DepthPlan(cap=self.h_max, probe=True, full_depth=True) -> "
    "DepthPlan(cap=self.h_max, probe=True, full_depth=True)": "both are True",
    "probe_stats: 0 -> 1": "at least one episode of a probe has full depth",
    "covering_depth: 1 -> 2 (3)": "the last episode always covers: the range ends before it matters",
    "batch_turns: True -> False": "as many starts as ends",
    "Intervention.__call__: 1.0 -> 2.0": "what divides factors that are all 0",
    "gate: 0.0 -> 1.0 (2)": "a score of 0 was dealt with before",
    "score_turns: True -> False": "their numbers were compared before",
    "minillm_returns: gae(zero_N + 1.0, zero_N, episode_N, gamma=1.0, lam=1.0) -> "
    "gae(zero_N + 1.0, zero_N, episode_N, gamma=1.0, lam=1.0)": "both are 1",
    "UnreadVotes.check: 2 -> 3": "which line a warning names",
    "judge_row: 0 -> 1 (2)": "either row of the distinct turns is as long",
    "staleness_row: end - start -> start - end": "the quotient's both sides change their sign",
    "token_row: columns['sampled_logp'] - batch.behavior_logp_N -> batch.behavior_logp_N - columns['sampled_logp']": (
        "the gap is absolute"
    ),
    "turn_row: loss_share(columns['loss'], weight_N, batch) -> loss_share(weight_N, columns['loss'], batch)": (
        "it multiplies the two"
    ),
    "LmLoss.backward: loss.detach() -> loss": "the same number",
    "LmLoss.backward: True -> False": "memory alone: the gradient is the same",
    "LmLoss.rows: wanted - documents -> documents - wanted": "to begin again more often reads the same",
    "majority: 2 -> 3": "only the first two are looked at",
    "_names: 1 -> 2": "two tokens before do as well as one",
    "_decode: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) -> "
    "tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)": "both are False",
    "_Reading.topk: True -> False (3)": "as many parts of the one as of the other",
    "_Reading.logprobs: True -> False (2)": "as many probabilities as spans",
    "_Reading._check: map(np.array_equal, own, ids) -> map(np.array_equal, ids, own)": "equality has no direction",
    "_Reading._said: True -> False": "as many answers as rows",
    "_Reading._said: True -> False (2)": "as many ids as probabilities",
    "_Reading._said: True -> False (3)": "as many tokens as likeliest ids",
    "_Reading._said: True -> False (4)": "as many answers as spans asked for",
    "_Reading._shares: True -> False": "as many answers as places",
    "_pairs: True -> False": "as many ids as probabilities",
    "divided: True -> False": "as many parts as ids",
    "divided: np.logaddexp(found[number], logq) -> np.logaddexp(logq, found[number])": "a sum has no order",
    "OtherVocabulary.__init__: 0 -> 1": "the first id of these tokenizers is no text",
    "OtherVocabulary._cuts: '' -> '_'": "nobody reads the text of a shared token",
    "OtherVocabulary._cuts: 0 -> 1 (2)": "nobody reads where a shared token ends",
    "OtherVocabulary._cuts: 0 -> 1 (3)": "nobody reads where a shared token ends",
    "_Reading._logq: True -> False": "as many answers as rows",
    "_Reading._logq: True -> False (2)": "as many parts as spans",
    "KnownPlaces.__call__: -1 -> 1": LAST_AXIS,
    "Pieces.merged: 0.0 -> 1.0": "nobody reads what is left of no pieces",
    "_Reading._pieces_by_token: True -> False": "one of each per piece",
    "KnownPlaces.__call__: student is None or teacher is None -> student is None and teacher is None": "both or none",
}
"""Mutants that compute the same, and why."""


@pytest.mark.parametrize("module", TESTED, ids=lambda module: module.__name__.removeprefix("turngym."))
@pytest.mark.filterwarnings("ignore")
def test_every_mutant_fails_a_literal_test(
    module: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TESTED[module]
    tests = [test for file in files for test in tools.literal_tests(file, request, WITH_MODELS.get(file, "$^"))]
    functions = [found for found in tools.functions(module) if not found.__qualname__.startswith(ELSEWHERE)]
    tools.assert_noticed(functions, tests, SAME, monkeypatch)
