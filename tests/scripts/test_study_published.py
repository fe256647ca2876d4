"""The rows of the studies that docs/research/worlds.md and docs/research/told.md show are those of their data files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from late import late

from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.evaluation.seeds import signed
from turngym.scripts.study.show import tables_of
from turngym.trainers.study.records import read_records
from turngym.trainers.study.results import Rows, same_step, times_less, total_cost
from turngym.trainers.study.tables import TABLES, StudyWorld, regime, rises

DOCS = Path(__file__).parents[2] / "docs"
RESEARCH = DOCS / "research"
TOLD = DOCS / "data" / "told"
NAMES = {"OPD": "opd", "TurnOPD": "turnopd", "TCOD": "tcod", "LoopStop": "loopstop", "always six turns": "six"}
"""Rows that the page calls otherwise."""
SECTIONS = {
    "alfworld-loops": "What TurnOPD gains in the household",
    "webshop-loops": "What TurnOPD gains in the shop",
    "search-loops": "What TurnOPD gains in search",
    "search-chains": "Search that stays long",
    "loopstop-smollm2": "A language model's own loops",
}
"""Data file -> heading of the page under which its rows are."""


def rows_of(file: str, world: str | None = None) -> Rows:
    worlds = read_records(DOCS / "data" / f"study-{file}.json.gz").worlds
    return worlds[world or file] if len(worlds) > 1 or world else next(iter(worlds.values()))


def shown(section: str) -> Iterator[dict[str, str]]:
    """The lines of the section's tables with a column Same-Step, by heading."""
    header: list[str] = []
    current = ""
    for line in (RESEARCH / "worlds.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            current = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or current != section:
            header = []
        elif "Same-Step [95 %]" in cells:
            header = cells
        elif header and not cells[1].startswith("---"):
            yield dict(zip(header, cells, strict=True))


@pytest.mark.parametrize("file", late(SECTIONS, "webshop-loops"))
def test_the_page_shows_what_the_data_say(file: str) -> None:
    rows = rows_of(file)
    found, seen = same_step(rows, "opd")[1], set()
    for line in shown(SECTIONS[file]):
        name = next(iter(line.values())).strip("`")
        name = NAMES.get(name, name.replace("always ", "fixed-").removesuffix(" turns"))
        total, same = total_cost(rows[name]), found[name]
        fewer, *single = times_less({seed: rows["opd"][seed] for seed in rows[name]}, rows[name], "turns")
        # the page has no range where every seed is near the means
        apart = any(abs(one - fewer) > 0.05 for one in single)
        said = [f"{len(rows[name])}", f"{total.turns:,.0f}", f"{total.tokens:,.0f}", str(same.value)]
        said += [f"{fewer:.2f}x ({single[0]:.2f} to {single[1]:.2f})" if apart else f"{fewer:.2f}x"]
        assert [line[key] for key in ("seeds", "turns", "tokens", "Same-Step [95 %]", "fewer turns")] == said, name
        if (minus := same.minus_base) is not None:
            assert line["minus OPD [95 %]"] == signed(minus), name
        seen.add(name)
    assert seen == set(rows)


def test_the_regime_is_in_the_tables_of_a_recorded_study() -> None:
    study = read_records(DOCS / "data" / "study-loopstop-alfworld.json.gz")
    view = StudyWorld(rows=study.worlds["alfworld"], baseline="opd", against={})
    assert [row[:6] for row in regime(view)[1]][:2] == [
        ["opd", "early", "24", "0.240", "0.393", "164.0 %"],
        ["opd", "late", "24", "0.084", "0.118", "140.2 %"],
    ]


def at_equal_cpu(file: str, world: str) -> dict[str, str]:
    """By method, what is more than the baseline's success at the least CPU time that any of them needed."""
    tables = {shown.title: shown.table for shown in tables_of(read_records(DOCS / "data" / f"study-{file}.json.gz"))}
    header, rows = tables[f"{world}: accuracy"]
    place = next(number for number, name in enumerate(header) if name.startswith("Least-CPU")) + 1
    return {row[0]: row[place] for row in rows}


def told(columns: int) -> Iterator[list[str]]:
    """The rows of methods in docs/research/told.md that have so many columns; the first names the method."""
    for line in (RESEARCH / "told.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == columns:
            yield [cells[0].strip("`"), *cells[1:]]


@pytest.mark.long
def test_the_page_of_told_policies_shows_what_its_data_say() -> None:
    rows = rows_of("told-alfworld", "alfworld")
    found = same_step(rows, "grpo")[1]
    lines = list(told(8))
    assert {line[0] for line in lines} == set(rows)
    equal = at_equal_cpu("told-alfworld", "alfworld")
    for name, seeds, _, mean, minus, _, at_equal, seconds in lines:
        assert at_equal == equal[name], name
        assert seeds == f"{len(rows[name])}"
        assert mean == str(found[name].value).partition(" ")[0], name
        assert minus == ("-" if found[name].minus_base is None else signed(found[name].minus_base)), name
        assert seconds == f"{total_cost(rows[name]).cpu:.1f}", name


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "place"), [("webshop", 1), ("search", 4)])
def test_the_page_of_told_policies_shows_shop_and_search(world: str, place: int) -> None:
    rows = rows_of("told-webshop-search", world)
    found = same_step(rows, "grpo")[1]
    lines = list(told(7))
    assert {line[0] for line in lines} == set(rows)
    assert {len(seeds) for seeds in rows.values()} == {5}
    equal = at_equal_cpu("told-webshop-search", world)
    for name, *cells in lines:
        mean, minus, at_equal = cells[place - 1 : place + 2]
        assert at_equal == equal[name], name
        assert mean == str(found[name].value).partition(" ")[0], name
        assert minus == ("-" if found[name].minus_base is None else signed(found[name].minus_base)), name


def test_the_page_of_told_policies_shows_smollm2s_shop() -> None:
    rows = rows_of("told-smollm2", "webshop-smollm2")
    found = same_step(rows, "grpo")[1]
    # one evaluation after the start says nothing of a cost before the end
    assert set(at_equal_cpu("told-smollm2", "webshop-smollm2").values()) == {"-"}
    lines = list(told(4))
    assert {line[0] for line in lines} == set(rows)
    once = ", one run each"
    for name, value, minus, seconds in lines:
        (run,) = rows[name].values()
        assert value == str(found[name].value), name
        given = found[name].minus_base
        assert minus == ("-" if given is None else signed(given).removesuffix(once)), name
        assert seconds == f"{run.total.cpu:,.0f}", name
        packed = read_result(TOLD / f"smollm2-{name}-seed{run.seed}.result.xz")
        assert {one.task.task_id: float(one.success) for one in packed.episodes} == run.evaluations[-1].tasks, name
    assert len([*TOLD.glob("smollm2-*")]) == len(rows)


def test_the_last_evaluations_in_smollm2s_shop_are_packed() -> None:
    for method, runs in rows_of("loopstop-smollm2").items():
        for seed, run in runs.items():
            packed = read_result(DOCS / "results" / f"webshop-smollm2-{method}-seed{seed}.result.xz")
            played = {episode.task.task_id: float(episode.success) for episode in packed.episodes}
            assert played == run.evaluations[-1].tasks, method


def test_loopstops_page_shows_what_it_saves_in_smollm2s_shop() -> None:
    rows = rows_of("loopstop-smollm2")
    ours, opd = rows["loopstop"], rows["opd"]
    same, (total, base) = same_step(rows, "opd")[1]["loopstop"], (total_cost(ours), total_cost(opd))
    assert same.minus_base is not None
    page = (RESEARCH / "loopstop.md").read_text(encoding="utf-8")
    cells = ["LoopStop", ", ".join(map(str, ours)), str(same.value), signed(same.minus_base), f"{total.turns:,.0f}"]
    cells.append(f"{base.turns / total.turns:.2f}x")
    assert f"| `webshop-smollm2` | {' | '.join(cells)} |" in page
    one, two, three = (f"{opd[seed].total.turns / ours[seed].total.turns:.2f}x" for seed in ours)
    assert f"{one}, {two} and {three} (three seeds)" in page


@pytest.mark.long
@pytest.mark.parametrize("world", late(("alfworld", "webshop", "search"), "alfworld", mark=pytest.mark.nightly))
def test_the_last_evaluations_of_told_policies_are_packed(world: str) -> None:
    rows = rows_of("told-alfworld" if world == "alfworld" else "told-webshop-search", world)
    names = {(method, seed): f"{world}-{method}-seed{seed}.result.xz" for method in rows for seed in rows[method]}
    assert {path.name for path in TOLD.glob(f"{world}-*")} == set(names.values())
    for (method, seed), name in names.items():
        played: dict[str, list[bool]] = {}
        for episode in read_result(TOLD / name).episodes:
            played.setdefault(episode.task.task_id, []).append(episode.success)
        assert {len(samples) for samples in played.values()} == {4}
        means = {task: sum(samples) / 4 for task, samples in played.items()}
        assert means == rows[method][seed].evaluations[-1].tasks, name


@pytest.mark.parametrize("file", ["learn-rewards", "learn-teachers"])
def test_rises_by_seeds_that_chose_nothing(file: str) -> None:
    study = read_records(DOCS / "data" / f"study-{file}.json.gz")
    page = (RESEARCH / "learn.md").read_text(encoding="utf-8").partition(f"study-{file}")[2]
    for row in rises(StudyWorld(rows=study.worlds["alfworld"], baseline="", against=study.against))[1]:
        name, _, _, end, rise, _, difference, _ = (cell.removesuffix(" *") for cell in row)
        name = name.replace("reinforce-pp", "reinforce++")
        assert f"| `{name}` | {end} | {rise} | {'' if difference == '-' else f'{difference} '}|" in page


@pytest.mark.parametrize("world", ["search-loops", "alfworld-loops"])
def test_turnwise_success_and_turns(world: str) -> None:
    page = (RESEARCH / "turnwise.md").read_text(encoding="utf-8")
    view = StudyWorld(rows=rows_of(f"turnwise-{world}", world), baseline="opd", against={})
    known = {row[0]: row for row in TABLES["cost"](view)[1]}
    for name, _, success, difference, *_ in TABLES["overview"](view)[1]:
        if name not in ("start", "opd"):
            row = f"| {success} | {difference.removesuffix(' *')} | "
            assert any(row in line and f"| {int(known[name][1]):,} |" in line for line in page.splitlines()), name
