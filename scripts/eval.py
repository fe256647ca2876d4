"""Evaluate an agent on a task panel: Avg@4, pass@k, rows by category, rates; resumes where it stopped.

Examples:
    turngym eval --panel alfworld-generated --agent expert
    turngym eval --panel alfworld-valid-unseen --data ~/alfworld --agent model:runs/student --out runs/student/eval
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from turngym.agents.environments import env_maker, json_object, probe
from turngym.agents.evaluation.tables import behavior_table, columns, print_table, success_table, write_json
from turngym.agents.evaluation.tasks import EvalResult, evaluate_tasks
from turngym.agents.executor.open_workers import WorkerOptions, open_workers
from turngym.agents.open_agent import AgentOptions, OpenedAgent, open_agent
from turngym.agents.sglang.options import PolicyServer
from turngym.envs.core import TurngymError
from turngym.envs.panels import Panel, load_panel, verify_panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Play every task of a panel and score it."""

    panel: str
    """Name (newest version), full name, or path of a manifest; `turngym panel list` shows them."""
    player: Annotated[AgentOptions, tyro.conf.arg(name="")] = field(default_factory=AgentOptions)
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)
    samples: int = 4
    """Episodes per task."""
    out: Path | None = None
    """Folder for results.json and trace.jsonl; an interrupted evaluation with the same folder goes on."""
    limit: int | None = None
    """Play only the first so many tasks of the panel."""
    seed: int = 0
    """Same seed, same episodes, whatever the batch."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    max_turns: int | None = None
    """Turns before an episode is cut; by default the environment's own limit (50 for ALFWorld)."""
    make: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"engine": "textworld"}'."""
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    verify: bool = True
    """Check every task's hash against the panel before anything is played."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym eval` with `argv` (without the verb itself); status 1 if episodes ended in errors."""
    options = tyro.cli(Options, args=list(argv), prog="turngym eval", description=(__doc__ or "").split("\n")[0])
    result = run(options)
    runs = {str(result.settings["agent"]): result.scores}
    print_table(columns(success_table(runs), behavior_table(runs)), title=title(options, result))
    if result.scores.errors:
        print(f"{result.scores.errors} episodes ended in errors and are not counted; run again to play them again")
        return 1
    return 0


def run(options: Options) -> EvalResult:
    """Play, and write the files if a folder was named."""
    panel = load_panel(options.panel)
    overrides = json_object("--make", options.make)
    overrides |= {name: value for name in ("data", "max_turns") if (value := getattr(options, name)) is not None}
    tasks = panel.tasks if options.limit is None else panel.tasks[: options.limit]
    _check(panel, overrides, options)
    kwargs = {**panel.make_kwargs, **overrides}
    wired = open_agent(options.player, lambda: probe(panel.env_id, kwargs), options.servers)
    trace = None if options.out is None else options.out / "trace.jsonl"
    with open_workers(options.workers) as play:
        result = evaluate_tasks(
            panel if options.limit is None else tasks,
            env_maker(panel.env_id, **kwargs, channel=wired.channel),
            wired.agent,
            samples=options.samples,
            temperature=wired.temperature,
            seed=options.seed,
            slots=options.player.slots,
            trace=trace,
            system=wired.system,
            settings=_note(overrides, wired),
            progress=True,
            play=play,
        )
    for problem in result.problems:
        print(f"{trace}: skipped {problem}", file=sys.stderr)
    if options.out is not None:
        named = {"panel": panel.full_name, "panel_sha256": panel.sha256, "limit": options.limit}
        write_json(options.out / "results.json", {**result.to_json(), **named})
    return result


def title(options: Options, result: EvalResult) -> str:
    """What was measured, in one line."""
    first = "" if options.limit is None else f", first {options.limit} tasks"
    heat = result.settings["temperature"]
    return f"{options.panel}{first}: {options.samples} samples" + ("" if heat is None else f", temperature {heat:g}")


def _note(overrides: dict[str, Any], wired: OpenedAgent) -> dict[str, Any]:
    """What else the episodes depend on, besides panel, seed and agent name."""
    note: dict[str, Any] = {"make": {name: overrides[name] for name in sorted(overrides) if name != "data"}}
    if wired.channel is not None:
        note["channel"] = wired.channel
    if wired.fingerprint is not None:
        note["model"] = wired.fingerprint
    return note


def _check(panel: Panel, overrides: dict[str, Any], options: Options) -> None:
    if not options.verify:
        return
    env = panel.make_env(**overrides)
    try:
        problems = verify_panel(panel, env)
    finally:
        env.close()
    if problems:
        raise TurngymError(
            f"{len(problems)} of {len(panel.tasks)} tasks are not those of {panel.full_name}: {problems[0]}; get the "
            "data that the panel names (`turngym panel verify` lists every difference)"
        )
