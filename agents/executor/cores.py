"""How many processor cores this process may count on: affinity, the container's quota, and who else runs beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SHARE = "TURNGYM_CORES"
"""Environment variable: cores for this process, set by whoever starts several side by side."""
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Where Linux says what a container may use: version 2, then version 1 of control groups."""


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """At least 1. Of several processes that torchrun started on a machine, each has its part."""
    limits = [_allowed(), *_quota(), *_number(environment, SHARE)]
    beside = _number(environment, "LOCAL_WORLD_SIZE")
    return max(1, min(limits) // max(1, *beside, 1))


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def _quota() -> list[int]:
    """The container's limit in whole cores, rounded up; empty without one."""
    modern, old = QUOTAS
    try:
        if modern.exists():
            quota, period = modern.read_text(encoding="ascii").split()[:2]
        else:
            quota = old.read_text(encoding="ascii").strip()
            period = old.with_name("cpu.cfs_period_us").read_text(encoding="ascii")
        return [] if int(quota) <= 0 else [-(-int(quota) // int(period))]
    except (OSError, ValueError):  # none there, or `max`
        return []


def _number(environment: Mapping[str, str], name: str) -> list[int]:
    """What the variable says, if it is a number."""
    said = environment.get(name, "")
    return [int(said)] if said.isdecimal() else []
