"""Measure this machine: rollouts, a training step on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "gpu": "turngym.scripts.bench_gpu",
    "rollout": "turngym.scripts.bench_rollout",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym bench", VERBS, argv)
