"""Rollouts in parallel: `ParallelRollout` is called like `rollout`, and `Workers` is where its workers live."""

from turngym.agents.executor.breakable import BreakableRollout
from turngym.agents.executor.core import Answer, ExecutorError, Workers
from turngym.agents.executor.env_spec import EnvSpec
from turngym.agents.executor.local import LocalWorkers
from turngym.agents.executor.parallel import ParallelRollout

__all__ = ["Answer", "BreakableRollout", "EnvSpec", "ExecutorError", "LocalWorkers", "ParallelRollout", "Workers"]
