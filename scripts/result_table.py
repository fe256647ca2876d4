"""Many packed results as one table: a page that sorts and holds every episode, CSV, Markdown.

Results of one panel and preset stand together. Where two played the same tasks in the same settings, their difference
is paired by task.
"""

from __future__ import annotations

import base64
import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.compare import decisive, describe, differing, flat_settings
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result
from turngym.agents.evaluation.scores import compare
from turngym.agents.evaluation.statistics import Interval, ScoreError
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table, atomic_write, markdown

TEMPLATE = Path(__file__).with_name("result_page.html")
HEADER = ["result", "success % [95 %]", "pass % [95 %]", "samples", "tasks", "turns", "invalid %", "cut %", "errors"]
HEADER += ["seed", "played by", "turngym", "date", "seal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Results of one panel and preset, the most successful first."""

    title: str
    results: Mapping[str, PackedResult]
    """By the name of their file."""

    def table(self) -> Table:
        """One row per result."""
        return HEADER, [_row(name, result) for name, result in self.results.items()]

    def paired(self) -> tuple[Table, list[str]] | None:
        """Row minus column in points of success, paired by task, and notes on pairs that are not compared.

        None with fewer than two results.
        """
        names, notes = list(self.results), list[str]()
        if len(names) < 2:
            return None
        rows = []
        for name in names:
            cells = [self._difference(name, other, notes) if name != other else "" for other in names]
            rows.append([name, *cells])
        return (["row minus column", *names], rows), list(dict.fromkeys(notes))

    def _difference(self, name: str, other: str, notes: list[str]) -> str:
        first, second = self.results[other], self.results[name]
        if theirs := decisive(differing(flat_settings(first.settings), flat_settings(second.settings))):
            notes.append(f"{min(name, other)} and {max(name, other)} were played otherwise: {describe(theirs)}")
            return "-"
        try:
            value = compare(first.episodes, second.episodes)
        except ScoreError as error:
            notes.append(f"{min(name, other)} and {max(name, other)}: {error}")
            return "-"
        return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


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
        Group(title=title, results=dict(sorted(rows.items(), key=lambda row: -row[1].scores["overall"]["avg"]["mean"])))
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


def page(groups: Sequence[Group], title: str) -> str:
    """One self-contained page."""
    body, data = [], []
    for group in groups:
        body.append(f"<h2>{escape(group.title)}</h2>{_html(group.table(), links=True)}")
        if (pairs := group.paired()) is not None:
            table, notes = pairs
            body.append(f"<h3>Paired differences, points of success [95 %]</h3>{_html(table, links=False)}")
            body += [f"<p>{escape(note)}</p>" for note in notes]
        for name, result in group.results.items():
            packed = base64.b64encode(gzip.compress(_episodes(result).encode(), 9, mtime=0)).decode()
            data.append(f'<script type="application/octet-stream" data-result="{escape(name)}">{packed}</script>')
    text = TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (("__TITLE__", escape(title)), ("__BODY__", "".join(body)), ("__DATA__", "\n".join(data))):
        text = text.replace(mark, value)
    return text


def _html(table: Table, *, links: bool) -> str:
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for name, *cells in rows:
        shown = f'<a href="#{escape(name)}">{escape(name)}</a>' if links else escape(name)
        lines.append("".join(f"<td>{cell}</td>" for cell in (shown, *map(escape, cells))))
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
        parts += [f"{level} {group.title}", markdown(group.table())]
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
        file.write(page(groups, title))
    with atomic_write(out / "results.md") as file:
        file.write(as_markdown(groups))
    with atomic_write(out / "results.csv") as file:
        csv.writer(file, lineterminator="\n").writerows(as_rows(groups))
    return groups
