"""Every packed result in docs comes out the same when it is played again, and its numbers on every processor."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from turngym.agents.evaluation.packed import check_result
from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.evaluation.statistics import alike
from turngym.agents.worlds import WORLDS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs").rglob("*.result.xz"))
QUICK = ("alfworld-student", "webshop-random", "search-loops-tcod-seed4")


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Few are quick; what was trained in a study is played by night."""
    late = pytest.mark.nightly if re.search(r"-seed\d", name) else pytest.mark.long
    return () if name in QUICK else (late,)


@pytest.mark.parametrize("path", [pytest.param(one, id=name_of(one), marks=marks_of(name_of(one))) for one in FILES])
def test_it_comes_out_the_same(path: Path) -> None:
    assert check_result(path) == []
    assert path.stat().st_size < 2500 * len(read_result(path).episodes)


def test_every_world_has_its_models_expert_and_random_player() -> None:
    names = set(map(name_of, FILES))
    assert names.issuperset(QUICK)
    assert {f"{world}-{player}" for world in WORLDS for player in ("student", "teacher", "expert", "random")} <= names


KERNELS = {"Haswell": "1", "Sandybridge": "2", "Prescott": "1"}
"""Kernels of OpenBLAS that every x86 processor of the last ten years runs, each with a number of threads."""
SEEDS = [f"webshop-smollm2-{method}-seed{seed}" for method in ("opd", "turnopd") for seed in (0, 1)]


def has(instructions: str) -> bool:
    facts = Path("/proc/cpuinfo")
    return facts.is_file() and instructions in facts.read_text(encoding="utf-8")


def numbers_of(files: list[Path], words: dict[str, str]) -> subprocess.Popen[str]:
    """A child that prints its kernel, and below it all numbers of `files` to the last bit."""
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "recorded_numbers.py"), *map(str, files)],
        env={**os.environ, **words, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def are_the_same(files: list[Path]) -> None:
    """The same by every kernel and number of threads, to the last bit; by another C library as a check tolerates."""
    kernels = KERNELS | ({"SkylakeX": "2"} if has("avx512f") else {})
    names = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    machines = [dict(zip(names, (kernel, count, count), strict=True)) for kernel, count in kernels.items()]
    # logarithms and the like of a processor without fused products, of glibc's and of NumPy's own
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    old = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4", "NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    children = [numbers_of(files, words) for words in (*machines, machines[0] | old)]
    # together: a child whose pipe is full waits
    with ThreadPoolExecutor(len(children)) as pool:
        *same, of_old = pool.map(lambda child: child.communicate()[0].splitlines(), children)
    first, *others = same
    assert [child.returncode for child in children] == [0] * len(children)
    assert len(first) > len(files)
    if "openblas" in first[0] and platform.machine() in ("x86_64", "AMD64"):
        assert len({each[0] for each in (first, *others)}) == len(machines), (
            "the children have computed with one kernel"
        )
    for each in others:
        assert each[1:] == first[1:]
    assert all(alike(json.loads(one), json.loads(other)) for one, other in zip(first[1:], of_old[1:], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_numbers_of_all_files_are_the_same_on_every_processor(step: int) -> None:
    """Of every twentieth file, and of those that a table compares; by night of all."""
    studies = sorted((ROOT / "docs" / "data").glob("study-*.json.gz"))
    compared = [path for path in FILES if name_of(path) in SEEDS]
    others = [path for path in FILES if path not in compared]
    are_the_same([*others[::step], *compared, *studies[::step]])


ROUNDED_BY_KERNELS = {"dot", "vdot", "inner", "matmul", "einsum", "linalg", "polynomial"}
ROUNDED_BY_ORDER = {"mean", "average", "std", "var", "cov"}
RECOMPUTED = [
    *(path for path in (ROOT / "agents" / "evaluation").glob("*.py") if path.name != "coverage.py"),
    *(ROOT / "trainers" / "study").glob("*.py"),
    ROOT / "trainers" / "diagnostics" / "depth_regime.py",
    ROOT / "scripts" / "result_table.py",
]


def test_no_kernel_sums_what_others_recompute() -> None:
    """Products of few numbers are the same by every kernel, of many they are not: what a test sees depends on data."""
    found = []
    for path in RECOMPUTED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.BinOp(op=ast.MatMult()):
                    found.append(f"{path.name}:{node.lineno} @")
                case ast.Attribute(attr=name) if name in ROUNDED_BY_KERNELS:
                    found.append(f"{path.name}:{node.lineno} {name}")
                # called, since `row.mean` is also the field of an interval
                case ast.Call(func=ast.Attribute(attr=name)) if name in ROUNDED_BY_ORDER:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []
