"""Many packed results as one table: a page that sorts and holds every episode, CSV, Markdown.

Results of one panel and preset, scored alike, stand together. Files NAME-seed0, NAME-seed1, ... are training seeds of
one method, and methods have a table of their own. Differences are paired by task, where settings are the same; all of a
group are one family (Holm).
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from turngym.agents.evaluation.compare import decisive, describe, differences_of, no_seeds, responses_of, scripted
from turngym.agents.evaluation.departures import departures
from turngym.agents.evaluation.packed import inconsistencies
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result
from turngym.agents.evaluation.rules import deviations
from turngym.agents.evaluation.scores import APPROXIMATE, check_hashes, score, task_means
from turngym.agents.evaluation.seeds import Difference, in_family, over_seeds, rise, seed_spread
from turngym.agents.evaluation.statistics import Interval, ScoreError
from turngym.agents.play_spec import EnvPlayer, EvalSpec, OnPanel, Own, Random, RecordedAgent
from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.tables import Table, atomic_write, csv_text, filled, markdown, markup

OVER_SEEDS = "Methods over their training seeds; intervals hold for new seeds and new tasks"
PARTS_TITLE = "What the differences rest on: runs and tasks of both, standard errors by each in points"
SEED = re.compile(r"(.+)-seed(\d+)")
TEMPLATE = Path(__file__).with_name("result_page.html")
HEADER = ["result", "success % [95 %]", "pass % [95 %]", "samples", "tasks", "turns", "invalid %", "cut %", "errors"]
PLAYED_BY = "played by (as stated)"
HEADER += ["seed", PLAYED_BY, "turngym", "date", "seal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Results of one panel and preset, scored alike."""

    title: str
    results: Mapping[str, PackedResult]
    """Results by the name of their file, the most successful first."""

    def table(self) -> Table:
        """One row per result."""
        rows = [_row(name, result) for name, result in self.results.items()]
        header, place = list(HEADER), HEADER.index("samples")
        more = {"new_clusters": "new scenes, worlds, products [95 %]", "graded": "score [95 %]"}
        for key, title in more.items():
            if any(result.scores.get(key) for result in self.results.values()):
                header.insert(place, title)
                for row, result in zip(rows, self.results.values(), strict=True):
                    found = result.scores.get(key)
                    row.insert(place, "-" if found is None else str(Interval(**found)))
        if any(own := ["; ".join(deviations(result.spec)[1]) for result in self.results.values()]):
            header.insert(header.index(PLAYED_BY), "otherwise than the panel")
            for row, text in zip(rows, own, strict=True):
                row.insert(header.index(PLAYED_BY) - 1, text or "-")
        return header, rows

    def originals(self) -> list[str]:
        """A line for results that differ from the original in the same way: in what, and which results they are."""
        found: dict[str, list[str]] = {}
        for name, result in self.results.items():
            if (departs := departures(result.spec)) is not None:
                found.setdefault(departs.line, []).append(name)
        every = len(found) == 1 and len(next(iter(found.values()))) == len(self.results)
        return [line if every else f"{', '.join(names)}: {line}" for line, names in found.items()]

    def apart(self) -> dict[str, str]:
        """Method -> why its files are no training seeds of one method, so that each of them stands alone."""
        families: dict[str, list[str]] = {}
        for name in self.results:
            families.setdefault(_seeded(name)[0], []).append(name)
        return {method: why for method, names in families.items() if (why := self._no_method(names))}

    def _no_method(self, names: Sequence[str]) -> str:
        found: dict[int | None, str] = {}
        for name in names:
            seed = _seeded(name)[1]
            if seed in found:
                return f"{found[seed]} and {name} are both of training seed {seed}"
            found[seed] = name
        if None in found and len(found) > 1:
            other = next(name for name in names if name != found[None])
            return f"{found[None]} has no training seed in its name, and {other} has one"
        if not set.intersection(*({one.task.task_id for one in self.results[name].episodes} for name in names)):
            return f"{', '.join(names)} have no task in common"
        return no_seeds({name: (self.results[name].spec, responses_of(self.results[name].episodes)) for name in names})

    def lines(self) -> list[str]:
        """What is said below the table of all results."""
        alone = [f"{method}: not one method over training seeds: {why}" for method, why in self.apart().items()]
        return [*alone, *self.originals()]

    @property
    def methods(self) -> dict[str, dict[int, PackedResult]]:
        """The results by method and training seed, the most successful method first. Files NAME-seed0, NAME-seed1, ...
        are runs of the method NAME; any other file, and one that stands `apart`, is a method with one run."""
        found: dict[str, dict[int, PackedResult]] = {}
        apart = self.apart()
        for name, result in self.results.items():
            method, seed = _seeded(name)
            if method in apart or seed is None:
                method, seed = name, 0
            found.setdefault(method, {})[seed] = result
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
            spread = seed_spread([{task: run[task] for task in shared} for run in means])
            cells = ["-" if spread is None else f"{100 * spread:.1f}"]
            cells += [f"{100 * edge:.1f}" for edge in (min(ends), max(ends))]
            turns = fmean(result.scores["turns"] for result in runs.values())
            rows.append([name, str(len(runs)), str(value), *cells, str(len(shared)), f"{turns:.1f}"])
        header = [
            "method",
            "training seeds",
            "success % [95 %]",
            "std of seeds, chance taken out",
            "least",
            "most",
            "tasks",
            "turns",
        ]
        return header, rows

    def compared(self) -> tuple[dict[tuple[str, str], Difference], list[str]]:
        """(row, column) -> row minus column of all pairs of methods that can be compared, one family; and notes on
        those that cannot."""
        found, notes = dict[str, Difference](), list[str]()
        names = {f"{first} {second}": (first, second) for first, second in combinations(self.methods, 2)}
        for key, (first, second) in names.items():
            try:
                found[key] = self._difference(second, first)
            except ScoreError as error:
                notes.append(f"{min(first, second)} and {max(first, second)}: {error}")
        pairs = {names[key]: one for key, one in in_family(found).items()}
        return pairs | {(second, first): one.reversed() for (first, second), one in pairs.items()}, notes

    def _difference(self, before: str, after: str, by_cluster: bool = False) -> Difference:
        """`after` minus `before` over the tasks that all of their runs played. Of two methods with several training
        seeds those count that both have, or all where they share none; `by_cluster` for new scenes, worlds, products.

        Raises ScoreError where the settings differ, or too little was shared.
        """
        first, second = self.methods[before], self.methods[after]
        pair = False
        fixed = any(len(side) == 1 and scripted(next(iter(side.values())).spec) for side in (first, second))
        if 1 not in (len(first), len(second)):
            both = sorted(first.keys() & second.keys())
            if pair := len(both) > 1:
                first, second = ({seed: side[seed] for seed in both} for side in (first, second))
        runs = [*first.values(), *second.values()]
        for run in runs[1:]:
            if theirs := decisive(differences_of(runs[0].spec, run.spec)):
                raise ScoreError(f"played otherwise: {describe(theirs)}")
            check_hashes(runs[0].episodes, run.episodes)
        means = [task_means(run.episodes) for run in runs]
        shared = set[str].intersection(*map(set, means))
        if not shared:
            raise ScoreError("no task in common")
        cut = [{task: run[task] for task in shared} for run in means]
        clusters = {one.task.task_id: one.task.cluster or one.task.task_id for one in runs[0].episodes}
        known = clusters if by_cluster else None
        return rise(cut[: len(first)], cut[len(first) :], clusters=known, fixed=fixed, pair=pair, p=not by_cluster)

    def paired(self) -> tuple[Table, list[str]] | None:
        """Row minus column in points of success, paired by task, and notes. None with fewer than two methods."""
        names = list(self.methods)
        if len(names) < 2:
            return None
        found, notes = self.compared()
        fewer = [one for one in found.values() if one.tasks < max(each.tasks for each in found.values())]
        if fewer:
            notes.append(f"Some pairs share fewer tasks, {min(one.tasks for one in fewer)} at least.")
        rows = [[row, *("" if row == column else _cell(found.get((row, column))) for column in names)] for row in names]
        size = max((one.family for one in found.values()), default=0)
        notes = [f'"*": clear of zero in a family of {size} comparisons (Holm).', *notes] if size else notes
        return (["row minus column", *names], rows), list(dict.fromkeys(notes))

    def parts(self, p: bool = False) -> Table | None:
        """What each difference rests on: seeds and tasks of both, and the standard error by each, in points."""
        rows = [
            [
                *(f"{first} minus {second}", _cell(one), "{1} and {0}".format(*one.seeds), str(one.tasks)),
                *(_points(one.seed_error), _points(one.task_error), f"{100 * one.better:.0f}"),
                *(["-" if value is None else f"{value:.4f}" for value in (one.p, one.adjusted)] if p else []),
            ]
            for (first, second), one in self.compared()[0].items()
            if [*self.methods].index(first) < [*self.methods].index(second)
        ]
        if any(one.task.cluster for result in self.results.values() for one in result.episodes):
            for row in rows:
                first, _, second = row[0].partition(" minus ")
                row.insert(2, _cell(replace(self._difference(second, first, by_cluster=True), adjusted=1.0)))
            title = ["the same for new scenes, worlds, products"]
        else:
            title = []
        header = ["comparison", "points of success [95 %]", *title, "seeds", "tasks", "s.e. by seeds", "s.e. by tasks"]
        header += ["better in a task %", *(["p", "p (Holm)"] if p else [])]
        return (header, rows) if rows else None


def _seeded(name: str) -> tuple[str, int | None]:
    """Method and training seed of a result by the name of its file; a name without a seed is its own method."""
    seeded = SEED.fullmatch(name)
    return (seeded[1], int(seeded[2])) if seeded else (name, None)


def _success(result: PackedResult) -> float:
    return float(result.scores["overall"]["avg"]["mean"])


def _cell(found: Difference | None) -> str:
    if found is None:
        return "-"
    text = f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return text + (" *" if found.clear else ", one run each" if found.one_run_each else "")


def _points(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.1f}"


def read_folder(folder: Path, left_out: list[str] | None = None) -> dict[str, PackedResult]:
    """The packed results in `folder` and below, by their path without suffix.

    Raises TurngymError if there is none, and for one that cannot be read; a given `left_out` gets the reasons instead.
    """
    paths = sorted(folder.rglob(f"*{SUFFIX}"))
    if not paths:
        raise TurngymError(f"{folder} holds no packed results (*{SUFFIX}); make them with `turngym result pack`")
    found: dict[str, PackedResult] = {}
    for path in paths:
        try:
            found[path.relative_to(folder).as_posix().removesuffix(SUFFIX)] = _read(path)
        except TurngymError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
    if not found and left_out:
        raise TurngymError(left_out[0])
    return found


def _read(path: Path) -> PackedResult:
    """A packed result whose numbers are those of its episodes; who ended in an error has lost.

    Raises TurngymError where file and episodes contradict each other.
    """
    result = read_result(path)
    if wrong := inconsistencies(result):
        raise TurngymError(f"{path} is not consistent: {wrong[0]}; turngym result check {path} names all that differs")
    if not result.scores["errors"]:
        return result
    # left out, a loss that is called an error would lift the mean
    episodes = tuple(
        replace(one, success=False, score=0.0, status=Status.TRUNCATED_DEPTH) if one.status.is_error else one
        for one in result.episodes
    )
    counted = replace(score(episodes, result.spec.play), errors=result.scores["errors"])
    return replace(result, episodes=episodes, scores=json.loads(json.dumps(counted.to_json())))


def grouped(results: Mapping[str, PackedResult]) -> list[Group]:
    """The results by panel, preset and what the scores depend on besides."""
    found: dict[str, dict[str, PackedResult]] = {}
    for name, result in results.items():
        preset, scoring = result.spec.preset, result.spec.play.scoring
        title = panel_name(result.spec) + (f", preset {preset}" if preset else "")
        if why := scoring.get(APPROXIMATE):
            title += f", scores approximate ({why})"
        elif (tagger := scoring.get("scored_with")) is not None:
            title += f", scored with {tagger}"
        # what scores otherwise is another game: its own table, never a row among the panel's
        title += "".join(f", {text}" for text in deviations(result.spec)[0])
        found.setdefault(title, {})[name] = result
    return [
        Group(title=title, results=dict(sorted(rows.items(), key=lambda row: -_success(row[1]))))
        for title, rows in sorted(found.items())
    ]


def panel_name(spec: EvalSpec) -> str:
    """The panel of a result."""
    return spec.play.tasks.panel if isinstance(spec.play.tasks, OnPanel) else "no panel"


def _row(name: str, result: PackedResult) -> list[str]:
    play, scores = result.spec.play, result.scores
    overall = scores["overall"]
    best = max(overall["pass_intervals"], key=int)
    cut = sum(scores["truncated"].values())
    mark = "~" if APPROXIMATE in play.scoring else ""
    cells = [name, *(f"{mark}{Interval(**row)}" for row in (overall["avg"], overall["pass_intervals"][best]))]
    cells += [str(overall["samples"]), str(overall["avg"]["tasks"]), f"{scores['turns']:.1f}"]
    cells += [f"{100 * scores['invalid_rate']:.1f}", f"{100 * cut:.1f}", str(scores["errors"]), str(play.seed)]
    return [*cells, _agent(result), result.versions.get("turngym", "-"), result.date[:10] or "-", result.seal[:12]]


def _agent(result: PackedResult) -> str:
    agent = result.spec.agent
    weights, temperature = getattr(agent, "weights", ""), getattr(agent, "temperature", None)
    about = (
        [f"files {weights}"]
        if weights
        else []
        if isinstance(agent, EnvPlayer | Random | RecordedAgent)
        else ["no fingerprint"]
    )
    about += [f"opened as {agent.name}"] if isinstance(agent, Own) else []
    about += [] if temperature is None else [f"temperature {temperature:g}"]
    return f"{result.agent or '-'}" + (f" ({', '.join(about)})" if about else "")


# --- The page: tables as HTML, episodes as compressed JSON that the page unpacks when one is opened


def page(groups: Sequence[Group], title: str, folder: str, p: bool = False) -> str:
    """One self-contained page.

    Args:
        groups: results by table, as `grouped` makes them.
        title: heading of the page.
        folder: path of the packed files relative to the page, which links to them.
        p: whether the table of what differences rest on has p-values.
    """
    body, data = [], []
    for group in groups:
        body.append(f"<h2>{markup(group.title, 'html')}</h2>")
        if (methods := group.by_method()) is not None:
            body.append(f"<h3>{OVER_SEEDS}</h3>{_html(methods)}<h3>Every run</h3>")
        body.append(_html(group.table(), folder))
        body += [f"<p>{markup(line, 'html')}</p>" for line in group.lines()]
        if (pairs := group.paired()) is not None:
            table, notes = pairs
            body.append(f"<h3>Paired differences, points of success [95 %]</h3>{_html(table)}")
            body += [f"<p>{markup(note, 'html')}</p>" for note in notes]
            if (parts := group.parts(p)) is not None:
                body.append(f"<h3>{PARTS_TITLE}</h3>{_html(parts)}")
        for name, result in group.results.items():
            packed = base64.b64encode(gzip.compress(_episodes(result).encode(), 9, mtime=0)).decode()
            data.append(
                f'<script type="application/octet-stream" data-result="{markup(name, "html")}">{packed}</script>'
            )
    values = {"__TITLE__": markup(title, "html"), "__BODY__": "".join(body), "__DATA__": "\n".join(data)}
    return filled(TEMPLATE.read_text(encoding="utf-8"), values)


def _html(table: Table, folder: str | None = None) -> str:
    """The table; with a `folder` the first cell leads to the episodes and the last one to the packed file."""
    header, rows = table
    head = "".join(f"<th>{markup(cell, 'html')}</th>" for cell in header)
    lines = []
    for row in rows:
        cells, place = [markup(cell, "html") for cell in row], quote(row[0])
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


def as_markdown(groups: Sequence[Group], level: str = "##", p: bool = False) -> str:
    """The tables in Markdown, each below a heading of this level."""
    parts = []
    for group in groups:
        methods = group.by_method()
        parts += [
            f"{level} {markup(group.title, 'markdown')}",
            *([] if methods is None else [markdown(methods)]),
            markdown(group.table()),
            *(markup(line, "markdown") for line in group.lines()),
        ]
        if (pairs := group.paired()) is not None:
            parts += [markdown(pairs[0]), *(markup(note, "markdown") for note in pairs[1])]
            if (rests := group.parts(p)) is not None:
                parts += [f"{PARTS_TITLE}.", markdown(rests)]
    return "\n\n".join(parts) + "\n"


def as_rows(groups: Sequence[Group]) -> list[list[str]]:
    """All results as rows for a CSV file, numbers as they are; header first."""
    header = ["result", "panel", "panel_sha256", "preset", "scored_with", "approximate", "agent", "model"]
    header += ["player", "temperature", "seed", "deviations", "samples", "tasks"]
    header += ["success", "low", "high", "turns", "invalid_rate", "errors", "turngym", "date", "sha256"]
    rows = [header]
    for group in groups:
        for name, result in group.results.items():
            spec, scores = result.spec, result.scores
            play, agent, average = spec.play, spec.agent, scores["overall"]["avg"]
            panel = play.tasks if isinstance(play.tasks, OnPanel) else None
            named: list[Any] = [None, None] if panel is None else [panel.panel, panel.sha256]
            named += [spec.preset, play.scoring.get("scored_with"), play.scoring.get(APPROXIMATE), result.agent]
            named += [getattr(agent, "weights", None), agent.name if isinstance(agent, Own) else None]
            named += [getattr(agent, "temperature", None), play.seed]
            named.append("; ".join(text for part in deviations(spec) for text in part))
            numbers = [play.samples, average["tasks"], average["mean"], average["low"], average["high"]]
            numbers += [scores["turns"], scores["invalid_rate"], scores["errors"]]
            about = [result.versions.get("turngym"), result.date, result.seal]
            rows.append([name, *("" if value is None else str(value) for value in (*named, *numbers, *about))])
    return rows


def write_table(folder: Path, out: Path, title: str, p: bool = False) -> tuple[list[Group], int]:
    """Writes index.html, results.md and results.csv into `out`, of the packed results in `folder`.

    Returns the tables, and how many files are not in them. Standard error says of each of those why.

    Args:
        folder: the packed results; subfolders are read, too.
        out: folder of the three files.
        title: heading of index.html.
        p: whether the tables of what differences rest on have p-values.
    """
    left_out: list[str] = []
    results = read_folder(folder, left_out)
    for line in left_out:
        print(f"turngym: left out: {line}", file=sys.stderr)
    groups = grouped(results)
    with atomic_write(out / "index.html") as file:
        file.write(page(groups, title, os.path.relpath(folder, out), p))
    with atomic_write(out / "results.md") as file:
        file.write(as_markdown(groups, p=p))
    with atomic_write(out / "results.csv") as file:
        file.write(csv_text(as_rows(groups)))
    return groups, len(left_out)
