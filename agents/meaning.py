"""What a difference at a path of a spec changes: of an evaluation (`EvalSpec`), or of a training run (`TrainConfig`).

`differing` (core/nested.py) says at which paths two specs differ. Whoever compares runs asks here what that means: a
resumed run, the cells of a study, `--compare`, departures from an original, a report.
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
    # Who plays, and what is learned: all that is not named. `endpoint` is what a handshake found out about a server.
    "player": ("agent", "endpoint", "play.also", "play.traces", "play.rollout_dtype"),
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
        *("run.tensorboard", "run.tracker"),
        *("engine.policy_server", "engine.server_parallel", "engine.server_deadline"),
        *("engine.engine_python", "engine.engine_memory", "engine.weight_sync"),
    ),
}
"""What a difference changes, and the paths where it does; the longest beginning of a path counts."""
MEANING: Mapping[str, Meaning] = {path: kind for kind, paths in PATHS.items() for path in paths}


def meaning(path: str) -> Meaning:
    """What a difference at `path` changes."""
    while path and path not in MEANING:
        path = path.rpartition(".")[0]
    # nothing else is known of what only an older version had
    return MEANING.get(path, "player")
