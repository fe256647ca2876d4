"""The tables of a study, one function each, made from records alone.

A study file names the tables that it wants; `TABLES` has them by name. Each is about one world: its rows are methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from turngym.agents.evaluation.seeds import (
    Difference,
    TaskMeans,
    crossed_difference,
    crossed_error,
    differences,
    in_family,
    over_seeds,
    rise,
    seed_spread,
)
from turngym.agents.evaluation.statistics import t_quantile
from turngym.core.tables import Table
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
    seeds_apart,
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
SHARED_CPU = (
    "CPU and wall clock compare only runs that had a machine to themselves: side by side, identical work took 0.5 to "
    "1.1 times as long. Turns and tokens hold anywhere."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWorld:
    """One world of a study: what a table is made of."""

    world: str
    rows: Rows
    """Method -> seed -> record."""
    baseline: str
    """Method with which the others are compared; "" for none."""
    against: Mapping[str, str]
    """Method -> whom it is compared with instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTable:
    """A table that studies may ask for."""

    make: Callable[[StudyWorld], Table]
    about: str
    """What its columns say."""


def caption(name: str, rows: Rows) -> str:
    """What the columns of a table of one world say, with the number of evaluations that a mean is over, and n."""
    return f"{TABLES[name].about.replace('LAST EVALUATIONS', last_evaluations(rows))} {sizes(rows)}"


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
        "task": [len(one.evaluations[-1].tasks) for one in records if WHOLE not in one.evaluations[-1].tasks],
        "sample": [one.samples for one in records if one.samples],
    }
    said = []
    for what, values in counts.items():
        if values:
            ends = dict.fromkeys((min(values), max(values)))
            said.append(f"{' to '.join(map(str, ends))} {what}{'' if [*ends] == [1] else 's'}")
    return f"n: {', '.join(said)}."


def tables_of(study: Records) -> dict[str, Table]:
    """Title (`WORLD: TABLE`) -> table, for the tables that `study` asks for; those without a row are left out."""
    found: dict[str, Table] = {}
    for world, rows in study.worlds.items():
        base = study.baseline if study.baseline in rows else None
        view = StudyWorld(world=world, rows=rows, baseline=base or "", against=study.against)
        for name in study.tables:
            table = TABLES[name].make(view)
            if table[1]:
                found[f"{world}: {name}"] = table
    return found


def notes_of(study: Records) -> list[str]:
    """What the tables of `study` leave out, a line each: tasks without an episode, and seeds that do not pair up."""
    notes = []
    every: dict[str, set[str]] = {}
    for record in study.records:
        every.setdefault(record.world, set()).update(*(point.tasks for point in record.evaluations))
    for world, tasks in study.shared_tasks.items():
        if left_out := len(every[world] - tasks):
            notes.append(f"{world}: {left_out} tasks left out that not every evaluation has an episode of")
    for world, rows in study.worlds.items():
        notes += [
            *_no_step_in_common(world, rows),
            *_no_curve(world, rows),
            *_seeds_apart(world, rows, study.baseline or ""),
        ]
        for name, seeds in rows.items():
            for control in dict.fromkeys((study.baseline or "", study.against.get(name, ""))):
                other = rows.get(control, {})
                if control == name or not other or other.keys() == seeds.keys() or fixed(other) or fixed(seeds):
                    continue
                both = _numbers(other.keys() & seeds.keys())
                notes.append(
                    f"{world}: {name} has seeds {_numbers(seeds)}, {control} {_numbers(other)}: "
                    + (f"differences are of {both}" if both else "none in common, and no difference")
                )
    return notes


def _no_step_in_common(world: str, rows: Rows) -> list[str]:
    """The note that runs of a world share no evaluation after training has begun, where it is so."""
    trained = {name: [one for one in seeds.values() if one.trained] for name, seeds in rows.items()}
    steps = {
        name: set.intersection(*({point.step for point in one.evaluations} for one in runs)) - {0}
        for name, runs in trained.items()
        if runs
    }
    if not any(steps.values()) or set.intersection(*steps.values()):
        return []
    said = "; ".join(f"{name} {_numbers(those) or 'none'}" for name, those in steps.items())
    return [f"{world}: no evaluation after the same steps, and no Same-Step: {said}"]


def _no_curve(world: str, rows: Rows) -> list[str]:
    """The note that runs have too few evaluations for a value at a cost, where it is so."""
    few = [
        name
        for name, seeds in rows.items()
        if any(one.trained and len(one.evaluations) < EVALUATED for one in seeds.values())
    ]
    return (
        [f"{world}: evaluated once after the start, and not known at a cost before the end: {', '.join(few)}"]
        if few
        else []
    )


def _seeds_apart(world: str, rows: Rows, baseline: str) -> list[str]:
    """A line for each method of which a seed lies apart: both readings."""
    notes = []
    for name, one in seeds_apart(rows, baseline).items():
        said = f"{world}: {name} has seed {one.seed} apart, at {100 * one.mean:.1f}; "
        said += f"{one.value[0]}, {one.value[1]} without"
        if one.minus_base is not None:
            # a comparison made once more is no further claim that it is clear of zero
            with_it, without = (signed(found).removesuffix(" *") for found in one.minus_base)
            said += f"; minus {baseline} {with_it}, {without} without"
        notes.append(f"{said}: intervals of seeds that vary normally")
    return notes


def _numbers(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def starts(rows: Rows) -> dict[str, TaskMeans]:
    """Rows `start`: task -> mean success before step 1. Methods that began alike (equal in the seeds that they share)
    have one row; those that began otherwise than most have their own, `start of NAME`."""
    groups: list[dict[str, dict[int, TaskMeans]]] = []
    for name, seeds in rows.items():
        first = {seed: one.evaluations[0] for seed, one in seeds.items() if one.trained}
        own = {seed: point.tasks for seed, point in first.items() if point.step == 0}
        if not own:
            continue
        for group in groups:
            other = next(iter(group.values()))
            if (both := own.keys() & other.keys()) and all(own[seed] == other[seed] for seed in both):
                group[name] = own
                break
        else:
            groups.append({name: own})
    found: dict[str, Mapping[str, float]] = {}
    for place, group in enumerate(sorted(groups, key=len, reverse=True)):
        every = {seed: tasks for seeds in group.values() for seed, tasks in seeds.items()}
        label = f"start of {', '.join(group)}" if place else "start"
        # a task whose episodes all ended in an error has no mean
        if shared := [task for task in next(iter(every.values())) if all(task in tasks for tasks in every.values())]:
            found[label] = {task: fmean(tasks[task] for tasks in every.values()) for task in shared}
    return found


# The tables, from the question that is asked first.


def overview(view: StudyWorld) -> Table:
    """Better by how much, how sure, at what cost: 80 columns. Intervals of success itself are in `accuracy`."""
    base = view.baseline
    steps, cpus = same_step(view.rows, base)[1], least_time(view.rows, base, "cpu")
    header = ["method", "seeds", "success", *([f"minus {base} [95 %]", "at equal CPU [95 %]"] if base else []), "turns"]
    before = starts(view.rows).items()
    lines = [[name, "-", f"{100 * _mean(tasks):.1f}", *(["-", "-"] if base else []), "0"] for name, tasks in before]
    for name, seeds in view.rows.items():
        at = [found.get(name) for found in (steps, cpus)]
        cells = [name, str(len(seeds)), "-" if at[0] is None else f"{100 * at[0].value.mean:.1f}"]
        if base:
            minus = [None if one is None else one.minus_base for one in at]
            cells += [signed(one).replace(", one run each", " †") for one in minus]
        lines.append([*cells, f"{total_cost(seeds).turns:.0f}"])
    return header, lines


def rises(view: StudyWorld) -> Table:
    """How far each method rises from its start, and beyond whom it is compared with, at their last evaluations."""
    header = [
        "method",
        "seeds",
        "start",
        "end [95 %]",
        "rise [95 %]",
        "against",
        "end minus its end [95 %]",
        "training",
    ]
    lines, beyond = [], dict[str, Difference]()
    for name, seeds in view.rows.items():
        first = {seed: record.evaluations[0].tasks for seed, record in seeds.items()}
        last = {seed: record.evaluations[-1].tasks for seed, record in seeds.items()}
        control = view.against.get(name, view.baseline if name != view.baseline else "")
        others = view.rows.get(control, {})
        other = {seed: record.evaluations[-1].tasks for seed, record in others.items()}
        both = difference(other, last, fixed=(fixed(others), fixed(seeds))) if others else None
        if both is not None:
            beyond[name] = both
        cells = [str(over_seeds(list(first.values()))), str(over_seeds(list(last.values())))]
        cells += [signed(rise(list(first.values()), list(last.values()))), control if both is not None else "-"]
        spent = median(record.total.seconds for record in seeds.values())
        lines.append([name, str(len(seeds)), *cells, "-", f"{spent:.0f} s"])
    # each row's own rise is a claim for itself; that some row is better than its control is one of many
    for line in lines:
        line[-2] = signed(in_family(beyond).get(line[0]))
    return header, lines


def accuracy(view: StudyWorld) -> Table:
    """Same-Step and Least-Time with intervals over seeds and tasks, and what each differs from the baseline by."""
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
    for name, found in ways.items():
        header += [f"{name} [95 %]", *([f"minus {base} (family of {family_size(found)})"] if base else [])]
    before = starts(rows).items()
    lines = [[name, "-", str(over_seeds([tasks])), *["-"] * (len(header) - 3)] for name, tasks in before]
    for name, seeds in rows.items():
        at = [found.get(name) for found in ways.values()]
        cells = [
            cell for one in at for cell in (["-", "-"] if one is None else [str(one.value), signed(one.minus_base)])
        ]
        cells = cells if base else cells[::2]
        lines.append([name, str(len(seeds)), *cells])
    return header, lines


def family_size(found: Mapping[str, AccuracyEstimate]) -> int:
    """Number of comparisons with the baseline, the family that Holm's p-values are for."""
    return max((one.minus_base.family for one in found.values() if one.minus_base is not None), default=0)


def parts(view: StudyWorld) -> Table:
    """What the differences from the baseline rest on, after the same steps: their interval for new scenes, worlds or
    products where tasks share some, seeds and tasks of both, standard errors, and how often a run of the method does
    better in a task."""
    steps = same_step(view.rows, view.baseline)[1]
    shared = any(one.in_new_clusters is not None for one in steps.values())
    header = ["method", f"minus {view.baseline} [95 %]", *(["for new scenes, worlds, products"] if shared else [])]
    header += ["seeds", "tasks", "s.e. by seeds", "s.e. by tasks", "better in a task %"]
    lines = []
    for name, one in steps.items():
        if (found := one.minus_base) is not None:
            lines.append([name, signed(found), *([signed(one.in_new_clusters)] if shared else [])])
            lines[-1] += ["{} and {}".format(*found.seeds), str(found.tasks)]
            lines[-1] += [points(found.seed_error), points(found.task_error), f"{100 * found.better:.0f}"]
    return header, lines


def p_values(view: StudyWorld) -> Table:
    """p-values of the differences from the baseline, alone and among all of the family (Holm)."""
    rows, base = view.rows, view.baseline
    ways = {
        "Same-Step": same_step(rows, base)[1],
        "Least-Time": least_time(rows, base),
        "Least-CPU": least_time(rows, base, "cpu"),
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


def averages(view: StudyWorld) -> Table:
    """What averaging does to how high a method ends, and how far apart its seeds: mean ± standard deviation of seeds,
    less what chance alone gives."""
    rows = view.rows
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
    means = [_plus_minus(fmean(apart[way]) if apart[way] else None).strip() for way in columns]
    total = [f"{mean} ({len(apart[way])} methods)" if mean else "-" for mean, way in zip(means, columns, strict=True)]
    return ["method", "seeds", *columns], [*lines, ["mean of methods", "", *total]]


def cost(view: StudyWorld) -> Table:
    """What all steps cost, mean over seeds, and how many times less than the baseline's that is, with its range over
    seeds."""
    header = ["method", *(NAMES[name] + (" s" if name in ("seconds", "cpu") else "") for name in MEASURES)]
    header += [f"speed-up, {NAMES[name]}" for name in MEASURES]
    lines = []
    for name, seeds in view.rows.items():
        total = total_cost(seeds)
        cells = ["-" if total.sampled is None else f"{total.sampled:.0f}", f"{total.tokens:.0f}"]
        cells = [f"{total.turns:.0f}", *cells, f"{total.seconds:.1f}", f"{total.cpu:.1f}"]
        cells += [_times(times_less(view.rows.get(view.baseline, {}), seeds, measure)) for measure in MEASURES]
        lines.append([name, *cells])
    return header, lines


def to_target(view: StudyWorld) -> Table:
    """Share of the baseline's turns, tokens and time in which a method reaches its Same-Step accuracy (`reached`)."""
    rows, name_of_base = view.rows, view.baseline
    header = ["method", *(f"{NAMES[name]}, % of {name_of_base}'s" for name in MEASURES)]
    if name_of_base not in rows:
        return header, []
    target, base = same_step(rows, name_of_base)[1].get(name_of_base), total_cost(rows[name_of_base])
    if target is None:
        return header, []
    lines = []
    for name, at in reached(rows, target.value.mean).items():
        shares = [_share(at, base, measure) if at is not None else "-" for measure in MEASURES]
        lines.append([name, *shares])
    return header, lines


def categories(view: StudyWorld) -> Table:
    """Accuracy by category at Least-Time (Tables 3 and 4)."""
    rows = view.rows
    every = [record.categories.values() for seeds in rows.values() for record in seeds.values()]
    names = sorted({kind for kinds in every for kind in kinds})
    if not names:
        return ["method"], []
    found = maps_at(rows, budgets(rows), "seconds")
    lines = [
        [name, *(str(at_category(found[name], seeds, kind)) for kind in names)]
        for name, seeds in rows.items()
        if name in found
    ]
    return ["method", *names], lines


def phases(view: StudyWorld) -> Table:
    """Wall clock and CPU seconds by phase, mean over seeds."""
    header = ["method", *(f"{phase}, {clock}" for phase in PHASES for clock in ("wall s", "CPU s"))]
    lines = []
    for name, seeds in view.rows.items():
        cells = [
            f"{fmean(record.phases[phase][clock] for record in seeds.values()):.1f}"
            for phase in PHASES
            for clock in (0, 1)
        ]
        lines.append([name, *cells])
    return header, lines


def depth(view: StudyWorld) -> Table:
    """What the controller chose: caps off probes, horizons at the end, and where weights and loss went (Table 6)."""
    header = ["method", "mean cap", "turns / episode", "last H_eff", "last H_cov", "last Hbar", "mean alpha"]
    header += ["deep third of weights", "deep third of loss", "deep third of KL (eq. 11)"]
    lines = []
    for name, seeds in view.rows.items():
        steps = [step for record in seeds.values() for step in record.steps]
        if not steps:
            continue  # an agent that was only evaluated
        ends = [record.steps[-1] for record in seeds.values() if record.steps]
        caps = [s.get("depth/cap") for s in steps if not s.get("depth/probe")] or [s.get("depth/cap") for s in steps]
        cells = [_average(caps), _average([step.get("turns_mean") for step in steps])]
        cells += [_average([end.get(f"depth/{key}") for end in ends]) for key in ("h_eff", "h_cov", "hbar")]
        cells += [_average([step.get("weight/alpha") for step in steps], 2)]
        for key in ("weight_deep_share", "loss_deep_share", "kl_deep_share"):
            cells.append(_average([None if step.get(key) is None else 100 * step[key] for step in steps], 1, " %"))
        lines.append([name, *cells])
    return header, lines


def critic(view: StudyWorld) -> Table:
    """Share of the returns' variance that a critic explains before it learns from them, second half of the steps."""
    lines = []
    for name, seeds in view.rows.items():
        values = []
        for record in seeds.values():
            half = record.evaluations[-1].step / 2
            late = [step.get("critic_explained") for step in record.steps if step["step"] > half]
            known = [value for value in late if value is not None]
            values += [fmean(known)] if known else []
        if values:
            lines.append(
                [name, str(len(values)), f"{fmean(values):.2f}", ", ".join(f"{value:.2f}" for value in values)]
            )
    return ["method", "seeds", "variance explained", "seed by seed"], lines


def heldout(view: StudyWorld) -> Table:
    """Nats per token of held-out passages before and after, and how much more than whom it is compared with."""
    found = {
        name: {seed: record.text for seed, record in seeds.items() if record.text is not None}
        for name, seeds in view.rows.items()
    }
    lines = []
    for name, seeds in found.items():
        if not seeds:
            continue
        before, after = ([text[place] for text in seeds.values()] for place in (0, 1))
        control = view.against.get(name, view.baseline if name != view.baseline else "")
        both = [seed for seed in seeds if seed in found.get(control, {})]
        against = [found[control][seed][1] for seed in both], [seeds[seed][1] for seed in both]
        beyond = crossed_difference(*against) if len(both) > 1 else None
        cells = [f"{fmean(map(_mean, before)):.3f}", _nats(after), _nats(differences(before, after), "+")]
        lines.append([name, str(len(seeds)), *cells, control if both else "-"])
        lines[-1].append(_nats(differences(*against), "+", beyond) if both else "-")
    return ["method", "seeds", "start", "end [95 %]", "more [95 %]", "against", "end minus its end [95 %]"], lines


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
    said = f"{mean:{sign}.3f} [{mean - half:{sign}.3f}, {mean + half:{sign}.3f}]"
    return said + (", one run each" if alone else "")


def regime(view: StudyWorld) -> Table:
    """The regime of every method whose steps of full depth were measured, pooled over seeds: early, late, all."""
    # brings torch, which the other tables do without
    from turngym.trainers.diagnostics.depth_regime import measure_regime
    from turngym.trainers.study.regime_table import MeasuredRegime, regime_table

    found: dict[str, dict[str, MeasuredRegime]] = {}
    for name, seeds in view.rows.items():
        parts = [record.regime for record in seeds.values() if record.regime]
        if parts and (name == view.baseline or view.baseline not in view.rows):
            sums = {window: pooled_sums([part[window] for part in parts]) for window in WINDOWS}
            found[name] = {window: MeasuredRegime(regime=measure_regime(one)) for window, one in sums.items()}
    return regime_table(found)


def signed(value: Difference | None) -> str:
    """A difference in points with its interval, and whether it is clear of zero (`*`) or of one run each."""
    if value is None:
        return "-"
    said = f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
    return said + (" *" if value.clear else ", one run each" if value.one_run_each else "")


def points(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.1f}"


def _plus_minus(spread: float | None) -> str:
    """Nothing where seeds lie no further apart than chance alone puts them: they are not known to be equal."""
    return "" if spread is None or 100 * spread < 0.05 else f" ± {100 * spread:.1f}"


def _times(found: Sequence[float]) -> str:
    """A ratio, and its range over seeds."""
    if not found:
        return "-"
    return f"{found[0]:.2f}x" + (f" ({found[1]:.2f} to {found[2]:.2f})" if len(found) > 1 else "")


def _share(at: Cost, base: Cost, measure: str) -> str:
    one, all_of_base = getattr(at, measure), getattr(base, measure)
    return f"{100 * one / all_of_base:.0f} %" if one is not None and all_of_base else "-"


def _average(values: Sequence[float | None], digits: int = 1, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}{unit}" if known else "-"


# The tables by name.

TABLES: Mapping[str, NamedTable] = {
    "overview": NamedTable(
        make=overview,
        about="Success in percent at Same-Step: LAST EVALUATIONS after the same number of steps, and what it is more "
        "than the "
        "baseline's, 95 % for new seeds and tasks. At equal CPU: the difference at the least CPU time that any main "
        "method needed, if runs had a machine to themselves. Turns: played in training. `*`: clear of zero among all "
        "of its column (Holm). "
        "`†`: one run each; it holds for these two runs and says nothing about other seeds.",
    ),
    "rises": NamedTable(
        make=rises,
        about="Success in percent before and after training. The rise is end minus start, paired by seed and task; "
        "training: wall clock of a run, median over seeds.",
    ),
    "accuracy": NamedTable(
        make=accuracy,
        about="Percent, with 95 % intervals for new seeds and new tasks, which are crossed; a row of one seed has one "
        "for this run and new tasks (one run each). Same-Step: LAST EVALUATIONS that all have, up to "
        "this step."
        " Least-Time: at the least wall clock that any main method needed for all of its steps, seed by seed, on "
        "straight lines between evaluations, and as a mean over the last part of it; Least-CPU the same by CPU "
        "seconds. `*`: the difference is clear of zero among all of its column (Holm, family-wise 5 %).",
    ),
    "parts": NamedTable(
        make=parts,
        about="Differences at Same-Step: how many seeds and tasks, standard errors in points by seeds (chance taken "
        "out) and by tasks (with the chance of samples), and the probability of improvement: how often a run of "
        "the method does better than one of the baseline in the same task, equal counting half.",
    ),
    "p": NamedTable(
        make=p_values,
        about="p-values: the least level at which the interval is clear of zero, alone and among all of the column "
        "(Holm).",
    ),
    "averages": NamedTable(
        make=averages,
        about="Percent, mean ± standard deviation of training seeds, less what chance alone gives (without ±: no more "
        "than that, or one run), three ways: at their last evaluation, LAST EVALUATIONS, and with the averaged weights "
        "of their last checkpoints (`evaluate.average`). Below: mean of the deviations.",
    ),
    "cost": NamedTable(
        make=cost,
        about="All steps, evaluations excluded, mean over seeds; CPU seconds are those of the training process. "
        f"Speed-up: of the means, and its range over the seeds. {SHARED_CPU}",
    ),
    "to-target": NamedTable(
        make=to_target,
        about="The first evaluation at the baseline's Same-Step accuracy or above from which on the mean of the rest "
        "stays there too (means over seeds), as a share of what all of the baseline's steps cost. `-`: none.",
    ),
    "categories": NamedTable(
        make=categories, about="Mean success by category at Least-Time, percent, 95 % over seeds and tasks."
    ),
    "phases": NamedTable(make=phases, about="Seconds of training by phase, mean over seeds."),
    "depth": NamedTable(
        make=depth,
        about="Caps off probes (where every step is a probe: of those), horizons after the last step, and shares of the"
        " deepest third of each step's turns, means over steps and seeds.",
    ),
    "critic": NamedTable(
        make=critic,
        about="Share of the returns' variance that the critic explains before it learns from them, second half of the "
        "steps.",
    ),
    "heldout": NamedTable(
        make=heldout,
        about="Negative log-likelihood of held-out passages, nats per token, intervals over seeds and documents; "
        "differences are paired by seed and document.",
    ),
    "regime": NamedTable(
        make=regime,
        about="Signs that depth can pay, in the baseline's own full-depth steps (`turngym study regime`).",
    ),
}
