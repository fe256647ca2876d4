"""How many processor cores this process may use, and how a process that it starts is told its number of threads."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from turngym.core.errors import TurngymError
from turngym.core.redaction import brief

SHARE = "TURNGYM_CORES"
"""Environment variable with the number of cores for this process, for programs that start several side by side."""
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Files with a Linux container's limit: version 2, then version 1 of control groups."""
OPENMP = "OMP_NUM_THREADS"
POOLS = (OPENMP, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS")
"""Environment variables that torch and faiss (OpenMP), NumPy's and torch's matrix products, and tokenizers (Rayon) read
once, when they are loaded."""


def counted(environment: Mapping[str, str], name: str, usual: int) -> int:
    """The whole number in a variable of the environment, `usual` where it is not set or empty. Raises TurngymError for
    any other text."""
    text = environment.get(name, "").strip()
    # Python reads no number of thousands of digits
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise TurngymError(f"the environment variable {name} is {brief(text, 80)}; valid: a whole number below 10^9")
    return int(text or usual)


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Processor cores that this process may use, at least 1.

    The smallest of its affinity, the container's quota and `TURNGYM_CORES`, divided among the processes that torchrun
    started on this machine. Raises TurngymError for a variable that holds no number.
    """
    # macOS and Windows have no affinity
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [allowed, *_quota(), counted(environment, SHARE, allowed)]
    return max(1, min(limits) // max(1, counted(environment, "LOCAL_WORLD_SIZE", 1)))


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
    # there is no such file, or it says `max`
    except (OSError, ValueError):
        return []


def threads_each(processes: int) -> int:
    """Threads for each of `processes` processes: its share of the cores, or OMP_NUM_THREADS of this one if smaller."""
    limit = os.environ.get(OPENMP, "")
    share = max(1, available_cores() // max(1, processes))
    # what else OpenMP takes (`4,2`) is its own affair
    return min(share, max(1, int(limit))) if re.fullmatch("[0-9]{1,9}", limit) else share


def environment_with_threads(threads: int) -> dict[str, str]:
    """The environment of a process that is to compute with `threads` threads, in all of its libraries."""
    return {**os.environ, **dict.fromkeys(POOLS, str(threads)), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}


def use_threads(threads: int) -> None:
    """Sets the number of threads in the libraries that this process has loaded. Libraries loaded later read the
    environment.

    A module that was imported first may have changed the environment, or may have been built to ignore it.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    if (faiss := sys.modules.get("faiss")) is not None:
        faiss.omp_set_num_threads(threads)
