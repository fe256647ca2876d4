"""Makes docs/results: tiny models, expert and random player of every embedded world, evaluated and packed.

A result that is there is not made again. On another machine the models' rounding may differ, and with it an episode
here and there; the files check all the same, since a check replays what was said.

Example:
    python tests/bench/pack_results.py --runs runs/results
"""

from __future__ import annotations

import sys
from pathlib import Path

from turngym.agents import evaluate
from turngym.agents.evaluation.packed import pack_result
from turngym.agents.evaluation.packed_file import SUFFIX
from turngym.agents.worlds import WORLDS, load_world
from turngym.core.spec import Spec
from turngym.scripts.options import read_options

SHIPPED = Path(__file__).parents[2] / "docs" / "results"


class Options(Spec):
    """Where the evaluations are played and the packed files written."""

    runs: Path = Path("runs/results")
    """Folder of the evaluations; interrupted ones go on."""
    out: Path = SHIPPED
    """Folder of the packed results."""
    samples: int = 4
    """Episodes per task; the expert, who always plays the same, gets one."""


def main(options: Options) -> None:
    for name in WORLDS:
        world = load_world(name)
        players = {
            "expert": world.expert,
            "teacher": f"model:{world.checkpoint('teacher')}",
            "student": f"model:{world.checkpoint('student')}",
            "random": "random",
        }
        for player, agent in players.items():
            path, run = options.out / f"{name}-{player}{SUFFIX}", options.runs / f"{name}-{player}"
            if path.exists():
                continue
            samples = 1 if player == "expert" else options.samples
            evaluate(world.panel, agent, samples=samples, out=run, workers=0, threads=1)
            result = pack_result(run, path)
            print(
                f"{path.name}: {result.scores['overall']['avg']['mean']:.3f}, {path.stat().st_size:,} bytes", flush=True
            )


if __name__ == "__main__":
    main(read_options(Options, sys.argv[1:], prog="pack_results.py", about=__doc__))
