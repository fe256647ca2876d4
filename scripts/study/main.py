"""Methods compared over seeds, worlds and tasks, from one file: run, show, list; plan how large; coverage."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "run": "turngym.scripts.study.run",
    "show": "turngym.scripts.study.show",
    "list": "turngym.scripts.study.list",
    "plan": "turngym.scripts.study.plan",
    "coverage": "turngym.scripts.study.coverage",
    "regime": "turngym.scripts.study.regime",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym study", VERBS, argv)
