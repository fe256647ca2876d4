"""Cases of training in several processes against one, and how far two runs of a case are apart.

The tiny models that ship play generated ALFWorld games. Each case is `turngym train` in one process and in several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_runs import with_file

from turngym.agents.models import load_model
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.errors import TurngymError
from turngym.trainers.algorithm_spec import find_algorithm
from turngym.trainers.checkpoint import latest_model
from turngym.trainers.metrics import read_metrics

EQUAL = ("tokens", "turns_mean", "success", "valid_actions", "depth/cap")
"""What depends on the episodes alone."""
STEPS = 5
CASES: Mapping[str, tuple[str, ...]] = {
    "sft": ("--expert", "searching", "--sft.noise", "0", "0.5"),
    "opd": (),
    "opd, student's top K": ("--distill.support", "student", "--distill.temperature", "2"),
    "opd, sampled": ("--distill.form", "sampled", "--temperature", "0.8", "--shard-teacher"),
    "turnopd": (
        *("turnopd.depth.warmup = 1", "--optimizer.minibatches", "2", "--optimizer.ppo-epochs", "2"),
        "--gradient-checkpointing",
    ),
    "turnopd, ahead": ("turnopd.depth.warmup = 1", "--staleness", "2"),
    "opd, workers": ("--workers", "1"),
    "opd, lora": ("--lora.rank", "4", "--optimizer.lr", "1e-3", "--gradient-checkpointing"),
    "tcod": ("--tcod.direction", "b2f", "--tcod.schedule.k-start", "1"),
    "grpo": ("--grpo.n", "3", "--grpo.kl-coef", "0.1", "--grpo.entropy-coef", "0.01", "--max-turns", "8"),
    "luffy": ("--luffy.n", "3", "--luffy.kl-coef", "0.1", "--max-turns", "8"),
    "prm-rl": ("--judge", "rules", "--prm-rl.kl-coef", "0.1", "--shard-teacher"),
    "opd-hints": ("--judge", "rules", "--opd-hints.entropy-coef", "0.01"),
    "prm-opd": ("--judge", "rules", "--prm-opd.kl-coef", "0.1"),
    "atod": ("--atod.n", "3", "atod.floor = 0.5"),
    "sage-opd": ("--judge", "rules"),
    "grpo-opd": ("--grpo-opd.n", "3"),
    "grpo-kd": ("--grpo-kd.n", "3", "grpo_kd.student_entropy = true"),
    "grpo-minillm": ("--grpo-kd.n", "3", "--lm-loss.documents", "3", "--lm-loss.files", __file__),
    "ppo-kd": ("--optimizer.minibatches", "2", "ppo_kd.critic.lr = 1e-4"),
    "ppo-minillm": ("ppo_kd.critic.kind = 'head'", "--lm-loss.documents", "1", "--lm-loss.files", __file__),
}
"""What is added to the command line, and lines of its file; the first word of a case's name is its algorithm."""
EPISODES = 9
"""A multiple of the group size that 2 and 4 processes do not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Largest absolute differences between two runs over all steps and parameters."""

    loss: float
    norm: float
    other: float
    """Of critic losses and further terms."""
    parameter: float
    moved: float
    """How far training moved any parameter, for scale."""
    same_episodes: bool
    """Tokens, turns, success and validity of every step are equal."""
    seconds: tuple[float, float]
    """Of training, one process and several."""


def place(folder: Path, name: str, processes: int) -> Path:
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}_{processes}"


def command(name: str, out: Path, *, steps: int = STEPS, episodes: int = EPISODES, turns: int = 4) -> list[str]:
    """The words after `turngym train` for a case."""
    algorithm = name.partition(",")[0]
    models = CHECKPOINTS / "alfworld"
    teacher = ("--teacher", str(models / "teacher")) if "teacher" in find_algorithm(algorithm).uses else ()
    common = {"steps": steps, "episodes": episodes, "max-turns": turns, "eval-every": 0, "micro-tokens": 600, "seed": 3}
    words = [word for key, value in common.items() for word in (f"--{key}", str(value))]
    words += ["--tracker", "none", "--threads", "1", "--device", "cpu", "--optimizer.lr", "1e-4"]
    # refused actions cost reward here, so that groups of short episodes differ
    words += ["--env-kwargs", '{"on_invalid": "penalize"}']
    return [
        "--algorithm",
        algorithm,
        "--student",
        str(models / "student"),
        *teacher,
        "--out",
        str(out),
        *words,
        *with_file(out.parent, CASES[name]),
    ]


def difference(folder: Path, name: str, sizes: tuple[int, int]) -> Difference:
    """How far the runs of a case in two numbers of processes are apart."""
    runs = [place(folder, name, size) for size in sizes]
    rows = [[row for row in read_metrics(run) if row["kind"] == "train"] for run in runs]
    one, many = (_weights(latest_model(run)) for run in runs)
    start = _weights(CHECKPOINTS / "alfworld" / "student")

    def gap(*names: str) -> float:
        pairs = [(a[name], b[name]) for a, b in zip(*rows, strict=True) for name in names if name in a]
        return max((abs(a - b) for a, b in pairs), default=0.0)

    return Difference(
        loss=gap("loss"),
        norm=gap("grad_norm"),
        other=gap("critic_loss", "term/lpt"),
        parameter=_apart(one, many),
        moved=_apart(one, start),
        same_episodes=all(a.get(name) == b.get(name) for a, b in zip(*rows, strict=True) for name in EQUAL),
        seconds=(rows[0][-1]["time/train_s"], rows[1][-1]["time/train_s"]),
    )


def _weights(folder: Path) -> dict[str, Any]:
    weights: dict[str, Any] = load_model(folder).state_dict()
    return weights


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    if one.keys() != other.keys():
        raise TurngymError(f"the models differ in their weights' names: {sorted(one.keys() ^ other.keys())[:3]}")
    return max(float((one[name] - other[name]).abs().max()) for name in one)
