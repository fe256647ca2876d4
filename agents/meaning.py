"""What a difference at a path of a spec changes: of an evaluation (`EvalSpec`), or of a training run (`TrainConfig`).

`differing` (core/spec.py) says at which paths two specs differ. Whoever compares runs asks here what that means: a
resumed run, the cells of a study, `--compare`, departures from an original, a report.
"""

from __future__ import annotations

from typing import Literal

Meaning = Literal["game", "amount", "player", "seed", "rounding", "cost"]
"""What is played (`game`), how much of it (`amount`), who plays or what is learned (`player`), which draw it is
(`seed`), nothing but how sums round (`rounding`), nothing that is played or learned (`cost`)."""

MEANING: dict[str, Meaning] = {
    # What is played.
    "preset": "cost",
    "play": "game",
    "play.tasks": "amount",
    "play.samples": "amount",
    "play.seed": "seed",
    # Who plays an evaluation.
    "agent": "player",
    # the weights say which model it is, wherever it lies
    "agent.folder": "cost",
    "agent.temperature": "game",
    "agent.chat.examples.file": "cost",
    "agent.chat.examples.folder": "cost",
    "agent.endpoint.base_url": "cost",
    "agent.endpoint.key_env": "cost",
    "agent.endpoint.request_deadline": "cost",
    "agent.endpoint.request_retries": "cost",
    "agent.endpoint.handshake": "cost",
    "agent.endpoint.price_in": "cost",
    "agent.endpoint.price_cached": "cost",
    "agent.endpoint.price_out": "cost",
    "agent.engine.device": "cost",
    "agent.engine.threads": "cost",
    "agent.engine.policy_server": "cost",
    "agent.engine.server_parallel": "cost",
    "agent.engine.server_deadline": "cost",
    "compute": "cost",
    # what a handshake found out about a server
    "endpoint": "player",
    # What a run of training plays besides.
    "play.also": "player",
    "play.traces": "player",
    "play.rollout_dtype": "player",
    "play.data": "cost",
    "play.slots": "cost",
    "play.keep_rollouts": "cost",
    # How it learns. All that is not named is `player`: models, the algorithm's own settings, the optimizer.
    "models.out": "cost",
    "models.resume": "cost",
    "models.device": "cost",
    "models.threads": "cost",
    # wherever a teacher computes, its weights count
    "method.teacher.kind": "cost",
    "method.teacher.teacher_server": "cost",
    "method.teacher.server_parallel": "cost",
    "method.teacher.server_deadline": "cost",
    "method.frozen.shard_teacher": "cost",
    "method.judge.judge_unread": "cost",
    "method.judge.judge_every": "cost",
    "method.judge.judge_parallel": "cost",
    "method.judge.judge_timeout": "cost",
    "method.judge.judge_tries": "cost",
    "run.seed": "seed",
    "run.steps": "amount",
    "run.eval_every": "amount",
    "run.checkpoint_every": "cost",
    "run.keep_checkpoints": "cost",
    "run.gradient_checkpointing": "cost",
    "run.tensorboard": "cost",
    "run.tracker": "cost",
    "run.micro_tokens": "rounding",
    "run.head_chunk": "rounding",
    "engine": "rounding",
    "engine.policy_server": "cost",
    "engine.server_parallel": "cost",
    "engine.server_deadline": "cost",
    "engine.engine_python": "cost",
    "engine.engine_memory": "cost",
    "engine.weight_sync": "cost",
    "workers": "cost",
}
"""The longest beginning of a path counts."""
# who demonstrates is an agent, whose files count by their content
MEANING |= {
    path.replace("agent", "method.demonstrations.demonstrator", 1): found
    for path, found in MEANING.items()
    if path.startswith(("agent.endpoint.", "agent.engine."))
}


def meaning(path: str) -> Meaning:
    """What a difference at `path` changes."""
    while path and path not in MEANING:
        path = path.rpartition(".")[0]
    # nothing else is known of what only an older version had
    return MEANING.get(path, "player")
