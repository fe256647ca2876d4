"""Studies on tiny models: learn, scenarios, what papers argue with (turnopd, regime, recipe), and plan their size."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "learn": "turngym.scripts.study.learn",
    "plan": "turngym.scripts.study.plan",
    "regime": "turngym.scripts.study.regime",
    "recipe": "turngym.scripts.study.recipe",
    "scenarios": "turngym.scripts.study.scenarios",
    "turnopd": "turngym.scripts.study.turnopd",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym study", VERBS, argv)
