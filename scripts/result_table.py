"""Many packed results as one table: a page that sorts and holds every episode, CSV, Markdown.

Results of one panel and preset stand together. Files NAME-seed0, NAME-seed1, ... are training seeds of one method, and
methods have a table of their own. Differences are paired by task and by training seed, where settings are the same.
"""

from __future__ import annotations

import base64
import csv
import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from turngym.agents.evaluation.compare import decisive, describe, differing, flat_settings
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result
from turngym.agents.evaluation.scores import check_hashes, task_means
from turngym.agents.evaluation.seeds import TaskMeans, over_seeds, rise
from turngym.agents.evaluation.statistics import Interval, ScoreError
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table, atomic_write, markdown

OVER_SEEDS = "Methods over their training seeds; intervals hold for new seeds and new tasks"
SEED = re.compile(r"(.+)-seed(\d+)")
TEMPLATE = Path(__file__).with_name("result_page.html")
HEADER = ["result", "success % [95 %]", "pass % [95 %]", "samples", "tasks", "turns", "invalid %", "cut %", "errors"]
HEADER += ["seed", "played by", "turngym", "date", "seal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Results of one panel and preset."""

    title: str
    results: Mapping[str, PackedResult]
    """By the name of their file, the most successful first."""

    def table(self) -> Table:
        """One row per result."""
        return HEADER, [_row(name, result) for name, result in self.results.items()]

    @property
    def methods(self) -> dict[str, dict[int, PackedResult]]:
        """The results by method and training seed, the most successful method first. Files NAME-seed0, NAME-seed1, ...
        are runs of the method NAME; any other file is a method with one run."""
        found: dict[str, dict[int, PackedResult]] = {}
        for name, result in self.results.items():
            seeded = SEED.fullmatch(name)
            found.setdefault(seeded[1] if seeded else name, {})[int(seeded[2]) if seeded else 0] = result
        return dict(sorted(found.items(), key=lambda row: -fmean(map(_success, row[1].values()))))

    def by_method(self) -> Table | None:
        """One row per method, over its training seeds; None where no method has more than one."""
        if len(self.methods) == len(self.results):
            return None
        rows = []
        for name, runs in self.methods.items():
            means = [task_means(result.episodes) for result in runs.values()]
            shared = set[str].intersection(*(set(run) for run in means))
            value = over_seeds([{task: run[task] for task in shared} for run in means])
            ends = [_success(result) for result in runs.values()]
            cells = [f"{100 * stdev(ends):.1f}" if len(ends) > 1 else "-"]
            cells += [f"{100 * edge:.1f}" for edge in (min(ends), max(ends))]
            turns = fmean(result.scores["turns"] for result in runs.values())
            rows.append([name, str(len(runs)), str(value), *cells, str(len(shared)), f"{turns:.1f}"])
        header = ["method", "training seeds", "success % [95 %]", "std of seeds", "least", "most", "tasks", "turns"]
        return header, rows

    def paired(self) -> tuple[Table, list[str]] | None:
        """Row minus column in points of success, paired by task and training seed, and notes on pairs that are not
        compared. None with fewer than two methods."""
        names, notes = list(self.methods), list[str]()
        if len(names) < 2:
            return None
        rows = []
        for name in names:
            cells = [self._difference(name, other, notes) if name != other else "" for other in names]
            rows.append([name, *cells])
        return (["row minus column", *names], rows), list(dict.fromkeys(notes))

    def _difference(self, name: str, other: str, notes: list[str]) -> str:
        before, after = self.methods[other], self.methods[name]
        if 1 in (len(before), len(after)):
            # who has one run, such as an expert, is compared with every seed of the other
            pairs = list(product(before.values(), after.values()))
        else:
            pairs = [(before[seed], after[seed]) for seed in sorted(before.keys() & after.keys())]
        try:
            return _paired(pairs)
        except ScoreError as error:
            notes.append(f"{min(name, other)} and {max(name, other)}: {error}")
            return "-"


def _success(result: PackedResult) -> float:
    return float(result.scores["overall"]["avg"]["mean"])


def _paired(pairs: Sequence[tuple[PackedResult, PackedResult]]) -> str:
    """Second minus first, one pair for each training seed, on the tasks that all of them played.

    Raises ScoreError where the settings differ, or too little was shared.
    """
    means: list[tuple[TaskMeans, TaskMeans]] = []
    for first, second in pairs:
        if theirs := decisive(differing(flat_settings(first.settings), flat_settings(second.settings))):
            raise ScoreError(f"played otherwise: {describe(theirs)}")
        check_hashes(*({one.task.task_id: one.task.sha256 for one in run.episodes} for run in (first, second)))
        means.append((task_means(first.episodes), task_means(second.episodes)))
    played = [set(run) for pair in means for run in pair]
    shared = set[str].intersection(*played) if played else set()
    if not shared:
        raise ScoreError("no task in common" if pairs else "no training seed in common")
    value = rise(*([{task: run[task] for task in shared} for run in side] for side in zip(*means, strict=True)))
    short = "" if all(tasks == shared for tasks in played) else f", {len(shared)} shared tasks"
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]{short}"


def read_folder(folder: Path) -> dict[str, PackedResult]:
    """The packed results in `folder` and below, by their path without suffix. Raises TurngymError if there is none."""
    paths = sorted(folder.rglob(f"*{SUFFIX}"))
    if not paths:
        raise TurngymError(f"{folder} holds no packed results (*{SUFFIX}); make them with `turngym result pack`")
    return {path.relative_to(folder).as_posix().removesuffix(SUFFIX): read_result(path) for path in paths}


def grouped(results: Mapping[str, PackedResult]) -> list[Group]:
    """The results by panel and preset."""
    found: dict[str, dict[str, PackedResult]] = {}
    for name, result in results.items():
        preset = result.settings.get("preset")
        title = str(result.settings["panel"]) + (f", preset {preset}" if preset else "")
        found.setdefault(title, {})[name] = result
    return [
        Group(title=title, results=dict(sorted(rows.items(), key=lambda row: -_success(row[1]))))
        for title, rows in sorted(found.items())
    ]


def _row(name: str, result: PackedResult) -> list[str]:
    settings, scores = result.settings, result.scores
    overall = scores["overall"]
    best = max(overall["pass_intervals"], key=int)
    cut = sum(scores["truncated"].values())
    cells = [name, str(Interval(**overall["avg"])), str(Interval(**overall["pass_intervals"][best]))]
    cells += [str(overall["samples"]), str(overall["avg"]["tasks"]), f"{scores['turns']:.1f}"]
    cells += [f"{100 * scores['invalid_rate']:.1f}", f"{100 * cut:.1f}", str(scores["errors"]), str(settings["seed"])]
    return [*cells, _agent(settings), result.versions.get("turngym", "-"), result.date[:10] or "-", result.seal[:12]]


def _agent(settings: Mapping[str, Any]) -> str:
    model, heat = settings.get("model"), settings.get("temperature")
    about = [text for text in (model and f"files {model}", heat is not None and f"temperature {heat:g}") if text]
    return f"{settings['agent']}" + (f" ({', '.join(about)})" if about else "")


# --- The page: tables as HTML, episodes as compressed JSON that the page unpacks when one is opened


def page(groups: Sequence[Group], title: str, folder: str) -> str:
    """One self-contained page; `folder` is where the packed files lie, seen from the page, which links to them."""
    body, data = [], []
    for group in groups:
        body.append(f"<h2>{escape(group.title)}</h2>")
        if (methods := group.by_method()) is not None:
            body.append(f"<h3>{OVER_SEEDS}</h3>{_html(methods)}<h3>Every run</h3>")
        body.append(_html(group.table(), folder))
        if (pairs := group.paired()) is not None:
            table, notes = pairs
            body.append(f"<h3>Paired differences, points of success [95 %]</h3>{_html(table)}")
            body += [f"<p>{escape(note)}</p>" for note in notes]
        for name, result in group.results.items():
            packed = base64.b64encode(gzip.compress(_episodes(result).encode(), 9, mtime=0)).decode()
            data.append(f'<script type="application/octet-stream" data-result="{escape(name)}">{packed}</script>')
    text = TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (("__TITLE__", escape(title)), ("__BODY__", "".join(body)), ("__DATA__", "\n".join(data))):
        text = text.replace(mark, value)
    return text


def _html(table: Table, folder: str | None = None) -> str:
    """The table; with a `folder` the first cell leads to the episodes and the last one to the packed file."""
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for row in rows:
        cells, place = [escape(cell) for cell in row], quote(row[0])
        if folder is not None:
            cells[0] = f'<a href="#{quote(row[0], safe="")}">{cells[0]}</a>'
            cells[-1] = f'<a href="{quote(folder)}/{place}{SUFFIX}" download>{cells[-1]}</a>'
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _episodes(result: PackedResult) -> str:
    """The episodes as JSON. Texts are listed once and named by their places: most observations occur many times."""
    texts: dict[str, int] = {}

    def place(text: str | None) -> int:
        return -1 if text is None else texts.setdefault(text, len(texts))

    rows = [
        [
            *(one.task.task_id, one.sample, one.task.category, one.status.value, one.success, one.score),
            [
                [place(turn.observation), place(turn.response), place(turn.action), turn.verdict.value, turn.reward]
                for turn in one.turns
            ],
            place(one.final_observation),
        ]
        for one in result.episodes
    ]
    return json.dumps({"episodes": rows, "texts": list(texts)}, separators=(",", ":"))


# --- Markdown and CSV


def as_markdown(groups: Sequence[Group], level: str = "##") -> str:
    """The tables in Markdown, each below a heading of this level."""
    parts = []
    for group in groups:
        methods = group.by_method()
        parts += [f"{level} {group.title}", *([] if methods is None else [markdown(methods)]), markdown(group.table())]
        if (pairs := group.paired()) is not None:
            parts += [markdown(pairs[0]), *pairs[1]]
    return "\n\n".join(parts) + "\n"


def as_rows(groups: Sequence[Group]) -> list[list[str]]:
    """All results as rows for a CSV file, numbers as they are; header first."""
    header = ["result", "panel", "panel_sha256", "preset", "agent", "model", "temperature", "seed", "samples", "tasks"]
    header += ["success", "low", "high", "turns", "invalid_rate", "errors", "turngym", "date", "sha256"]
    rows = [header]
    for group in groups:
        for name, result in group.results.items():
            own, scores = result.settings, result.scores
            average = scores["overall"]["avg"]
            named = [
                own.get(key) for key in ("panel", "panel_sha256", "preset", "agent", "model", "temperature", "seed")
            ]
            numbers = [own["samples"], average["tasks"], average["mean"], average["low"], average["high"]]
            numbers += [scores["turns"], scores["invalid_rate"], scores["errors"]]
            about = [result.versions.get("turngym"), result.date, result.seal]
            rows.append([name, *("" if value is None else str(value) for value in (*named, *numbers, *about))])
    return rows


def write_table(folder: Path, out: Path, title: str) -> list[Group]:
    """Writes index.html, results.md and results.csv into `out`, of the packed results in `folder`."""
    groups = grouped(read_folder(folder))
    with atomic_write(out / "index.html") as file:
        file.write(page(groups, title, os.path.relpath(folder, out)))
    with atomic_write(out / "results.md") as file:
        file.write(as_markdown(groups))
    with atomic_write(out / "results.csv") as file:
        csv.writer(file, lineterminator="\n").writerows(as_rows(groups))
    return groups
