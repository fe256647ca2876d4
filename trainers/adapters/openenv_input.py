"""What OpenEnv's clients send, read: which episode a reset asks for, and ids that a client sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from turngym.envs.core import TurngymError
from turngym.envs.protocols import Generation


def which(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `TokenSessions.open` in the fields of a reset. Raises TurngymError for other types or ranges."""
    task_id = wanted.get("task_id")
    if task_id is not None and not isinstance(task_id, str):
        raise TurngymError(f"task_id is {task_id!r:.60}; it must be text")
    names: dict[str, Any] = {} if task_id is None else {"task_id": task_id}
    for name in ("seed", "sample"):
        value = wanted.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise TurngymError(f"{name} is {value!r:.60}; it must be a whole number from 0 to 2**63 - 1")
        names[name] = value
    return names


def generation(action: Mapping[str, Any]) -> Generation:
    """The response that `response_ids` and `logprobs` are. Raises TurngymError for ids or lengths that cannot be."""
    ids, logprobs = action["response_ids"], action.get("logprobs")
    if logprobs is not None and len(logprobs) != len(ids):
        raise TurngymError(f"{len(logprobs)} log-probabilities came with {len(ids)} response ids")
    if not all(0 <= token < 2**31 for token in ids):
        raise TurngymError("response_ids must be from 0 to 2**31 - 1")
    values = np.full(len(ids), np.nan) if logprobs is None else logprobs
    return Generation(
        ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
        finish="stop",
        policy_version=int(action.get("policy_version") or 0),
    )
