"""Break each formula once and see its literal test fail: a test that cannot fail proves nothing."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from turngym.trainers import batch, lm_head, microbatch, targets, token_weights, train_loop, turn_stats
from turngym.trainers import losses as policy_gradient
from turngym.trainers import losses as reverse_kl
from turngym.trainers.algorithms import tcod as curriculum
from turngym.trainers.algorithms import turnopd as depth

FOLDER = Path(__file__).parent

# (function, what stands there, what it becomes, file, test that must fail)
MUTANTS: list[tuple[Callable[..., Any], str, str, str, str]] = [
    # the single label shift, the mask, the rows
    (batch._Columns.add_turn, "first - 1, start + r0 + last - 1", "first, start + r0 + last", "batch", "two_ragged"),
    (batch._Columns.add_turn, "np.arange(start + r0", "np.arange(r0", "batch", "two_ragged"),
    (batch._Columns.add_turn, "origin not in origins or ", "", "batch", "a_demonstrator_began"),
    (batch._Columns.add_turn, "np.nan", "0.0", "batch", "two_ragged"),
    (batch._Columns.add_turn, '== "demonstration"', '== "policy"', "batch", "only_the_asked"),
    (batch._Columns.batch, "Status.TRUNCATED_DEPTH", "Status.TRUNCATED_TURNS", "batch", "a_depth_cap"),
    (batch._add_episode, "turn.origin not in origins or ", "", "batch", "each_segment"),
    (batch._add_episode, "turn.segment != segment", "segment < 0", "batch", "each_segment"),
    (batch.pack, "if not episode.status.is_error", "", "batch", "error_episodes"),
    (microbatch.pad_rows, "]] + position", "]] + position + 1", "batch", "split_and_pad"),
    (microbatch.split_rows, "np.argsort(-lengths", "np.argsort(lengths", "batch", "split_and_pad"),
    # weights
    (token_weights.trajectory_weights, "batch.episode_N", "batch.turn_N", "token_weights", "trajectory_weights_by"),
    (
        token_weights.trajectory_weights,
        "_bucket_mean(batch.episode_N)",
        "token_mean(batch)",
        "token_weights",
        "trajectory_weights_by",
    ),
    (token_weights._bucket_mean, "len(counts) * ", "", "token_weights", "trajectory_weights_by"),
    (
        token_weights.turn_weights,
        "np.zeros(batch.tokens)",
        "trajectory_weights(batch)",
        "token_weights",
        "turn_weights_by",
    ),
    (
        token_weights.turn_weights,
        "_bucket_mean(batch.turn_N",
        "_bucket_mean(batch.episode_N",
        "token_weights",
        "turn_weights_by",
    ),
    (token_weights.turn_mean, "batch.episode_N *", "0 *", "token_weights", "turn_mean_by"),
    (token_weights.reliable_turns, "max(n_min, share)", "n_min", "token_weights", "n_min"),
    (token_weights.reliable_turns, "max(n_min, share)", "share", "token_weights", "n_min"),
    (token_weights.reliable_turns, ", n_traj)", ", 10**9)", "token_weights", "n_min"),
    (token_weights.reliable_turns, "math.ceil(", "int(", "token_weights", "n_min"),
    (token_weights.reliable_turns, " - 1e-9", "", "token_weights", "meant_in_decimal"),
    (turnopd.blend_weights, "(1.0 - alpha) * traj", "traj", "token_weights", "blend_weights_by"),
    (token_weights.blend_alpha, "(progress - start)", "progress", "token_weights", "blend_alpha_by"),
    (token_weights.blend_alpha, "step / total", "(step - 1) / total", "token_weights", "blend_alpha_by"),
    (token_weights.blend_alpha, ">= start", "> start", "token_weights", "blend_alpha_by"),
    # reverse KL
    (reverse_kl._divergence, "student_logp - teacher_logp", "teacher_logp - student_logp", "reverse_kl", "full_by"),
    (reverse_kl._divergence, "student_logp.exp()", "teacher_logp.exp()", "reverse_kl", "bin_by"),
    (reverse_kl.bin_reverse_kl, "tail_logp(student_topk_logp_NK)", "tail_logp(teacher)", "reverse_kl", "bin_by"),
    (reverse_kl.raw_reverse_kl, "_divergence", "bin_reverse_kl", "reverse_kl", "raw_by"),
    (reverse_kl.renorm_reverse_kl, ".detach().log_softmax(-1)", ".detach()", "reverse_kl", "renorm_by"),
    (reverse_kl.tail_logp, ".clamp(max=-MIN_TAIL)", "", "reverse_kl", "tail_by"),
    (reverse_kl.tail_logp, "(-covered.expm1())", "covered.exp()", "reverse_kl", "tail_by"),
    (
        reverse_kl.sampled_advantage,
        "teacher_logp_N - student_logp_N",
        "student_logp_N - teacher_logp_N",
        "reverse_kl",
        "advantage_by",
    ),
    (reverse_kl.importance_weight, ".clamp(low, high)", "", "reverse_kl", "importance_weight_by"),
    (reverse_kl.importance_weight, ".detach()", "", "reverse_kl", "importance_weight_by"),
    (reverse_kl.importance_weight, ".nan_to_num(nan=0.0)", "", "reverse_kl", "importance_weight_by"),
    (
        reverse_kl.importance_weight,
        ".clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
        "",
        "reverse_kl",
        "importance_weight_by",
    ),
    (reverse_kl.topk_entropy, "-(bins", "(bins", "reverse_kl", "topk_entropy_by"),
    # targets, and which column the depth controller sees
    (
        targets.SampledAdvantage.__call__,
        "sampled_advantage(student_logp_N, teacher_logp_N)",
        "sampled_advantage(teacher_logp_N, student_logp_N)",
        "targets",
        "teacher_minus_student",
    ),
    (targets.SplitAdvantage.__call__, "self.alpha, self.beta", "self.beta, self.alpha", "targets", "their_own_factors"),
    (train_loop.TrainLoop._step, '"kl_raw"', '"kl_bin"', "train_step", "sees_the_raw_divergence"),
    # LM head
    (lm_head._Chunk.__call__, "- logits.logsumexp(-1, keepdim=True)", "", "lm_head", "two_positions"),
    (lm_head._logits, "logits / temperature", "logits * temperature", "lm_head", "temperature_by"),
    (lm_head._logits, "logits[:, :vocab]", "logits", "lm_head", "vocab_cuts"),
    (lm_head._logits, "logits.float()", "logits", "lm_head", "low_precision"),
    (lm_head.topk, "- logits.logsumexp(", "- best.values.logsumexp(", "lm_head", "topk_is_sorted"),
    (lm_head._project, "len(hidden_N) <= work.chunk or", "True or", "lm_head", "only_one_chunk"),
    (lm_head.chunks, "range(0, max(length, 1), chunk)", "range(0, 1)", "weight_head", "one_gradient_of_the_weight"),
    (lm_head._project, "matrix is not None and dtype", "False and dtype", "weight_head", "one_gradient_of_the_weight"),
    # policy gradient
    (policy_gradient.clipped_objective, "torch.maximum", "torch.minimum", "policy_gradient", "clipped_surrogate_by"),
    (
        policy_gradient.clipped_objective,
        "1.0 + eps_high))",
        "1.0 + eps_low))",
        "policy_gradient",
        "clipped_surrogate_by",
    ),
    (policy_gradient.clipped_objective, "above | below", "above", "policy_gradient", "clipped_surrogate_by"),
    (
        policy_gradient.clipped_surrogate,
        ".clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
        "",
        "policy_gradient",
        "a_wild_log_ratio",
    ),
    (
        policy_gradient.kl_k1,
        "logp_N - reference_logp_N.detach()",
        "reference_logp_N - logp_N",
        "policy_gradient",
        "estimators_by",
    ),
    (policy_gradient.kl_k2, "0.5 * ", "", "policy_gradient", "estimators_by"),
    (
        policy_gradient.kl_k3,
        "reference_logp_N.detach() - logp_N",
        "logp_N - reference_logp_N",
        "policy_gradient",
        "estimators_by",
    ),
    (policy_gradient.kl_k3, ", *K3_LIMITS", ", -1e9, 1e9", "policy_gradient", "cut_to_ten"),
    # depth
    (depth.AdaptiveDepth.plan, "round(state.hbar) + 1", "round(state.hbar)", "depth", "cap_by"),
    (depth.AdaptiveDepth.plan, "round(state.hbar)", "int(state.hbar + 0.5)", "depth", "cap_by"),
    (depth.AdaptiveDepth.plan, "step <= config", "step < config", "depth", "probes_are"),
    (depth.AdaptiveDepth.plan, "step % config", "(step - 1) % config", "depth", "probes_are"),
    (depth.AdaptiveDepth.plan, "cap=config.h_max", "cap=cap", "depth", "cap_by"),
    (depth.AdaptiveDepth.update, "max(h_eff, h_cov)", "h_eff", "depth", "ten_steps"),
    (depth.AdaptiveDepth.update, "max(h_eff, h_cov)", "h_cov", "depth", "greater_of_both"),
    (depth.AdaptiveDepth.update, "hbar = rho *", "hbar = 0 + round(rho) *", "depth", "ten_steps"),
    (depth.AdaptiveDepth.update, "not plan.probe or ", "", "depth", "only_probes"),
    (depth.AdaptiveDepth.update, "state.h_cov if covered is None", "0 if covered is None", "depth", "too_few"),
    (depth.divergence_mass, "/ survivors_T[0]", "", "depth", "mass_and_effective"),
    (depth.divergence_mass, "survivors_T / ", "1 / ", "depth", "mass_and_effective"),
    (depth.divergence_mass, ", 0.0) *", ", -9.0) *", "depth", "mass_and_effective"),
    (depth.effective_depth, "round(", "int(0.5 + ", "depth", "rounds_half"),
    (depth.covering_depth, ">= config.p)", "> config.p)", "depth", "covering_depth_by"),
    (depth.covering_depth, "rank - 1", "rank", "depth", "covering_depth_by"),
    (depth.covering_depth, "+ config.cov_base", "", "depth", "covering_depth_by"),
    (depth.covering_depth, "< config.min_successes", "<= config.min_successes", "depth", "too_few"),
    (depth.covering_depth, "if config.use_success:", "if False:", "depth", "coverage_looks"),
    (depth.covering_depth, "success_E & ~stats.cut_E", "success_E", "depth", "cap_cut_neither"),
    (depth.covering_depth, "config.h_max - 1", "stats.last_turn_E", "depth", "cap_cut_neither"),
    (depth.AdaptiveDepth.plan, "1.0 - config.probe_share", "0.0", "depth", "partial_probe"),
    # curriculum
    (curriculum.DepthSchedule.depth, "n // eta", "-(-n // eta)", "curriculum", "schedule_by"),
    (curriculum.DepthSchedule.depth, "self.k_start + ", "", "curriculum", "schedule_by"),
    (curriculum.FrontToBack.plan, "step - 1", "step", "curriculum", "front_to_back"),
    (curriculum.BackToFront.plan, "step - 1", "step", "curriculum", "back_to_front"),
    # turn statistics
    (turn_stats._pooled_mean, "/ np.maximum(count_T, 1)", "", "turn_stats", "divergence_by_turn"),
    (turn_stats._survivors, "> np.arange", ">= np.arange", "turn_stats", "divergence_by_turn"),
    (turn_stats.loss_share, "weight_N * loss_N", "weight_N", "turn_stats", "loss_share_by"),
    (turn_stats.loss_share, "np.abs", "", "turn_stats", "loss_share_by"),
    (turn_stats.turn_stats, " & ~unknown_E", "", "turn_stats", "neither_success"),
    (turn_stats.turn_stats, "& batch.short_E", "& ~batch.short_E", "turn_stats", "full_depth_a_cut"),
    (
        turn_stats.kl_share,
        "np.maximum(sum_by_turn(kl_N, batch), 0.0)",
        "abs(sum_by_turn(kl_N, batch))",
        "turn_stats",
        "kl_share",
    ),
    (turn_stats.deep_third, "-(-2 * len(share_T) // 3)", "2 * len(share_T) // 3", "turn_stats", "deep_third_by"),
    (turn_stats.probe_stats, "~batch.short_E", "~batch.truncated_E", "turn_stats", "probe_counts_every"),
    (turn_stats.probe_stats, "~batch.short_E", "batch.short_E | True", "turn_stats", "short_episodes"),
    (turn_stats.probe_stats, "depth_E - 1", "depth_E", "turn_stats", "probe_counts_every"),
    (turn_stats.probe_stats, "batch.success_E[", "batch.reward_E[", "turn_stats", "success_is_the_flag"),
]


@cache
def test_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mutated_{name}", FOLDER / f"test_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


test_module.__test__ = False  # type: ignore[attr-defined]


def find_test(file: str, part: str) -> Callable[..., None]:
    """The one test function of `file` whose name contains `part`."""
    names = [name for name in vars(test_module(file)) if name.startswith("test_") and part in name]
    assert len(names) == 1, f"{part!r} names {names} in test_{file}.py"
    return getattr(test_module(file), names[0])


def mutated_code(function: FunctionType, old: str, new: str) -> CodeType:
    """The code of `function` after a replacement in its body."""
    source = textwrap.dedent(inspect.getsource(function))
    body = source.rindex('"""') + 3 if '"""' in source else 0
    assert old in source[body:], f"{function.__qualname__} no longer contains {old!r}: write the mutation anew"
    space: dict[str, Any] = {}
    exec(
        compile(source[:body] + source[body:].replace(old, new, 1), function.__code__.co_filename, "exec"),
        {**function.__globals__},
        space,
    )
    mutant = space[function.__name__]
    return inspect.unwrap(getattr(mutant, "fget", mutant)).__code__


def label(mutant: tuple[Callable[..., Any], str, str, str, str]) -> str:
    function, old, new, *_ = mutant
    return f"{function.__qualname__}: {old} -> {new or 'nothing'}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=label)
def test_a_broken_formula_fails_its_literal_test(mutant, request, monkeypatch):
    function, old, new, file, part = mutant
    # decorated functions (no_grad) wrap the one whose code counts
    function = inspect.unwrap(function)
    literal = find_test(file, part)
    arguments = {name: request.getfixturevalue(name) for name in inspect.signature(literal).parameters}
    literal(**arguments)
    # every importer shares the function object, so the code is what must change
    monkeypatch.setattr(function, "__code__", mutated_code(function, old, new))
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        literal(**arguments)
