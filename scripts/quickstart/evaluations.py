"""Evaluations of the quickstart: played by this process while its methods leave a core free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from turngym.agents.evaluation.tasks import EvalResult
from turngym.agents.executor.cores import available_cores
from turngym.scripts.quickstart.board import Board, evaluation_look
from turngym.scripts.quickstart.methods import Methods
from turngym.scripts.quickstart.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model to be evaluated."""

    name: str
    model: Path
    out: Path

    @classmethod
    def first(cls, plan: Plan) -> list[Evaluation]:
        """What can be evaluated before anything is trained."""
        roles = {"teacher": plan.teacher, "student": plan.student}
        return [cls(name=role, model=model, out=plan.out / "eval" / role) for role, model in roles.items()]

    @classmethod
    def last(cls, plan: Plan, method: str) -> Evaluation:
        """What a method has made of the student."""
        return cls(name=method, model=plan.trained(method), out=plan.out / method / "eval")


def evaluate_all(plan: Plan, methods: Methods, board: Board) -> list[EvalResult]:
    """Evaluate the models before training and those of the methods as each ends, one after the other.

    While every core trains nothing is played: the methods' times would not be their own.
    """
    waiting, done, cores = Evaluation.first(plan), list[EvalResult](), available_cores()
    while waiting or methods.running or len(done) < 2 + len(plan.methods):
        waiting += [Evaluation.last(plan, method) for method in methods.ended()]
        if waiting and methods.running < cores:
            done.append(_evaluate(plan, waiting.pop(0), board))
        else:
            time.sleep(0.5)
    return done


def _evaluate(plan: Plan, which: Evaluation, board: Board) -> EvalResult:
    """Avg@n of a model on the panel; continues or skips what is in its folder."""
    from turngym.scripts import eval as evaluation
    from turngym.scripts.options.eval import EvalOptions
    from turngym.scripts.options.parsing import parse

    words = ["--panel", plan.panel, "--agent", f"model:{which.model}", "--samples", str(plan.samples)]
    words += ["--limit", str(plan.limit)] if plan.limit else []
    words += ["--seed", str(plan.seed), "--out", str(which.out)]
    board.add(which.name, plan.episodes, evaluation_look(which.out / "trace.jsonl"))
    with _one_thread():
        options = parse(EvalOptions, words, prog="turngym eval", description="")
        return evaluation.run(options, command=("turngym", "eval", *words), progress=False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes in one thread, as the methods do: the other cores are theirs, and models are tiny."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
