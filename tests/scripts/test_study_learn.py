"""`turngym study learn`: what is planned, how runs are kept and resumed, and the arithmetic of its table."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the bench needs turngym[train]")

from turngym.agents.evaluation.statistics import ScoreError, clustered
from turngym.agents.worlds import load_world
from turngym.envs.core.errors import TurngymError
from turngym.scripts import train
from turngym.scripts.study import grid as jobs
from turngym.scripts.study import learn
from turngym.scripts.study.grid import Job, Runner
from turngym.scripts.study.learn import crossed_error, over_seeds, rise, write_text
from turngym.scripts.study.learn_recipes import MUST_RISE, RECIPES, Size, choose


def test_rises_over_seeds_and_tasks_by_hand() -> None:
    before = [{"a": 0.0, "b": 0.25}, {"a": 0.5, "b": 0.25}]
    after = [{"a": 0.5, "b": 0.25}, {"a": 0.5, "b": 0.75}]
    # differences 0.5 0 / 0 0.5: both seeds and both tasks have the mean 0.25, so nothing varies but chance
    assert rise(before, after).mean == 0.25
    uneven = [{"a": 0.2, "b": 0.4, "c": 0.6}, {"a": 0.4, "b": 0.6, "c": 0.8}]
    # seeds 0.4 and 0.6: variance 0.02, A = 0.01; tasks 0.3, 0.5, 0.7: variance 0.04, B = 0.04 / 3;
    # f = 0.000544 / (0.0001 / 1 + 0.000178 / 2) = 2.88, rounded down to 2: t = 4.3027
    found = over_seeds(uneven)
    half = 4.302652729911275 * math.sqrt(0.01 + 0.04 / 3)
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == (pytest.approx(max(0.0, 0.5 - half)), pytest.approx(min(1.0, 0.5 + half)))
    assert crossed_error([list(run.values()) for run in uneven]) == pytest.approx(half)


def test_what_seeds_add_is_visible_and_the_interval_over_tasks_is_the_least() -> None:
    tasks = [f"{n}" for n in range(50)]
    alike = [dict.fromkeys(tasks, 0.0) | {"0": 0.5}] * 3
    # the seeds agree, so there is only what tasks say: below the t interval, which knows no end, above Gaffke's bound
    assert over_seeds(alike).high == clustered([0.5] + [0.0] * 49).high > 0.01 + 2.0096 * 0.01
    assert over_seeds(alike).low == 0.0
    apart = [dict.fromkeys(tasks, value) for value in (0.2, 0.5, 0.8)]
    half = 4.302652729911275 * math.sqrt(0.09 / 3)  # seeds 0.2, 0.5, 0.8: variance 0.09
    found = over_seeds(apart)
    assert (found.low, found.high) == (0.0, 1.0)
    assert half > 0.5
    near = over_seeds([dict.fromkeys(tasks, value) for value in (0.45, 0.5, 0.55)])
    assert near.low == pytest.approx(0.5 - 4.302652729911275 * math.sqrt(0.0025 / 3))


def test_one_seed_gives_the_interval_over_tasks() -> None:
    assert over_seeds([{"a": 0.2, "b": 0.4}]) == clustered([0.2, 0.4])


def test_runs_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ScoreError, match="run 2 of 2 played other tasks"):
        over_seeds([{"a": 0.0}, {"b": 0.0}])
    with pytest.raises(ScoreError, match="no runs"):
        over_seeds([])
    with pytest.raises(ScoreError, match="do not pair up"):
        rise([{"a": 0.0}], [{"a": 0.0}, {"a": 1.0}])


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=2, max_size=4)
    ),
    st.floats(-0.5, 0.5),
)
def test_moving_every_value_moves_the_interval(values: list[list[float]], by: float) -> None:
    moved = [[value + by for value in row] for row in values]
    one, two = crossed_error(values), crossed_error(moved)
    if one > 1e-6:  # without variance there is nothing but rounding
        assert two == pytest.approx(one, rel=1e-6, abs=1e-6)
    found = over_seeds([{str(task): value for task, value in enumerate(row)} for row in values])
    assert found.low <= found.mean + 1e-9
    assert found.mean <= found.high + 1e-9


def test_controls_come_along_and_come_first() -> None:
    assert list(choose(("luffy",))) == ["grpo", "luffy"]
    assert list(choose(())) == list(RECIPES)
    names = list(RECIPES)
    assert all(names.index(r.control) < names.index(n) for n, r in RECIPES.items() if r.control)
    assert set(MUST_RISE) <= set(names)
    with pytest.raises(TurngymError, match=r"'grpp': there are .* Did you mean 'grpo'"):
        choose(("grpp",))


@pytest.mark.parametrize("env", ["alfworld", "webshop", "search"])
def test_every_command_is_one_that_train_takes(env: str, tmp_path: Path) -> None:
    options = learn.LearnOptions(env=env, out=tmp_path, seeds=2)
    planned = learn.plan(options, load_world(env), choose(()))
    runs = {name: 4 if name in MUST_RISE else 2 for name in RECIPES}
    starts = ["warm", "hints"] if env == "webshop" else ["hints"]
    assert list(planned) == [*starts, *RECIPES]
    assert {name: len(planned[name]) for name in RECIPES} == runs
    for row in planned.values():
        for job in row:
            if job is not row[-1]:
                continue
            parsed = train.parse(shlex.split(job.command)[2:])
            assert parsed.run.steps == job.steps
            assert parsed.models.out == job.folder
            if parsed.algorithm == "prm-rl":
                assert parsed.optimizer.ppo_epochs == 1, "of an option that comes twice the last one counts"
    hinted = planned["opd-hints"][1]
    assert hinted.needs is planned["hints"][0]
    assert str(hinted.needs.model) in hinted.command
    order = [job.name.partition("/")[2] for job in learn.in_turn(list(planned.values()))]
    assert order[: len(RECIPES) + len(starts)] == [*starts, *(f"{name}/seed0" for name in RECIPES)]
    assert len(order) == len(starts) + sum(runs.values())
    assert planned["opd"][1].same_start == planned["grpo"][1].same_start != hinted.same_start
    assert planned["grpo"][1].needs is (planned["warm"][0] if env == "webshop" else None)


def test_a_world_says_how_much_is_trained_unless_the_user_does() -> None:
    sizes = [learn.size_of(learn.LearnOptions(env=env), load_world(env)) for env in ("alfworld", "webshop", "search")]
    assert [(size.steps, size.episodes, size.every) for size in sizes] == [(24, 64, 12), (24, 64, 12), (36, 256, 18)]
    asked = learn.LearnOptions(env="search", episodes=8, steps=4, evaluations=4)
    assert learn.size_of(asked, load_world("search")) == Size(steps=4, episodes=8, every=1, tasks=100, samples=4)
    with pytest.raises(TurngymError, match="--steps 24 cannot be cut into 5 equal parts"):
        learn.size_of(learn.LearnOptions(evaluations=5), load_world("alfworld"))
    with pytest.raises(TurngymError, match="'alfworld-loops': there are recipes for alfworld, webshop, search only"):
        learn.size_of(learn.LearnOptions(env="alfworld-loops"), load_world("alfworld-loops"))
    with pytest.raises(TurngymError, match="--episodes is 0"):
        learn.LearnOptions(episodes=0)


def test_a_start_is_shared_within_its_world_only() -> None:
    shop, search = (
        learn.plan(learn.LearnOptions(env=env), load_world(env), choose(("grpo",)))["grpo"][0].same_start
        for env in ("webshop", "search")
    )
    assert shop != search


def test_what_a_world_asks_for_comes_after_what_all_have() -> None:
    strict = {
        env: learn.plan(learn.LearnOptions(env=env), load_world(env), choose(("prm-rl",)))["prm-rl"][0].words
        for env in ("alfworld", "search")
    }
    parsed = {env: train.parse([*words, "--out", "x"]) for env, words in strict.items()}
    assert tuple(options.rollouts.judging.judge_strict for options in parsed.values()) == (True, False)


def fake_train(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Runs are a few lines of shell: $1 is the run's folder."""

    def launch(job: Job, cores: int) -> subprocess.Popen[bytes]:
        job.folder.mkdir(parents=True, exist_ok=True)
        words = ["sh", "-ec", script, "sh", str(job.folder), "--resume" if job.begun else "new"]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL)

    monkeypatch.setattr(jobs, "launch", launch)


def job(folder: Path, name: str, **more: Any) -> Job:
    return Job(name=name, folder=folder / name, words=(), steps=2, **more)


FINISH = 'mkdir -p "$1/checkpoints/step_000002/model"; echo $2 >> "$1/calls"'


def test_finished_runs_are_kept_killed_ones_resumed_and_needs_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = job(tmp_path, "start")
    jobs = [job(tmp_path, "needy", needs=start), start, job(tmp_path, "done"), job(tmp_path, "killed")]
    jobs[2].model.mkdir(parents=True)
    (jobs[3].folder / "checkpoints" / "step_000001").mkdir(parents=True)
    fake_train(monkeypatch, FINISH)
    Runner(jobs=jobs, poll=0.01).run()
    assert all(one.finished for one in jobs)
    assert not (jobs[2].folder / "calls").exists()
    assert (jobs[3].folder / "calls").read_text() == "--resume\n"
    assert (jobs[0].folder / "calls").read_text() == "new\n"
    order = [(one.folder / "calls").stat().st_mtime_ns for one in (start, jobs[0])]
    assert order == sorted(order)
    Runner(jobs=jobs, poll=0.01).run()
    assert (jobs[3].folder / "calls").read_text() == "--resume\n", "nothing runs twice"


def test_a_failed_run_is_named_and_what_needs_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = job(tmp_path, "bad")
    jobs = [bad, job(tmp_path, "needy", needs=bad), job(tmp_path, "good")]
    fake_train(monkeypatch, f'case "$1" in *bad) exit 3;; esac; {FINISH}')
    with pytest.raises(TurngymError, match=r"failed: bad; the reason is at the end of .*bad\.log"):
        Runner(jobs=jobs, poll=0.01).run()
    assert jobs[2].finished
    assert not jobs[1].folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_bench_ends_its_runs(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(tmp_path, "one")
    script = """trap 'echo saved >> "$1/calls"; exit 0' TERM; touch "$1/started"; while :; do sleep 0.05; done"""
    fake_train(monkeypatch, script)

    def update(self: Any, running: set[str]) -> None:
        if (one.folder / "started").exists():
            os.kill(os.getpid(), number)

    monkeypatch.setattr(jobs.Board, "update", update)
    with pytest.raises(KeyboardInterrupt):
        Runner(jobs=[one], poll=0.01, patience=0.01).run()
    assert (one.folder / "calls").read_text() == "saved\n"


def test_a_run_with_other_options_is_refused(tmp_path: Path) -> None:
    one = job(tmp_path, "one")
    one.folder.mkdir()
    (one.folder / "command.txt").write_text("turngym train --lr 5\n")
    with pytest.raises(TurngymError, match="holds a run with other options"):
        Runner(jobs=[one]).run()


def test_a_run_without_its_last_evaluation_is_not_finished(tmp_path: Path) -> None:
    one = job(tmp_path, "one", evaluates=True)
    one.model.mkdir(parents=True)
    rows = [{"step": 1, "kind": "eval"}, {"step": 2, "kind": "train"}]
    (one.folder / jobs.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not one.finished
    with (one.folder / jobs.METRICS).open("a") as file:
        file.write(json.dumps({"step": 2, "kind": "eval"}) + "\n")
    assert one.finished


def test_a_complete_first_evaluation_is_played_once(tmp_path: Path) -> None:
    both = [job(tmp_path, name, same_start="s") for name in ("first", "second")]
    trace = both[0].folder / jobs.START
    trace.parent.mkdir(parents=True)
    trace.write_text("episodes\n")
    jobs.borrow_start(both[1], both)
    assert not (both[1].folder / jobs.START).exists(), "it may be half written"
    (both[0].folder / jobs.METRICS).write_text(json.dumps({"step": 0, "kind": "eval"}) + "\n")
    jobs.borrow_start(both[1], both)
    assert (both[1].folder / jobs.START).read_text() == "episodes\n"


@pytest.mark.parametrize(("env", "said"), [("alfworld", "<action>go to "), ("search", "\n<search>")])
def test_text_for_language_modeling_has_one_document_per_episode(env: str, said: str, tmp_path: Path) -> None:
    from turngym.trainers.lm_loss import read_texts

    path = write_text(load_world(env), tmp_path / "text.txt", episodes=5)
    documents = list(read_texts([path]))
    assert len(documents) == 5
    assert all(said in text and "\n\n" not in text for text in documents)
    stamp = path.stat().st_mtime_ns
    assert write_text(load_world(env), path).stat().st_mtime_ns == stamp


@pytest.mark.long
def test_the_whole_path_from_training_to_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--algorithms", "grpo", "--seeds", "1", "--steps", "1", "--evaluations", "1"]
    words += ["--episodes", "8", "--tasks", "2", "--samples", "1", "--parallel", "1"]
    status = learn.main(words)
    found = json.loads((tmp_path / "alfworld" / "learn.json").read_text())
    row = found["rows"]["grpo"]
    assert status == (0 if row["rises"] else 1)
    assert list(row["by_seed"]) == list(row["curve"]) == ["0", "1"]
    assert row["seeds"] == 2, "twice as many for a row that must rise"
    assert row["rise"]["mean"] == pytest.approx(row["end"]["mean"] - row["start"]["mean"])
    assert (tmp_path / "alfworld" / "learn.png").stat().st_size > 5000
    report = (tmp_path / "alfworld" / "report.md").read_text()
    assert "turngym train --algorithm grpo" in report
    assert report in capsys.readouterr().out
