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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from turngym.agents.evaluation.compare import decisive, describe, differences_of, no_seeds, responses_of, scripted
from turngym.agents.evaluation.departures import departures
from turngym.agents.evaluation.packed import inconsistencies
from turngym.agents.evaluation.packed_file import SUFFIX, PackedResult, read_result
from turngym.agents.evaluation.rules import deviations
from turngym.agents.evaluation.scores import APPROXIMATE, check_hashes, score, task_means
from turngym.agents.evaluation.seeds import (
    NEW_CLUSTERS,
    Difference,
    in_family,
    over_seeds,
    points,
    rise,
    seed_spread,
    signed,
)
from turngym.agents.evaluation.statistics import Interval, ScoreError
from turngym.agents.play_spec import EnvPlayer, EvalSpec, OnPanel, Own, Random, RecordedAgent
from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.tables import Table, csv_text, filled, markdown, markup, table_of
from turngym.core.whole_files import atomic_write

OVER_SEEDS = "Methods over their training seeds; intervals hold for new seeds and new tasks"
PARTS_TITLE = "What the differences rest on: runs and tasks of both, standard errors by each in points"
SEED = re.compile(r"(.+)-seed(\d+)")
TEMPLATE = Path(__file__).with_name("result_page.html")
EXTRAS = {"graded": "score [95 %]", "new_clusters": "new scenes, worlds, products [95 %]"}
"""Scores that not every panel has, and their columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Results of one panel and preset, scored alike."""

    title: str
    results: Mapping[str, PackedResult]
    """Results by the name of their file, the most successful first."""

    def table(self) -> Table:
        results = self.results.values()
        extras = {key: title for key, title in EXTRAS.items() if any(result.scores.get(key) for result in results)}
        otherwise = {name: "; ".join(deviations(result.spec)[1]) for name, result in self.results.items()}
        rows = []
        for name, result in self.results.items():
            play, scores = result.spec.play, result.scores
            overall = scores["overall"]
            mark = "~" if APPROXIMATE in play.scoring else ""
            best = overall["pass_intervals"][max(overall["pass_intervals"], key=int)]
            others = {title: str(Interval(**scores[key])) if scores.get(key) else "-" for key, title in extras.items()}
            rows.append(
                {
                    "result": name,
                    "success % [95 %]": f"{mark}{Interval(**overall['avg'])}",
                    "pass % [95 %]": f"{mark}{Interval(**best)}",
                    **others,
                    "samples": str(overall["samples"]),
                    "tasks": str(overall["avg"]["tasks"]),
                    "turns": f"{scores['turns']:.1f}",
                    "invalid %": f"{100 * scores['invalid_rate']:.1f}",
                    "cut %": f"{100 * sum(scores['truncated'].values()):.1f}",
                    "errors": str(scores["errors"]),
                    "seed": str(play.seed),
                    **({"otherwise than the panel": otherwise[name] or "-"} if any(otherwise.values()) else {}),
                    "played by (as stated)": _agent(result),
                    "turngym": result.versions.get("turngym", "-"),
                    "date": result.date[:10] or "-",
                    "seal": result.seal[:12],
                }
            )
        return table_of(rows)

    def originals(self) -> list[str]:
        """A line for results that differ from the original in the same way: in what, and which results they are."""
        by_line: dict[str, list[str]] = {}
        for name, result in self.results.items():
            if (departs := departures(result.spec)) is not None:
                by_line.setdefault(departs.line, []).append(name)
        every = len(by_line) == 1 and len(next(iter(by_line.values()))) == len(self.results)
        return [line if every else f"{', '.join(names)}: {line}" for line, names in by_line.items()]

    def apart(self) -> dict[str, str]:
        """Method -> why its files are no training seeds of one method, so that each of them stands alone."""
        families: dict[str, list[str]] = {}
        for name in self.results:
            families.setdefault(_seeded(name)[0], []).append(name)
        return {method: why for method, names in families.items() if (why := self._no_method(names))}

    def _no_method(self, names: Sequence[str]) -> str:
        by_seed: dict[int | None, str] = {}
        for name in names:
            seed = _seeded(name)[1]
            if seed in by_seed:
                return f"{by_seed[seed]} and {name} are both of training seed {seed}"
            by_seed[seed] = name
        if None in by_seed and len(by_seed) > 1:
            seeded = next(name for name in names if name != by_seed[None])
            return f"{by_seed[None]} has no training seed in its name, and {seeded} has one"
        if not set.intersection(*({episode.task.task_id for episode in self.results[name].episodes} for name in names)):
            return f"{', '.join(names)} have no task in common"
        return no_seeds({name: (self.results[name].spec, responses_of(self.results[name].episodes)) for name in names})

    def lines(self) -> list[str]:
        """The notes below the table of all results."""
        alone = [f"{method}: not one method over training seeds: {why}" for method, why in self.apart().items()]
        return [*alone, *self.originals()]

    @property
    def methods(self) -> dict[str, dict[int, PackedResult]]:
        """The results by method and training seed, the most successful method first. Files NAME-seed0, NAME-seed1, ...
        are runs of the method NAME; any other file, and one that stands `apart`, is a method with one run."""
        by_method: dict[str, dict[int, PackedResult]] = {}
        apart = self.apart()
        for name, result in self.results.items():
            method, seed = _seeded(name)
            if method in apart or seed is None:
                method, seed = name, 0
            by_method.setdefault(method, {})[seed] = result
        return dict(sorted(by_method.items(), key=lambda row: -fmean(map(_success, row[1].values()))))

    def by_method(self) -> Table | None:
        """One row per method, over its training seeds; None where no method has more than one."""
        methods = self.methods
        if len(methods) == len(self.results):
            return None
        rows = []
        for name, runs in methods.items():
            means = _shared([task_means(result.episodes) for result in runs.values()])
            ends = [_success(result) for result in runs.values()]
            rows.append(
                {
                    "method": name,
                    "training seeds": str(len(runs)),
                    "success % [95 %]": str(over_seeds(means)),
                    "std of seeds, chance taken out": points(seed_spread(means)),
                    "least": points(min(ends)),
                    "most": points(max(ends)),
                    "tasks": str(len(means[0])),
                    "turns": f"{fmean(result.scores['turns'] for result in runs.values()):.1f}",
                }
            )
        return table_of(rows)

    def compared(self) -> tuple[dict[tuple[str, str], Difference], list[str]]:
        """(one, other) -> one minus other of all pairs of methods that can be compared, the more successful one first,
        as one family; and notes on those that cannot."""
        differences, notes = dict[str, Difference](), list[str]()
        names = {f"{first} {second}": (first, second) for first, second in combinations(self.methods, 2)}
        for key, (first, second) in names.items():
            try:
                differences[key] = self._difference(second, first)
            except ScoreError as error:
                notes.append(f"{min(first, second)} and {max(first, second)}: {error}")
        return {names[key]: difference for key, difference in in_family(differences).items()}, notes

    def _difference(self, before: str, after: str, by_cluster: bool = False) -> Difference:
        """`after` minus `before` over the tasks that all of their runs played. Of two methods with several training
        seeds those count that both have, or all where they share none; `by_cluster` for new scenes, worlds, products.

        Raises ScoreError where the settings differ, or too little was shared.
        """
        first, second = self.methods[before], self.methods[after]
        pair = False
        fixed = any(len(side) == 1 and scripted(next(iter(side.values())).spec) for side in (first, second))
        if 1 not in (len(first), len(second)):
            shared = sorted(first.keys() & second.keys())
            if pair := len(shared) > 1:
                first, second = ({seed: side[seed] for seed in shared} for side in (first, second))
        runs = [*first.values(), *second.values()]
        for run in runs[1:]:
            if theirs := decisive(differences_of(runs[0].spec, run.spec)):
                raise ScoreError(f"played otherwise: {describe(theirs)}")
            check_hashes(runs[0].episodes, run.episodes)
        means = _shared([task_means(run.episodes) for run in runs])
        tasks = [episode.task for episode in runs[0].episodes]
        clusters = {task.task_id: task.cluster or task.task_id for task in tasks} if by_cluster else None
        sides = means[: len(first)], means[len(first) :]
        return rise(*sides, clusters=clusters, fixed=fixed, pair=pair, p=not by_cluster)

    def paired(self) -> tuple[Table, list[str]] | None:
        """Row minus column in points of success, paired by task, and notes. None with fewer than two methods."""
        names = list(self.methods)
        if len(names) < 2:
            return None
        differences, notes = self.compared()
        tasks = [difference.tasks for difference in differences.values()]
        if tasks and min(tasks) < max(tasks):
            notes.append(f"Some pairs share fewer tasks, {min(tasks)} at least.")
        if size := max((difference.family for difference in differences.values()), default=0):
            notes.insert(0, f'"*": clear of zero in a family of {size} comparison{"s" if size > 1 else ""} (Holm).')
        differences |= {(second, first): difference.reversed() for (first, second), difference in differences.items()}
        rows = []
        for row in names:
            cells = ("" if column == row else signed(differences.get((row, column))) for column in names)
            rows.append([row, *cells])
        return (["row minus column", *names], rows), list(dict.fromkeys(notes))

    def parts(self, p: bool = False) -> Table | None:
        """The table of what each difference rests on: seeds and tasks of both, and the standard error by each, in
        points."""
        clusters = any(episode.task.cluster for result in self.results.values() for episode in result.episodes)
        rows = []
        for (first, second), difference in self.compared()[0].items():
            cells = {"comparison": f"{first} minus {second}", "points of success [95 %]": signed(difference)}
            if clusters:
                wider = replace(self._difference(second, first, by_cluster=True), adjusted=1.0)
                cells[f"the same {NEW_CLUSTERS}"] = signed(wider)
            cells |= {"seeds": "{1} and {0}".format(*difference.seeds), "tasks": str(difference.tasks)}
            cells |= {"s.e. by seeds": points(difference.seed_error), "s.e. by tasks": points(difference.task_error)}
            cells["better in a task %"] = f"{100 * difference.better:.0f}"
            if p:
                values = {"p": difference.p, "p (Holm)": difference.adjusted}
                cells |= {name: "-" if value is None else f"{value:.4f}" for name, value in values.items()}
            rows.append(cells)
        return table_of(rows) if rows else None

    def blocks(self, p: bool) -> Iterator[tuple[str, Table, list[str]]]:
        """The blocks of a page: headings, the tables below them, and their notes."""
        methods = self.by_method()
        if methods is not None:
            yield OVER_SEEDS, methods, []
        yield "Every run" if methods is not None else "", self.table(), self.lines()
        if (pairs := self.paired()) is not None:
            yield "Paired differences, points of success [95 %]", *pairs
            if (parts := self.parts(p)) is not None:
                yield PARTS_TITLE, parts, []


def _shared(runs: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The means of the tasks that all runs have. Raises ScoreError where there is none."""
    shared = set[str].intersection(*map(set, runs))
    if not shared:
        raise ScoreError("no task in common")
    return [{task: run[task] for task in shared} for run in runs]


def _seeded(name: str) -> tuple[str, int | None]:
    """Method and training seed of a result by the name of its file; a name without a seed is its own method."""
    seeded = SEED.fullmatch(name)
    return (seeded[1], int(seeded[2])) if seeded else (name, None)


def _success(result: PackedResult) -> float:
    return float(result.scores["overall"]["avg"]["mean"])


def read_folder(folder: Path, left_out: list[str] | None = None) -> dict[str, PackedResult]:
    """The packed results in `folder` and below, by their path without suffix.

    Raises TurngymError if there is none, and for one that cannot be read; a given `left_out` gets the reasons instead.
    """
    paths = sorted(folder.rglob(f"*{SUFFIX}"))
    if not paths:
        raise TurngymError(f"{folder} holds no packed results (*{SUFFIX}); make them with `turngym result pack`")
    results: dict[str, PackedResult] = {}
    for path in paths:
        try:
            results[path.relative_to(folder).as_posix().removesuffix(SUFFIX)] = _read(path)
        except TurngymError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
    if not results and left_out:
        raise TurngymError(left_out[0])
    return results


def _read(path: Path) -> PackedResult:
    """A packed result whose numbers are recomputed from its episodes. Episodes that ended in an error count as lost.

    Raises TurngymError where file and episodes contradict each other.
    """
    result = read_result(path)
    if wrong := inconsistencies(result):
        raise TurngymError(f"{path} is not consistent: {wrong[0]}; turngym result check {path} names all that differs")
    if not result.scores["errors"]:
        return result
    # left out, a loss that is called an error would lift the mean
    episodes = tuple(
        replace(episode, success=False, score=0.0, status=Status.TRUNCATED_DEPTH)
        if episode.status.is_error
        else episode
        for episode in result.episodes
    )
    counted = replace(score(episodes, result.spec.play), errors=result.scores["errors"])
    return replace(result, episodes=episodes, scores=json.loads(json.dumps(counted.to_json())))


def grouped(results: Mapping[str, PackedResult]) -> list[Group]:
    """The results by panel, preset and what the scores depend on besides."""
    groups: dict[str, dict[str, PackedResult]] = {}
    for name, result in results.items():
        preset, scoring = result.spec.preset, result.spec.play.scoring
        title = panel_name(result.spec) + (f", preset {preset}" if preset else "")
        if why := scoring.get(APPROXIMATE):
            title += f", scores approximate ({why})"
        elif (tagger := scoring.get("scored_with")) is not None:
            title += f", scored with {tagger}"
        # what scores otherwise is another game: its own table, never a row among the panel's
        title += "".join(f", {text}" for text in deviations(result.spec)[0])
        groups.setdefault(title, {})[name] = result
    return [
        Group(title=title, results=dict(sorted(rows.items(), key=lambda row: -_success(row[1]))))
        for title, rows in sorted(groups.items())
    ]


def panel_name(spec: EvalSpec) -> str:
    return spec.play.tasks.panel if isinstance(spec.play.tasks, OnPanel) else "no panel"


def _agent(result: PackedResult) -> str:
    agent, about = result.spec.agent, list[str]()
    if weights := getattr(agent, "weights", ""):
        about.append(f"files {weights}")
    elif not isinstance(agent, EnvPlayer | Random | RecordedAgent):
        about.append("no fingerprint")
    if isinstance(agent, Own):
        about.append(f"opened as {agent.name}")
    if (temperature := getattr(agent, "temperature", None)) is not None:
        about.append(f"temperature {temperature:g}")
    return (result.agent or "-") + (f" ({', '.join(about)})" if about else "")


# --- The page: tables as HTML, episodes as compressed JSON that the page unpacks when one is opened


def page(groups: Sequence[Group], title: str, folder: str, p: bool = False) -> str:
    """One self-contained page. It links to the packed files in `folder`, a path relative to the page."""
    body, data = [], []
    for group in groups:
        body.append(f"<h2>{markup(group.title, 'html')}</h2>")
        for heading, table, notes in group.blocks(p):
            body += [f"<h3>{heading}</h3>"] if heading else []
            body.append(_html(table, folder if table[0][0] == "result" else None))
            body += [f"<p>{markup(note, 'html')}</p>" for note in notes]
        for name, result in group.results.items():
            packed = base64.b64encode(gzip.compress(_episodes(result).encode(), 9, mtime=0)).decode()
            attributes = f'type="application/octet-stream" data-result="{markup(name, "html")}"'
            data.append(f"<script {attributes}>{packed}</script>")
    values = {"__TITLE__": markup(title, "html"), "__BODY__": "".join(body), "__DATA__": "\n".join(data)}
    return filled(TEMPLATE.read_text(encoding="utf-8"), values)


def _html(table: Table, folder: str | None) -> str:
    """The table; with a `folder` the first cell leads to the episodes and the last one to the packed file."""
    header, rows = table
    head = "".join(f"<th>{markup(cell, 'html')}</th>" for cell in header)
    lines = []
    for row in rows:
        cells = [markup(cell, "html") for cell in row]
        if folder is not None:
            cells[0] = f'<a href="#{quote(row[0], safe="")}">{cells[0]}</a>'
            cells[-1] = f'<a href="{quote(folder)}/{quote(row[0])}{SUFFIX}" download>{cells[-1]}</a>'
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _episodes(result: PackedResult) -> str:
    """The episodes as JSON. Texts are listed once and named by their places: most observations occur many times."""
    texts: dict[str, int] = {}

    def place(text: str | None) -> int:
        return -1 if text is None else texts.setdefault(text, len(texts))

    rows = []
    for episode in result.episodes:
        turns = [
            [place(turn.observation), place(turn.response), place(turn.action), turn.verdict.value, turn.reward]
            for turn in episode.turns
        ]
        head = [episode.task.task_id, episode.sample, episode.task.category, episode.status.value]
        rows.append([*head, episode.success, episode.score, turns, place(episode.final_observation)])
    return json.dumps({"episodes": rows, "texts": list(texts)}, separators=(",", ":"))


# --- Markdown and CSV


def as_markdown(groups: Sequence[Group], level: str = "##", p: bool = False) -> str:
    """The tables in Markdown, each below a heading of this level."""
    parts = []
    for group in groups:
        parts.append(f"{level} {markup(group.title, 'markdown')}")
        for heading, table, notes in group.blocks(p):
            parts += [f"{heading}:"] if heading else []
            parts += [markdown(table), *(markup(note, "markdown") for note in notes)]
    return "\n\n".join(parts) + "\n"


def as_rows(groups: Sequence[Group]) -> list[list[str]]:
    """All results as rows for a CSV file, numbers as they are; header first."""
    rows = []
    for name, result in (named for group in groups for named in group.results.items()):
        spec, scores = result.spec, result.scores
        play, agent, average = spec.play, spec.agent, scores["overall"]["avg"]
        values = {
            "result": name,
            "panel": getattr(play.tasks, "panel", None),
            "panel_sha256": getattr(play.tasks, "sha256", None),
            "preset": spec.preset,
            "scored_with": play.scoring.get("scored_with"),
            "approximate": play.scoring.get(APPROXIMATE),
            "agent": result.agent,
            "model": getattr(agent, "weights", None),
            "player": agent.name if isinstance(agent, Own) else None,
            "temperature": getattr(agent, "temperature", None),
            "seed": play.seed,
            "deviations": "; ".join(text for part in deviations(spec) for text in part),
            "samples": play.samples,
            "tasks": average["tasks"],
            "success": average["mean"],
            "low": average["low"],
            "high": average["high"],
            **{key: scores[key] for key in ("turns", "invalid_rate", "errors")},
            "turngym": result.versions.get("turngym"),
            "date": result.date,
            "sha256": result.seal,
        }
        rows.append({key: "" if value is None else str(value) for key, value in values.items()})
    header, lines = table_of(rows)
    return [header, *lines]


def write_table(folder: Path, out: Path, title: str, p: bool = False) -> tuple[list[Group], int]:
    """Writes index.html, results.md and results.csv into `out`, of the packed results in `folder`.

    Returns the tables, and how many files are not in them. Standard error says of each of those why.
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
