"""Evaluate an agent on a task panel: Avg@4, pass@k, rows by category, rates; resumes where it stopped.

Examples:
    turngym eval --panel alfworld-generated --agent expert
    turngym eval --panel alfworld-valid-unseen --data ~/alfworld --agent model:runs/student --out runs/student/eval
    turngym eval --rescore runs/student/eval
    turngym eval --compare runs/before/eval runs/after/eval
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from turngym.agents.agent_options import settings_of
from turngym.agents.environments import json_object
from turngym.agents.evaluation.compare import compare_recorded
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.held import EvaluationError
from turngym.agents.evaluation.rescore import rescore
from turngym.agents.evaluation.tables import print_table
from turngym.agents.evaluation.tasks import EvalResult
from turngym.envs.common.folder_lock import locked_folder
from turngym.scripts.options.channel import say_channel
from turngym.scripts.options.eval import EvalOptions
from turngym.scripts.options.parsing import parse
from turngym.scripts.options.presets import list_presets


def main(argv: Sequence[str]) -> int:
    """Run `turngym eval` with `argv` (without the verb itself); status 1 if episodes ended in errors."""
    if list_presets(argv):
        return 0
    description = (__doc__ or "").split("\n")[0]
    options = parse(EvalOptions, argv, prog="turngym eval", description=description)
    asked = [name for name in ("panel", "rescore", "compare") if getattr(options, name) is not None]
    if len(asked) != 1:
        said = " and ".join(f"--{name}" for name in asked) or "none of them"
        raise EvaluationError(f"give a --panel to play (`turngym panel list`), --rescore or --compare; given is {said}")
    if options.compare is not None:
        comparison = compare_recorded(*options.compare, different_settings=options.different_settings)
        print_table(comparison.table())
        print("".join(f"{line}\n" for line in comparison.notes()), end="")
        return 0
    if options.rescore is None:
        say_channel(options.player)
    result = run(options, command=("turngym", "eval", *argv)) if options.rescore is None else again(options)
    print_table(result.table(), title=result.title)
    if result.settings.get("chat"):
        print(result.settings["chat"])
    if result.scores.errors:
        print(f"{result.scores.errors} episodes ended in errors and are not counted; run again to play them again")
        return 1
    return 0


def again(options: EvalOptions) -> EvalResult:
    """Score a trace; write results.json if a folder was named."""
    assert options.rescore is not None
    result = rescore(options.rescore)
    for problem in result.problems:
        print(f"{options.rescore}: skipped {problem}", file=sys.stderr)
    if result.missing:
        print(f"{result.missing} episodes are missing: the evaluation was interrupted", file=sys.stderr)
    if options.out is not None:
        with locked_folder(options.out):
            result.write(options.out / "results.json")
    return result


def run(options: EvalOptions, command: Sequence[str], *, progress: bool = True) -> EvalResult:
    """Play, and write the files if a folder was named."""
    assert options.panel is not None
    shown = {} if options.show_admissible is None else {"show_admissible": options.show_admissible == "on"}
    result = evaluate(
        options.panel,
        options.player.agent,
        preset=options.preset,
        samples=options.samples,
        seed=options.seed,
        temperature=options.player.temperature,
        slots=options.player.slots,
        out=options.out,
        limit=options.limit,
        data=options.data,
        max_turns=options.max_turns,
        env_kwargs=json_object("--env-kwargs", options.env_kwargs) | shown,
        workers=options.workers,
        servers=options.servers,
        verify=options.verify,
        progress=progress,
        command=command,
        **settings_of(options.player),
    )
    for problem in result.problems:
        print(f"{options.out}/trace.jsonl: skipped {problem}", file=sys.stderr)
    return result
