"""`turngym study learn`: what is planned, how runs are kept and resumed, and the arithmetic of its table."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the bench needs turngym[train]")

from turngym.agents.worlds import load_world
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import locked_file
from turngym.scripts import jobs, train
from turngym.scripts.jobs import Job, Runner
from turngym.scripts.study import learn
from turngym.scripts.study.grid import in_turn
from turngym.scripts.study.learn import write_text
from turngym.scripts.study.learn_recipes import MUST_RISE, RECIPES, Size, choose


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
    made, cells = learn.plan(options, load_world(env), choose(()))
    runs = {name: 4 if name in MUST_RISE else 2 for name in RECIPES}
    starts = ["warm", "hints"] if env == "webshop" else ["hints"]
    assert [job.folder.name for job in made.values()] == starts
    assert {name: len(row) for name, row in cells.items()} == runs
    for job in (*made.values(), *(row[-1] for row in cells.values())):
        parsed = train.parse(shlex.split(job.command)[2:])
        assert parsed.run.steps == job.steps
        assert parsed.models.out == job.folder
        if parsed.algorithm == "prm-rl":
            assert parsed.optimizer.ppo_epochs == 1, "of an option that comes twice the last one counts"
    hinted = cells["opd-hints"][1]
    assert hinted.needs is made["hints"]
    assert str(hinted.needs.model) in hinted.command
    order = [job.name for job in in_turn(list(cells.values()))]
    assert order[: len(RECIPES)] == [f"{env}/{name}-seed0" for name in RECIPES]
    assert len(order) == sum(runs.values())
    assert cells["opd"][1].same_start == cells["grpo"][1].same_start != hinted.same_start
    assert cells["grpo"][1].needs is made.get("student")
    assert (cells["opd-from-hints"][1].method, cells["opd-from-hints"][1].seed) == ("opd-from-hints", 1)


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
        learn.plan(learn.LearnOptions(env=env), load_world(env), choose(("grpo",)))[1]["grpo"][0].same_start
        for env in ("webshop", "search")
    )
    assert shop != search


def test_what_a_world_asks_for_comes_after_what_all_have() -> None:
    strict = {
        env: learn.plan(learn.LearnOptions(env=env), load_world(env), choose(("prm-rl",)))[1]["prm-rl"][0].words
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
    with locked_file(bad.folder):
        pass  # its lock is free again


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


def test_a_report_needs_a_run_that_is_done(tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=r"no run in .*alfworld is done"):
        learn.main(["--out", str(tmp_path), "--no-run"])


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
