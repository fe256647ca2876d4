"""The tables of a study, one function each, made from records alone.

A study file names the tables that it wants; `TABLES` has them by name. Each is about one world: its rows are methods.
The docstring of a table is its caption, which says what its columns mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from turngym.agents.evaluation.seeds import (
    NEW_CLUSTERS,
    Difference,
    TaskMeans,
    crossed_difference,
    crossed_error,
    differences,
    in_family,
    over_seeds,
    points,
    rise,
    seed_apart,
    seed_spread,
    signed,
)
from turngym.agents.evaluation.statistics import t_quantile
from turngym.core.tables import Table, table_of
from turngym.trainers.study.records import PHASES, WHOLE, WINDOWS, Cost, Records, pooled_sums
from turngym.trainers.study.results import (
    EVALUATED,
    MEASURES,
    WINDOW,
    AccuracyEstimate,
    Rows,
    at_category,
    averaged_evaluations,
    budgets,
    difference,
    ends_of,
    fixed,
    least_time,
    maps_at,
    reached,
    same_step,
    same_step_maps,
    times_less,
    total_cost,
)

NAMES = {
    "turns": "turns",
    "sampled": "tokens sampled",
    "tokens": "tokens trained on",
    "seconds": "wall clock",
    "cpu": "CPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWorld:
    """One world of a study: what a table is made of."""

    rows: Rows
    """Method -> seed -> record."""
    baseline: str
    """Method with which the others are compared; "" for none."""
    against: Mapping[str, str]
    """Method -> whom it is compared with instead."""

    def control(self, name: str) -> str:
        """Whom a method is compared with."""
        return self.against.get(name, self.baseline if name != self.baseline else "")


def caption(name: str, rows: Rows) -> str:
    """Explains the columns of a world's tables, with the number of evaluations in a mean, and n."""
    about = " ".join((TABLES[name].__doc__ or "").split())
    return f"{about.replace('LAST EVALUATIONS', last_evaluations(rows))} {sizes(rows)}"


def last_evaluations(rows: Rows) -> str:
    """What Same-Step is in these rows, as `mean of the last 4 evaluations`."""
    many = averaged_evaluations(rows)
    if not many:
        return "no evaluation, for runs have none in common,"
    return "the last evaluation" if many == 1 else f"mean of the last {many} evaluations"


def sizes(rows: Rows) -> str:
    """`n: 3 to 5 seeds, 100 tasks, 4 samples.`; tasks and samples where they are known."""
    records = [record for seeds in rows.values() for record in seeds.values()]
    counts = {
        "seed": [len(seeds) for seeds in rows.values()],
        "task": [len(of.evaluations[-1].tasks) for of in records if WHOLE not in of.evaluations[-1].tasks],
        "sample": [of.samples for of in records if of.samples],
    }
    parts = []
    for unit, values in counts.items():
        if values:
            ends = dict.fromkeys((min(values), max(values)))
            parts.append(f"{' to '.join(map(str, ends))} {unit}{'' if [*ends] == [1] else 's'}")
    return f"n: {', '.join(parts)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTable:
    """A table of one world."""

    world: str
    name: str
    """Its key in `TABLES`."""
    table: Table
    caption: str

    @property
    def title(self) -> str:
        return f"{self.world}: {self.name}"


def tables_of(study: Records) -> list[StudyTable]:
    """The tables that `study` asks for, world by world; those without a row are left out."""
    tables = []
    for world, rows in study.worlds.items():
        base = study.baseline if study.baseline in rows else None
        view = StudyWorld(rows=rows, baseline=base or "", against=study.against)
        for name in study.tables:
            if (table := TABLES[name](view))[1]:
                tables.append(StudyTable(world=world, name=name, table=table, caption=caption(name, rows)))
    return tables


def notes_of(study: Records) -> list[str]:
    """Lists what the tables of `study` leave out: tasks without an episode, and seeds that do not pair up."""
    notes = []
    every: dict[str, set[str]] = {}
    for record in study.records:
        every.setdefault(record.world, set()).update(*(point.tasks for point in record.evaluations))
    for world, tasks in study.shared_tasks.items():
        if left_out := len(every[world] - tasks):
            notes.append(f"{world}: {left_out} tasks left out that not every evaluation has an episode of")
    for world, rows in study.worlds.items():
        baseline = study.baseline or ""
        lines = [*_no_step_in_common(rows), *_no_curve(rows), *_seeds_apart(rows, baseline)]
        for name, seeds in rows.items():
            for control in dict.fromkeys((baseline, study.against.get(name, ""))):
                control_seeds = rows.get(control, {})
                if (
                    control == name
                    or not control_seeds
                    or control_seeds.keys() == seeds.keys()
                    or fixed(control_seeds)
                    or fixed(seeds)
                ):
                    continue
                shared = _numbers(control_seeds.keys() & seeds.keys())
                lines.append(
                    f"{name} has seeds {_numbers(seeds)}, {control} {_numbers(control_seeds)}: "
                    + (f"differences are of {shared}" if shared else "none in common, and no difference")
                )
        notes += [f"{world}: {text}" for text in lines]
    return notes


def _no_step_in_common(rows: Rows) -> Iterable[str]:
    """A note if runs share no evaluation after training has begun."""
    trained = {name: [record for record in seeds.values() if record.trained] for name, seeds in rows.items()}
    steps = {
        name: set.intersection(*({point.step for point in record.evaluations} for record in runs)) - {0}
        for name, runs in trained.items()
        if runs
    }
    if any(steps.values()) and not set.intersection(*steps.values()):
        steps_text = "; ".join(f"{name} {_numbers(those) or 'none'}" for name, those in steps.items())
        yield f"no evaluation after the same steps, and no Same-Step: {steps_text}"


def _no_curve(rows: Rows) -> Iterable[str]:
    """A note if runs have too few evaluations for a value at a cost."""
    few = [
        name
        for name, seeds in rows.items()
        if any(record.trained and len(record.evaluations) < EVALUATED for record in seeds.values())
    ]
    if few:
        yield f"evaluated once after the start, and not known at a cost before the end: {', '.join(few)}"


def _seeds_apart(rows: Rows, baseline: str) -> Iterable[str]:
    """A line for each method of which a seed lies apart at Same-Step (`seed_apart`), with it and without. The intervals
    hold for seeds that vary normally, and not where a run in five or so collapses: then both belong beside each
    other."""
    maps = same_step_maps(rows)[1]
    base = maps.get(baseline, {})
    for name, seeds in maps.items():
        far = None if fixed(rows[name]) else seed_apart([*seeds.values()])
        if far is None:
            continue
        seed = [*seeds][far]
        without = {other: tasks for other, tasks in seeds.items() if other != seed}
        levels = ", ".join(str(over_seeds([*runs.values()])) for runs in (seeds, without))
        line = f"{name} has seed {seed} apart, at {100 * _mean(seeds[seed]):.1f}; {levels} without"
        if base and name != baseline:
            gaps = [difference(base, runs, fixed=(fixed(rows[baseline]), False)) for runs in (seeds, without)]
            if None not in gaps:
                # a comparison made once more is no further claim that it is clear of zero
                line += f"; minus {baseline} {', '.join(signed(gap).removesuffix(' *') for gap in gaps)} without"
        yield f"{line}: intervals of seeds that vary normally"


def _numbers(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def starts(rows: Rows) -> dict[str, TaskMeans]:
    """Rows `start`: task -> mean success before step 1. Methods that began alike (equal in the seeds that they share)
    have one row; those that began otherwise than most have their own, `start of NAME`."""
    groups: list[dict[str, dict[int, TaskMeans]]] = []
    for name, seeds in rows.items():
        first = {seed: record.evaluations[0] for seed, record in seeds.items() if record.trained}
        start_of = {seed: point.tasks for seed, point in first.items() if point.step == 0}
        if not start_of:
            continue
        for group in groups:
            reference = next(iter(group.values()))
            if (shared_seeds := start_of.keys() & reference.keys()) and all(
                start_of[seed] == reference[seed] for seed in shared_seeds
            ):
                group[name] = start_of
                break
        else:
            groups.append({name: start_of})
    by_label: dict[str, Mapping[str, float]] = {}
    for index, group in enumerate(sorted(groups, key=len, reverse=True)):
        every = {seed: tasks for seeds in group.values() for seed, tasks in seeds.items()}
        label = f"start of {', '.join(group)}" if index else "start"
        # a task whose episodes all ended in an error has no mean
        if shared := [task for task in next(iter(every.values())) if all(task in tasks for tasks in every.values())]:
            by_label[label] = {task: fmean(tasks[task] for tasks in every.values()) for task in shared}
    return by_label


# The tables, from the question that is asked first.


def overview(view: StudyWorld) -> Table:
    """Success in percent at Same-Step: LAST EVALUATIONS after the same number of steps, and what it is more than the
    baseline's, 95 % for new seeds and tasks. At equal CPU: the difference at the least CPU time that any main method
    needed, if runs had a machine to themselves. Turns: played in training. `*`: clear of zero among all of its column
    (Holm). `†`: one run each; it holds for these two runs and says nothing about other seeds."""
    base = view.baseline
    steps = same_step(view.rows, base)[1]
    ways = {f"minus {base} [95 %]": steps, "at equal CPU [95 %]": least_time(view.rows, base, "cpu")} if base else {}
    rows = [
        {"method": name, "seeds": "-", "success": f"{100 * _mean(tasks):.1f}", **dict.fromkeys(ways, "-"), "turns": "0"}
        for name, tasks in starts(view.rows).items()
    ]
    for name, seeds in view.rows.items():
        success = f"{100 * steps[name].value.mean:.1f}" if name in steps else "-"
        minus = {
            way: signed(_minus(estimates, name)).replace(", one run each", " †") for way, estimates in ways.items()
        }
        turns = f"{total_cost(seeds).turns:.0f}"
        rows.append({"method": name, "seeds": str(len(seeds)), "success": success, **minus, "turns": turns})
    return table_of(rows)


def _minus(estimates: Mapping[str, AccuracyEstimate], name: str) -> Difference | None:
    return estimates[name].minus_base if name in estimates else None


def rises(view: StudyWorld) -> Table:
    """Success in percent before and after training. The rise is end minus start, paired by seed and task; training:
    wall clock of a run, median over seeds."""
    first, last = (
        {name: {n: of.evaluations[which].tasks for n, of in seeds.items()} for name, seeds in view.rows.items()}
        for which in (0, -1)
    )
    beyond = dict[str, Difference]()
    for name, seeds in view.rows.items():
        if control_seeds := view.rows.get(control := view.control(name)):
            gap = difference(last[control], last[name], fixed=(fixed(control_seeds), fixed(seeds)))
            beyond |= {} if gap is None else {name: gap}
    # each row's own rise is a claim for itself; that some row is better than its control is one of many
    family = in_family(beyond)
    return table_of(
        {
            "method": name,
            "seeds": str(len(seeds)),
            "start": str(over_seeds([*first[name].values()])),
            "end [95 %]": str(over_seeds([*last[name].values()])),
            "rise [95 %]": signed(rise([*first[name].values()], [*last[name].values()])),
            "against": view.control(name) if name in family else "-",
            "end minus its end [95 %]": signed(family.get(name)),
            "training": f"{median(record.total.seconds for record in seeds.values()):.0f} s",
        }
        for name, seeds in view.rows.items()
    )


def accuracy(view: StudyWorld) -> Table:
    """Percent, with 95 % intervals for new seeds and new tasks, which are crossed; a row of one seed has one for this
    run and new tasks (one run each). Same-Step: LAST EVALUATIONS that all have, up to this step. Least-Time: at the
    least wall clock that any main method needed for all of its steps, seed by seed, on straight lines between
    evaluations, and as a mean over the last part of it; Least-CPU the same by CPU seconds. `*`: the difference is clear
    of zero among all of its column (Holm, family-wise 5 %)."""
    rows, base = view.rows, view.baseline
    step, steps = same_step(rows, base)
    # without a main method there is no limit
    seconds = f"{fmean(limits.values()):.0f}" if (limits := budgets(rows)) else "-"
    ways = {
        f"Same-Step ({step})": steps,
        f"Least-Time ({seconds} s)": least_time(rows, base),
        f"its last {100 * WINDOW:.0f} %": least_time(rows, base, window=WINDOW),
        "Least-CPU": least_time(rows, base, "cpu"),
    }
    header = ["method", "seeds"]
    for name, estimates in ways.items():
        family = max(
            (estimate.minus_base.family for estimate in estimates.values() if estimate.minus_base is not None),
            default=0,
        )
        header += [f"{name} [95 %]", *([f"minus {base} (family of {family})"] if base else [])]
    before = starts(rows).items()
    lines = [[name, "-", str(over_seeds([tasks])), *["-"] * (len(header) - 3)] for name, tasks in before]
    for name, seeds in rows.items():
        cells = [name, str(len(seeds))]
        for estimates in ways.values():
            cells.append(str(estimates[name].value) if name in estimates else "-")
            cells += [signed(_minus(estimates, name))] if base else []
        lines.append(cells)
    return header, lines


def parts(view: StudyWorld) -> Table:
    """Differences at Same-Step: how many seeds and tasks, standard errors in points by seeds (chance taken out) and by
    tasks (with the chance of samples), and the probability of improvement: how often a run of the method does better
    than one of the baseline in the same task, equal counting half."""
    steps = same_step(view.rows, view.baseline)[1]
    shared = any(estimate.in_new_clusters is not None for estimate in steps.values())
    return table_of(
        {
            "method": name,
            f"minus {view.baseline} [95 %]": signed(gap),
            **({NEW_CLUSTERS: signed(estimate.in_new_clusters)} if shared else {}),
            "seeds": "{} and {}".format(*gap.seeds),
            "tasks": str(gap.tasks),
            "s.e. by seeds": points(gap.seed_error),
            "s.e. by tasks": points(gap.task_error),
            "better in a task %": f"{100 * gap.better:.0f}",
        }
        for name, estimate in steps.items()
        if (gap := estimate.minus_base) is not None
    )


def p_values(view: StudyWorld) -> Table:
    """p-values: the least level at which the interval is clear of zero, alone and among all of the column (Holm)."""
    rows, base = view.rows, view.baseline
    ways = {
        "Same-Step": same_step(rows, base)[1],
        "Least-Time": least_time(rows, base),
        "Least-CPU": least_time(rows, base, "cpu"),
    }
    lines = []
    for name in rows:
        cells = {"method": name}
        for way, estimates in ways.items():
            minus = _minus(estimates, name)
            cells[f"{way}: p"] = _p(None if minus is None else minus.p)
            cells[f"{way}: p (Holm)"] = _p(None if minus is None else minus.adjusted)
        lines.append(cells)
    return table_of(lines)


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def averages(view: StudyWorld) -> Table:
    """Percent, mean ± standard deviation of training seeds, less what chance alone gives (without ±: no more than that,
    or one run), three ways: at their last evaluation, LAST EVALUATIONS, and with the averaged weights of their last
    checkpoints (`evaluate.average`). Below: mean of the deviations."""
    lines, apart = [], dict[str, list[float]]()
    for name, seeds in view.rows.items():
        cells = {"method": name, "seeds": str(len(seeds))}
        for way, runs in ends_of(list(seeds.values())).items():
            spread = seed_spread(runs)
            apart.setdefault(way, []).extend([] if spread is None else [spread])
            cells[way] = f"{100 * fmean(map(_mean, runs)):.1f}" + _plus_minus(spread)
        lines.append(cells)
    total = {"method": "mean of methods", "seeds": ""}
    for way, spreads in apart.items():
        mean = _plus_minus(fmean(spreads) if spreads else None).strip()
        total[way] = f"{mean} ({len(spreads)} methods)" if mean else "-"
    return table_of([*lines, total])


def cost(view: StudyWorld) -> Table:
    """All steps, evaluations excluded, mean over seeds; CPU seconds are those of the training process. Speed-up: of the
    means, and its range over the seeds. CPU and wall clock compare only runs that had a machine to themselves: side by
    side, identical work took 1.1 times the CPU and 2.1 times the clock. Turns and tokens hold anywhere."""
    lines, base = [], view.rows.get(view.baseline, {})
    for name, seeds in view.rows.items():
        cells, total = {"method": name}, total_cost(seeds)
        for measure in MEASURES:
            unit, digits = (" s", 1) if measure in ("seconds", "cpu") else ("", 0)
            cells[NAMES[measure] + unit] = _average([getattr(total, measure)], digits)
        cells |= {f"speed-up, {NAMES[kind]}": _times(times_less(base, seeds, kind)) for kind in MEASURES}
        lines.append(cells)
    return table_of(lines)


def to_target(view: StudyWorld) -> Table:
    """The first evaluation at the baseline's Same-Step accuracy or above from which on the mean of the rest stays there
    too (means over seeds), as a share of what all of the baseline's steps cost. `-`: none."""
    rows, name_of_base = view.rows, view.baseline
    target = same_step(rows, name_of_base)[1].get(name_of_base)
    if target is None:
        return table_of([])
    base = total_cost(rows[name_of_base])
    return table_of(
        {
            "method": name,
            **{f"{NAMES[measure]}, % of {name_of_base}'s": _share(at, base, measure) for measure in MEASURES},
        }
        for name, at in reached(rows, target.value.mean).items()
    )


def categories(view: StudyWorld) -> Table:
    """Mean success by category at Least-Time, percent, 95 % over seeds and tasks."""
    rows = view.rows
    names = sorted(
        {kind for seeds in rows.values() for record in seeds.values() for kind in record.categories.values()}
    )
    maps = maps_at(rows, budgets(rows), "seconds") if names else {}
    return table_of(
        {"method": name, **{kind: str(at_category(maps[name], seeds, kind)) for kind in names}}
        for name, seeds in rows.items()
        if name in maps
    )


def phases(view: StudyWorld) -> Table:
    """Seconds of training by phase, mean over seeds."""
    return table_of(
        {
            "method": name,
            **{
                f"{phase}, {clock}": f"{fmean(record.phases[phase][which] for record in seeds.values()):.1f}"
                for phase in PHASES
                for which, clock in enumerate(("wall s", "CPU s"))
            },
        }
        for name, seeds in view.rows.items()
    )


def depth(view: StudyWorld) -> Table:
    """Caps off probes (where every step is a probe: of those), horizons after the last step, and shares of the deepest
    third of each step's turns, means over steps and seeds."""
    lines = []
    for name, seeds in view.rows.items():
        # an agent that was only evaluated has none
        trained = [record for record in seeds.values() if record.steps]
        if not trained:
            continue
        steps = [step for record in trained for step in record.steps]
        ends = [record.steps[-1] for record in trained]
        caps = [s.get("depth/cap") for s in steps if not s.get("depth/probe")] or [s.get("depth/cap") for s in steps]
        cells = {"method": name, "mean cap": _average(caps)}
        cells["turns / episode"] = _average([step.get("turns_mean") for step in steps])
        for title, key in (("H_eff", "h_eff"), ("H_cov", "h_cov"), ("Hbar", "hbar")):
            cells[f"last {title}"] = _average([end.get(f"depth/{key}") for end in ends])
        cells["mean alpha"] = _average([step.get("weight/alpha") for step in steps], 2)
        for title, key in (("weights", "weight"), ("loss", "loss"), ("KL (eq. 11)", "kl")):
            shares = [step.get(f"{key}_deep_share") for step in steps]
            cells[f"deep third of {title}"] = _average([s if s is None else 100 * s for s in shares], 1, " %")
        lines.append(cells)
    return table_of(lines)


def critic(view: StudyWorld) -> Table:
    """Share of the returns' variance that the critic explains before it learns from them, second half of the steps."""
    lines = []
    for name, seeds in view.rows.items():
        values = []
        for record in seeds.values():
            half = record.evaluations[-1].step / 2
            late = [step.get("critic_explained") for step in record.steps if (step["step"] or 0) > half]
            explained_values = [value for value in late if value is not None]
            values += [fmean(explained_values)] if explained_values else []
        if values:
            by_seed = ", ".join(f"{value:z.2f}" for value in values)
            explained = {"variance explained": f"{fmean(values):z.2f}", "seed by seed": by_seed}
            lines.append({"method": name, "seeds": str(len(values)), **explained})
    return table_of(lines)


def heldout(view: StudyWorld) -> Table:
    """Negative log-likelihood of held-out passages, nats per token, intervals over seeds and documents; differences are
    paired by seed and document."""
    nats = {
        name: {seed: record.text for seed, record in seeds.items() if record.text is not None}
        for name, seeds in view.rows.items()
    }
    lines = []
    for name, seeds in nats.items():
        if not seeds:
            continue
        before, after = ([text[which] for text in seeds.values()] for which in (0, 1))
        control_seeds = nats.get(control := view.control(name), {})
        shared = [seed for seed in seeds if seed in control_seeds]
        against = [control_seeds[seed][1] for seed in shared], [seeds[seed][1] for seed in shared]
        beyond = crossed_difference(*against) if len(shared) > 1 else None
        lines.append(
            {
                "method": name,
                "seeds": str(len(seeds)),
                "start": f"{fmean(map(_mean, before)):.3f}",
                "end [95 %]": _nats(after),
                "more [95 %]": _nats(differences(before, after), "+"),
                "against": control if shared else "-",
                "end minus its end [95 %]": _nats(differences(*against), "+", beyond) if shared else "-",
            }
        )
    return table_of(lines)


def _mean(values: Mapping[str, float]) -> float:
    return fmean(values.values())


def _nats(runs: Sequence[Mapping[str, float]], sign: str = "", half: float | None = None) -> str:
    """Mean over seeds and documents, crossed, with its interval, `half` to either side where it is known; of one seed
    over documents, which says nothing of other seeds."""
    values = [[run[name] for name in sorted(runs[0])] for run in runs]
    mean, count = fmean(map(fmean, values)), len(values[0])
    alone = len(values) == 1
    if half is None:
        half = t_quantile(0.975, count - 1) * stdev(values[0]) / count**0.5 if alone else crossed_error(values)
    text = f"{mean:{sign}.3f} [{mean - half:{sign}.3f}, {mean + half:{sign}.3f}]"
    return text + (", one run each" if alone else "")


def regime(view: StudyWorld) -> Table:
    """Signs that depth can pay, in the baseline's own full-depth steps (`turngym study regime`)."""
    # brings torch, which the other tables do without
    from turngym.trainers.diagnostics.depth_regime import measure_regime
    from turngym.trainers.study.regime_table import MeasuredRegime, regime_table

    by_method: dict[str, dict[str, MeasuredRegime]] = {}
    for name, seeds in view.rows.items():
        parts = [record.regime for record in seeds.values() if record.regime]
        if parts and (name == view.baseline or view.baseline not in view.rows):
            sums = {window: pooled_sums([part[window] for part in parts]) for window in WINDOWS}
            by_method[name] = {
                window: MeasuredRegime(regime=measure_regime(window_sums)) for window, window_sums in sums.items()
            }
    return regime_table(by_method)


def _plus_minus(spread: float | None) -> str:
    """The spread of seeds; "" if they lie no further apart than chance alone puts them, since they are not known to be
    equal."""
    return "" if spread is None or 100 * spread < 0.05 else f" ± {100 * spread:.1f}"


def _times(ratios: Sequence[float]) -> str:
    """A ratio, and its range over seeds."""
    if not ratios:
        return "-"
    return f"{ratios[0]:.2f}x" + (f" ({ratios[1]:.2f} to {ratios[2]:.2f})" if len(ratios) > 1 else "")


def _share(at: Cost | None, base: Cost, measure: str) -> str:
    cost_value, all_of_base = getattr(at, measure, None), getattr(base, measure)
    return f"{100 * cost_value / all_of_base:.0f} %" if cost_value is not None and all_of_base else "-"


def _average(values: Sequence[float | None], digits: int = 1, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{fmean(present):.{digits}f}{unit}" if present else "-"


TABLES: Mapping[str, Callable[[StudyWorld], Table]] = {
    "overview": overview,
    "rises": rises,
    "accuracy": accuracy,
    "parts": parts,
    "p": p_values,
    "averages": averages,
    "cost": cost,
    "to-target": to_target,
    "categories": categories,
    "phases": phases,
    "depth": depth,
    "critic": critic,
    "heldout": heldout,
    "regime": regime,
}
