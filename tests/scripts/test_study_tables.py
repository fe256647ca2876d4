"""The study's estimates and tables by hand, on records of two seeds and two tasks; tables from a file are the same."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import study_records

from turngym.agents.evaluation.seeds import crossed_difference, over_seeds
from turngym.core.errors import TurngymError
from turngym.core.task import content_hash
from turngym.scripts.main import main
from turngym.scripts.study.show import write_tables
from turngym.trainers.study import results, tables
from turngym.trainers.study.records import SEAL, Cost, Record, Records, made_by, read_records, write_records
from turngym.trainers.study.results import AccuracyEstimate, Rows, reached, total_cost
from turngym.trainers.study.tables import TABLES, StudyWorld, tables_of


def record(method: str, seed: int, curve: Sequence[float], seconds: float) -> Record:
    """Step 0, 10, 20, ...; `curve` is the success of task a at each, task b always has 0.5 less; `seconds` a step."""
    costs = [cost(10 * n * seconds) for n in range(len(curve))]
    return study_records.record(method, seed, costs, [{"a": value, "b": value - 0.5} for value in curve], every=10)


def cost(seconds: float) -> Cost:
    return Cost(seconds=seconds, cpu=seconds / 2, turns=seconds * 3, tokens=seconds * 12)


def by_world(records: Sequence[Record]) -> dict[str, Rows]:
    return Records(title="t", records=records).worlds


def same_step(rows: Rows) -> tuple[int, dict[str, AccuracyEstimate]]:
    return results.same_step(rows, "opd")


def least_time(rows: Rows, measure: results.Measure = "seconds", window: float = 0.0) -> dict[str, AccuracyEstimate]:
    return results.least_time(rows, "opd", measure, window)


def view(rows: Rows, baseline: str = "opd") -> StudyWorld:
    return StudyWorld(rows=rows, baseline=baseline, against={})


OPD = [record("opd", 0, [0.5, 0.6, 0.7, 0.7, 0.8, 0.8], 2.0), record("opd", 1, [0.5, 0.6, 0.6, 0.7, 0.7, 0.8], 2.0)]
OURS = [record("turnopd", seed, [0.5, 0.7, 0.8, 0.8, 0.9, 0.9], 1.0) for seed in (0, 1)]
FIXED = [record("fixed-6", 0, [0.5, 0.6], 0.5)]


def apart(run: Record) -> Record:
    """A run that was evaluated at other steps than all others."""
    return replace(run, evaluations=tuple(replace(point, step=point.step + 1) for point in run.evaluations))


STUDY = Records(title="t", baseline="opd", records=OPD)


def test_same_step_is_the_last_four_evaluations_that_all_reached() -> None:
    rows = by_world([*OPD, *OURS])["house"]
    step, found = same_step(rows)
    assert step == 50
    # seed 0: a has (.7 + .7 + .8 + .8) / 4 = .75, b .25; seed 1: .7 and .2
    assert found["opd"].value == over_seeds([{"a": 0.75, "b": 0.25}, {"a": 0.7, "b": 0.2}])
    assert found["turnopd"].value.mean == pytest.approx(0.6)
    assert found["opd"].minus_base is None
    difference = found["turnopd"].minus_base
    assert difference is not None
    # .85 - .75 and .85 - .7
    assert difference.mean == pytest.approx(0.125)
    assert (difference.seeds, difference.family, difference.one_run_each) == ((2, 2), 1, False)
    # both tasks differ alike, so chance is nothing: a standard error of .05 / sqrt(2) / sqrt(2) by OPD's seeds alone
    assert difference.seed_error == pytest.approx(0.025)
    # task a: 0.85 beats 0.75 and 0.7
    assert difference.better == 1.0
    # a record that ended sooner shortens it for all
    assert same_step(by_world([*OPD, *OURS, *FIXED])["house"])[0] == 10


def agent(name: str, seed: int, value: float) -> Record:
    """An agent that was evaluated and not trained."""
    kind = "model" if name.startswith("model") else "player"
    given = {"settings": {"agent": {"kind": kind}}, "group": "main", "steps": []}
    return study_records.record(name, seed, [cost(0.0)], [{"a": value, "b": value}], every=10, **given)


def test_an_agent_that_is_only_evaluated_changes_no_number_of_those_that_are_trained() -> None:
    trained, both = by_world([*OPD, *OURS])["house"], by_world([*OPD, *OURS, agent("expert", 0, 1.0)])["house"]
    alone, beside = same_step(trained), same_step(both)
    assert beside[0] == alone[0] == 50
    assert [beside[1][name].value for name in trained] == [alone[1][name].value for name in trained]
    measures: tuple[results.Measure, ...] = ("seconds", "cpu", "turns", "tokens")
    for measure in measures:
        assert results.budgets(both, measure) == results.budgets(trained, measure)
    assert tables.to_target(view(both))[1][:2] == tables.to_target(view(trained))[1]
    # a scripted player has no training seeds: it is set against both runs of OPD, and holds for others
    minus = beside[1]["expert"].minus_base
    assert minus is not None
    assert (minus.mean, minus.seeds, minus.one_run_each) == (pytest.approx(1 - 0.475), (2, 1), False)
    # of a single run of OPD nothing is known of other seeds, whomever it is compared with; nor of a model's
    for records in ([OPD[0], agent("expert", 0, 1.0), agent("expert", 1, 1.0)], [*OPD, agent("model:m", 0, 1.0)]):
        (one,) = [found.minus_base for found in same_step(by_world(records)["house"])[1].values() if found.minus_base]
        assert one.one_run_each
    # agents alone are compared as they are
    agents = by_world([agent("opd", 0, 0.5), agent("expert", 0, 1.0)])["house"]
    assert same_step(agents)[1]["expert"].value.mean == least_time(agents)["expert"].value.mean == 1.0


def test_runs_are_compared_at_the_steps_at_which_all_were_evaluated() -> None:
    often = study_records.record(
        "opd", 0, [cost(t) for t in (0.0, 1.0, 2.0, 3.0)], [{"a": v} for v in (0, 0.2, 0.4, 1)], 5
    )
    rarely = record("turnopd", 0, [0.0, 0.5], 1.0)
    rarely = replace(rarely, evaluations=tuple(replace(p, tasks={"a": p.tasks["a"]}) for p in rarely.evaluations))
    step, found = same_step(by_world([often, rarely])["house"])
    # OPD's .2 at step 5 and its 1 at step 15 have no counterpart
    assert (step, found["opd"].value.mean, found["turnopd"].value.mean) == (10, 0.4, 0.5)
    never = replace(rarely, evaluations=(replace(rarely.evaluations[1], step=7),))
    rows = by_world([often, never])["house"]
    assert same_step(rows) == (0, {})
    assert [line[2:4] for line in tables.overview(view(rows))[1]] == [["0.0", "-"], ["-", "-"], ["-", "-"]]
    assert tables.to_target(view(rows))[1] == []


def test_the_start_is_no_evaluation_after_the_same_steps() -> None:
    other = study_records.record(
        "mine", 0, [cost(0.0), cost(1.0)], [{"a": 0.5, "b": 0.0}, {"a": 1.0, "b": 1.0}], every=7
    )
    study = Records(title="t", baseline="opd", records=[*OPD, other])
    assert same_step(study.worlds["house"]) == (0, {})
    assert tables.notes_of(study)[0] == (
        "house: no evaluation after the same steps, and no Same-Step: opd 10, 20, 30, 40, 50; mine 7"
    )
    assert "no Same-Step" not in str(tables.notes_of(Records(title="t", baseline="opd", records=[*OPD, *FIXED])))


def test_the_tables_say_of_which_seeds_a_difference_is() -> None:
    opd = [replace(OPD[seed % 2], seed=seed) for seed in range(5)]
    study = Records(title="t", baseline="opd", records=[*opd, *OURS])
    found = same_step(study.worlds["house"])[1]["turnopd"].minus_base
    assert found is not None
    assert found.seeds == (2, 2)
    said = "house: turnopd has seeds 0, 1, opd 0, 1, 2, 3, 4: differences are of 0, 1"
    assert tables.notes_of(study) == [said]
    assert tables.notes_of(Records(title="t", baseline="opd", records=[*OPD, *OURS])) == []
    none = replace(study, records=[opd[3], OURS[0]])
    assert tables.notes_of(none) == ["house: turnopd has seeds 0, opd 3: none in common, and no difference"]


def test_a_seed_that_lies_apart_is_said_with_both_readings() -> None:
    tasks = [f"{task}" for task in range(30)]

    def run(method: str, seed: int, level: float) -> Record:
        means = {task: level + place % 3 / 100 for place, task in enumerate(tasks)}
        kinds = {"categories": dict.fromkeys(tasks, "place")}
        return study_records.record(method, seed, [cost(0.0), cost(1.0)], [means, means], every=10, **kinds)

    runs = [run("opd", seed, 0.5 + seed / 50) for seed in range(5)]
    runs += [run("turnopd", seed, level) for seed, level in enumerate((0.5, 0.52, 0.51, 0.06, 0.53))]
    study = Records(title="t", baseline="opd", records=runs)
    note = next(note for note in tables.notes_of(study) if "apart" in note)
    assert note.startswith("house: turnopd has seed 3 apart, at 7.0; 43.4 [")
    assert "52.5 [" in note
    assert "minus opd -11.6 [" in note
    # of the seeds that both then have: .525 against .545
    assert ", -2.0 [" in note
    # without it, and where all vary, there is none
    left = [one for one in runs if (one.method, one.seed) != ("turnopd", 3)]
    assert not [note for note in tables.notes_of(replace(study, records=left)) if "apart" in note]


@pytest.mark.parametrize("place", [1, -1])
def test_a_task_whose_episodes_ended_in_errors_is_left_out_and_said(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [*OURS[0].evaluations]
    points[place] = replace(points[place], tasks={"a": 0.5})
    study = Records(title="t", baseline="opd", records=[*OPD, replace(OURS[0], evaluations=points)])
    said = "house: 1 tasks left out that not every evaluation has an episode of"
    assert f"- {said}" in write_tables(study, tmp_path)
    assert main(["study", "show", str(tmp_path), "--tables", "overview"]) == 0
    assert said in capsys.readouterr().out
    assert {*study.worlds["house"]["opd"][0].evaluations[0].tasks} == {"a"}
    apart = replace(study, records=[replace(OURS[0], evaluations=[replace(points[0], tasks={"c": 1.0})]), *OPD])
    with pytest.raises(TurngymError, match="house: no task is in every evaluation of turnopd, opd"):
        tables_of(apart)


def test_what_averaging_does_to_the_spread_of_seeds() -> None:
    ours = [replace(item, averaged={"a": level, "b": 0.5}) for item, level in zip(OURS, (0.6, 0.8), strict=True)]
    header, lines = tables.averages(view(by_world([*OPD, *ours, *FIXED])["house"]))
    assert header == ["method", "seeds", "last evaluation", "mean of the last ones", "averaged weights"]
    rows = {row[0]: row[1:] for row in lines}
    # .55 and .55 at the end; .5 and .45 as means of the last four; no averaged weights
    assert rows["opd"] == ["2", "55.0", "47.5 ± 3.5", "-"]
    assert rows["fixed-6"][0] == "1"
    assert rows["fixed-6"][1:] == ["35.0", "35.0", "-"]
    # .55 and .65 because of task a alone, which is what chance does, too
    assert rows["turnopd"][3] == "60.0"
    assert lines[-1] == ["mean of methods", "", "-", "± 1.8 (2 methods)", "-"]


def test_least_time_is_what_the_fastest_main_method_needed() -> None:
    rows = by_world([*OPD, *OURS, *FIXED])["house"]
    found = least_time(rows)
    # TurnOPD needs 50 s, when OPD (2 s a step) is halfway from step 20 to step 30; fixed depths set no limit
    assert found["opd"].value.mean == pytest.approx(fmean([0.7, 0.2, 0.65, 0.15]))
    assert found["turnopd"].value.mean == pytest.approx(0.65)
    assert found["turnopd"].minus_base is not None
    assert found["turnopd"].minus_base.mean == pytest.approx(0.65 - 0.425)
    # a run that was over before then counts as it ended; one seed of two pairs up: .35 against .45
    assert found["fixed-6"].minus_base is not None
    assert found["fixed-6"].minus_base.mean == pytest.approx(-0.1)
    # the last 30 % of it, from 35 to 50 s: TurnOPD rises from .6 at 35 s to .65 at 40 s, and stays
    window = least_time(rows, window=0.3)["turnopd"].value.mean
    assert window == pytest.approx((0.625 * 5 + 0.65 * 10) / 15)
    # a method that is slow at first is between its start and its first evaluation
    slow = by_world([record("opd", 0, [0.5, 0.9, 0.9], 9.0), record("turnopd", 0, [0.5, 0.6], 0.5)])["house"]
    assert least_time(slow)["opd"].value.mean == pytest.approx(0.25 + 0.4 * 5 / 90)
    assert least_time(slow)["turnopd"].minus_base is not None
    assert least_time(slow)["turnopd"].minus_base.told == "one run each"


def test_a_straight_line_from_start_to_end_is_no_success_at_a_cost() -> None:
    """A curve that bends lies above it: the slower method would look worse for it."""
    study = Records(
        title="t", baseline="opd", records=[record("opd", 0, [0.5, 0.9], 9.0), record("turnopd", 0, [0.5, 0.9], 0.5)]
    )
    rows = study.worlds["house"]
    # who has ended by then counts as it ended
    assert set(least_time(rows)) == set(least_time(rows, "cpu")) == {"turnopd"}
    assert least_time(rows, window=0.3) == {}
    assert {line[4] for line in tables.overview(view(rows))[1]} == {"-"}
    assert "opd, turnopd" in tables.notes_of(study)[-1]


def test_two_methods_that_are_equal_at_every_second_are_equal_at_least_time() -> None:
    """However long their steps: the mean of the evaluations before the limit lay further back for the slower one."""
    curve = [0.5 + 0.4 * t for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    fast = [record("turnopd", seed, curve, 1.0) for seed in (0, 1)]
    slow = [record("opd", seed, [0.5, 0.5 + 0.4 * 0.75, 0.5 + 0.4 * 1.5], 3.0) for seed in (0, 1)]
    for window in (0.0, 0.3):
        found = least_time(by_world([*fast, *slow])["house"], window=window)["turnopd"].minus_base
        assert found is not None
        assert found.mean == pytest.approx(0.0, abs=1e-12)


def test_least_time_by_another_measure() -> None:
    dear = [
        replace(item, evaluations=tuple(replace(p, cost=replace(p.cost, cpu=9e9)) for p in item.evaluations[1:]))
        for item in OPD
    ]
    rows = by_world([*dear, *OURS])["house"]
    assert least_time(rows)["opd"].value.mean > 0
    assert "opd" in least_time(rows, "turns")
    # without an evaluation within the limit there is nothing to say
    assert set(least_time(rows, "cpu")) == {"turnopd"}
    assert tables.accuracy(view(rows))[1][1][-2:] == ["-", "-"]


def test_what_differences_rest_on_and_their_family() -> None:
    rows = by_world([*OPD, *OURS, *[replace(one, method="tcod") for one in OURS]])["house"]
    header, lines = tables.parts(view(rows))
    found = dict(zip(header, lines[0], strict=True))
    assert (found["seeds"], found["tasks"], found["better in a task %"]) == ("2 and 2", "2", "100")
    assert "minus opd (family of 2)" in tables.accuracy(view(rows))[0]
    header, lines = tables.p_values(view(rows))
    alone, together = lines[1][1:3]
    assert float(together) == pytest.approx(min(1.0, 2 * float(alone)), abs=2e-4)


def test_a_difference_in_new_scenes_is_surer_of_more_scenes() -> None:
    tasks = {f"t{n}": n / 40 for n in range(40)}
    kinds = {"categories": dict.fromkeys(tasks, "place")}
    runs = [study_records.record("opd", 0, [cost(1.0)], [dict.fromkeys(tasks, 0.0)], every=10, **kinds)]
    runs += [study_records.record("ours", 0, [cost(1.0)], [tasks], every=10, **kinds)]

    def parts(shared: int) -> dict[str, str]:
        clusters = {task: f"scene {n // shared}" for n, task in enumerate(tasks)}
        known = [replace(one, clusters=clusters) for one in runs]
        header, lines = tables.parts(view(by_world(known)["house"]))
        return dict(zip(header, lines[0], strict=True))

    new, own = "for new scenes, worlds, products", "minus opd [95 %]"
    assert new not in parts(1)
    assert parts(20)[own] == parts(5)[own] == parts(1)[own]
    # t over the means of 8 scenes, 0.05 to 0.925 in steps of 0.125
    assert parts(5)[new] == "+48.8 [+23.2, +74.3], one run each"
    assert parts(20)[new] == "+48.8 [-100.0, +100.0], one run each"


def test_differences_at_equal_cpu_time_are_those_of_the_cpu_clock() -> None:
    free = [
        replace(item, evaluations=tuple(replace(p, cost=replace(p.cost, cpu=0.0)) for p in item.evaluations))
        for item in OPD
    ]
    ours = least_time(by_world([*free, *OURS])["house"], "cpu")["turnopd"].minus_base
    assert ours is not None
    # whose evaluations all cost nothing is at its end, .55 and .55; TurnOPD at .65
    assert ours.mean == pytest.approx(0.65 - 0.55)


def test_without_a_main_method_there_is_no_least_time() -> None:
    header, lines = tables.accuracy(view(by_world(FIXED)["house"]))
    assert header[0] == "method"
    assert [line[0] for line in lines] == ["start", "fixed-6"]


def test_when_a_method_arrives() -> None:
    lucky = record("turnopd", 0, [0.5, 0.9, 0.6, 0.6, 0.9, 0.9], 1.0)
    rows = by_world([OPD[0], lucky])["house"]
    # a = .9 is .65 on average; at step 10 the rest averages .53, at step 40 it stays
    arrived = reached(rows, 0.6)
    assert arrived["turnopd"] == cost(40.0)
    assert arrived["opd"] is None
    assert reached(rows, 0.5)["turnopd"] == cost(10.0)


def test_costs_and_their_ratios() -> None:
    rows = by_world([*OPD, *OURS])["house"]
    assert total_cost(rows["opd"]) == cost(100.0)
    same, twice = "1.00x (1.00 to 1.00)", "2.00x (2.00 to 2.00)"
    assert tables.cost(view(rows))[1] == [
        ["opd", "300", "-", "1200", "100.0", "50.0", same, "-", same, same, same],
        ["turnopd", "150", "-", "600", "50.0", "25.0", twice, "-", twice, twice, twice],
    ]
    # OPD's Same-Step is .475; TurnOPD evaluates at .55 from step 20 on, a fifth of OPD's 100 s
    assert tables.to_target(view(rows))[1][1] == ["turnopd", "20 %", "-", "20 %", "20 %", "20 %"]


def test_tasks_are_those_of_averaged_weights_too() -> None:
    """One whose evaluation lost a task: what all are compared on is without it, and the note says so."""
    whole, lost = replace(OPD[0], averaged={"a": 1.0, "b": 0.5}), replace(OURS[0], averaged={"a": 0.75})
    study = Records(title="t", baseline="opd", records=[whole, lost])
    assert study.shared_tasks == {"house": {"a"}}
    assert study.worlds["house"]["opd"][0].averaged == {"a": 1.0}
    assert "1 tasks left out" in tables.notes_of(study)[0]


def test_a_ratio_of_costs_has_its_range_and_tokens_are_those_that_were_drawn() -> None:
    def spent(method: str, seed: int, turns: float, sampled: float) -> Record:
        total = Cost(seconds=1.0, cpu=1.0, turns=turns, tokens=10.0, sampled=sampled)
        return replace(record(method, seed, [0.5, 0.6, 0.6], 1.0), total=total)

    runs = [spent("opd", 0, 100, 400), spent("opd", 1, 300, 600), spent("grpo", 0, 50, 800), spent("grpo", 1, 200, 700)]
    header, lines = tables.cost(view(by_world(runs)["house"]))
    found = dict(zip(header, lines[1], strict=True))
    assert (found["turns"], found["tokens sampled"], found["tokens trained on"]) == ("125", "750", "10")
    assert found["speed-up, turns"] == "1.60x (1.50 to 2.00)"
    assert found["speed-up, tokens sampled"] == "0.67x (0.50 to 0.86)"
    # one run of the method: no range
    assert "(" not in str(tables.cost(view(by_world(runs[:3])["house"]))[1][1])


def test_categories_phases_and_depth() -> None:
    rows = by_world([*OPD, *OURS])["house"]
    header, lines = tables.categories(view(rows))
    assert header == ["method", "heat", "place"]
    assert lines[1][1:] == ["40.0 [0.0, 100.0]", "90.0 [0.0, 100.0]"]
    assert tables.phases(view(rows))[1][0] == ["opd", "2.0", "1.0", "2.0", "1.0", "2.0", "1.0"]
    header, lines = tables.depth(view(rows))
    assert dict(zip(header, lines[1], strict=True)) == {
        "method": "turnopd",
        "mean cap": "8.0",
        "turns / episode": "7.0",
        "last H_eff": "4.0",
        "last H_cov": "-",
        "last Hbar": "-",
        "mean alpha": "0.50",
        "deep third of weights": "-",
        "deep third of loss": "-",
        "deep third of KL (eq. 11)": "-",
    }


def test_a_study_asks_for_its_tables() -> None:
    study = Records(title="t", baseline="opd", tables=("overview", "cost"), records=[*OPD, *OURS])
    shown = tables_of(study)
    assert [table.title for table in shown] == ["house: overview", "house: cost"]
    header, lines = shown[0].table
    assert header == ["method", "seeds", "success", "minus opd [95 %]", "at equal CPU [95 %]", "turns"]
    assert [line[:3] for line in lines] == [["start", "-", "25.0"], ["opd", "2", "47.5"], ["turnopd", "2", "60.0"]]
    alone = replace(study, baseline=None)
    assert tables_of(alone)[0].table[0] == ["method", "seeds", "success", "turns"]


def test_the_start_stands_above_what_became_of_it() -> None:
    """One row where methods began alike in the seeds that they share, one more for those that began otherwise."""
    reads = record("reads", 1, [0.7, 0.8], 1.0)
    rows = by_world([*OPD, *OURS, reads, agent("expert", 0, 1.0)])["house"]
    assert {name: fmean(tasks.values()) for name, tasks in tables.starts(rows).items()} == {
        "start": 0.25,
        "start of reads": pytest.approx(0.45),
    }
    for name in ("overview", "accuracy"):
        header, lines = TABLES[name](view(rows))
        assert [line[0] for line in lines] == ["start", "start of reads", *rows]
        assert {len(line) for line in lines} == {len(header)}
        assert lines[1][2].startswith("45.0")
    assert tables.starts(by_world([agent("expert", 0, 1.0)])["house"]) == {}


def test_the_start_is_of_the_tasks_that_all_runs_have_a_mean_of() -> None:
    """Where all episodes of a task ended in an error, the evaluation has none."""
    first, *later = OPD[1].evaluations
    task, *_ = first.tasks
    less = replace(first, tasks={name: value for name, value in first.tasks.items() if name != task})
    runs = by_world([OPD[0], replace(OPD[1], evaluations=(less, *later))])["house"]
    assert {name: set(tasks) for name, tasks in tables.starts(runs).items()} == {"start": {*less.tasks}}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([*OPD, *OURS], "mean of the last 4 evaluations after the same number of steps"),
        ([*OPD, *FIXED], ": the last evaluation after the same number of steps"),
        ([OPD[0], apart(OPD[1])], "runs have none in common"),
    ],
)
def test_captions_say_of_what_and_of_how_many(records: Sequence[Record], said: str) -> None:
    assert said in tables.caption("overview", by_world(records)["house"])
    sizes = tables.sizes(by_world(records)["house"])
    assert sizes == f"n: {'1 to 2' if FIXED[0] in records else '2'} seeds, 2 tasks, 4 samples."


def test_rises_and_whom_each_row_is_compared_with() -> None:
    rows = by_world([*OPD, *OURS, *FIXED])["house"]
    chosen = replace(view(rows), against={"fixed-6": "turnopd"})
    found = {line[0]: line for line in tables.rises(chosen)[1]}
    assert [found[name][5] for name in ("opd", "turnopd", "fixed-6")] == ["-", "opd", "turnopd"]
    # from .25 to .55
    assert found["opd"][4].startswith("+30.0 [")
    # .35 against .65, seed 0 alone
    assert found["fixed-6"][6].startswith("-30.0 [")
    assert found["fixed-6"][6].endswith("one run each")


def test_the_critic_and_held_out_text() -> None:
    steps = [{"step": n, "critic_explained": n / 100} for n in range(1, 51)]
    one = replace(OPD[0], steps=steps, text=({"0": 2.0, "1": 3.0}, {"0": 1.0, "1": 2.5}))
    other = replace(OURS[0], text=({"0": 2.0, "1": 3.0}, {"0": 2.0, "1": 3.0}))
    rows = by_world([one, other])["house"]
    # the mean of .26 to .5
    assert tables.critic(view(rows))[1] == [["opd", "1", "0.38", "0.38"]]
    lines = {line[0]: line for line in tables.heldout(view(rows))[1]}
    assert (lines["opd"][2], lines["opd"][3][:5], lines["opd"][4][:6]) == ("2.500", "1.750", "-0.750")
    assert lines["turnopd"][5:][0] == "opd"
    # nothing is known of other seeds
    assert all(cell.endswith("one run each") for cell in (lines["turnopd"][4], lines["turnopd"][6]))
    assert lines["turnopd"][6].startswith("+0.750")
    runs = [(1.0, 2.5), (1.1, 2.6)], [(2.0, 3.0), (2.4, 3.4)]
    text = [[dict(zip("01", end, strict=True)) for end in ends] for ends in runs]
    both = [
        replace(one, seed=seed, text=(text[0][0], text[place][seed]))
        for place, one in enumerate((OPD[0], OURS[0]))
        for seed in (0, 1)
    ]
    lines = {line[0]: line for line in tables.heldout(view(by_world(both)["house"]))[1]}
    half = crossed_difference(text[0], text[1])
    assert lines["turnopd"][6] == f"+0.900 [{0.9 - half:+.3f}, {0.9 + half:+.3f}]"


def test_every_table_can_be_made_of_any_study() -> None:
    bare = replace(OURS[0], regime={}, phases=dict.fromkeys(("rollout", "teacher", "update"), (0.0, 0.0)), steps=[])
    for records in ([*OPD, *OURS, *FIXED], [bare]):
        for baseline in ("opd", None):
            for name in TABLES:
                made = tables_of(Records(title="t", baseline=baseline, tables=(name,), records=records))
                assert all(len(row) == len(shown.table[0]) for shown in made for row in shown.table[1])


def test_the_study_can_be_written_again_from_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [made_by("turngym study run")]
    # two that are equal in all would be one run
    rows = [*OPD, OURS[0], replace(OURS[1], total=cost(51.0)), *FIXED]
    study = Records(title="T", baseline="opd", tables=("overview", "to-target"), records=rows, made_by=made)
    text = write_tables(study, tmp_path / "first")
    assert "## house: to-target" in text
    data = tmp_path / "first" / "study.json"
    assert main(["study", "show", str(data), "--out", str(tmp_path / "again")]) == 0
    assert "house: to-target" in capsys.readouterr().out
    first, again = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("first", "again"))
    assert {"study.md", "study.json", "house-overview.csv", "house-overview.tex", "house-curves.png"} < set(first)
    assert first == again
    (row,) = json.loads(first["study.json"])["made_by"]
    assert row["command"] == "turngym study run"
    assert "host" not in row
    # the numbers are the same in LaTeX
    tex = (tmp_path / "first" / "house-overview.tex").read_text()
    assert "\\label{tab:house-overview}\n\\begin{tabular}{lrrrrr}\n\\toprule\n" in tex
    assert "\\caption{Success in percent at Same-Step: the last evaluation" in tex
    assert "n: 1 to 2 seeds, 2 tasks, 4 samples.}" in tex
    assert not any(
        "± 0.0" in text or r"$\pm$ 0.0" in text for text in (name.decode(errors="ignore") for name in first.values())
    )
    for row in csv.DictReader((tmp_path / "first" / "house-overview.csv").open()):
        values = [value.replace("†", r"\dag{}") for name, value in row.items() if name != "method"]
        assert all(f" {value}" in tex for value in values), row


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("world", name) for name in ("/evil", "../evil", "a/b", "", 3, "a\n")),
        *(("method", name) for name in ("../evil", ["a"])),
        *(("evaluations", value) for value in ([], 3, [3], [{"step": "x"}])),
        *(("categories", value) for value in (["a"], {"a": "place"})),
        *(("total", {"seconds": value, "cpu": 0, "turns": 0, "tokens": 0}) for value in (-1.0, 1.7e308)),
        ("total", {"seconds": 1.0}),
        *(("settings", value) for value in (3, {}, {"algorithm": 3}, {"agent": "expert"})),
        *(("steps", value) for value in (3, [{}], [{"step": 1, "depth/cap": "x"}])),
        *(("text", value) for value in ([{}, {}], [{"a": 1.0}], [{"a": "x"}, {"a": 1}])),
        *(("averaged", value) for value in ({}, {"a": 7.0}, 3)),
    ],
)
def test_a_field_that_cannot_be_is_one_line(field: str, value: object, tmp_path: Path) -> None:
    refused(tmp_path, {field: value}, field)


@pytest.mark.parametrize("value", [7.0, -0.1, float("nan"), "x", None, True])
def test_success_that_cannot_be_is_refused(value: object, tmp_path: Path) -> None:
    points = json.loads(json.dumps(asdict(OPD[0])))["evaluations"]
    points[2]["tasks"]["a"] = value
    refused(tmp_path, {"evaluations": points}, r"evaluations\[2\]\.tasks")


def test_evaluations_rise(tmp_path: Path) -> None:
    points = json.loads(json.dumps(asdict(OPD[0])))["evaluations"]
    refused(tmp_path, {"evaluations": points[::-1]}, "evaluations")


def sealed(table: dict[str, Any]) -> str:
    """A study.json whose writer has sealed whatever it holds."""
    content = {name: value for name, value in table.items() if name != SEAL}
    return json.dumps({**content, SEAL: content_hash(content)})


@pytest.mark.parametrize("change", [{"title": "won"}, {"more": 1}, {SEAL: None}, {SEAL: "0" * 64}])
def test_what_tables_show_is_what_was_written(change: dict[str, Any], tmp_path: Path) -> None:
    write_records(STUDY, tmp_path / "study.json")
    table = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(table | change))
    with pytest.raises(TurngymError, match="changed after it was written"):
        read_records(tmp_path)


def test_a_run_that_is_copied_is_one_seed(tmp_path: Path) -> None:
    write_records(Records(title="t", records=[OPD[0], replace(OPD[0], seed=7)]), tmp_path / "study.json")
    with pytest.raises(TurngymError, match="house/opd/seed0 and house/opd/seed7 are one run"):
        read_records(tmp_path)


def test_names_of_a_study_are_text_on_its_page(tmp_path: Path) -> None:
    names = {"world": "<img src=x>", "method": "a [free](x)", "about": "__b__\n# c"}
    one = replace(OPD[0], evaluations=OPD[0].evaluations[:1], **names)
    said = write_tables(Records(title="# t", records=[one]), tmp_path)
    assert "<img" not in said
    assert "[free](" not in said
    assert "\n# c" not in said


def refused(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    """A study.json whose first record has `changed` fields is refused in one line, and nothing is written."""
    write_records(STUDY, tmp_path / "good.json")
    table = json.loads((tmp_path / "good.json").read_text())
    table["records"][0] |= changed
    (tmp_path / "bad.json").write_text(sealed(table))
    with pytest.raises(TurngymError, match=rf"bad\.json.*records\[0\].*{said}") as error:
        read_records(tmp_path / "bad.json")
    assert "\n" not in str(error.value)


def test_a_study_has_every_cell_once_and_its_own_fields(tmp_path: Path) -> None:
    write_records(STUDY, tmp_path / "study.json")
    table = json.loads((tmp_path / "study.json").read_text())
    for changed, said in (
        ({"records": [table["records"][0]] * 2}, "house/opd/seed0 2 times"),
        *(({"tables": value}, "tables") for value in ("overview", [1])),
        *(({name: value}, name) for name, value in {"baseline": 3, "against": ["a"], "made_by": 3, "title": 3}.items()),
    ):
        (tmp_path / "bad.json").write_text(sealed(table | changed))
        with pytest.raises(TurngymError, match=said):
            read_records(tmp_path / "bad.json")
    # a record that does not say its form is of none
    del table["records"][0]["schema"]
    (tmp_path / "bad.json").write_text(sealed(table))
    with pytest.raises(TurngymError, match="schema"):
        read_records(tmp_path / "bad.json")


def test_a_record_survives_json_and_other_files_are_refused(tmp_path: Path) -> None:
    kept = replace(OPD[0], clusters={"a": "kitchen"}, text=({"0": 2.0, "1": 3.0}, {"0": 1.0, "1": 2.5}))
    write_records(Records(title="t", records=[kept]), tmp_path / "study.json")
    assert read_records(tmp_path).records == [kept]
    refused(tmp_path, {"total": None}, "total")
    table = json.loads((tmp_path / "study.json").read_text())
    table["records"][0]["seed"] = "\ud800"
    (tmp_path / "half.json").write_text(sealed(table))
    with pytest.raises(TurngymError, match=r"half\.json is not a study's"):
        read_records(tmp_path / "half.json")
    for name, content in {"x.json": b"[]", "deep.json": b"[" * 10**6, "x.json.gz": gzip.compress(b"{}")[:-4]}.items():
        (tmp_path / name).write_bytes(content)
    for name in ("x.json", "deep.json", "x.json.gz", "none.json"):
        with pytest.raises(TurngymError, match=re.escape(name)):
            read_records(tmp_path / name)
