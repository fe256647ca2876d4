"""Measure turngym against a named peer in one run: alfworld, rollout."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "alfworld": "turngym.scripts.bench.alfworld",
    "rollout": "turngym.scripts.bench.rollout",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym bench", VERBS, argv)
