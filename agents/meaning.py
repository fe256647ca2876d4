"""Classifies the settings of evaluations (`EvalSpec`) and training runs (`TrainConfig`) by what a difference changes.

`differing` (core/nested.py) lists the paths at which two specs differ, `meaning` says what that means. All comparisons
of runs use it: a resumed run, the cells of a study, `--compare`, departures from an original, a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Meaning = Literal["game", "amount", "player", "seed", "rounding", "cost"]
PATHS: Mapping[Meaning, tuple[str, ...]] = {
    # What is played.
    "game": ("play", "agent.temperature"),
    # How much of it, and how often.
    "amount": ("play.tasks", "play.samples", "run.steps", "run.eval_every"),
    # Who plays, and what is learned: also every path not listed here. `endpoint` is what a handshake found out.
    "player": ("agent", "endpoint", "play.also", "play.traces", "engine.rollout_dtype"),
    # Which draw it is.
    "seed": ("play.seed", "run.seed"),
    # How sums round, or what servers draw.
    "rounding": ("run.micro_tokens", "run.head_chunk", "engine"),
    # Nothing that is played or learned.
    "cost": (
        *("preset", "compute", "workers", "play.data", "play.slots", "play.keep_rollouts"),
        # the weights say which model it is, wherever it lies, and hashes which texts
        *("agent.folder", "agent.chat.examples.file", "agent.chat.examples.folder"),
        *("chat.examples.file", "chat.examples.folder"),
        *(
            f"{agent}.{name}"
            for agent in ("agent", "method.demonstrations.demonstrator")
            for name in (
                *("endpoint.base_url", "endpoint.key_env", "endpoint.request_deadline", "endpoint.request_retries"),
                *("endpoint.handshake", "endpoint.price_in", "endpoint.price_cached", "endpoint.price_out"),
                *("engine.device", "engine.threads"),
                *("engine.policy_server", "engine.server_parallel", "engine.server_deadline"),
            )
        ),
        *("models.out", "models.resume", "models.device", "models.threads"),
        # wherever a teacher computes, its weights count
        *("method.teacher.kind", "method.teacher.teacher_server"),
        *("method.teacher.server_parallel", "method.teacher.server_deadline", "method.frozen.shard_teacher"),
        *("method.judge.judge_unread", "method.judge.judge_every", "method.judge.judge_parallel"),
        *("method.judge.judge_timeout", "method.judge.judge_tries"),
        *("run.checkpoint_every", "run.keep_checkpoints", "run.gradient_checkpointing"),
        "run.tracker",
        *("engine.policy_server", "engine.server_parallel", "engine.server_deadline"),
        *("engine.engine_python", "engine.engine_memory", "engine.weight_sync"),
    ),
}
"""What a difference changes, and the paths where it does; the longest beginning of a path counts."""
MEANING: Mapping[str, Meaning] = {path: kind for kind, paths in PATHS.items() for path in paths}


def meaning(path: str) -> Meaning:
    """Returns what a difference at `path` changes."""
    while path and path not in MEANING:
        path = path.rpartition(".")[0]
    # a setting that only an older version had may have changed anything
    return MEANING.get(path, "player")
