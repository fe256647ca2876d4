"""Studies on tiny models: learn, scenarios, turnopd, regime, recipe; plan their size, and how intervals cover."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "coverage": "turngym.scripts.study.coverage",
    "learn": "turngym.scripts.study.learn",
    "plan": "turngym.scripts.study.plan",
    "regime": "turngym.scripts.study.regime",
    "recipe": "turngym.scripts.study.recipe",
    "scenarios": "turngym.scripts.study.scenarios",
    "turnopd": "turngym.scripts.study.turnopd",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym study", VERBS, argv)
