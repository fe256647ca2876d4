"""Evaluate an agent on a task panel: Avg@4, pass@k, rows by category, rates; resumes where it stopped.

Examples:
    turngym eval --panel alfworld-generated-eval --agent expert
    turngym eval --panel alfworld-valid-unseen --data ~/alfworld --agent model:runs/student --out runs/student/eval
    turngym eval --rescore runs/student/eval
    turngym eval --compare runs/before/eval runs/after/eval
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from turngym.agents.agent_options import AgentOptions
from turngym.agents.agent_options import settings_of as keywords_of
from turngym.agents.evaluation.compare import compare_recorded, rescore
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.play_panel import EvalResult
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.playing.env_maker import env_arguments
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.errors import TurngymError, checked_int
from turngym.core.files import locked_folder
from turngym.core.settings import Count, Length, Needs, Seed, settings_of
from turngym.core.strict_json import json_object
from turngym.core.tables import print_table
from turngym.core.user_files import must_be_new
from turngym.envs.guard import OnInvalid
from turngym.envs.reading import Reading
from turngym.scripts.command_line import SERVED, list_presets, parse, say_channel


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Play every task of a panel and score it."""

    panel: str | None = None
    """Name (newest version), full name, or path of a manifest; `turngym panel list` shows them."""
    preset: str | None = None
    """A published set-up by name (turnopd, verl-agent, react, search-r1); `--preset list` shows what they set. Options
    that are given beside it take the place of its values."""
    rescore: Path | None = None
    """Play nothing: the table of this trace, or of the evaluation in this folder, computed again; with --out a
    results.json of it."""
    compare: tuple[Path, Path] | None = None
    """Play nothing: two traces, results files, packed results or folders of evaluations of the same tasks, their
    differences paired by task, and the settings that differ."""
    different_settings: bool = False
    """--compare: also where settings differ that change the game and not the player (turns, arguments of gym.make,
    temperature, preset); by default that is refused."""
    player: Annotated[AgentOptions, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes] = field(
        default_factory=AgentOptions
    )
    samples: Count | None = None
    """Episodes per task; by default the preset's, else 4."""
    sampling: str = "panel"
    """`panel`: every task, --samples times. `published`: the tasks that the published harness (verl-agent) draws with
    128 workers, `published:N` with N, in --samples validations; a number so drawn depends on N."""
    out: Path | None = None
    """Folder for results.json, trace.jsonl and config.toml; an interrupted evaluation with the same folder goes on."""
    max_errors: int = 0
    """Episodes that may end in errors: with more the exit status is 1. They are left out of the score, beside which
    stand its bounds (all of them lost, all of them won)."""
    limit: Length | None = None
    """Play only the first so many tasks of the panel."""
    seed: Seed = 0
    """Same seed, same episodes, whatever --slots and --workers."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    max_turns: Length | None = None
    """Turns before an episode is cut; by default the preset's limit, else the panel's, else the environment's (50)."""
    on_invalid: OnInvalid | None = None
    """What an invalid action does: `noop` as the environment itself, `reject` with the reason and what is possible,
    `penalize`, `terminate`; by default the preset's, else the panel's, else the environment's."""
    show_admissible: Literal["on", "off"] | None = None
    """Whether every observation ends with the list of admissible actions; by default as the preset says, else not."""
    reading: Reading | None = None
    """How responses are read: `strict` as the channel says, `folded` whatever the letter case, `lenient` in any form
    that holds a possible action (a bare line, `Action: ...`, a fence); by default as the preset says, else strict."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"engine": "textworld"}'."""
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    verify: bool = True
    """Check every task's hash against the panel before anything is played."""
    needs: ClassVar[Needs] = (
        (("different_settings",), "--compare", lambda options: options.compare is not None),
        (("out", "max_errors"), "--panel or --rescore", lambda options: options.compare is None),
        (
            (
                *("preset", "samples", "sampling", "limit", "seed", "data", "max_turns", "on_invalid"),
                *("show_admissible", "reading", "env_kwargs", "verify"),
                *(item.key for group in (AgentOptions, PolicyServer, WorkerOptions) for item in settings_of(group)),
            ),
            "--panel",
            lambda options: options.panel is not None,
        ),
        *SERVED,
    )


def main(argv: Sequence[str]) -> int:
    """Run `turngym eval` with `argv` (without the verb itself); status 1 if more episodes end in errors than may."""
    if list_presets(argv):
        return 0
    description = (__doc__ or "").split("\n")[0]
    options = parse(EvalOptions, argv, prog="turngym eval", description=description)
    given = [name for name in ("panel", "rescore", "compare") if getattr(options, name) is not None]
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "none of them"
        raise EvaluationError(f"give a --panel to play (`turngym panel list`), --rescore or --compare; given is {said}")
    checked_int("--max-errors", options.max_errors, 0)
    if options.compare is not None:
        comparison = compare_recorded(*options.compare, different_settings=options.different_settings)
        print_table(comparison.table())
        print("".join(f"{line}\n" for line in comparison.notes()), end="")
        return 0
    if options.rescore is None:
        say_channel(options.player)
    result = run(options, command=("turngym", "eval", *argv)) if options.rescore is None else again(options)
    print_table(result.table(), title=result.title)
    if result.departs:
        print(result.departs)
    if result.settings.get("chat"):
        print(result.settings["chat"])
    for text in result.hints():
        print(text)
    if result.scores.errors:
        print(f"{result.scores.errors} episodes ended in errors and are not counted; run again to play them again")
        return 1 if result.scores.errors > options.max_errors else 0
    return 0


def again(options: EvalOptions) -> EvalResult:
    """Score a trace; write results.json if a folder was named."""
    assert options.rescore is not None
    if options.out is not None:
        must_be_new(options.out / "results.json", TurngymError)
    result = rescore(options.rescore)
    for problem in result.problems:
        print(f"{options.rescore}: skipped {problem}", file=sys.stderr)
    if result.missing:
        print(f"{result.missing} episodes are missing: the evaluation was interrupted", file=sys.stderr)
    if options.out is not None:
        with locked_folder(options.out):
            result.write(options.out / "results.json")
    return result


def run(options: EvalOptions, command: Sequence[str]) -> EvalResult:
    """Play, and write the files if a folder was named."""
    assert options.panel is not None
    shown = None if options.show_admissible is None else options.show_admissible == "on"
    named = {"show_admissible": shown, "reading": options.reading, "on_invalid": options.on_invalid}
    result = evaluate(
        options.panel,
        options.player.agent,
        preset=options.preset,
        samples=options.samples,
        sampling=options.sampling,
        seed=options.seed,
        temperature=options.player.temperature,
        slots=options.player.slots,
        out=options.out,
        limit=options.limit,
        data=options.data,
        max_turns=options.max_turns,
        env_kwargs=env_arguments(json_object("--env-kwargs", options.env_kwargs), named),
        workers=options.workers,
        servers=options.servers,
        verify=options.verify,
        command=command,
        **keywords_of(options.player),
    )
    for problem in result.problems:
        print(f"{options.out}/trace.jsonl: skipped {problem}", file=sys.stderr)
    return result
