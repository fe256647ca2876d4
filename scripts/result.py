"""Results that others can check: pack an evaluation into one file, check such a file, make a table of many.

Examples:
    turngym result pack runs/student/eval --out student.result.xz
    turngym result check student.result.xz
    turngym result check student.result.xz --agent model:runs/student
    turngym result table results --out table
    turngym result export student.result.xz --to inspect --out logs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from turngym.agents.adapters import every_eval_ever, hub_results, inspect_log
from turngym.agents.evaluation.packed import check_result, inconsistencies, pack_result, packed, play_again
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result, read_sealed
from turngym.agents.evaluation.rules import deviations
from turngym.core.errors import TurngymError
from turngym.core.numbers import Count
from turngym.core.setting import Positional
from turngym.core.spec import Spec, Unread, needing
from turngym.core.strict_json import json_object
from turngym.core.tables import visible
from turngym.scripts.options import run_verb
from turngym.scripts.result_table import as_markdown, write_table

MOST_LINES = 20
"""Differences that are printed."""


class Pack(Spec):
    """Pack a finished evaluation on a panel, after playing its recorded responses once more."""

    run: Positional[Path]
    """Folder of an evaluation, or its trace."""
    out: Path
    """The file to write; its name ends in .result.xz."""
    panel: str | None = None
    """The panel, if it does not come with turngym: package:name, or its manifest. A file is not asked where it is."""
    data: Path | None = None
    """Folder of the environment's data; by default where the environment looks for it."""
    env_kwargs: str = "{}"
    """Arguments of gym.make that are not taken from a file, as JSON, for example '{"retriever": "http://..."}'."""


class CheckingPlayer(Spec):
    """Who plays the tasks of a result again."""

    name: str
    """The agent: model:FOLDER, ..."""
    tasks: Count | None = None
    """Play only the first so many tasks."""


class Check(Spec):
    """Play the recorded responses of packed results again and compare: observations, actions, verdicts, outcomes,
    table. Exit status 1 if anything differs."""

    files: Positional[tuple[Path, ...]]
    """Packed results."""
    panel: str | None = None
    """The panel, if it does not come with turngym: package:name, or its manifest. A file is not asked where it is."""
    data: Path | None = None
    """Folder of the environment's data; by default where the environment looks for it."""
    env_kwargs: str = "{}"
    """Arguments of gym.make that are not taken from a file, as JSON, for example '{"retriever": "http://..."}'."""
    agent: CheckingPlayer | None = None
    """Also let this agent play (model:FOLDER, ...) and compare its responses. Who has the model can tell whether it
    chose these actions."""


class Table(Spec):
    """Make a page, a CSV and a Markdown file of all packed results in a folder. Exit status 1 if one cannot be read."""

    folder: Positional[Path]
    """Folder with *.result.xz, searched with all folders below it."""
    out: Path = Path("results-table")
    """Folder for index.html (one file that holds every episode), results.csv and results.md."""
    title: str = "Results"
    """Heading of the page."""
    p: bool = False
    """Also p-values of the differences, alone and in their family (Holm)."""


class Export(Spec):
    """Write a result in a format of others: Every Eval Ever, the Hugging Face Hub's, or a log of Inspect."""

    result: Positional[Path]
    """A packed result, or the folder or trace of an evaluation."""
    to: Literal["every-eval-ever", "hf-eval-results", "inspect"]
    """Which format. `inspect` needs the extra of that name."""
    out: Path
    """Folder for the files."""
    model: str = ""
    """every-eval-ever: the model's id on the Hub, ORGANIZATION/NAME."""
    organization: str = ""
    """every-eval-ever: who evaluated."""
    relationship: every_eval_ever.Relationship = "other"
    """every-eval-ever: of who evaluated to who made the model."""
    dataset: str = ""
    """hf-eval-results: id of the benchmark's data set on the Hub, ORGANIZATION/NAME."""

    def unread(self) -> Unread:
        if self.to != "every-eval-ever":
            yield from needing("--to every-eval-ever", "model", "organization", "relationship")
        if self.to != "hf-eval-results":
            yield from needing("--to hf-eval-results", "dataset")


def main(argv: Sequence[str]) -> int:
    """Run `turngym result` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {Pack: pack, Check: check, Table: table, Export: export}
    return run_verb(verbs, argv, prog="turngym result", about=__doc__)


def pack(options: Pack) -> int:
    if not options.out.name.endswith(SUFFIX):
        raise TurngymError(f"--out is {options.out}; the name of a packed result ends in {SUFFIX}")
    kwargs = json_object("--env-kwargs", options.env_kwargs)
    result = pack_result(options.run, options.out, panel=options.panel, data=options.data, env_kwargs=kwargs)
    size = options.out.stat().st_size
    print(f"{options.out}: {len(result.episodes)} episodes in {size:,} bytes, checked{_otherwise(result)}")
    return 0


def check(options: Check) -> int:
    failed, kwargs = 0, json_object("--env-kwargs", options.env_kwargs)
    for path in options.files:
        start = time.monotonic()
        result = read_result(path)
        differences = check_result(result, panel=options.panel, data=options.data, env_kwargs=kwargs)
        # who lacks episodes, or has others, has nothing to be compared with
        if options.agent is not None and not inconsistencies(result):
            differences += play_again(
                result, options.agent.name, tasks=options.agent.tasks, panel=options.panel, env_kwargs=kwargs
            )
        turns = sum(episode.depth for episode in result.episodes)
        seconds = time.monotonic() - start
        verdict = f"{len(differences)} differences" if differences else f"as recorded, {result.seal[:12]}"
        size = f"{len(result.episodes)} episodes, {turns} turns, {seconds:.1f} s"
        print(f"{path}: {verdict} ({size}){_otherwise(result)}")
        print("".join(f"  {visible(line)}\n" for line in differences[:MOST_LINES]), end="")
        if len(differences) > MOST_LINES:
            print(f"  and {len(differences) - MOST_LINES} more")
        failed += bool(differences)
    return 1 if failed else 0


def _otherwise(result: PackedResult) -> str:
    """The notes that a table will print besides the numbers."""
    apart, deviating = deviations(result.spec)
    errors = sum(episode.status.is_error for episode in result.episodes)
    lines = [*(f"no result of its panel: {text}" for text in apart), *deviating]
    lines += [f"{errors} episodes ended in an error and count as lost in tables"] if errors else []
    return "".join(f"\n  otherwise than the panel: {visible(text)}" for text in lines)


def table(options: Table) -> int:
    groups, left_out = write_table(options.folder, options.out, options.title, options.p)
    print(as_markdown(groups, p=options.p))
    print(f"written to {options.out}; open {options.out / 'index.html'} in a browser")
    return 1 if left_out else 0


def export(options: Export) -> int:
    path = options.result
    result = read_sealed(path) if path.name.endswith(SUFFIX) else packed(path)
    if options.to == "inspect":
        written, lacks = inspect_log.write(result, options.out), inspect_log.LACKS
    elif options.to == "hf-eval-results":
        written, lacks = hub_results.write(result, options.out, dataset=options.dataset), hub_results.LACKS
    else:
        if not options.organization.strip():
            raise TurngymError("--organization is missing: the format asks who evaluated")
        written = every_eval_ever.write(
            result,
            options.out,
            model=options.model,
            organization=options.organization,
            relationship=options.relationship,
        )
        lacks = every_eval_ever.LACKS
    print("\n".join(map(str, written)))
    print(f"the format cannot hold everything: {lacks}")
    return 0
