"""Evaluate an agent on a task panel: Avg@4, pass@k, rows by category, rates; resumes where it stopped.

Examples:
    turngym eval --panel alfworld-generated-eval --agent expert
    turngym eval --panel alfworld-valid-unseen --data ~/alfworld --agent model:runs/student --out runs/student/eval
    turngym eval --rescore runs/student/eval
    turngym eval --compare runs/before/eval runs/after/eval
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.compare import compare_recorded, rescore
from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS, play_evaluation
from turngym.agents.evaluation.play_panel import EvalResult
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.play_spec import EvalSpec, OpenAI
from turngym.agents.resolve_play import resolve_play
from turngym.core.errors import TurngymError
from turngym.core.files import locked_folder
from turngym.core.nested import flat
from turngym.core.numbers import NotNegative, Number
from turngym.core.resolve import PROVENANCE, Resolved
from turngym.core.settings import whole_toml
from turngym.core.spec import Spec, expand
from turngym.core.tables import print_table
from turngym.core.user_files import must_be_new
from turngym.scripts.options import Verb, list_presets


class EvalCall(Spec):
    """What `turngym eval` has beside the settings of an evaluation."""

    rescore: str | None = None
    """Play nothing: the table of this trace, or of the evaluation in this folder, computed again; with --out a
    results.json of it."""
    compare: tuple[str, str] | None = None
    """Play nothing: two traces, results files, packed results or folders of evaluations of the same tasks, their
    differences paired by task, and the settings that differ."""
    different_settings: bool = False
    """--compare: also where settings differ that change the game and not the player (turns, arguments of gym.make,
    temperature); by default that is refused."""
    fail_if_worse: NotNegative | None = None
    """--compare: exit status 1 where the second is clearly worse by more than so many points of success or graded score
    (the whole interval of the difference lies below); 0: where it is clearly worse at all."""
    out: Path | None = None
    """Folder for results.json, trace.jsonl and spec.toml; an interrupted evaluation with the same folder goes on."""
    max_errors: Number = 0
    """Episodes that may end in errors, or be missing: with more the exit status is 1. They are left out of the score,
    beside which stand its bounds (all of them lost, all of them won)."""
    verify: bool = True
    """Check every task's hash against the panel before anything is played."""


VERB: Verb[EvalCall] = Verb(
    name="turngym eval",
    about=(__doc__ or "").strip(),
    own=EvalCall,
    spec=EvalSpec,
    usual=EVAL_DEFAULTS,
    first=(
        *("panel", "agent", "preset", "samples", "limit", "out", "temperature", "memory", "max_turns", "data"),
        *("slots", "rescore", "compare", "env_kwargs", "seed"),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run `turngym eval` with `argv` (without the verb itself); status 1 if more episodes are lost than may be."""
    if list_presets(argv):
        return 0
    line = VERB.asked(argv)
    call = line.own
    layers = [(where, table) for where, table in line.layers if table]
    if call.compare is not None or call.rescore is not None:
        _refuse(call, layers)
        return compare(call) if call.compare is not None else _show(again(call), call.max_errors)
    if not any("play.tasks.panel" in _flat(where, table) for where, table in layers):
        raise EvaluationError("give a --panel to play (`turngym panel list`), --rescore or --compare; given is none")
    if call.different_settings or call.fail_if_worse is not None:
        raise EvaluationError("--different-settings and --fail-if-worse are read by --compare alone")
    resolved = resolve_play(layers, usual=EVAL_DEFAULTS)
    if line.show:
        print(whole_toml(resolved), end="")
        return 0
    say_channel(resolved)
    command = ("turngym", "eval", *argv)
    result = play_evaluation(resolved, out=call.out, verify=call.verify, command=command)
    for problem in result.problems:
        print(f"{call.out}/trace.jsonl: skipped {problem}", file=sys.stderr)
    return _show(result, call.max_errors)


def _flat(where: str, table: Mapping[str, Any]) -> set[str]:
    """Paths of the settings in a table with short names."""
    return set(flat(expand(EvalSpec, {name: value for name, value in table.items() if name != PROVENANCE}, where)))


def _refuse(call: EvalCall, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises EvaluationError for settings of what is played where nothing is played."""
    mode = "--compare" if call.compare is not None else "--rescore"
    if call.compare is not None and call.rescore is not None:
        raise EvaluationError("give --rescore or --compare, not both")
    for where, table in layers:
        for path in sorted(_flat(where, table)):
            raise EvaluationError(f"{where}: {path} is read where something is played; {mode} plays nothing")
    if call.compare is not None and call.out is not None:
        raise EvaluationError("--out is written by --panel and --rescore; --compare writes nothing")


def compare(call: EvalCall) -> int:
    """Print the comparison of two evaluations; status 1 where one of them lacks more episodes than may be."""
    assert call.compare is not None
    comparison = compare_recorded(*call.compare, different_settings=call.different_settings)
    print_table(comparison.table())
    print("".join(f"{line}\n" for line in comparison.notes()), end="")
    worse = call.fail_if_worse is not None and comparison.worse_by(call.fail_if_worse)
    if call.fail_if_worse is not None:
        print(f"the second is {'' if worse else 'not '}clearly worse by more than {call.fail_if_worse:g} points")
    return int(worse or comparison.most_lost > call.max_errors)


def _show(result: EvalResult, most: int) -> int:
    print_table(result.table(), title=result.title)
    print("".join(f"{text}\n" for text in result.notes()), end="")
    return int(result.scores.errors + result.missing > most)


def again(call: EvalCall) -> EvalResult:
    """Score a trace; write results.json if a folder was named."""
    assert call.rescore is not None
    if call.out is not None:
        must_be_new(call.out / "results.json", TurngymError)
    result = rescore(call.rescore)
    for problem in result.problems:
        print(f"{call.rescore}: skipped {problem}", file=sys.stderr)
    if call.out is not None:
        with locked_folder(call.out):
            result.write(call.out / "results.json")
    return result


def say_channel(resolved: Resolved[EvalSpec]) -> None:
    """Says on standard error how an endpoint's actions are written, if no `--channel` was given."""
    agent = resolved.spec.agent
    if isinstance(agent, OpenAI) and agent.chat.channel == "auto":
        print(
            f"turngym: openai:{agent.model} writes actions as text, which every endpoint can (--channel text); "
            "--channel tool offers it the environment's tool",
            file=sys.stderr,
        )
