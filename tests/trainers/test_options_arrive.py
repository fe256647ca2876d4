"""Every option of an algorithm that changes a formula arrives at that formula, and at no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.core.errors import SettingsError
from turngym.core.setting import fields_of
from turngym.core.spec import Spec
from turngym.trainers.algorithm import Algorithm, FixedDepth, PrivilegedText
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import (
    gigpo,
    grpo,
    grpo_kd,
    luffy,
    opd,
    opd_hints,
    ppo,
    ppo_kd,
    prm_opd,
    prm_rl,
    reinforce_pp,
    rloo,
    sft,
    tcod,
    turnopd,
)
from turngym.trainers.algorithms.gigpo import TurnAdvantage
from turngym.trainers.algorithms.judge_targets import HintTargets, TurnScore
from turngym.trainers.algorithms.kd_reward import (
    GroupTeacherAdvantage,
    MiniLlmAdvantage,
    MixtureWeighted,
    TeacherReward,
)
from turngym.trainers.algorithms.luffy import PrefixSchedule
from turngym.trainers.algorithms.ppo import CriticBaseline
from turngym.trainers.algorithms.prm_opd import ScoredOrHinted
from turngym.trainers.algorithms.rloo import LeaveOneOut
from turngym.trainers.algorithms.tcod import Curriculum, DepthSchedule
from turngym.trainers.algorithms.turnopd import DepthConfig
from turngym.trainers.contrib import agent_opsd, atod, grpo_opd, guided_opd, opid, rlsd, sage_opd, sdar, skill_sd, sod
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage
from turngym.trainers.contrib.guided_opd import CosineGuide, GuidedLoss, supervised
from turngym.trainers.contrib.sage_opd import Intervention
from turngym.trainers.group_advantage import ComparableGroups, GroupAdvantage
from turngym.trainers.judged_episodes import HintedTurns, ScoredTurns
from turngym.trainers.losses import (
    JensenShannon,
    MixedKL,
    bin_forward_kl,
    bin_reverse_kl,
    clipped_surrogate,
    clipped_weight,
    kl_k1,
    kl_k2,
    kl_k3,
    raw_reverse_kl,
    renorm_reverse_kl,
)
from turngym.trainers.run import build_algorithm, run_of
from turngym.trainers.run_config import CriticConfig, DistillConfig, LmLossConfig, RunConfig
from turngym.trainers.targets import SampledAdvantage, StudentTopK, TeacherTopK, WithReference, WithSequences
from turngym.trainers.token_losses import ClippedAdvantage, PolicyGradient, SupportKL
from turngym.trainers.token_weights import WEIGHTS, trajectory_weights
from turngym.trainers.train_config import train_config

RUN = RunConfig(max_turns=17)
Build = Callable[..., Algorithm]


def with_run(module: Any, config: type[Any]) -> Build:
    return lambda **options: module.build(config(**options), BuildContext(run=RUN))


def with_distill(module: Any, config: Any) -> Build:
    return lambda **options: module.build(config, BuildContext(run=RUN, distill=DistillConfig(**options)))


def with_both(module: Any, config: type[Any]) -> Build:
    return lambda **options: module.build(config(**options), BuildContext(run=RUN, distill=DistillConfig(top_k=9)))


GRPO = with_run(grpo, grpo.GrpoConfig)
GIGPO = with_run(gigpo, gigpo.GigpoConfig)
KD = with_run(grpo_kd, grpo_kd.GrpoKdConfig)
GRPO_OPD = with_run(grpo_opd, grpo_opd.GrpoOpdConfig)
GUIDED = with_both(guided_opd, guided_opd.GuidedOpdConfig)
ATOD = with_run(atod, atod.AtodConfig)
SOD = with_run(sod, sod.SodConfig)
SAGE = with_both(sage_opd, sage_opd.SageOpdConfig)
RLOO = with_run(rloo, rloo.RlooConfig)
REINFORCE_PP = with_run(reinforce_pp, reinforce_pp.ReinforcePpConfig)
PPO = with_run(ppo, ppo.PpoConfig)
PPO_KD = with_run(ppo_kd, ppo_kd.PpoKdConfig)
LUFFY = with_run(luffy, luffy.LuffyConfig)
PRM = with_run(prm_rl, prm_rl.PrmRlConfig)
SFT = with_run(sft, sft.SftConfig)
OPD = with_distill(opd, opd.OpdConfig())
SDAR = with_run(sdar, sdar.SdarConfig)
RLSD = with_run(rlsd, rlsd.RlsdConfig)
SKILL_SD = with_run(skill_sd, skill_sd.SkillSdConfig)
OPID = with_run(opid, opid.OpidConfig)
AGENT_OPSD = with_run(agent_opsd, agent_opsd.AgentOpsdConfig)
REWARDED = (GRPO, GIGPO, RLOO, REINFORCE_PP, PPO)
TOLD = (SDAR, RLSD, SKILL_SD, OPID, AGENT_OPSD)
HINTS = with_both(opd_hints, opd_hints.OpdHintsConfig)
PRM_OPD = with_both(prm_opd, prm_opd.PrmOpdConfig)


PRM_OPD_TOPK: Build = lambda **options: PRM_OPD(form="topk", **options)  # noqa: E731
TURN = with_both(turnopd, turnopd.TurnOpdConfig)
TCOD = with_both(tcod, tcod.TcodConfig)
PREFIX = PrefixSchedule(strategy="linear", count=3, low=0.2, high=0.7, steps=50, share=True, seed=4)
SCHEDULE = DepthSchedule(k_start=2, eta=3, k_max=5)
ALFWORLD = DepthSchedule(eta=6, k_max=30)

ITSELF = object()
"""The option's own value."""
# (algorithm, option, its value, the field of Algorithm where it arrives, what stands in there: a number or a word under
# this name, however deep; a part that is a formula anywhere)
OPTIONS: list[tuple[Build, str, Any, str, Any]] = [
    # the distillation that opd, turnopd and tcod share
    (OPD, "top_k", 7, "target_fn", TeacherTopK(7)),
    (OPD, "support", "student", "target_fn", StudentTopK(50)),
    (OPD, "form", "topk", "token_loss", SupportKL(kl=bin_reverse_kl, importance=(0.1, 10.0))),
    (OPD, "form", "forward", "token_loss", SupportKL(kl=bin_forward_kl, importance=(0.1, 10.0))),
    (OPD, "form", "jsd", "token_loss", JensenShannon(0.5)),
    (OPD, "form", "mixed", "token_loss", MixedKL(0.5)),
    (lambda **more: OPD(form="jsd", **more), "beta", 0.2, "token_loss", JensenShannon(0.2)),
    (lambda **more: OPD(form="mixed", **more), "beta", 0.2, "token_loss", MixedKL(0.2)),
    (OPD, "form", "sampled", "target_fn", SampledAdvantage()),
    (OPD, "form", "sampled", "token_loss", ClippedAdvantage(loss=PolicyGradient(clip=(0.2, 0.28)))),
    (OPD, "tail", "bin", "token_loss", bin_reverse_kl),
    (OPD, "tail", "raw", "token_loss", raw_reverse_kl),
    (OPD, "tail", "renorm", "token_loss", renorm_reverse_kl),
    (OPD, "importance", (0.5, 3.0), "token_loss.importance", ITSELF),
    (OPD, "temperature", 2.5, "distill_temperature", ITSELF),
    # turnopd
    (TURN, "n_min", 3, "weight.n_min", ITSELF),
    (TURN, "n_min_share", 0.4, "weight.min_share", ITSELF),
    (TURN, "blend_start", 0.25, "weight.start", ITSELF),
    (TURN, "blend_end", 0.75, "weight.end", ITSELF),
    (TURN, "weight", "trajectory", "weight", trajectory_weights),
    (TURN, "depth", None, "depth", FixedDepth(h_max=17)),
    (TURN, "depth", DepthConfig(rho=0.3, p=0.6, h_max=9), "depth.rho", 0.3),
    (TURN, "depth", DepthConfig(rho=0.3, p=0.6, h_max=9), "depth.p", 0.6),
    (TURN, "depth", DepthConfig(h_max=9, h_min=4), "depth.h_max", 9),
    (TURN, "depth", DepthConfig(warmup=5), "depth.h_max", 17),  # by default that of the run
    (TURN, "depth", DepthConfig(warmup=5), "depth.warmup", 5),
    (TURN, "depth", DepthConfig(cov_base=1), "depth.cov_base", 1),
    (TURN, "weight", "turn", "target_fn", TeacherTopK(9)),
    # tcod
    (TCOD, "direction", "f2b", "depth", Curriculum(schedule=ALFWORLD, h_max=17)),
    (TCOD, "direction", "b2f", "depth", Curriculum(schedule=ALFWORLD, back_to_front=True, h_max=17)),
    (TCOD, "schedule", SCHEDULE, "depth.schedule", ITSELF),
    (TCOD, "schedule", SCHEDULE, "weight", trajectory_weights),
    # grpo
    (GRPO, "n", 5, "group", ITSELF),
    (GRPO, "reward", "success", "target_fn", GroupAdvantage(reward="success")),
    (GRPO, "scale", "none", "target_fn", GroupAdvantage(scale="none")),
    (GRPO, "group_over", "turns", "target_fn", GroupAdvantage(over="turns")),
    (GRPO, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
    (GRPO, "kl_coef", 0.3, "target_fn", GroupAdvantage()),
    (GRPO, "kl_coef", 0.3, "needs_reference", True),
    (GRPO, "kl", "k1", "token_loss", kl_k1),
    (GRPO, "kl", "k2", "token_loss", kl_k2),
    (GRPO, "kl", "k3", "token_loss", kl_k3),
    (GRPO, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (GRPO, "entropy_coef", 0.07, "entropy_gradient", True),
    (GRPO, "filter_groups", True, "select", ComparableGroups()),
    (GRPO, "reward", "score", "select", ComparableGroups(reward="score")),
    (GRPO, "filter_groups", False, "select", ComparableGroups(spread=False)),
    (GRPO, "objective", "surrogate", "token_loss", clipped_surrogate),
    (GRPO, "objective", "weight", "token_loss", clipped_weight),
    (GRPO, "ratio", "token", "target_fn", GroupAdvantage()),
    (GRPO, "ratio", "turn", "target_fn", WithSequences(target_fn=GroupAdvantage(), unit="turn")),
    (GRPO, "ratio", "episode", "target_fn", WithSequences(target_fn=GroupAdvantage(), unit="episode")),
    (GRPO, "refill", 3, "refill", ITSELF),
    (GRPO, "refill", 3, "select", ComparableGroups(most=8)),
    # gigpo
    (GIGPO, "n", 5, "group", ITSELF),
    (GIGPO, "n", 5, "select", ComparableGroups(spread=False)),
    (GIGPO, "gamma", 0.5, "target_fn", TurnAdvantage(gamma=0.5)),
    (GIGPO, "w_step", 0.5, "target_fn", TurnAdvantage(w_step=0.5)),
    (GIGPO, "anchor", "state", "target_fn", TurnAdvantage(anchor="state")),
    (GIGPO, "anchor", "state", "states", True),
    (GIGPO, "anchor", "observation", "states", False),
    (GIGPO, "similarity", 0.95, "target_fn", TurnAdvantage(similarity=0.95)),
    (GIGPO, "reward", "success", "target_fn", TurnAdvantage(reward="success")),
    (GIGPO, "invalid_cost", 0.1, "target_fn", TurnAdvantage(invalid_cost=0.1)),
    (GIGPO, "scale", "std", "target_fn", TurnAdvantage(scale="std")),
    (GIGPO, "baseline", "turns", "target_fn", TurnAdvantage(baseline="turns")),
    (GIGPO, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
    (GIGPO, "kl_coef", 0.0, "target_fn", TurnAdvantage()),
    (GIGPO, "kl_coef", 0.0, "needs_reference", False),
    (GIGPO, "kl", "k1", "token_loss", kl_k1),
    (GIGPO, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (GIGPO, "entropy_coef", 0.07, "entropy_gradient", True),
    # guided-opd
    (GUIDED, "start", 0.5, "guide", CosineGuide(total=RUN.steps, start=0.5)),
    (GUIDED, "ratio", 0.4, "guide", CosineGuide(total=RUN.steps, ratio=0.4)),
    (GUIDED, "start", 0.5, "target_fn", TeacherTopK(9)),
    (GUIDED, "start", 0.5, "token_loss", GuidedLoss(loss=SupportKL())),
    (GUIDED, "start", 0.5, "select", supervised),
    (GUIDED, "start", 0.5, "origins", ("policy", "demonstration")),
    (GUIDED, "start", 0.5, "to_the_end", True),
    # atod
    (ATOD, "n", 5, "group", ITSELF),
    (ATOD, "n", 5, "select", ComparableGroups(spread=False)),
    (ATOD, "n", 5, "target_fn.total", RUN.steps),
    (ATOD, "n", 5, "to_the_end", True),
    (ATOD, "start", 0.3, "target_fn.start", ITSELF),
    (ATOD, "end", 0.7, "target_fn.end", ITSELF),
    (ATOD, "floor", 0.4, "target_fn.floor", ITSELF),
    (ATOD, "strength", 2.5, "target_fn.strength", ITSELF),
    (ATOD, "reward", "score", "target_fn.reward", ITSELF),
    (ATOD, "scale", "none", "target_fn.scale", ITSELF),
    # sage-opd
    (SAGE, "weak", 0.3, "target_fn", Intervention(k=9, weak=0.3)),
    (SAGE, "confidence", False, "target_fn", Intervention(k=9, confidence=False)),
    (SAGE, "weak", 0.3, "token_loss", SupportKL(kl=bin_reverse_kl, importance=(0.1, 10.0))),
    (SAGE, "weak", 0.3, "judge", "score"),
    (SAGE, "weak", 0.3, "select", None),
    # sod
    (SOD, "n", 5, "group", ITSELF),
    (SOD, "n", 5, "select", ComparableGroups(spread=False)),
    (SOD, "n", 5, "target_fn.w_reward", 1.0),
    (SOD, "coef", 0.3, "target_fn.w_teacher", ITSELF),
    (SOD, "delta", 0.7, "target_fn.delta", ITSELF),
    (SOD, "reward", "score", "target_fn.reward", ITSELF),
    (SOD, "scale", "none", "target_fn.scale", ITSELF),
    # grpo-opd
    (GRPO_OPD, "n", 5, "group", ITSELF),
    (GRPO_OPD, "n", 5, "select", ComparableGroups(spread=False)),
    (GRPO_OPD, "w_reward", 0.3, "target_fn", CombinedAdvantage(w_reward=0.3)),
    (GRPO_OPD, "w_teacher", 0.4, "target_fn", CombinedAdvantage(w_teacher=0.4)),
    (GRPO_OPD, "reward", "score", "target_fn", CombinedAdvantage(reward="score")),
    (GRPO_OPD, "scale", "none", "target_fn", CombinedAdvantage(scale="none")),
    # grpo-kd
    (KD, "n", 5, "group", ITSELF),
    (KD, "n", 5, "select", ComparableGroups(spread=False, tokens=True)),
    (KD, "reward", "sum", "target_fn.pool", "sum"),
    (KD, "student_entropy", True, "target_fn", TeacherReward(student_entropy=True)),
    (KD, "env_coef", 0.6, "target_fn.env_coef", ITSELF),
    (KD, "scale", "none", "target_fn.scale", ITSELF),
    (KD, "kl_coef", 0.0, "target_fn", GroupTeacherAdvantage(reward=TeacherReward())),
    (KD, "kl_coef", 0.4, "token_loss.kl_coef", ITSELF),
    (KD, "kl", "k1", "token_loss", kl_k1),
    (KD, "teacher_mix", 0.2, "target_fn.share", 0.2),
    (KD, "teacher_mix", 0.2, "teacher_mix", 0.2),
    # rloo, reinforce++, ppo
    (RLOO, "n", 5, "group", ITSELF),
    (RLOO, "n", 5, "select", ComparableGroups(spread=False)),
    (RLOO, "reward", "success", "target_fn", LeaveOneOut(reward="success")),
    (RLOO, "kl_coef", 0.3, "target_fn", LeaveOneOut(kl_coef=0.3)),
    (RLOO, "kl_coef", 0.3, "needs_reference", True),
    (REINFORCE_PP, "n", 5, "group", ITSELF),
    (REINFORCE_PP, "n", 5, "select", ComparableGroups(spread=False)),
    (REINFORCE_PP, "n", 5, "target_fn.baseline", True),
    (REINFORCE_PP, "reward", "score", "target_fn.reward", ITSELF),
    (REINFORCE_PP, "kl_coef", 0.3, "target_fn.kl_coef", ITSELF),
    (REINFORCE_PP, "kl_coef", 0.0, "needs_reference", False),
    (PPO, "reward", "score", "target_fn", CriticBaseline(reward="score")),
    (PPO, "paid", "turn", "target_fn", CriticBaseline(paid="turn")),
    (PPO, "gamma", 0.9, "target_fn", CriticBaseline(gamma=0.9)),
    (PPO, "lam", 0.8, "target_fn", CriticBaseline(lam=0.8)),
    (PPO, "bootstrap", True, "target_fn", CriticBaseline(bootstrap=True)),
    (PPO, "kl_coef", 0.4, "token_loss.kl_coef", ITSELF),
    (PPO, "kl_coef", 0.4, "target_fn", CriticBaseline()),
    (PPO, "kl_coef", 0.4, "needs_reference", True),
    (PPO, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (PPO, "entropy_coef", 0.07, "entropy_gradient", True),
    (PPO, "critic", CriticConfig(lr=0.5, clip=None), "critic", ITSELF),
    # ppo-kd
    (PPO_KD, "teacher_coef", 0.4, "target_fn", TeacherReward(coef=0.4)),
    (PPO_KD, "student_entropy", True, "target_fn", TeacherReward(student_entropy=True)),
    (PPO_KD, "env_coef", 0.7, "target_fn.env_coef", ITSELF),
    (PPO_KD, "gamma", 0.9, "target_fn.gamma", ITSELF),
    (PPO_KD, "lam", 0.8, "target_fn.lam", ITSELF),
    (PPO_KD, "whiten", "population", "target_fn.whiten", ITSELF),
    (PPO_KD, "bootstrap", False, "target_fn.bootstrap", ITSELF),
    (PPO_KD, "advantage", "minillm", "target_fn", MiniLlmAdvantage(reward=TeacherReward(), gamma=1.0)),
    (PPO_KD, "advantage", "minillm", "critic", None),
    (PPO_KD, "kl_coef", 0.4, "token_loss.kl_coef", ITSELF),
    (PPO_KD, "kl_coef", 0.4, "needs_reference", True),
    (PPO_KD, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (PPO_KD, "entropy_coef", 0.0, "entropy_gradient", False),
    (PPO_KD, "teacher_mix", 0.3, "target_fn.share", 0.3),
    (PPO_KD, "critic", CriticConfig(lr=0.5, clip=None), "critic", ITSELF),
    # luffy
    (LUFFY, "n", 5, "group", ITSELF),
    (LUFFY, "prefix", PREFIX, "prefix", ITSELF),
    (LUFFY, "reward", "score", "target_fn.reward", ITSELF),
    (LUFFY, "advantage", "grpo", "target_fn.split", False),
    (LUFFY, "advantage", "grpo_split", "target_fn.split", True),
    (LUFFY, "scale", "none", "target_fn.scale", ITSELF),
    (LUFFY, "alpha", 0.3, "target_fn.alpha", ITSELF),
    (LUFFY, "beta", 0.4, "target_fn.beta", ITSELF),
    (LUFFY, "shape", "pow", "token_loss.off.shape", ITSELF),
    (LUFFY, "a", 0.5, "token_loss.off.a", ITSELF),
    (LUFFY, "a", 0.5, "token_loss.on.a", ITSELF),
    (LUFFY, "w", 0.3, "token_loss.off.w", ITSELF),
    (LUFFY, "w", 0.3, "token_loss.on.w", ITSELF),
    (LUFFY, "e", 0.7, "token_loss.off.e", ITSELF),
    (LUFFY, "e", 0.7, "token_loss.on.e", ITSELF),
    (LUFFY, "kl_reward_coef", 0.2, "target_fn.kl_coef", ITSELF),
    (LUFFY, "kl_reward_coef", 0.2, "needs_reference", True),
    (LUFFY, "kl_reward_coef", 0.2, "token_loss.kl_coef", 0.0),
    (LUFFY, "on_shape", "logp", "token_loss.on.shape", ITSELF),
    (LUFFY, "off_clamp", (0.1, 0.9), "token_loss.off_clamp", ITSELF),
    (LUFFY, "clip", (0.1, 0.3), "token_loss.clip", ITSELF),
    (LUFFY, "clip", None, "token_loss.clip", ITSELF),
    (LUFFY, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (LUFFY, "kl_coef", 0.2, "token_loss.kl_coef", ITSELF),
    (LUFFY, "kl_coef", 0.2, "target_fn.beta", 1.0),
    (LUFFY, "filter_groups", True, "select", ComparableGroups(own=True)),
    (LUFFY, "filter_groups", False, "select", ComparableGroups(spread=False, own=True)),
    (LUFFY, "reward", "score", "select", ComparableGroups(reward="score", own=True)),
    (LUFFY, "advantage", "grpo", "select", ComparableGroups()),
    (LUFFY, "alpha", 1.0, "origins", ("policy", "demonstration")),
    # prm-rl
    (PRM, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
    (PRM, "kl_coef", 0.3, "target_fn", TurnScore()),
    (PRM, "kl_coef", 0.0, "needs_reference", False),
    (PRM, "weight", "turn_mean", "needs_reference", True),
    (PRM, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (PRM, "mask_neutral", True, "select.mask_neutral", ITSELF),
    (PRM, "exclude", "openclaw", "select.exclude", ITSELF),
    # opd-hints
    (HINTS, "n", 4, "group", ITSELF),
    (HINTS, "reader", "live", "target_fn", HintTargets(own=None, privileged=PrivilegedText(reader="live"))),
    (HINTS, "reader", "live", "needs_reference", True),
    (HINTS, "position", "opening", "privileged.position", ITSELF),
    (HINTS, "form", "sampled", "target_fn", HintTargets(own=None)),
    (HINTS, "form", "topk", "target_fn", HintTargets(k=9, own=None)),
    (HINTS, "form", "topk", "token_loss", SupportKL(kl=bin_reverse_kl, importance=(0.1, 10.0))),
    (HINTS, "form", "topk", "token_loss.kl_coef", 0.02),
    (HINTS, "reject_below", 0.05, "target_fn", HintTargets(own=None, reject_below=0.05)),
    (HINTS, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
    (HINTS, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (HINTS, "entropy_coef", 0.07, "select", HintedTurns()),
    # what tells a policy something beside a group's reward
    *(
        row
        for build in TOLD
        for row in (
            (build, "n", 5, "group", ITSELF),
            (build, "n", 5, "select", ComparableGroups(spread=False)),
            (build, "n", 5, "judge", "hint"),
            (build, "reward", "score", "target_fn.reward", ITSELF),
            (build, "kl_coef", 0.3, "needs_reference", True),
            (build, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
            (build, "kl_coef", 0.0, "needs_reference", False),
            (build, "reader", "initial", "target_fn.reader", ITSELF),
            (build, "reader", "initial", "privileged.reader", ITSELF),
            (build, "position", "last_message", "privileged.position", ITSELF),
        )
    ),
    (SDAR, "coef", 0.3, "token_loss.coef", ITSELF),
    (SDAR, "beta", 2.0, "token_loss.beta", ITSELF),
    (SDAR, "clip", (0.1, 0.3), "token_loss", PolicyGradient(clip=(0.1, 0.3), kl_coef=0.01)),
    (RLSD, "lam", 0.3, "target_fn", rlsd.Directed(lam=0.3, eps=0.2, fade=100)),
    (RLSD, "eps", 0.3, "target_fn", rlsd.Directed(lam=0.5, eps=0.3, fade=100)),
    (RLSD, "fade", 7, "target_fn", rlsd.Directed(lam=0.5, eps=0.2, fade=7)),
    (SKILL_SD, "coef", 0.3, "token_loss.coef", ITSELF),
    (SKILL_SD, "clip", (0.1, 0.3), "token_loss", PolicyGradient(clip=(0.1, 0.3), kl_coef=0.01)),
    (OPID, "w_told", 0.3, "target_fn", opid.Added(w_told=0.3)),
    (OPID, "scale", "none", "target_fn.scale", ITSELF),
    (AGENT_OPSD, "lam", 0.3, "target_fn", agent_opsd.Believed(lam=0.3, eps=0.2)),
    (AGENT_OPSD, "eps", 0.3, "target_fn", agent_opsd.Believed(lam=0.5, eps=0.3)),
    # prm-opd
    (PRM_OPD, "form", "sampled", "target_fn", HintTargets()),
    (PRM_OPD, "form", "sampled", "token_loss", PolicyGradient(clip=(0.2, 0.28), kl_coef=0.02)),
    (PRM_OPD, "form", "topk", "target_fn", HintTargets(k=9)),
    (PRM_OPD, "form", "topk", "token_loss", PolicyGradient(clip=(0.2, 0.28))),
    (PRM_OPD, "form", "topk", "token_loss", SupportKL(kl=bin_reverse_kl, importance=(0.1, 10.0))),
    (PRM_OPD, "form", "topk", "token_loss.kl_coef", 0.02),
    (PRM_OPD, "w_reward", 0.25, "target_fn", HintTargets(w_reward=0.25)),
    (PRM_OPD, "w_hint", 0.25, "target_fn", HintTargets(w_hint=0.25)),
    (PRM_OPD_TOPK, "w_reward", 0.25, "token_loss.w_reward", ITSELF),
    (PRM_OPD_TOPK, "w_hint", 0.25, "token_loss.w_hint", ITSELF),
    (PRM_OPD_TOPK, "clip", (0.1, 0.3), "token_loss", PolicyGradient(clip=(0.1, 0.3))),
    (PRM_OPD_TOPK, "reject_below", 0.05, "target_fn", HintTargets(k=9, reject_below=0.05)),
    (PRM_OPD_TOPK, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (PRM_OPD, "reject_below", 0.05, "target_fn", HintTargets(reject_below=0.05)),
    (PRM_OPD, "kl_coef", 0.3, "token_loss.kl_coef", ITSELF),
    (PRM_OPD, "kl_coef", 0.0, "target_fn", HintTargets()),
    (PRM_OPD, "entropy_coef", 0.07, "token_loss.entropy_coef", ITSELF),
    (PRM_OPD, "entropy_coef", 0.07, "entropy_gradient", True),
    (PRM_OPD, "mask_neutral", True, "select", ScoredOrHinted(scored=ScoredTurns(mask_neutral=True))),
    (PRM_OPD, "position", "last_message", "privileged", PrivilegedText(position="last_message")),
    (PRM_OPD, "weight", "token_mean", "weight", WEIGHTS["token_mean"]),
    (PRM_OPD, "w_hint", 1.0, "judge", "both"),
    # sft
    (SFT, "train_on", "both", "origins", ("demonstration", "policy")),
    (SFT, "train_on", "policy", "origins", ("policy",)),
    (SFT, "train_on", "demonstration", "origins", ("demonstration",)),
]
SEVERAL = {
    "kl_coef": {"target_fn", "token_loss", "needs_reference"},
    "entropy_coef": {"token_loss", "entropy_gradient"},
    "position": {"privileged", "target_fn"},
    "reader": {"privileged", "target_fn"},
    "reward": {"target_fn", "select"},
    "teacher_mix": {"target_fn", "teacher_mix"},
    "weight": {"weight"},
    "w_reward": {"target_fn", "token_loss"},
    "w_hint": {"target_fn", "token_loss"},
}
"""Fields that an option of this name may change, beside those of its rows."""
CHOICES = [one[:3] for number, one in enumerate(OPTIONS) if one[:3] not in [row[:3] for row in OPTIONS[:number]]]


def test_an_option_arrives() -> None:
    for build, option, value, place, given in OPTIONS:
        wanted = value if given is ITSELF else given
        field, *names = place.split(".")
        inner = parts(getattr(build(**{option: value}), field))
        found = [part for path, part in inner if is_part(names, path) or (not names and is_formula(wanted))]
        arrived = any(part == wanted and isinstance(part, type(wanted)) for part in found)
        assert arrived, f"{option} = {value!r} at {place}: {found}"


def parts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields what `value` is composed of, with the names that lead to it."""
    yield path, value
    if is_dataclass(value) or isinstance(value, Spec):
        for item in fields_of(type(value)) if isinstance(value, Spec) else fields(value):
            yield from parts(getattr(value, item.name), (*path, item.name))
    elif isinstance(value, partial):
        for name, given in value.keywords.items():
            yield from parts(given, (*path, name))


def is_part(names: Sequence[str], path: Sequence[str]) -> bool:
    """Whether `path` ends with the last of the names, and the others come before it in this order."""
    rest = iter(path)
    return all(name in rest for name in names) and path[-1:] == tuple(names[-1:])


def is_formula(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, Spec) or callable(value)


def test_an_option_arrives_nowhere_else() -> None:
    for build, option, value in CHOICES:
        default, made = build(), build(**{option: value})
        changed = {item.name for item in fields(made) if getattr(made, item.name) != getattr(default, item.name)}
        named = {row[3].partition(".")[0] for row in OPTIONS if row[:3] == (build, option, value)}
        assert changed <= named | SEVERAL.get(option, set()) | {"settings"}, f"{option} = {value!r}"


@pytest.mark.parametrize("build", [*REWARDED, GRPO_OPD, ATOD, SOD, KD, PPO_KD, PRM, HINTS, RLSD, OPID, AGENT_OPSD])
def test_the_lower_and_the_upper_clip_are_told_apart(build: Build) -> None:
    loss = build(clip=(0.15, 0.35)).token_loss
    assert isinstance(loss, PolicyGradient)
    assert loss.clip == (0.15, 0.35)


def test_the_clip_of_the_sampled_form() -> None:
    assert OPD(form="sampled", clip=(0.15, 0.35)).token_loss == ClippedAdvantage(loss=PolicyGradient(clip=(0.15, 0.35)))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (SFT, ("token_mean", "episode_mean", "turn_mean")),
        (lambda weight: opd.build(opd.OpdConfig(weight=weight), BuildContext(run=RUN)), ("trajectory", "turn_mean")),
        *(
            (build, ("trajectory", "token_mean", "turn_mean"))
            for build in (*REWARDED, GRPO_OPD, ATOD, SOD, GUIDED, SAGE, KD, LUFFY, PRM, HINTS, *TOLD)
        ),
    ],
)
def test_the_weighting_is_the_one_that_was_named(build: Build, names: tuple[str, ...]) -> None:
    assert [build(weight=name).weight for name in names] == [WEIGHTS[name] for name in names]


def test_without_a_filter_only_an_attempt_that_is_alone_is_left_out() -> None:
    assert LUFFY(advantage="grpo", filter_groups=False).select == ComparableGroups(spread=False)


def with_text(tmp_path: Path, **options: Any) -> BuildContext:
    (tmp_path / "a.txt").write_text("abc\n\nde")
    words: Any = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(letter) % 32 for letter in text])
    text = LmLossConfig(files=(tmp_path / "a.txt",), documents=2, coef=0.5, **options)
    return BuildContext(run=RUN, lm_loss=text, tokenizer=words)


def test_text_in_the_reward_is_no_term_and_warns(tmp_path: Path) -> None:
    spec = ppo_kd.WITH_TEXT
    with pytest.warns(UserWarning, match="no gradient reaches the text"):
        algorithm = spec.build(ppo_kd.PpoKdConfig(), with_text(tmp_path, in_reward=0.25))
    assert (algorithm.name, algorithm.terms) == ("ppo-minillm", ())
    signal: Any = algorithm.target_fn
    assert signal.text_coef == 0.25
    flat: Any = SimpleNamespace(logprobs=lambda ids, places: [np.full(len(where), -2.0) for where in places])
    assert signal.text(flat, 1) == 2.0
    algorithm = spec.build(ppo_kd.PpoKdConfig(), with_text(tmp_path))
    assert [term.name for term in algorithm.terms] == ["lpt"]
    signal = algorithm.target_fn
    assert (algorithm.name, signal.text, signal.text_coef) == ("ppo-minillm", None, 0.0)


def test_text_in_the_reward_of_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cancels in a group-relative advantage"):
        grpo_kd.WITH_TEXT.build(grpo_kd.GrpoKdConfig(), with_text(tmp_path, in_reward=0.25))
    assert [term.name for term in grpo_kd.WITH_TEXT.build(grpo_kd.GrpoKdConfig(), with_text(tmp_path)).terms] == ["lpt"]


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({}, None),
        ({"staleness": 1}, 3.0),
        ({"traces": ("a.jsonl",)}, 3.0),
        ({"dual_clip": 2.0}, 2.0),
        ({"staleness": 1, "dual_clip": 0.0}, None),
    ],
)
def test_the_dual_clip_is_on_where_episodes_may_be_stale(more: dict[str, Any], bound: float | None) -> None:
    config = train_config("grpo", {"student": "s", "out": "o", **more}, "test")
    loss: Any = build_algorithm(config).token_loss
    assert (loss.loss if "staleness" in more else loss).dual_clip == bound
    for refused in (0.5, 1.0):
        config = train_config("grpo", {"student": "s", "out": "o", "dual_clip": refused}, "test")
        with pytest.raises(SettingsError, match=f"dual_clip is {refused}"):
            build_algorithm(config)


@pytest.mark.parametrize(("device", "given", "tokens"), [("cpu", None, 2048), ("meta", None, 8192), ("cpu", 300, 300)])
def test_tokens_per_pass_suit_the_device(device: str, given: int | None, tokens: int) -> None:
    config = train_config("grpo", {"student": "s", "out": "o", "device": device, "micro_tokens": given}, "test")
    assert run_of(config).micro_tokens == run_of(config).pass_tokens == tokens


def test_minillm_returns_get_the_options_of_their_own(tmp_path: Path) -> None:
    own: Any = PPO_KD(
        advantage="minillm", gamma=0.9, env_coef=0.5, whiten="none", student_entropy=True, teacher_coef=2.0
    )
    reward = TeacherReward(coef=2.0, student_entropy=True)
    assert own.target_fn == MiniLlmAdvantage(reward=reward, env_coef=0.5, gamma=0.9, whiten="none")
    assert PPO_KD(advantage="minillm", teacher_mix=0.2).target_fn.share == 0.2  # type: ignore[attr-defined]
    single: Any = PPO_KD(advantage="minillm", student_entropy=True, single_step=0.5, entropy_coef=0.07)
    assert (single.target_fn.support, single.token_loss.coef, single.token_loss.loss.entropy_coef) == (50, 0.5, 0.07)
    with pytest.raises(SettingsError, match="teacher_coef is 0"):
        PPO_KD(advantage="minillm", teacher_coef=0.0, env_coef=1.0)
    with pytest.raises(SettingsError, match=r"in_reward is 0\.5; it needs advantage=gae"):
        ppo_kd.WITH_TEXT.build(ppo_kd.PpoKdConfig(advantage="minillm"), with_text(tmp_path, in_reward=0.5))


def test_the_depth_is_the_runs() -> None:
    for build in (
        SFT,
        OPD,
        GUIDED,
        SAGE,
        ATOD,
        SOD,
        GRPO,
        GIGPO,
        GRPO_OPD,
        KD,
        RLOO,
        REINFORCE_PP,
        PPO,
        PPO_KD,
        LUFFY,
        PRM,
        HINTS,
    ):
        assert build().depth == FixedDepth(h_max=17)


def test_teacher_mixed_sampling_weighs_the_advantage_below_the_reference() -> None:
    inner = GroupTeacherAdvantage(reward=TeacherReward())
    assert KD(teacher_mix=0.2).target_fn == WithReference(target_fn=MixtureWeighted(target_fn=inner, share=0.2))
    assert KD(kl_coef=0.0, teacher_mix=0.2).target_fn == MixtureWeighted(target_fn=inner, share=0.2)
