"""Turn-aware training on traces: `train()` for a whole run, `Trainer` for one put together by hand.

What is listed here may be relied on; it is imported when it is asked for, so that `import turngym.trainers` loads no
torch. The other modules may change from release to release.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "train": "turngym.trainers.launch",
    "Trainer": "turngym.trainers.trainer",
    "RunResult": "turngym.trainers.trainer",
    "TrainError": "turngym.trainers.trainer",
    "Algorithm": "turngym.trainers.algorithm",
    "DepthController": "turngym.trainers.algorithm",
    "DepthPlan": "turngym.trainers.algorithm",
    "DepthState": "turngym.trainers.algorithm",
    "Scorers": "turngym.trainers.algorithm",
    "TargetFn": "turngym.trainers.algorithm",
    "Targets": "turngym.trainers.algorithm",
    "Term": "turngym.trainers.algorithm",
    "TokenLoss": "turngym.trainers.algorithm",
    "TokenLosses": "turngym.trainers.algorithm",
    "Tokens": "turngym.trainers.algorithm",
    "Weight": "turngym.trainers.algorithm",
    "AlgorithmSpec": "turngym.trainers.registry",
    "BuildContext": "turngym.trainers.registry",
    "find_algorithm": "turngym.trainers.registry",
    "RolloutBatch": "turngym.trainers.batch",
    "pack": "turngym.trainers.batch",
    "CriticConfig": "turngym.trainers.config",
    "DistillConfig": "turngym.trainers.config",
    "OptimizerConfig": "turngym.trainers.config",
    "RunConfig": "turngym.trainers.config",
    "fingerprint": "turngym.trainers.config",
    "FixedDepth": "turngym.trainers.rollout_plan.depth",
    "WEIGHTS": "turngym.trainers.losses.token_weights",
    "LocalScorer": "turngym.trainers.models.scorer",
    "load_model": "turngym.trainers.models.model",
    "save_model": "turngym.trainers.models.model",
    "load_student": "turngym.trainers.models.load",
    "LogSink": "turngym.trainers.run.log_sinks",
    "read_metrics": "turngym.trainers.run.metrics",
}
"""Public name -> module. `__init__.pyi` says the same to type checkers; a test compares the two."""
__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
