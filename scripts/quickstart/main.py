"""Distill a tiny student in a generated world, with vanilla OPD and TurnOPD side by side, in under ten minutes.

Both start from the same weak student and learn from the same teacher (two checkpoints that come with turngym) for the
same number of steps, each in a process of its own. Ends with a table, a figure and traces to read. Stopping it loses
nothing: the same command goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import tyro

from turngym.agents.evaluation.tables import print_table
from turngym.scripts.quickstart.board import open_board, training_look
from turngym.scripts.quickstart.closing import write_report
from turngym.scripts.quickstart.evaluations import evaluate_all
from turngym.scripts.quickstart.methods import training
from turngym.scripts.quickstart.plan import Plan, Quickstart


def main(argv: Sequence[str]) -> int:
    """Run `turngym quickstart` with `argv` (without the verb itself)."""
    words = tyro.cli(Quickstart, args=list(argv), prog="turngym quickstart", description=(__doc__ or "").split("\n")[0])
    plan = Plan.of(words)
    plan.check()
    start = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    with training(plan) as methods, open_board() as board:
        for method in plan.methods:
            board.add(method, plan.steps, training_look(plan.out / method))
        results = evaluate_all(plan, methods, board)
    for result in results:
        print_table(result.table(), title=result.title)
    write_report(plan)
    print(f"finished in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0
