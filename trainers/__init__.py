"""Turn-aware training on traces: `train()` for a whole run, `Trainer` for one put together by hand.

    from turngym.trainers import train
    train("turnopd", student="models/student", teacher="models/teacher", out="runs/turnopd", steps=50)

The names in `__all__` may be relied on; each is imported when it is first used, so that importing this loads no torch.
"""

from turngym.envs.common.lazy import lazy as _lazy

_PUBLIC = {
    "WEIGHTS": "turngym.trainers.losses.token_weights",
    "Algorithm": "turngym.trainers.algorithm",
    "AlgorithmSpec": "turngym.trainers.algorithm_spec",
    "BuildContext": "turngym.trainers.algorithm_spec",
    "CriticConfig": "turngym.trainers.config",
    "DepthController": "turngym.trainers.algorithm",
    "DepthPlan": "turngym.trainers.algorithm",
    "DepthState": "turngym.trainers.algorithm",
    "DistillConfig": "turngym.trainers.config",
    "FixedDepth": "turngym.trainers.rollout_plan.depth",
    "LocalScorer": "turngym.trainers.models.scorer",
    "LogSink": "turngym.trainers.run.log_sinks",
    "OptimizerConfig": "turngym.trainers.config",
    "RolloutBatch": "turngym.trainers.batch",
    "RunConfig": "turngym.trainers.config",
    "RunResult": "turngym.trainers.trainer",
    "Scorers": "turngym.trainers.algorithm",
    "TargetFn": "turngym.trainers.algorithm",
    "Targets": "turngym.trainers.algorithm",
    "Term": "turngym.trainers.algorithm",
    "TokenLoss": "turngym.trainers.algorithm",
    "TokenLosses": "turngym.trainers.algorithm",
    "Tokens": "turngym.trainers.algorithm",
    "TrainConfig": "turngym.trainers.train_config",
    "TrainError": "turngym.trainers.trainer",
    "Trainer": "turngym.trainers.trainer",
    "Weight": "turngym.trainers.algorithm",
    "build_trainer": "turngym.trainers.assembly",
    "find_algorithm": "turngym.trainers.registry",
    "fingerprint": "turngym.trainers.config",
    "iter_metrics": "turngym.trainers.run.metrics",
    "load_model": "turngym.trainers.models.model",
    "load_student": "turngym.trainers.models.load",
    "pack": "turngym.trainers.batch",
    "read_metrics": "turngym.trainers.run.metrics",
    "save_model": "turngym.trainers.models.model",
    "train": "turngym.trainers.launch",
}
"""Public name -> module that has it; `__init__.pyi` says the same to type checkers."""

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = _lazy(__name__, _PUBLIC)
