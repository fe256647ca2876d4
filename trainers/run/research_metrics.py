"""What a study of training asks of every step beside the loss: rewards, advantages, lengths, the teacher's opinion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.envs.episode import Episode
from turngym.trainers.algorithm import Targets
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.rollout_plan.rewarded import PAID

DEMONSTRATIONS = ("used", "missing", "failed", "unsolved", "low_reward", "too_long")
"""What may become of a demonstration, as the rollout side says it in `meta`."""


def research_row(episodes: Sequence[Episode], batch: RolloutBatch, targets: Targets) -> dict[str, Any]:
    """Means and spreads (standard deviations) of what was played and of what it is compared with."""
    row = played_row(episodes)
    if targets.advantage_N is not None:
        row |= _spread("advantage", targets.advantage_N)
    if targets.reward is not None:
        row |= _spread("reward", targets.reward)
    return row | _teacher(batch, targets) | dict(targets.log)


def played_row(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Returns, scores and lengths of all episodes that were played, whether or not they are trained on."""
    played = [episode for episode in episodes if not episode.status.is_error]
    paid = [float(episode.meta[PAID]) for episode in played if PAID in episode.meta]
    policy = [turn for episode in played for turn in episode.turns if turn.origin == "policy"]
    return {
        **_spread("return", np.array([episode.episode_return for episode in played])),
        **(_spread(PAID, np.array(paid)) if paid else {}),
        **_spread("score", np.array([episode.score for episode in played])),
        **demonstration_row(played),
        "response_tokens": float(np.mean([turn.response_length for turn in policy])) if policy else None,
    }


def demonstration_row(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What became of the demonstrations that were asked for; nothing where none were."""
    found = Counter(str(episode.meta["demonstration"]) for episode in episodes if "demonstration" in episode.meta)
    if not found:
        return {}
    exact = sum(bool(episode.meta.get("demonstration_exact")) for episode in episodes)
    row: dict[str, Any] = {f"demonstrations/{name}": found[name] for name in DEMONSTRATIONS}
    return row | {"demonstrations/exact": exact}


def turn_tokens(batch: RolloutBatch) -> NDArray[np.int64]:
    """Supervised tokens of each turn, all episodes together: int64 [T]."""
    return np.bincount(batch.turn_N, minlength=int(batch.depth_E.max()))


def _teacher(batch: RolloutBatch, targets: Targets) -> dict[str, Any]:
    """The teacher's log-likelihood of the sampled tokens; of a top-K support it is known for the tokens within it."""
    found = targets.label_logp_N
    if found is None and targets.topk_ids_NK is not None and targets.topk_logp_NK is not None:
        hit_NK = targets.topk_ids_NK == batch.label_N[:, None]
        # -inf marks labels outside the support: unknown, and left out of the mean below
        found = np.where(hit_NK, targets.topk_logp_NK, -np.inf).max(axis=1)
    if found is None:
        return {}
    known = found[np.isfinite(found)]
    mean = float(known.mean(dtype=np.float64)) if len(known) else None
    return {"teacher_logp": mean, "teacher_logp_known": len(known) / len(found)}


def _spread(name: str, values: NDArray[Any]) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}/mean": None, f"{name}/std": None}
    wide = values.astype(np.float64)
    return {f"{name}/mean": float(wide.mean()), f"{name}/std": float(wide.std())}
