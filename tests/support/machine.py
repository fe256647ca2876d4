"""What this machine computes with, in one line: a failure that only some processors show can then be told."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

NAMED = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NPY_DISABLE_CPU_FEATURES", "MKL_CBWR")


def computed_on() -> str:
    """Processor, kernel and threads of every BLAS that is loaded, versions, and what the environment says of them."""
    facts = [f"{processor()} ({os.cpu_count()} cores)", *kernels(), f"NumPy {np.__version__}"]
    if (torch := sys.modules.get("torch")) is not None:
        facts.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}")
    return ", ".join([*facts, *(f"{name}={os.environ[name]}" for name in NAMED if name in os.environ)])


def processor() -> str:
    """The processor's name, as the system knows it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def kernels() -> list[str]:
    """Kernel and threads of every BLAS that is loaded; what NumPy was built with where threadpoolctl is missing."""
    if find_spec("threadpoolctl") is None:
        config = np.show_config(mode="dicts")
        return [f"{config['Build Dependencies']['blas']['name']}, kernel unknown without threadpoolctl"]
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return [f"{pool['internal_api']} {pool.get('architecture') or ''} x{pool['num_threads']}" for pool in pools]
