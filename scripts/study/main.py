"""What the papers argue with, run again on tiny models: turnopd, regime, recipe."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "regime": "turngym.scripts.study.regime",
    "recipe": "turngym.scripts.study.recipe.main",
    "turnopd": "turngym.scripts.study.turnopd",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym study", VERBS, argv)
