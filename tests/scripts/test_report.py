"""`turngym report`: the page, figures and numbers of training runs; what a run did not record is said."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate
from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.scores import score
from turngym.core.episode import Episode, Status, Turn
from turngym.core.nested import put
from turngym.core.settings import to_toml, write_toml_text
from turngym.core.task import Task, Verdict
from turngym.core.trace import TraceWriter, read_trace
from turngym.scripts import report
from turngym.scripts.main import main
from turngym.scripts.report_data import load_run
from turngym.scripts.report_figures import Plot

NUMBERS = ("kl_by_turn", "kl_map", "survivors", "outcome_separation", "kl_share", "controller", "counterfactual_depth")
NUMBERS += ("deep_budget", "horizon", "seconds", "train_rollout_gap", "accuracy")


def train_row(step: int, cap: int, **more: Any) -> dict[str, Any]:
    turns = {
        "turn/kl_raw": [0.5, 1.0, 0.25],
        "turn/teacher_entropy": [0.3, 0.2, 0.1],
        "turn/tokens": [20, 20, 10],
        "turn/survivors": [10, 10, 8],
        "turn/ended_success": [0, 1, 8],
        "turn/ended_cut": [0, 0, 0],
        "turn/weight": [0.5, 0.25, 0.25],
        "turn/kl_raw_success": [0.5, 0.5, 0.5],
        "turn/kl_raw_failure": [0.5, 1.5, None],
    }
    times = {f"time/{name}_s": 1.0 for name in ("rollout", "teacher", "update")} | {"time/step_s": 3.5}
    plain = {
        "gap_mean": 1e-6,
        "gap_max": 1e-5,
        "turns_mean": 2.8,
        "episodes": 10,
        "cost/turns": 28,
        "time/train_s": 3.5 * step,
    }
    depth = {"depth/cap": cap, "depth/probe": 0, "depth/hbar": 3.0, "depth/h_eff": 0, "depth/h_cov": 0}
    return {"step": step, "kind": "train", **times, **plain, **depth, **turns, **more}


def evaluation(step: int) -> dict[str, Any]:
    scores = {"eval/avg": 0.25 + step / 40, "eval/low": 0.1, "eval/high": 0.9, "eval/category/heat": step / 10}
    return {"step": step, "kind": "eval", **scores, "time/train_s": 3.5 * step, "time/eval_s": 1.0}


def write_run(folder: Path, rows: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder.name}={folder}"


FULL = [evaluation(0), *(row for step in range(1, 11) for row in (train_row(step, 3), evaluation(step)))]


@pytest.fixture
def full(tmp_path: Path) -> str:
    return write_run(tmp_path / "full", FULL)


def write_old(folder: Path) -> str:
    """A run of an older version: survivors by turn, and little else."""
    kept = ("step", "kind", "turn/survivors", "depth/cap", "time/train_s")
    rows = [{name: train_row(step, 3)[name] for name in kept} for step in range(1, 5)]
    return write_run(folder / "old", [evaluation(0), *rows, evaluation(4)])


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A report of `old` and `full` with three of its figures."""
    with pytest.MonkeyPatch.context() as patched:
        only_draw(patched, "accuracy", "kl_by_turn", "horizon")
        return report_of_two(tmp_path_factory.mktemp("reported"))


def report_of_two(work: Path) -> tuple[Path, str]:
    """The folder of a report of `old` and `full`, and what was printed."""
    runs, printed = [write_old(work), write_run(work / "full", FULL)], io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["report", *runs, "--out", str(work / "out"), "--title", "Two <runs>"]) == 0
    return work / "out", printed.getvalue()


def test_the_comparison_of_what_was_trained_comes_first(tmp_path: Path, capsys: Any) -> None:
    """As the quickstart reports: two models and two methods, of which the methods are what it was made for."""
    for name, noise in (("student", 0.9), ("teacher", 0.0), ("opd", 0.5), ("turnopd", 0.3)):
        trained = name.endswith("opd")
        out = tmp_path / name / "eval" if trained else tmp_path / name
        evaluate("alfworld-quickstart", "expert", noise=noise, samples=1, limit=8, workers=0, out=out, progress=False)
        if trained:
            (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FULL))
            (tmp_path / name / "config.toml").write_text(
                f'algorithm = "{name}"\nstudent = "/home/me/models/small/student"\nteacher = "big/teacher"\n'
                'env = "turngym/ALFWorld-v0"\n[provenance]\nstarted = "2026-11-25T01:02:03+00:00"\n'
            )
    runs = [f"{name}={tmp_path / name}" for name in ("student", "teacher", "opd", "turnopd")]
    assert main(["report", *runs, "--no-diagnostics", "--no-figure", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# opd, turnopd: alfworld-quickstart-v1"
    summary = lines[2]
    assert re.fullmatch(
        r"turnopd minus opd: [-\d.]+ \[.+\] points of success on 8 shared tasks, "
        r"one run each, which says nothing about other seeds\. "
        r"Success: student [\d.]+ %, teacher 100\.0 %, opd [\d.]+ %, turnopd [\d.]+ %\. "
        r"Training took opd 35 s for 10 steps, turnopd 35 s for 10 steps\.",
        summary,
    )
    assert "- turngym/ALFWorld-v0, panel alfworld-quickstart-v1" in lines
    assert "- opd: opd, student small/student, teacher big/teacher, 2026-11-25" in lines
    assert any(line.startswith("- turngym report student=") and "--out" not in line for line in lines)
    tables = [line for line in lines if line.startswith("|")]
    assert tables[0].startswith("| comparison | points [95 %] |")
    compared = [line.split("|")[1].strip() for line in tables[2:6]]
    assert compared == ["turnopd minus opd", "opd minus student", "turnopd minus student", "teacher minus student"]
    # one that was trained alone is compared with the model that it began as
    assert main(["report", *runs[:3], "--no-diagnostics", "--no-figure", "--out", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("opd minus student: ")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"<p class=summary>{summary}</p>" in page


def seeds_of(
    folder: Path, name: str, ends: Sequence[float], *, scenes: int = 20, early: float = 0.4, **settings: Any
) -> list[Path]:
    """Runs NAME-0, NAME-1, ... whose last of five evaluations is `ends`, those between `early`; each task is won that
    often of ten. The 20 tasks lie in so many scenes."""
    made = []
    for seed, end in enumerate(ends):
        out = folder / f"{name}-{seed}"
        values = (0.0, early, early, early, end)
        rows: list[dict[str, Any]] = []
        for step, value in enumerate(values):
            rows += [{"step": step, "kind": "train", "time/train_s": 2.0 * step, "depth/cap": 9}] if step else []
            rows.append({"step": step, "kind": "eval", "eval/avg": value, "time/train_s": 2.0 * step})
        write_run(out, rows)
        (out / "eval").mkdir()
        for step, value in enumerate(values):
            with TraceWriter(out / "eval" / f"step_{step:06d}.jsonl") as writer:
                for place in range(20):
                    writer.write(played(place, won=(place * 7) % 10 < 10 * value, scenes=scenes))
        config = {"models.out": f"{name}-{seed}", "models.threads": seed + 1, "run.seed": seed, "run.steps": 4}
        table: dict[str, Any] = {"algorithm": "opd"}
        for path, value in {**config, **settings}.items():
            put(table, path, value)
        write_toml_text(out / "config.toml", to_toml({**table, "provenance": {"started": f"2026-11-2{seed}"}}))
        made.append(out)
    return made


def played(place: int, *, won: bool, scenes: int = 20) -> Episode:
    task = Task(
        env_id="e-v0",
        task_id=f"t{place:02d}",
        sha256="0" * 64,
        split="eval",
        category="ab"[place % 2],
        cluster=f"scene {place % scenes}",
    )
    turn = Turn(index=0, observation="o", admissible=None, response="r", action="a", verdict=Verdict.OK, reward=0.0)
    ended: dict[str, Any] = {
        "status": Status.COMPLETED,
        "success": won,
        "episode_return": float(won),
        "score": float(won),
    }
    return Episode(task=task, seed=0, sample=0, group=0, segments=(), turns=(turn,), meta={"agent": "s"}, **ended)


def rows_of(text: str, header: str) -> dict[str, list[str]]:
    """Rows of the table that begins with `header`, by their first cell."""
    lines = text.partition(header)[2].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in takewhile(lambda line: line.startswith("|"), lines)]
    return {row[0]: row[1:] for row in cells}


def test_panels_are_compared_apart_and_the_clearest_difference_comes_first(tmp_path: Path, capsys: Any) -> None:
    """In the shop both win the same; in the house the second one falls, and that is said first. Costs are told."""
    used = {"answers": 2, "prompt_tokens": 1000, "completion_tokens": 10, "cost": 0.25}
    for env in ("shop", "house"):
        for model in ("big", "small"):
            with TraceWriter(tmp_path / f"{env}-{model}.jsonl") as writer:
                for place in range(20):
                    one = played(place, won=place > 4 and not (env == "house" and model == "small"))
                    task = dataclasses.replace(one.task, env_id=f"{env}-v0")
                    more = {"usage": used if model == "big" else {**used, "cost": None}}
                    writer.write(dataclasses.replace(one, task=task, meta={**one.meta, **more}))
    names = ("shop-big", "shop-small", "house-big", "house-small")
    assert main(["report", *(f"{name}={tmp_path / name}.jsonl" for name in names), "--no-figure"]) == 0
    text = capsys.readouterr().out
    assert list(rows_of(text, "| comparison |")) == ["shop-small minus shop-big", "house-small minus house-big"]
    assert text.splitlines()[2].startswith("house-small minus house-big: -75.0 [")
    assert rows_of(text, "| run | prompt tokens |")["house-big"] == ["20,000", "200", "5.0000"]
    assert rows_of(text, "| run | prompt tokens |")["shop-small"] == ["20,000", "200", "-"]


@pytest.mark.parametrize(("probed", "told"), [(False, "7.0"), (True, "5.0")])
def test_the_depth_is_what_was_played(tmp_path: Path, capsys: Any, probed: bool, told: str) -> None:
    """A controller without a horizon leaves it where it began; a probe plays all turns, whatever the depth."""
    rows = [train_row(step, cap, **{"depth/hbar": 1.0}) for step, cap in ((1, 3), (2, 5), (3, 7))]
    rows[-1] |= {"depth/probe": int(probed)}
    write_run(tmp_path / "run", rows)
    assert main(["report", f"own={tmp_path / 'run'}", "--no-figure", "--no-diagnostics"]) == 0
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if line.startswith("| method |")).strip("| ").split(" | ")
    assert rows_of(text, "| method |")["own"][header.index("depth") - 1] == told


def test_differences_in_new_scenes_have_a_column(tmp_path: Path, capsys: Any) -> None:
    """Ten scenes of two tasks that go alike are ten things to learn from, not twenty."""
    for scenes in (20, 10):
        folder = tmp_path / str(scenes)
        runs = [seeds_of(folder, name, (end,), scenes=scenes, early=end) for name, end in (("opd", 0.2), ("mine", 0.6))]
        words = [f"{run.name}={run}" for (run,) in runs]
        assert main(["report", *words, "--no-diagnostics", "--no-figure", "--out", str(folder / "out")]) == 0
        (row,) = rows_of(capsys.readouterr().out, "| comparison |").values()
        own, wider = row[:2]
        assert own.startswith("40.0 [")
        assert (wider == "20") == (scenes == 20)
    low, high = (float(re.findall(r"\[(-?[\d.]+)", text)[0]) for text in (wider, own))
    assert wider.startswith("40.0 [")
    assert low < high


def test_seeds_of_a_method_are_one_row(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_of(tmp_path, "opd", (0.1, 0.3, 0.5))
    for run in seeds_of(tmp_path, "mine", (0.9, 0.8, 1.0), algorithm="my:OWN"):
        (run / "config.toml").write_text(
            (run / "config.toml").read_text().replace("[prov", "[optimizer]\nlr = 0.2\n[prov")
        )
    monkeypatch.chdir(tmp_path)
    words = ["report", "opd=opd-*", "mine=mine-*", "--no-diagnostics", "--no-figure", "--latex", "--out", "out"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("# opd (3 seeds), mine (3 seeds): e-v0")
    # never between seeds; as the tables of training have it
    compared = rows_of(text, "| comparison |")
    assert list(compared) == ["mine minus opd"]
    assert compared["mine minus opd"][-1] == "success (mean of the last 4 evaluations)"
    assert compared["mine minus opd"][1:3] == ["20", "3 and 3"]
    assert "points of success (mean of the last 4 evaluations) on 20 shared tasks" in text.splitlines()[2]
    assert "Success: opd 37.5 %, mine 52.5 %." in text.splitlines()[2]
    assert rows_of(text, "| run | a | b |")["opd"][0:2] != ["-", "-"]
    success = rows_of(text, "| method | seeds | success | minus opd [95 %] |")
    # (3 * 40 + 10, 30, 50) / 4, without the evaluation before training
    assert [row[:2] for row in success.values()] == [["-", "0.0"], ["3", "37.5"], ["3", "52.5"]]
    assert list(success) == ["start", "opd", "mine"]
    assert success["mine"][2].startswith("+15.0 [")
    assert compared["mine minus opd"][0] == success["mine"][2].replace("+", "").removesuffix(" *")
    assert rows_of(text, "| method | seeds | last evaluation |")["opd"][1].startswith("30.0 ± ")
    training = rows_of(text, "| method | seeds | steps | seconds | start | last | highest")
    assert training["opd"] == ["3", "4", "8", "0.0", "30.0", "40.0 of 5"]
    # settings that differ, first those that matter; seeds, folders and threads are none
    assert list(rows_of(text, "| setting | opd | mine |")) == ["algorithm", "optimizer.lr"]
    study = ("overview", "accuracy", "averages", "cost", "categories")
    for name in (*(f"training-{name}" for name in study), "paired", "success", "behavior", "training", "settings"):
        latex = (tmp_path / "out" / "tables" / f"{name}.tex").read_text()
        assert rf"\label{{tab:{name}}}" in latex
        assert r"\begin{tabular}{l" in latex
        assert latex.count("toprule") == 1
        # the same digits everywhere
        page = html.unescape((tmp_path / "out" / "report.html").read_text())
        for row in list(csv.reader((tmp_path / "out" / "data" / f"{name}.csv").open()))[1:]:
            for cell in filter(None, row):
                assert all(cell in where for where in (page, text))
                assert cell.replace("%", r"\%").replace("±", r"$\pm$").replace("_", r"\_") in latex


def test_runs_that_differ_in_the_seed_alone_need_no_name(tmp_path: Path, capsys: Any) -> None:
    runs = seeds_of(tmp_path, "opd", (0.1, 0.3))
    assert main(["report", *map(str, runs), "--no-diagnostics"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# opd (2 seeds): e-v0")
    assert "| comparison |" not in text, "seeds are not compared with each other"
    other = seeds_of(tmp_path, "b", (0.9,), **{"run.steps": 5})
    assert main(["report", *map(str, runs), str(other[0]), "--no-diagnostics"]) == 0
    text = capsys.readouterr().out
    assert list(rows_of(text, "| comparison |")) == ["b-0 minus opd"]
    assert rows_of(text, "| comparison |")["b-0 minus opd"][-2] == "one run each"
    assert list(rows_of(text, "| setting | opd | b-0 |")) == ["steps"]
    # an evaluation has no settings of training to differ in
    assert main(["report", f"start={runs[0] / 'eval' / 'step_000000.jsonl'}", str(runs[1]), "--no-diagnostics"]) == 0
    assert "| setting |" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run.steps": 5}, "steps is 4 in "),
        ({"play.env": "turngym/WebShop-v0"}, "env is None in "),
        ({"run.seed": 0}, "two runs are called 'opd' and have the seed 0"),
    ],
)
def test_runs_of_one_name_that_are_no_seeds_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path, capsys: Any
) -> None:
    seeds_of(tmp_path, "opd", (0.1, 0.3))
    shutil.rmtree(tmp_path / "opd-1")
    (other,) = seeds_of(tmp_path, "x", (0.3,), **{"run.seed": 1, **settings})
    other.rename(tmp_path / "opd-1")
    assert main(["report", f"opd={tmp_path}/opd-*", "--no-diagnostics"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert main(["report", f"opd={tmp_path}/nothing-*"]) == 2
    assert "no run matches the pattern" in capsys.readouterr().err


def test_a_run_that_was_killed_in_its_first_row_has_no_steps(tmp_path: Path, capsys: Any) -> None:
    (run,) = seeds_of(tmp_path, "opd", (0.1,))
    (run / "metrics.jsonl").write_text('{"step": 1, "kind": "tr')
    assert main(["report", str(run), "--out", str(tmp_path / "out"), "--no-figure"]) == 0
    assert "| opd-0 | 1 | 0 |" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_of_other_tasks_is_said(tmp_path: Path, capsys: Any) -> None:
    first, second = seeds_of(tmp_path, "opd", (0.1, 0.3))
    for path in (second / "eval").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    assert main(["report", f"opd={first}", f"opd={second}", "--no-diagnostics"]) == 0
    text = capsys.readouterr().out
    assert "- opd: 2 tasks left out that not every seed has an episode of, as t18" in text
    assert rows_of(text, "| method | seeds | success |")["opd"][0] == "2"


@pytest.mark.parametrize(
    "lines", [lambda lines: lines[:-1], lambda lines: [*lines, lines[-1]]], ids=["interrupted", "joined"]
)
def test_episodes_that_are_missing_or_there_twice_are_said(lines: Any, tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "run" / "trace.jsonl"
    result = evaluate("alfworld-quickstart", "expert", samples=2, limit=2, out=trace.parent)
    trace.write_text("".join(lines(trace.read_text().splitlines(keepends=True))))
    assert main(["report", str(trace.parent), "--no-figure"]) == 0
    (note,) = set(rescore(trace).notes()) - set(result.notes())
    assert f"- {trace}: {note}" in capsys.readouterr().out


def numbers(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "data" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_all_figures_of_a_run(tmp_path: Path) -> None:
    out, printed = report_of_two(tmp_path)
    assert "deep third of KL mass" in printed
    for name in NUMBERS:
        if name != "controller":  # neither run had one
            drawing = (out / "figures" / f"{name}.svg").read_text(encoding="utf-8")
            assert 'width="633.6pt"' in drawing, "all figures are two panels of 4.4 inches wide"
            assert numbers(out, name), name
            assert (out / "figures" / f"{name}.png").stat().st_size > 5000, name
            assert (out / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF"), name
            assert (out / "figures" / f"{name}.svg").read_text(encoding="utf-8").count("<svg") == 1
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<title>Two &lt;runs&gt;</title>" in page
    assert "old: K_t, reverse KL per token not recorded in this run" in page
    assert "old: probes not recorded in this run" in page
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "- old: weights by turn not recorded in this run." in text
    assert all((out / found).is_file() for found in re.findall(r"\]\((\S+?)\)", text))


def only_draw(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The other figures are left out; to draw all of them takes seconds."""
    write = report.write_figure
    monkeypatch.setattr(
        report,
        "write_figure",
        lambda figure, folder, *, draw: write(figure, folder, draw=draw and figure.name in names),
    )


def test_the_page_needs_nothing_else(
    reported: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = reported
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    names = "http://www.w3.org/"
    assert [link for link in re.findall(r'(?:href|src)="([^"#]*)', page) if link and not link.startswith("data:")] == []
    assert page.count("://") == page.count(names), "only names of SVG's vocabulary look like addresses"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 100
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used <= set(ids)
    assert "var(--ink)" in page
    # drawn again it is the same
    again = tmp_path / "again"
    runs = [f"{name}={out.parent / name}" for name in ("old", "full")]
    only_draw(monkeypatch, "accuracy", "kl_by_turn")
    assert report.main([*runs, "--out", str(again), "--title", "Two <runs>"]) == 0
    drawings = re.findall(r"<svg.*?</svg>", (again / "report.html").read_text(encoding="utf-8"), re.DOTALL)
    assert len(drawings) > 2
    assert all(drawing in page for drawing in drawings)


def test_numbers_arrive(full: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert report.main([full, "--out", str(out), "--no-figure"]) == 0
    assert not (out / "figures").exists()
    by_turn = [float(row["kl"]) for row in numbers(out, "kl_by_turn") if row["phase"] == "0-30 %"]
    assert by_turn == [0.5, 1.0, 0.25]
    gaps = [row["separation"] for row in numbers(out, "outcome_separation") if row["phase"] == "0-100 %"]
    assert gaps == ["0", "1", ""]
    shares = [float(row["kl_share"]) for row in numbers(out, "kl_share") if row["phase"] == "60-100 %"]
    assert shares == pytest.approx([10 / 32.5, 20 / 32.5, 2.5 / 32.5], rel=1e-5)
    assert {row["deep_weight"] for row in numbers(out, "deep_budget")} == {"0.25"}
    (seconds,) = numbers(out, "seconds")
    assert (seconds["rollout"], seconds["steps_total"], seconds["evaluations"], seconds["turns"]) == (
        "10",
        "35",
        "11",
        "280",
    )
    # what the paper's controller would have made of the probes 1, 2, 3 and 8; 8 of 9 won in turn 2
    made = next(row for row in numbers(out, "counterfactual_depth") if row["setting"] == "defaults")
    assert (made["probes"], made["h_eff_last"], made["h_cov_last"]) == ("4", "1", "2")
    assert float(made["hbar_last"]) == pytest.approx(2 + 0.7**4)
    variants = {row["setting"]: row for row in numbers(out, "counterfactual_depth")}
    assert "p = 0.4" in variants


def test_a_replay_that_differs_is_said(full: str, tmp_path: Path) -> None:
    folder = Path(full.partition("=")[2])
    (folder / "config.toml").write_text(
        'algorithm = "turnopd"\nstudent = "s"\nout = "o"\nsteps = 10\nmax_turns = 3\nenv = "turngym/ALFWorld-v0"\n'
    )
    out = tmp_path / "out"
    assert report.main([full, "--out", str(out), "--no-figure"]) == 0
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "full: replay differs in 10 of 10 steps, first step 1: probe 1 for 0" not in text, "figures are not drawn"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "full: replay differs in 10 of 10 steps, first step 1: probe 1 for 0, h_eff 1 for 0, h_cov 2 for 0" in page
    assert [row["alpha"] for row in numbers(out, "deep_budget")][:2] == ["0.1", "0.2"]


def test_episodes_are_kept_without_their_text(tmp_path: Path) -> None:
    from turngym.scripts import rollout

    path = tmp_path / "random.jsonl"
    assert rollout.main(["--agent", "random", "--tasks", "2", "--max-turns", "5", "--out", str(path)]) == 0
    run = load_run("", path)
    assert score(run.episodes) == score(read_trace(path)[0])
    assert [sum(episode.verdicts) for episode in run.episodes] == [5, 5]
    out = tmp_path / "out"
    assert report.main([str(path), "--out", str(out), "--no-figure"]) == 0
    assert [row["survivors"] for row in numbers(out, "episodes") if row["outcome"] == "all"] == ["2"] * 5


@pytest.mark.parametrize(("text", "why"), [("", "it is empty"), ('{"a": 1}\n', "none of its 1 lines is an episode")])
def test_a_file_without_episodes_is_no_report(text: str, why: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    for spec in (tmp_path, tmp_path / "trace.jsonl"):
        assert main(["report", str(spec), "--out", str(tmp_path / "out")]) == 2
        assert f"no episode to report: {why}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DRAWS = """
import os, sys
from pathlib import Path
from turngym.scripts.report_figures import Plot, save_panels

before = os.environ.get("MPLBACKEND")
save_panels([Plot("a $run_x$", lambda axis: axis.plot([1, 2], [3, 4], label="{x}"))], *map(Path, sys.argv[1:]))
assert os.environ.get("MPLBACKEND") == before
assert "matplotlib.pyplot" not in sys.modules, "it would ask for the user's backend"
import matplotlib
print(matplotlib.rcParams["lines.linewidth"])
"""
USERS: tuple[tuple[dict[str, str], str], ...] = (
    (
        {"MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        "text.usetex: True\nfont.family: Times New Roman\nlines.linewidth: 9\nsavefig.dpi: 20\naxes.grid: False\n",
    ),
    (
        {"MPLBACKEND": "nonsense", "MPLCONFIGDIR": "/proc/nowhere"},
        "backend: nonsense\nfigure.dpi: 7\nsvg.fonttype: path\nxkcd: yes\n",
    ),
)


@pytest.mark.long
def test_figures_are_the_same_whatever_the_user_has_set(tmp_path: Path) -> None:
    """The variables of a notebook or a display, and a matplotlibrc in the working folder."""
    drawn = []
    for number, (variables, rc) in enumerate([({}, ""), *USERS]):
        folder = tmp_path / str(number)
        folder.mkdir(parents=True)
        (folder / "matplotlibrc").write_text(rc)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MPL")} | variables
        command = [sys.executable, "-c", DRAWS, "a.png", "a.svg"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        # what the user draws later looks as it did
        assert ("9.0" in done.stdout) == ("linewidth: 9" in rc)
        drawn.append([(folder / name).read_bytes() for name in ("a.png", "a.svg")])
    assert all(one == drawn[0] for one in drawn)
    assert b"$run_x$" in drawn[0][1]


def test_a_matplotlibrc_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"# caf\xe9\n")
    code = (
        "from pathlib import Path\nfrom turngym.scripts.report_figures import save_panels\n"
        "try:\n    save_panels([], Path('a.png'))\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("TurngymError matplotlib cannot be imported: UnicodeDecodeError"), done


def test_a_figure_that_fails_costs_nothing_else(
    full: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_draw(monkeypatch, "accuracy", "seconds")
    out, write = tmp_path / "out", report.write_figure

    def failing(figure: Any, folder: Path, *, draw: bool = True) -> list[str]:
        def broken(axis: Any) -> None:
            raise RuntimeError("no room on the canvas\nof this panel")

        if figure.name == "accuracy":
            figure = dataclasses.replace(figure, panels=(*figure.panels, Plot("broken", broken)))
        return write(figure, folder, draw=draw)

    monkeypatch.setattr(report, "write_figure", failing)
    assert main(["report", full, "--out", str(out)]) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("turngym report:")]
    assert line == "turngym report: accuracy.png could not be drawn: RuntimeError: no room on the canvas"
    for name in ("report.md", "report.html"):
        assert "accuracy.png could not be drawn" in (out / name).read_text(encoding="utf-8")
    assert "figures/accuracy.png" not in (out / "report.md").read_text(encoding="utf-8")
    assert numbers(out, "accuracy")
    assert (out / "figures" / "seconds.png").stat().st_size
    assert (out / "report.png").stat().st_size
