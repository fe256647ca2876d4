"""Every packed result in docs comes out the same when it is played again, and its numbers on every processor."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from turngym.agents.evaluation.packed import check_result
from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.worlds import WORLDS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs").rglob("*.result.xz"))
QUICK = [f"{world}-{player}" for world in ("alfworld", "webshop", "search") for player in ("student", "random")]
QUICK += ["search-loops-tcod-seed4"]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=name_of(path), marks=() if name_of(path) in QUICK else pytest.mark.long) for path in FILES],
)
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


def numbers_by(kernel: str, threads: str, files: list[Path]) -> subprocess.Popen[str]:
    """A child that prints its kernel, and below it all numbers of `files` to the last bit."""
    words = {"OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    if kernel == "Prescott":
        # an old processor has none of NumPy's own vector instructions either
        found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
        words["NPY_DISABLE_CPU_FEATURES"] = " ".join(found)
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "recorded_numbers.py"), *map(str, files)],
        env={**os.environ, **words, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def numbers_by_kernel(files: list[Path]) -> list[list[str]]:
    """The lines that every kernel gives: its name first, then the numbers."""
    facts = Path("/proc/cpuinfo")
    wide = {"SkylakeX": "2"} if facts.is_file() and "avx512f" in facts.read_text(encoding="utf-8") else {}
    children = [numbers_by(kernel, threads, files) for kernel, threads in (KERNELS | wide).items()]
    found = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    return found


def the_same(found: list[list[str]]) -> None:
    if "openblas" in found[0][0] and platform.machine() in ("x86_64", "AMD64"):
        assert len({lines[0] for lines in found}) == len(found), "the children have computed with one kernel"
    for lines in found[1:]:
        assert lines[1:] == found[0][1:]


def test_numbers_are_the_same_on_every_processor() -> None:
    packed = [path for path in FILES if name_of(path) in (*SEEDS, "search-student")]
    assert len(packed) == 5
    the_same(numbers_by_kernel([*packed, ROOT / "docs" / "data" / "study-loopstop-smollm2.json.gz"]))


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


@pytest.mark.long
def test_the_numbers_of_all_files_are_the_same_on_every_processor() -> None:
    studies = sorted((ROOT / "docs" / "data").glob("study-*.json.gz"))
    seeds = [path for path in FILES if name_of(path) in SEEDS]
    rest = [path for path in FILES if path not in seeds]
    the_same(numbers_by_kernel([*rest, *seeds, *studies]))
