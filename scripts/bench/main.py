"""Measure turngym against a named peer in one run, or what its algorithms teach: alfworld, learn, retrieval, ..."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "ahead": "turngym.scripts.bench.ahead",
    "alfworld": "turngym.scripts.bench.alfworld",
    "distributed": "turngym.scripts.bench.distributed",
    "learn": "turngym.scripts.bench.learn",
    "loss": "turngym.scripts.bench.loss",
    "packing": "turngym.scripts.bench.packing",
    "proxy": "turngym.scripts.bench.proxy",
    "retrieval": "turngym.scripts.bench.retrieval",
    "rollout": "turngym.scripts.bench.rollout",
    "webshop": "turngym.scripts.bench.webshop",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym bench", VERBS, argv)
