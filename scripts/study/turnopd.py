"""TurnOPD against vanilla OPD, TCOD, its ablations, sweeps and fixed depths, in embedded worlds: tables with intervals.

Every world x method x seed is a cell: a `turngym train` in a process of its own, with a lock, so that several processes
and machines can share one --out. A cell that is done is never run again; one that was killed goes on where it was.

Examples:
    turngym study turnopd --short
    turngym study turnopd --worlds alfworld --methods main ablation --seeds 0 1 2
    turngym study turnopd --methods main reward --seeds 0 1 2 3 4 --average --pack
    turngym study turnopd --no-run
    turngym study turnopd --methods fixed-12 --no-base --seeds 3 --out runs/more
    turngym study turnopd --data runs/study/tables/study.json runs/more/tables/study.json --out runs/merged
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from turngym.agents.evaluation.packed import pack_result
from turngym.agents.evaluation.packed_file import SUFFIX
from turngym.agents.evaluation.results import AVERAGE
from turngym.agents.evaluation.seeds import Difference, seed_spread
from turngym.agents.evaluation.statistics import Interval
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.secrets import recorded_command
from turngym.envs.core.settings import provenance
from turngym.envs.core.tables import Table, markdown, write_json
from turngym.scripts.jobs import shown
from turngym.scripts.model import average, evaluate_average
from turngym.scripts.options import distill_argv
from turngym.scripts.report_figures import csv_text
from turngym.scripts.result_table import write_table
from turngym.scripts.study.grid import (
    PHASES,
    WINDOWS,
    Cell,
    Cost,
    Record,
    from_json,
    pooled_sums,
    read_record,
    run_cells,
    to_json,
)
from turngym.scripts.study.regime import Measured, regime_table
from turngym.scripts.study.results import (
    LAST,
    MEASURES,
    WINDOW,
    Estimate,
    Rows,
    Study,
    at_category,
    budgets,
    by_world,
    ends_of,
    least_time,
    maps_at,
    merge_studies,
    reached,
    same_step,
    total_cost,
)
from turngym.scripts.study.rows import points, signed
from turngym.scripts.study.settings import BASE, GROUPS, Method, StudyOptions, chosen_methods, replaced, shortened
from turngym.trainers.diagnostics.depth import measure_regime

# The tables of a study, from its records.

NAMES = {"turns": "turns", "tokens": "tokens", "seconds": "wall clock", "cpu": "CPU"}


def study_tables(records: Sequence[Record], p: bool = False) -> dict[str, Table]:
    """Name -> table; those of a world begin with its name. With `p`, also one of p-values."""
    worlds = by_world(records)
    found = {"overview": overview(worlds), "regime": regime_table(regimes(worlds))}
    for world, rows in worlds.items():
        found[f"{world}-accuracy"] = accuracy(rows)
        found[f"{world}-parts"] = parts(rows)
        if p:
            found[f"{world}-p"] = p_values(rows)
        found[f"{world}-averages"] = averages(rows)
        found[f"{world}-cost"] = cost(rows)
        found[f"{world}-to-target"] = to_target(rows)
        found[f"{world}-categories"] = categories(rows)
        found[f"{world}-phases"] = phases(rows)
        found[f"{world}-depth"] = depth(rows)
    return found


def overview(worlds: Mapping[str, Rows]) -> Table:
    """Methods against worlds, Same-Step and Least-Time (as Table 2 groups them)."""
    header, names = ["method"], list(dict.fromkeys(name for rows in worlds.values() for name in rows))
    found = {}
    for world, rows in worlds.items():
        header += [f"{world}: Same-Step", f"{world}: Least-Time"]
        found[world] = (same_step(rows)[1], least_time(rows))
    lines = []
    for name in names:
        cells = []
        for steps, times in found.values():
            cells += [_mean(part[name].value) if name in part else "-" for part in (steps, times)]
        lines.append([name, *cells])
    return header, lines


def accuracy(rows: Rows) -> Table:
    """Same-Step and Least-Time with intervals over seeds and tasks, and what each differs from OPD by."""
    step, steps = same_step(rows)
    # without a main method there is no limit
    seconds = f"{fmean(limits.values()):.0f}" if (limits := budgets(rows)) else "-"
    ways = {
        f"Same-Step ({step})": steps,
        f"Least-Time ({seconds} s)": least_time(rows),
        f"its last {100 * WINDOW:.0f} %": least_time(rows, window=WINDOW),
        "Least-CPU": least_time(rows, "cpu"),
    }
    header = ["method", "seeds"]
    for name, found in ways.items():
        header += [f"{name} [95 %]", f"minus {BASE} (family of {family_size(found)})"]
    lines = []
    for name, seeds in rows.items():
        at = [found.get(name) for found in ways.values()]
        cells = [
            cell for one in at for cell in (["-", "-"] if one is None else [str(one.value), _signed(one.minus_base)])
        ]
        lines.append([name, str(len(seeds)), *cells])
    return header, lines


def family_size(found: Mapping[str, Estimate]) -> int:
    """Comparisons with OPD that are made together."""
    return max((one.minus_base.family for one in found.values() if one.minus_base is not None), default=0)


def parts(rows: Rows) -> Table:
    """What the differences from OPD rest on, at the same step: seeds and tasks of both, standard errors, and how often
    a run of the method does better in a task."""
    header = ["method", "minus OPD [95 %]", "seeds", "tasks", "s.e. by seeds", "s.e. by tasks", "better in a task %"]
    lines = []
    for name, one in same_step(rows)[1].items():
        if (found := one.minus_base) is not None:
            lines.append([name, _signed(found), "{} and {}".format(*found.seeds), str(found.tasks)])
            lines[-1] += [points(found.seed_error), points(found.task_error), f"{100 * found.better:.0f}"]
    return header, lines


def p_values(rows: Rows) -> Table:
    """p-values of the differences from OPD, alone and among all of the family (Holm)."""
    ways = {
        "Same-Step": same_step(rows)[1],
        "Least-Time": least_time(rows),
        "Least-CPU": least_time(rows, "cpu"),
    }
    header = ["method", *(f"{name}: {kind}" for name in ways for kind in ("p", "p (Holm)"))]
    lines = []
    for name in rows:
        cells = []
        for found in ways.values():
            minus = found[name].minus_base if name in found else None
            cells += [_p(None if minus is None else minus.p), _p(None if minus is None else minus.adjusted)]
        lines.append([name, *cells])
    return header, lines


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def averages(rows: Rows) -> Table:
    """What averaging does to how high a method ends, and how far apart its seeds: mean ± standard deviation of seeds,
    less what chance alone gives."""
    ways = {name: ends_of(list(seeds.values())) for name, seeds in rows.items()}
    columns = list(dict.fromkeys(way for found in ways.values() for way in found))
    lines, apart = [], dict[str, list[float]]()
    for name, found in ways.items():
        cells = []
        for way in columns:
            runs = found.get(way, [])
            spread = seed_spread(runs)
            apart.setdefault(way, []).extend([] if spread is None else [spread])
            mean = f"{100 * fmean(fmean(run.values()) for run in runs):.1f}" if runs else "-"
            cells.append(mean + _plus_minus(spread))
        lines.append([name, str(len(rows[name])), *cells])
    total = [f"± {100 * fmean(apart[way]):.1f} ({len(apart[way])} methods)" if apart[way] else "-" for way in columns]
    return ["method", "seeds", *columns], [*lines, ["mean of methods", "", *total]]


def cost(rows: Rows) -> Table:
    """What all steps cost, mean over seeds, and how many times less than OPD's that is."""
    header = ["method", "turns", "tokens", "wall clock s", "CPU s"]
    header += [f"speed-up, {NAMES[name]}" for name in ("seconds", "cpu", "turns", "tokens")]
    base = total_cost(rows[BASE]) if BASE in rows else None
    lines = []
    for name, seeds in rows.items():
        total = total_cost(seeds)
        cells = [f"{total.turns:.0f}", f"{total.tokens:.0f}", f"{total.seconds:.1f}", f"{total.cpu:.1f}"]
        cells += [_times(base, total, measure) for measure in ("seconds", "cpu", "turns", "tokens")]
        lines.append([name, *cells])
    return header, lines


def to_target(rows: Rows) -> Table:
    """Share of OPD's turns, tokens and time in which a method reaches OPD's Same-Step accuracy (`reached`)."""
    header = ["method", *(f"{NAMES[name]}, % of {BASE}'s" for name in MEASURES)]
    if BASE not in rows:
        return header, []
    target, base = same_step(rows)[1][BASE].value.mean, total_cost(rows[BASE])
    lines = []
    for name, at in reached(rows, target).items():
        shares = [_share(at, base, measure) if at is not None else "-" for measure in MEASURES]
        lines.append([name, *shares])
    return header, lines


def categories(rows: Rows) -> Table:
    """Accuracy by category at Least-Time (Tables 3 and 4)."""
    every = [record.categories.values() for seeds in rows.values() for record in seeds.values()]
    names = sorted({kind for kinds in every for kind in kinds})
    found = maps_at(rows, budgets(rows), "seconds")
    lines = [
        [name, *(str(at_category(found[name], seeds, kind)) for kind in names)]
        for name, seeds in rows.items()
        if name in found
    ]
    return ["method", *names], lines


def phases(rows: Rows) -> Table:
    """Wall clock and CPU seconds by phase, mean over seeds."""
    header = ["method", *(f"{phase}, {clock}" for phase in PHASES for clock in ("wall s", "CPU s"))]
    lines = []
    for name, seeds in rows.items():
        cells = [
            f"{fmean(record.phases[phase][clock] for record in seeds.values()):.1f}"
            for phase in PHASES
            for clock in (0, 1)
        ]
        lines.append([name, *cells])
    return header, lines


def depth(rows: Rows) -> Table:
    """What the controller chose: caps off probes, horizons at the end, and where weights and loss went (Table 6)."""
    header = ["method", "mean cap", "turns / episode", "last H_eff", "last H_cov", "last Hbar", "mean alpha"]
    header += ["deep third of weights", "deep third of loss", "deep third of KL (eq. 11)"]
    lines = []
    for name, seeds in rows.items():
        steps = [step for record in seeds.values() for step in record.steps]
        ends = [record.steps[-1] for record in seeds.values() if record.steps]
        caps = [step["depth/cap"] for step in steps if not step.get("depth/probe")] or [s["depth/cap"] for s in steps]
        cells = [_average(caps), _average([step.get("turns_mean") for step in steps])]
        cells += [_average([end.get(f"depth/{key}") for end in ends]) for key in ("h_eff", "h_cov", "hbar")]
        cells += [_average([step.get("weight/alpha") for step in steps], 2)]
        for key in ("weight_deep_share", "loss_deep_share", "kl_deep_share"):
            cells.append(_average([None if step.get(key) is None else 100 * step[key] for step in steps], 1, " %"))
        lines.append([name, *cells])
    return header, lines


def regimes(worlds: Mapping[str, Rows]) -> dict[str, dict[str, Measured]]:
    """The regime of vanilla OPD in every world, pooled over seeds: early, late, all."""
    found = {}
    for world, rows in worlds.items():
        parts = [record.regime for record in rows.get(BASE, {}).values() if record.regime]
        if parts:
            sums = {name: pooled_sums([part[name] for part in parts]) for name in WINDOWS}
            found[world] = {name: Measured(regime=measure_regime(one)) for name, one in sums.items()}
    return found


def _mean(value: Interval) -> str:
    return f"{100 * value.mean:.1f}"


def _signed(value: Difference | None) -> str:
    if value is None:
        return "-"
    return signed(value) + (" *" if value.clear else ", one run each" if value.one_run_each else "")


def _plus_minus(spread: float | None) -> str:
    return "" if spread is None else f" ± {100 * spread:.1f}"


def _times(base: Cost | None, total: Cost, measure: str) -> str:
    if base is None or not getattr(total, measure):
        return "-"
    return f"{getattr(base, measure) / getattr(total, measure):.2f}x"


def _share(at: Cost, base: Cost, measure: str) -> str:
    return f"{100 * getattr(at, measure) / getattr(base, measure):.0f} %" if getattr(base, measure) else "-"


def _average(values: Sequence[float | None], digits: int = 1, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}{unit}" if known else "-"


# The written study: Markdown, one CSV per table, and the records, from which all of it can be made again.

DATA = "study.json"
ABOUT = {
    "overview": "Mean success in percent over seeds and tasks: Same-Step and Least-Time.",
    "regime": "Signs that depth can pay, in vanilla OPD's own full-depth steps (`turngym study regime`).",
    "accuracy": "Percent, with 95 % intervals for new seeds and new tasks, which are crossed; a row of one seed has "
    "one for this run and new tasks (one run each). Same-Step: mean of the last four evaluations up to this step. "
    "Least-Time: at the least wall clock that any main method needed for all of its steps, seed by seed, on straight "
    "lines between evaluations, and as a mean over the last part of it; Least-CPU the same by CPU seconds. `*`: the "
    "difference is clear of zero among all of its column (Holm, family-wise 5 %).",
    "parts": "Differences at Same-Step: how many seeds and tasks, standard errors in points by seeds (chance taken "
    "out) and by tasks (with the chance of samples), and the probability of improvement: how often a run of the method "
    "does better than one of OPD in the same task, equal counting half.",
    "p": "p-values: the least level at which the interval is clear of zero, alone and among all of the column (Holm).",
    "averages": "Percent, mean ± standard deviation of training seeds, less what chance alone gives: at their last "
    "evaluation, in the mean of their last four, and with the averaged weights of their last checkpoints "
    "(`--average`). Below: mean of the deviations.",
    "cost": "All steps, evaluations excluded, mean over seeds; CPU seconds are those of the training process.",
    "to-target": "The first evaluation at OPD's Same-Step accuracy or above from which on the mean of the rest stays "
    "there too (means over seeds), as a share of what all of OPD's steps cost. `-`: none.",
    "categories": "Mean success by category at Least-Time, percent, 95 % over seeds and tasks.",
    "phases": "Seconds of training by phase, mean over seeds.",
    "depth": "Caps off probes (where every step is a probe: of those), horizons after the last step, and shares of the "
    "deepest third of each step's turns, means over steps and seeds.",
}


def made_by(command: str) -> dict[str, Any]:
    """Where records come from that `command` makes now; whose machine it is, is nobody's business."""
    return {name: value for name, value in provenance(command).items() if name != "host"}


def write_study(study: Study, out: Path, p: bool = False) -> str:
    """Write study.md, the tables as CSV, and study.json into `out`; returns the Markdown. The same bytes every time."""
    records, tables = study.records, study_tables(study.records, p)
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        (out / f"{name}.csv").write_text(csv_text(table), encoding="utf-8")
    text = render(records, tables)
    (out / "study.md").write_text(text, encoding="utf-8")
    write_json(out / DATA, {"made_by": study.made_by, "records": [to_json(record) for record in records]})
    return text


def render(records: Sequence[Record], tables: Mapping[str, Table]) -> str:
    """All tables, world by world."""
    worlds = by_world(records)
    cells = f"{len(records)} cells; methods: " + "; ".join(
        f"{name}: {about}" for name, about in dict.fromkeys((record.method, record.about) for record in records)
    )
    said = ["# Study", cells + "."]
    for name in ("overview", "regime"):
        said += [f"## {name.capitalize()}", ABOUT[name], markdown(tables[name])]
    for world in worlds:
        said.append(f"## {world}")
        for kind in ("accuracy", "parts", "p", "averages", "cost", "to-target", "categories", "phases", "depth"):
            if f"{world}-{kind}" not in tables:
                continue
            said += [f"### {world}: {kind.replace('-', ' ')}", ABOUT[kind], markdown(tables[f"{world}-{kind}"])]
    return "\n\n".join(said) + "\n"


def read_study(path: Path) -> Study:
    """The content of a study.json, as it is or compressed by gzip. Raises TurngymError where it is none."""
    try:
        data = path.read_bytes()
        values: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        rows, made = values["records"], values.get("made_by", [])
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TurngymError(f"{path} is not a study.json with records") from error
    except OSError as error:
        raise TurngymError(f"cannot read {path}: {error.strerror}") from error
    return Study(
        records=[from_json(row, f"{path}, record {number}") for number, row in enumerate(rows)],
        made_by=made,
    )


# The cells: every world x method x seed, in the order in which they are run.


def cells_of(options: StudyOptions) -> list[Cell]:
    """All cells: seed by seed, main methods first, worlds in turn."""
    rows = []
    for name in options.worlds:
        world = load_world(name)
        chosen = chosen_methods(options.methods, options.max_turns or world.max_turns, options.base)
        rows += [(world, method) for method in chosen]
    rows.sort(key=lambda row: GROUPS.index(row[1].group))
    return [_cell(options, world, method, seed) for seed in options.seeds for world, method in rows]


def _cell(options: StudyOptions, world: EmbeddedWorld, method: Method, seed: int) -> Cell:
    student, teacher = options.student or world.checkpoint("student"), options.teacher or world.checkpoint("teacher")
    words = [*method.words, "--student", shown(student)]
    # who learns from the reward alone has no teacher
    words += [] if method.group == "reward" else ["--teacher", shown(teacher)]
    # how the world is distilled in, with what the study wants otherwise in place of what the world says
    changed = {
        "--eval-every": str(options.steps // options.evaluations),
        "--eval-samples": str(options.samples),
        **({"--episodes": str(options.episodes)} if options.episodes else {}),
        **({"--max-turns": str(options.max_turns)} if options.max_turns else {}),
        # a warm-up as long as a short run would leave it nothing to learn with
        "--optimizer.lr-warmup": str(min(world.distill.warmup, options.steps // 5)),
    }
    settings = replaced(distill_argv(world), changed)
    pairs = zip(settings[::2], settings[1::2], strict=True)
    words += [word for name, value in pairs if name not in method.words for word in (name, value)]
    words += ["--steps", str(options.steps), "--seed", str(seed), "--panel", world.panel]
    words += ["--eval-limit", str(options.tasks), "--no-tensorboard"]
    if options.average:
        words += ["--checkpoint-every", str(options.steps // options.evaluations), "--keep-checkpoints", str(LAST)]
    return Cell(
        world=world.name,
        method=method.name,
        group=method.group,
        about=method.about,
        seed=seed,
        name=f"{world.name}/{method.name}/seed{seed}",
        folder=options.out / "cells" / world.name / f"{method.name}-seed{seed}",
        words=tuple(words),
        steps=options.steps,
        evaluates=True,
        same_start=f"{world.name}-seed{seed}",
    )


def main(argv: Sequence[str]) -> int:
    """Run `turngym study turnopd` with `argv` (without the verb itself)."""
    about = (__doc__ or "").split("\n")[0]
    options = shortened(tyro.cli(StudyOptions, args=list(argv), prog="turngym study turnopd", description=about))
    if options.data:
        study = merge_studies({str(path): read_study(path) for path in options.data})
    else:
        command = recorded_command(["turngym", "study", "turnopd", *argv])
        study = Study(records=records_of(options), made_by=[made_by(command)])
    tables = options.out / "tables"
    print(write_study(study, tables, options.p))
    print(f"written to {tables}")
    return 0


def _average_weights(cell: Cell) -> None:
    """Averages the weights of a cell's last checkpoints and evaluates them; what a killed process left goes on."""
    if not (cell.folder / AVERAGE / "model").exists():
        average(cell.folder, last=LAST)
    evaluate_average(cell.folder)


def records_of(options: StudyOptions) -> list[Record]:
    """Run what is to be run; the records of all cells that are done, whoever ran them."""
    cells = cells_of(options)
    if options.run:
        run_cells(cells, options.parallel, ended=_average_weights if options.average else None)
    finished = [cell for cell in cells if cell.finished]
    if options.pack and finished:
        for cell in finished:
            packed = options.out / "results" / f"{cell.world}-{cell.method}-seed{cell.seed}{SUFFIX}"
            if not packed.exists():
                pack_result(cell.folder / "eval" / f"step_{cell.steps:06d}.jsonl", packed)
        write_table(options.out / "results", options.out / "results-table", "Study")
    records = [read_record(cell.folder) for cell in finished]
    if not records:
        raise TurngymError(f"no cell in {options.out} is done: there is nothing to put into tables")
    return records
