"""From a step's episodes and per-token columns to its row of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode, EpisodeError
from turngym.core.plugin_values import checked_number
from turngym.core.task import Verdict
from turngym.trainers.algorithm import Blended, DepthPlan, DepthState, Targets, Weight
from turngym.trainers.batch import RolloutBatch, was_refused
from turngym.trainers.judged_episodes import judge_row
from turngym.trainers.optimizer_step import Epochs, RunStep
from turngym.trainers.rewards import PAID
from turngym.trainers.turn_stats import deep_third, turn_row

# What a study of training asks of every step beside the loss: rewards, advantages, lengths, the teacher's opinion.

DEMONSTRATIONS = ("used", "missing", "failed", "unsolved", "low_reward", "too_long")
"""What may become of a demonstration, as the rollout side says it in `meta`."""


def research_row(episodes: Sequence[Episode], batch: RolloutBatch, targets: Targets) -> dict[str, Any]:
    """Means and spreads (standard deviations) of what was played and of what it is compared with."""
    row = played_row(episodes)
    if targets.advantage_N is not None:
        row |= _spread("advantage", targets.advantage_N)
    if targets.reward is not None:
        row |= _spread("reward", targets.reward)
    return row | _teacher(batch, targets)


def spent_row(episodes: Sequence[Episode]) -> dict[str, int]:
    """The cost of playing: turns of all episodes, and tokens that the policy drew. Lost episodes, refills and filtered
    episodes count."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "cost/turns": len(turns),
        "cost/sampled": sum(turn.response_length for turn in turns if turn.origin == "policy"),
    }


def played_row(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Returns, scores and lengths of all episodes that were played, whether or not they are trained on."""
    played = [episode for episode in episodes if not episode.status.is_error]
    rewarded = [episode for episode in played if PAID in episode.meta]
    paid = [checked_number(f"{PAID} of {e.task.task_id}", e.meta[PAID], error=EpisodeError) for e in rewarded]
    policy = [turn for episode in played for turn in episode.turns if turn.origin == "policy"]
    return {
        **_spread("return", np.array([episode.episode_return for episode in played])),
        **(_spread(PAID, np.array(paid)) if paid else {}),
        **_spread("score", np.array([episode.score for episode in played])),
        **demonstration_row(played),
        "response_tokens": float(np.mean([turn.response_length for turn in policy])) if policy else None,
        "malformed": _share(turn.verdict is Verdict.MALFORMED for turn in policy),
        "answers_cut": _share(turn.finish == "length" for turn in policy),
    }


def _share(flags: Iterable[bool]) -> float | None:
    """The share of what is true; None of nothing."""
    values = list(flags)
    return sum(values) / len(values) if values else None


def demonstration_row(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Counts of the demonstrations by outcome; {} without any."""
    counts = Counter(str(episode.meta["demonstration"]) for episode in episodes if "demonstration" in episode.meta)
    if not counts:
        return {}
    exact = sum(bool(episode.meta.get("demonstration_exact")) for episode in episodes)
    row: dict[str, Any] = {f"demonstrations/{name}": counts[name] for name in DEMONSTRATIONS}
    return row | {"demonstrations/exact": exact}


def _teacher(batch: RolloutBatch, targets: Targets) -> dict[str, Any]:
    """The teacher's log-likelihood of the sampled tokens; of a top-K support it is known for the tokens within it."""
    label_logp_N = targets.label_logp_N
    if label_logp_N is None and targets.topk_ids_NK is not None and targets.topk_logp_NK is not None:
        hit_NK = targets.topk_ids_NK == batch.label_N[:, None]
        # -inf marks labels outside the support: unknown, and left out of the mean below
        label_logp_N = np.where(hit_NK, targets.topk_logp_NK, -np.inf).max(axis=1)
    if label_logp_N is None:
        return {}
    finite_logp = label_logp_N[np.isfinite(label_logp_N)]
    mean = float(finite_logp.mean(dtype=np.float64)) if len(finite_logp) else None
    return {"teacher_logp": mean, "teacher_logp_known": len(finite_logp) / len(label_logp_N)}


def _spread(name: str, values: NDArray[Any]) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}/mean": None, f"{name}/std": None}
    wide = values.astype(np.float64)
    return {f"{name}/mean": float(wide.mean()), f"{name}/std": float(wide.std())}


Columns = Mapping[str, NDArray[np.float32]]
OWN_COLUMNS = frozenset(
    {
        *("loss", "logp", "sampled_logp", "entropy", "kl_bin", "kl_raw", "kl_reference", "teacher_entropy"),
        *("clipped", "ratio", "truncated", "off_shaped"),
    }
)
"""Per-token numbers that have names of their own in a row; all others are written as `token/<name>`."""


def step_row(
    episodes: Sequence[Episode],
    batch: RolloutBatch,
    targets: Targets,
    epochs: Epochs,
    plan: DepthPlan,
    state: DepthState,
) -> dict[str, Any]:
    """All numbers of a step but its times.

    `episodes` are all that were played, before any filter; `state` is that after the step.
    """
    turns = turn_row(batch, epochs.columns, epochs.weight_N, full_depth=plan.full_depth)
    return {
        "loss": float(np.mean([result.loss for result in epochs.results])),
        "grad_norm": float(np.mean([result.grad_norm for result in epochs.results])),
        **{f"term/{name}": float(np.mean([r.terms[name] for r in epochs.results])) for name in epochs.results[0].terms},
        **critic_row(epochs),
        "updates": sum(not result.skipped for result in epochs.results),
        "updates_skipped": sum(result.skipped for result in epochs.results),
        "lr": epochs.lr,
        **spent_row(episodes),
        **rollout_row(episodes, batch),
        **judge_row(episodes, batch),
        **token_row(batch, epochs.columns, epochs.fresh_N),
        **research_row(episodes, batch, targets),
        "loss_deep_share": deep_third(np.asarray(turns["turn/loss_share"])),
        "weight_deep_share": deep_third(np.asarray(turns["turn/weight"])),
        **({"kl_deep_share": deep_third(np.asarray(turns["turn/kl_share"]))} if "turn/kl_share" in turns else {}),
        **depth_row(plan, state),
        **({"depth/left_loops": float(np.mean(batch.truncated_E & batch.short_E))} if plan.loop_share else {}),
        **turns,
    }


def critic_row(epochs: Epochs) -> dict[str, Any]:
    """Numbers about the critic; {} without one."""
    if not epochs.critic_losses:
        return {}
    return {"critic_loss": float(np.mean(epochs.critic_losses)), "critic_explained": epochs.critic_explained}


def rollout_row(episodes: Sequence[Episode], batch: RolloutBatch) -> dict[str, Any]:
    """Numbers about the rollouts. Episodes that ended in an error are counted apart."""
    played = [episode for episode in episodes if not episode.status.is_error]
    valid = [turn.verdict.valid for episode in played for turn in episode.turns if turn.origin == "policy"]
    demonstrated = [turn for episode in played for turn in episode.turns if turn.origin == "demonstration"]
    return {
        **({"off/refused": sum(map(was_refused, demonstrated))} if demonstrated else {}),
        "episodes": batch.episodes,
        "episodes_failed": len(episodes) - len(played),
        "episodes_dropped": len(played) - batch.episodes,
        "tokens": batch.tokens,
        "success": float(np.mean([episode.success for episode in played])),
        "turns_mean": float(np.mean([episode.depth for episode in played])),
        "valid_actions": float(np.mean(valid)) if valid else None,
        "truncated": float(np.mean([episode.status.is_cut for episode in played])),
        "time/env_s": float(sum(episode.timings.get("env", 0.0) for episode in played)),
    }


def staleness_row(episodes: Sequence[Episode], version: int) -> dict[str, Any]:
    """How many versions the policy that drew the ids was behind `version`; None where no policy drew any."""
    counts: Counter[int] = Counter()
    for episode in episodes:
        for turn in episode.turns:
            if turn.origin == "policy" and turn.logprobs is not None:
                # spans exist only where the weights changed within a turn
                whole = (turn.policy_version, turn.begun, turn.response_length)
                for drawn, start, end in turn.version_spans or (whole,):
                    counts[version - drawn] += end - start
    total = counts.total()
    mean = sum(lag * tokens for lag, tokens in counts.items()) / total if total else None
    return {"staleness_mean": mean, "staleness_max": max(counts) if total else None}


def token_row(batch: RolloutBatch, columns: Columns, fresh_N: NDArray[np.bool_]) -> dict[str, Any]:
    """Means over supervised tokens (the gap: over those seen before any update); None where there is no such number."""
    gap_N = np.abs(columns["sampled_logp"] - batch.behavior_logp_N)[fresh_N]
    gap_N = gap_N[np.isfinite(gap_N)]
    means = {name: _mean(columns.get(name)) for name in ("entropy", "kl_bin", "kl_raw")}
    if "kl_reference" in columns:
        means["kl_reference"] = _mean(columns["kl_reference"])
    return {
        **means,
        **_off_policy(batch, columns),
        "clip_fraction": _mean(columns.get("clipped")),
        **{f"importance/{name}": _known_mean(columns[name]) for name in ("ratio", "truncated") if name in columns},
        "gap_mean": float(gap_N.mean()) if len(gap_N) else None,
        "gap_max": float(gap_N.max()) if len(gap_N) else None,
        **{f"token/{name}": _known_mean(values) for name, values in columns.items() if name not in OWN_COLUMNS},
    }


def _off_policy(batch: RolloutBatch, columns: Columns) -> dict[str, Any]:
    """Statistics of demonstrated tokens apart from the policy's own; nothing where a batch holds only one kind."""
    off_N = batch.off_policy_N
    if off_N.all() or not off_N.any():
        return {}
    row: dict[str, Any] = {"off/tokens": int(off_N.sum())}
    for kind, mask_N in (("off", off_N), ("on", ~off_N)):
        row[f"{kind}/prob"] = float(np.exp(columns["logp"][mask_N]).mean())
        row[f"{kind}/entropy"] = _mean(columns["entropy"][mask_N])
        row[f"{kind}/reward"] = float(batch.reward_E[np.unique(batch.episode_N[mask_N])].mean())
    if "off_shaped" in columns:
        row["off/shaped"] = _mean(columns["off_shaped"][off_N])
    return row


def depth_row(plan: DepthPlan, state: DepthState) -> dict[str, Any]:
    """The planned depth, and the controller's state after the step."""
    return {
        "depth/cap": plan.cap,
        "depth/probe": int(plan.probe),
        "depth/hbar": state.hbar,
        "depth/h_eff": state.h_eff,
        "depth/h_cov": state.h_cov,
        **({} if state.loop_ratio is None else {"depth/loop_ratio": state.loop_ratio}),
    }


def weight_row(weight: Weight, run_step: RunStep) -> dict[str, float]:
    """How far the token weights have moved from trajectories to turns; nothing for weights that know no such scale."""
    if not isinstance(weight, Blended):
        return {}
    return {"weight/alpha": weight.alpha(step=run_step.step, total_steps=run_step.total_steps)}


def _mean(values: NDArray[np.float32] | None) -> float | None:
    # float64: columns are float32, and long batches would lose digits
    return None if values is None or not len(values) else float(values.mean(dtype=np.float64))


def _known_mean(values: NDArray[np.float32]) -> float | None:
    return _mean(values[np.isfinite(values)])
