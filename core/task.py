"""What is played, and how an action was judged: `Task` and `Verdict`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any


class Verdict(StrEnum):
    """How one response of an agent was judged. An invalid response is data, never an exception."""

    OK = "ok"
    MALFORMED = "malformed"
    """No action could be read from the response."""
    INADMISSIBLE = "inadmissible"
    """An action was read, but the environment does not allow it in this state."""
    NO_EFFECT = "no_effect"
    """The environment took the step and nothing changed."""

    @property
    def valid(self) -> bool:
        """Whether the environment was given the action."""
        return self in (Verdict.OK, Verdict.NO_EFFECT)


def content_hash(parts: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of `parts` as canonical JSON: sorted keys, no spaces, UTF-8.

    Equal hashes mean equal tasks if `parts` has everything that fixes a task.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # a replaced surrogate would make two different tasks equal
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(1 << 16)
def task_number(task_id: str) -> int:
    """A stable 63-bit number of a task id, so that random streams depend on the task and never on its position."""
    # not hash(), which differs from process to process; the shift makes it fit a signed 64-bit seed
    return int.from_bytes(hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def plain_id(env_id: str) -> str:
    """A Gymnasium id without the module that registers it: `a/B-v0` of `my_package:a/B-v0`."""
    return env_id.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One playable task. The same `sha256` means the same task on every machine and worker."""

    env_id: str
    """Gymnasium id, for example `turngym/ALFWorld-v0`."""
    task_id: str
    """Unique within the environment, for example `valid_seen/pick_heat_.../trial_T...`."""
    sha256: str
    """`content_hash` of everything that fixes the task (text, goal, price cap, game bytes)."""
    split: str
    category: str
    """The row of the result tables to which it belongs: `place`, `heat`, ... or the data source."""
    cluster: str = field(default="", compare=False)
    """What it shares with other tasks, which are then no independent evidence of new ones: a scene, a world, a product;
    empty for a task on its own. No part of what the task is: records from before have none."""


MAX_TURNS = 50
"""Turns of the agent after which an episode is truncated, where nobody says otherwise."""
