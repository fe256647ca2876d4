"""Measure turngym against a named peer in one run, or what its algorithms teach: alfworld, learn, retrieval, ..."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "ahead": "turngym.scripts.bench.ahead",
    "alfworld": "turngym.scripts.bench.alfworld",
    "distributed": "turngym.scripts.bench.distributed",
    "faults": "turngym.scripts.bench.faults.main",
    "gpu": "turngym.scripts.bench.gpu.main",
    "growth": "turngym.scripts.bench.growth.main",
    "intervals": "turngym.scripts.bench.intervals",
    "learn": "turngym.scripts.bench.learn.main",
    "live": "turngym.scripts.bench.served.live",
    "loss": "turngym.scripts.bench.loss.main",
    "packing": "turngym.scripts.bench.packing",
    "proxy": "turngym.scripts.bench.served.proxy",
    "retrieval": "turngym.scripts.bench.retrieval.main",
    "rollout": "turngym.scripts.bench.rollout.main",
    "scenarios": "turngym.scripts.bench.scenarios.main",
    "webshop": "turngym.scripts.bench.webshop.main",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym bench", VERBS, argv)
