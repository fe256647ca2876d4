"""Makes the tables of docs/research/published_tables.md from the published numbers in the two CSV files beside it.

python tests/tools/published_tables.py            # prints them
python tests/tools/published_tables.py --write    # puts them into the page, between its markers
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import comb, sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.published_tasks import published_tasks
from turngym.agents.evaluation.seeds import Design, detectable, spread_of
from turngym.agents.evaluation.statistics import clustered, holm
from turngym.envs.panels import load_panel
from turngym.scripts.study.plan import StudyPlanOptions, read_pilot

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "research" / "published_tables.md"
GAMES = 128
"""Episodes of one validation, in the scripts of the repositories that are counted here."""
VALIDATIONS = 62
"""Validations that a row is looked for in: up to the latest that a row fits."""
EVERY = 5
"""Updates between two validations in those scripts; validation 0 is before the first update."""
TYPES = ("place", "look", "clean", "heat", "cool", "two")
"""Categories of the panels, in the order of the tables' columns."""
PAPERS = ("SDAR", "ADRS", "UCOB", "GRSD", "OPID", "SEED", "SKILL0")
"""Whose means are counted; GiGPO's are of three seeds."""
SPLITS = {"alfworld": "seen", "webshop": "test", "search": "seven sets"}
LOGS = {
    "GRPO, ALFWorld": "curves_300step/grpo_alfworld",
    "SDAR, ALFWorld": "curves_300step/sdar_alfworld",
    "GiGPO, ALFWorld": "curves_300step/gigpo_alfworld",
    "ADRS, ALFWorld": "table2/3b_alfworld",
    "ADRS, ALFWorld, the other log": "curves_300step/adrs_alfworld",
    "GRPO, WebShop": "curves_300step/grpo_webshop",
    "ADRS, WebShop": "table2/3b_webshop",
}
"""Logs of 300 updates, by name in the table."""
MODELS = {"3B": "Qwen2.5-3B-Instruct", "7B": "Qwen2.5-7B-Instruct", "1.7B": "Qwen3-1.7B"}


Record = Mapping[str, str]
"""A line of a CSV file, by column."""


@cache
def read_table(name: str) -> tuple[Record, ...]:
    with (PAGE.parent / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def rows(**wanted: str) -> list[Record]:
    """Published numbers whose columns have these values; `value` is percent."""
    return [row for row in read_table("published_tables.csv") if wanted.items() <= row.items()]


def log_of(name: str) -> dict[int, int]:
    """Update -> games won of `GAMES`, in the validations of a published log."""
    return {int(one["step"]): int(one["won"]) for one in read_table("published_validations.csv") if one["log"] == name}


def parts_of(row: Record) -> list[float]:
    """ALFWorld: success by type, as `TYPES`; Search: of the seven sets; WebShop: score."""
    return [float(part) for part in row["parts"].split()]


def find(paper: str, model: str, method: str, benchmark: str = "alfworld") -> Record:
    """The one row of that name; `model` is a key of `MODELS`."""
    split = SPLITS[benchmark]
    (row,) = rows(paper=paper, model=MODELS[model], method=method, benchmark=benchmark, split=split)
    return row


# --- Arithmetic


@cache
def counts(percent: float, games: int, digits: int = 1) -> tuple[int, ...]:
    """The counts of `games` whose percentage is `percent`, rounded to `digits` decimals or cut there."""
    half, whole = 0.5 * 10**-digits + 1e-6, 10**-digits - 1e-6
    return tuple(k for k in range(games + 1) if -half <= 100 * k / games - percent <= max(half, whole))


def is_rounded(percent: float) -> bool:
    return any(abs(100 * k / GAMES - percent) <= 0.05 + 1e-6 for k in range(GAMES + 1))


def won_of(row: Record) -> int:
    (won,) = counts(float(row["value"]), GAMES)
    return won


def chance_of(found: int, rows_: int, rate: float) -> float:
    """P(at least `found` of `rows_`), each with probability `rate`."""
    return sum(comb(rows_, k) * rate**k * (1 - rate) ** (rows_ - k) for k in range(found, rows_ + 1))


def fisher(one: int, of_one: int, other: int, of_other: int) -> float:
    """Fisher's exact test, two-sided: the probability of all tables with these margins that are no likelier."""
    won, total = one + other, comb(of_one + of_other, one + other)
    ways = [comb(of_one, k) * comb(of_other, won - k) for k in range(max(0, won - of_other), min(won, of_one) + 1)]
    seen = comb(of_one, one) * comb(of_other, other)
    return sum(way for way in ways if way <= seen) / total


def difference(one: int, other: int, games: int = GAMES) -> tuple[float, float, float]:
    """one less other, in points, with the 95 % interval of two independent samples: the squares of the distances to
    Clopper and Pearson's ends are added (Newcombe 1998, method 10, with these ends)."""
    a, b = (clustered([1.0] * won + [0.0] * (games - won)) for won in (one, other))
    apart = a.mean - b.mean
    low = apart - sqrt((a.mean - a.low) ** 2 + (b.high - b.mean) ** 2)
    high = apart + sqrt((a.high - a.mean) ** 2 + (b.mean - b.low) ** 2)
    return 100 * apart, 100 * low, 100 * high


def told_by_fisher(base: int, games: int, wanted: float = 0.8) -> float:
    """Least true difference in points above `base` of `games` that p <= 0.05 shows with probability `wanted`."""
    tells = _tells(games)
    low = _binomial(base / games, games)
    for tenth in range(1, int(1000 * (1 - base / games))):
        if float(_binomial(base / games + tenth / 1000, games) @ tells @ low) >= wanted:
            return tenth / 10
    return float("inf")


@cache
def _tells(games: int) -> NDArray[np.bool_]:
    """Whether Fisher's test tells k of `games` from j, bool [k, j]."""
    found = np.zeros((games + 1, games + 1), dtype=np.bool_)
    for k in range(games + 1):
        for j in range(k):
            found[k, j] = found[j, k] = fisher(k, games, j, games) <= 0.05
    return found


def _binomial(rate: float, games: int) -> NDArray[np.float64]:
    return np.array([comb(games, k) * rate**k * (1 - rate) ** (games - k) for k in range(games + 1)])


# --- Which games a validation played


@cache
def draws(split: str) -> tuple[tuple[int, ...], ...]:
    """How many games of each type the first `VALIDATIONS` validations of a run with seed 0 play, by the library."""
    panel = load_panel(f"alfworld-valid-{split}")
    tasks = published_tasks(panel, None, workers=GAMES, validations=VALIDATIONS, seed=0)
    found = [Counter(task.category for task in tasks[at : at + GAMES]) for at in range(0, len(tasks), GAMES)]
    return tuple(tuple(one[name] for name in TYPES) for one in found)


def fits(row: Record, games: Sequence[int]) -> bool:
    """Whether whole numbers of these games by type give every printed percentage, and together the printed mean."""
    each = [counts(part, number) for part, number in zip(parts_of(row), games, strict=True)]
    return bool({sum(won) for won in product(*each)} & {*counts(float(row["value"]), sum(games))})


def validations_of(row: Record) -> list[int]:
    """Numbers of the validations that a row fits."""
    return [number for number, games in enumerate(draws(row["split"])) if fits(row, games)]


def logs_that_fit() -> tuple[int, int]:
    """Validations of the logs whose percentages by type are those of the library's draw, and all of them."""
    logged = [one for one in read_table("published_validations.csv") if one["benchmark"] == "alfworld"]
    fit = 0
    for one in logged:
        games = draws(one["split"])[int(one["step"]) // EVERY]
        each = [counts(part, number, 4) for part, number in zip(parts_of(one), games, strict=True)]
        fit += int(one["won"]) in {sum(won) for won in product(*each)}
    return fit, len(logged)


# --- Tables


def table(header: str, lines: Iterable[Sequence[str]]) -> str:
    names = [name.strip() for name in header.split("|")]
    rule = ["---", *["---:"] * (len(names) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([*names], rule, *lines))


def counts_table() -> str:
    """How many means are whole numbers of 128."""
    rate = fmean(bool(counts(tenth / 10, GAMES)) for tenth in range(1001))
    lines = []
    for paper, (key, name) in product(PAPERS, (("alfworld", "ALFWorld"), ("webshop", "WebShop"))):
        found = rows(paper=paper, benchmark=key, split=SPLITS[key])
        own = [float(row["value"]) for row in found if not row["note"].startswith("quoted")]
        if own:
            rounded, either = (sum(map(test, own)) for test in (is_rounded, lambda value: bool(counts(value, GAMES))))
            chance = _p(chance_of(either, len(own), rate))
            lines.append([f"{paper}, {name}", str(len(own)), str(rounded), str(either - rounded), chance])
    return table("own rows of | means | rounded | cut | as many by chance", lines)


def draw_table() -> str:
    """SDAR's ALFWorld rows: games won, and in which validation."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows(paper="SDAR")):
        cells = []
        for model in MODELS:
            row = find("SDAR", model, method)
            (number,) = validations_of(row)
            cells.append(f"{won_of(row)}, {number}")
        lines.append([method, *cells])
    own = [find("ADRS", model, "ADRS") for model in MODELS]
    lines.append(["ADRS (its table)", *(f"{won_of(row)}, {validations_of(row)[0]}" for row in own)])
    return table("won of 128, validation | " + " | ".join(MODELS.values()), lines)


def tests_table() -> str:
    """Differences of published numbers, each taken as one sample of 128."""
    pairs = [
        (f"SDAR - GRPO, {model}, {name}", find("SDAR", model, "SDAR", key), find("SDAR", model, "GRPO", key))
        for key, name in (("alfworld", "ALFWorld"), ("webshop", "WebShop"))
        for model in MODELS
    ]
    family = holm({name: fisher(won_of(a), GAMES, won_of(b), GAMES) for name, a, b in pairs})
    pairs += [
        ("ADRS (its table) - SDAR, 3B, ALFWorld", find("ADRS", "3B", "ADRS"), find("SDAR", "3B", "SDAR")),
        ("GiGPO (UCOB's rerun) - SDAR, 1.7B, ALFWorld", find("UCOB", "1.7B", "GiGPO"), find("SDAR", "1.7B", "SDAR")),
        ("UCOB - GiGPO, 1.7B, ALFWorld", find("UCOB", "1.7B", "UCOB"), find("UCOB", "1.7B", "GiGPO")),
        ("UCOB - GiGPO, 3B, ALFWorld", find("UCOB", "3B", "UCOB"), find("UCOB", "3B", "GiGPO")),
        ("SDAR - GRPO in GRSD, 1.7B, ALFWorld", find("GRSD", "1.7B", "SDAR"), find("GRSD", "1.7B", "GRPO")),
        ("SDAR - GRPO in GRSD, 3B, ALFWorld", find("GRSD", "3B", "SDAR"), find("GRSD", "3B", "GRPO")),
        ("GRSD - GRPO in GRSD, 1.7B, ALFWorld", find("GRSD", "1.7B", "GRSD"), find("GRSD", "1.7B", "GRPO")),
        ("GRSD - GRPO in GRSD, 3B, ALFWorld", find("GRSD", "3B", "GRSD"), find("GRSD", "3B", "GRPO")),
    ]
    counted = [(name, won_of(a), won_of(b)) for name, a, b in pairs]
    logs = {name: log_of(f"curves_300step/{name}_alfworld")[150] for name in ("sdar", "grpo", "gigpo")}
    counted += [
        ("SDAR - GRPO in ADRS's logs at 150, 3B, ALFWorld", logs["sdar"], logs["grpo"]),
        ("GiGPO - GRPO in ADRS's logs at 150, 3B, ALFWorld", logs["gigpo"], logs["grpo"]),
        ("GRPO in ADRS's logs at 150 - GRPO in SDAR, 3B", logs["grpo"], won_of(find("SDAR", "3B", "GRPO"))),
    ]
    lines = []
    for name, one, other in counted:
        apart, low, high = difference(one, other)
        p = fisher(one, GAMES, other, GAMES)
        text = f"{_p(p)}; {_p(family[name])}" if name in family else _p(p)
        lines.append([name, f"{one}, {other}", f"{apart:+.1f} [{low:+.1f}, {high:+.1f}]", text])
    return table("difference | won of 128 | points [95 %] | Fisher p; Holm of six", lines)


def whom_table() -> str:
    """One method and model in ALFWorld, by who trained it."""
    lines = []
    for method, model in (("GRPO", "3B"), ("SDAR", "3B"), ("GRPO", "7B"), ("GRPO", "1.7B"), ("SDAR", "1.7B")):
        own = rows(method=method, model=MODELS[model], benchmark="alfworld", split="seen")
        found = [f"{row['value']} ({row['paper']})" for row in own]
        if model == "3B":
            won = log_of(f"curves_300step/{method.lower()}_alfworld")[150]
            found.append(f"{100 * won / GAMES:.1f} (ADRS, logs)")
        lines.append([f"{method}, {MODELS[model]}", ", ".join(found)])
    return table("method, model | success, % (by whom)", lines).replace("---:", "---")


def runs_table() -> str:
    """What the choice of the validation is worth in published logs."""
    lines = []
    for name, log in LOGS.items():
        shares = {step: 100 * won / GAMES for step, won in log_of(log).items()}
        cells = []
        for last in (150, 300):
            late = fmean(shares[last - EVERY * back] for back in range(6))
            best = max(share for step, share in shares.items() if step <= last)
            cells += [f"{number:.1f}" for number in (shares[last], best, late)]
        found, expected = scatter(list(shares.values())[-20:])
        lines.append([name, *cells, f"{found:.1f} ({expected:.1f})"])
    header = "log, Qwen2.5-3B | at 150 | best | mean of six | at 300 | best | mean of six | scatter (chance)"
    return table(header, lines)


def scatter(shares: Sequence[float]) -> tuple[float, float]:
    """Standard deviation in points of successive validations around their line, and what 128 episodes alone give."""
    place, seen = np.arange(len(shares)), np.array(shares) / 100
    line = np.polyval(np.polyfit(place, seen, 1), place)
    found = sqrt(float(np.sum((seen - line) ** 2)) / (len(seen) - 2))
    return 100 * found, 100 * sqrt(float(np.mean(line * (1 - line))) / GAMES)


def search_table() -> str:
    """How much of a difference of averages over seven sets is one set."""
    lines = []
    for model, full in MODELS.items():
        one, other = (parts_of(find("SDAR", model, method, "search")) for method in ("SDAR", "GRPO"))
        apart = [a - b for a, b in zip(one, other, strict=True)]
        bamboogle = f"{other[-1]:.1f}, {one[-1]:.1f}"
        six = fmean(apart[:-1])
        lines.append([full, f"{fmean(apart):+.1f}", bamboogle, f"{apart[-1] / 7:+.1f}", f"{six:+.1f}"])
    return table(
        "SDAR - GRPO in Search | mean of seven sets | Bamboogle: GRPO, SDAR | its part | mean of the other six", lines
    )


def plan_table() -> str:
    """The least difference that designs tell with probability 0.8."""
    data = ROOT / "docs" / "data" / "study-told-alfworld.json.gz"
    pilot = read_pilot(StudyPlanOptions(data=data, methods=("grpo", "sdar")))
    spread = spread_of(pilot.first, pilot.second, pilot.samples)
    lines = [
        [
            f"1 run each, {GAMES} drawn games each, Fisher, from {share} %",
            f"{told_by_fisher(won, GAMES):.1f}",
            "two runs",
        ]
        for won, share in ((96, 75), (64, 50))
    ]
    for seeds in (3, 5, 10):
        for samples in (1, 4):
            design = Design(seeds=seeds, tasks=140, samples=samples)
            # training seeds taken to vary as in the pilot, and by the 80 % limit of what it says
            seen, cautious = (
                100 * detectable(each, design) for each in (spread, replace(spread, seed=spread.seed_high))
            )
            lines.append([f"{seeds} seeds each, 140 games x {samples}", f"{seen:.1f} to {cautious:.1f}", "two methods"])
    return table("design | points | about", lines)


def _p(value: float) -> str:
    if value < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4f}" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "counts": counts_table,
    "draws": draw_table,
    "tests": tests_table,
    "whom": whom_table,
    "runs": runs_table,
    "search": search_table,
    "plan": plan_table,
}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="puts the tables into the page")
    if parser.parse_args(argv).write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    fit, logged = logs_that_fit()
    print("\n\n".join(f"{name}\n{make()}" for name, make in TABLES.items()))
    print(f"\nlogs: {fit} of {logged} validations fit the draw of the library")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
