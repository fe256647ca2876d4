"""Rollouts in parallel: `ParallelRollout` is called like `rollout`, and `Workers` is where its workers live."""

from turngym.agents.executor.cancellable import CancellableRollout
from turngym.agents.executor.core import Answer, ExecutorError, Workers
from turngym.agents.executor.env_spec import EnvSpec
from turngym.agents.executor.local import LocalWorkers
from turngym.agents.executor.parallel import ParallelRollout

__all__ = ["Answer", "CancellableRollout", "EnvSpec", "ExecutorError", "LocalWorkers", "ParallelRollout", "Workers"]
