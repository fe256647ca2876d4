"""Cells of a study are run once, go on after a kill, and are shared by processes; a changed file adds what is new."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import study_records

from turngym.agents.evaluation.packed_file import read_result
from turngym.core.errors import TurngymError
from turngym.core.files import locked_file
from turngym.core.settings import read_toml
from turngym.envs.panels import shipped_panel, write_panel
from turngym.scripts import jobs as running
from turngym.scripts.jobs import RunJob
from turngym.scripts.main import main
from turngym.scripts.study import run
from turngym.scripts.study.cells import Cell, cells_of
from turngym.scripts.study.study_file import read_study_file
from turngym.trainers import content_hashes
from turngym.trainers.study.records import Cost, read_records

FILE = """
world = "alfworld"
seeds = [0, 1]
baseline = "opd"
train = { steps = 4, episodes = 8 }
evaluate = { times = 1, tasks = 2, samples = 1 }
[methods.opd]
[methods.turnopd]
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings are processes that only make the files of a finished run; the names of those that were started."""
    started: list[str] = []

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        started.append(job.name)
        assert job.settings_file.read_text() == job.toml, "a run finds its settings"
        row = json.dumps({"step": job.steps, "kind": "eval"})
        code = 'mkdir -p "$1"; echo "$3" > "$2/metrics.jsonl"'
        return subprocess.Popen(["sh", "-ec", code, "sh", str(job.model), str(job.folder), row])

    def record(cell: Cell) -> Any:
        # two runs that are equal in all, time included, would be one
        costs = [Cost(seconds=t + cell.seed / 100, cpu=t, turns=t, tokens=t) for t in (0.0, 1.0)]
        curve = [{"a": 0.5, "b": 0.25}, {"a": 1.0, "b": 0.75}]
        given = {"world": cell.world, "settings": cell.settings, "contents": content_hashes.of_all(cell.settings)}
        return study_records.record(cell.method, cell.seed, costs, curve, every=4, **given)

    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr(run, "make_record", record)
    return started


def test_a_cell_imports_nothing_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('of the working folder')")
    monkeypatch.chdir(tmp_path)
    job = RunJob(name="mine", folder=tmp_path / "mine", words=("--help",), steps=1, verb="eval")
    assert running.launch(job, 1).wait(120) == 0, job.log.read_text()


def study(tmp_path: Path) -> tuple[Path, Path]:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path, tmp_path / "out"


def test_cells_are_run_once_and_those_of_somebody_else_are_left_alone(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    cells = cells_of(read_study_file(path), out)
    cells[1].folder.parent.mkdir(parents=True)
    with locked_file(cells[1].folder):
        found = run.run_study(path, out)
        assert [cell.finished for cell in cells] == [True, False, True, True]
        assert len(found.records) == 3
    assert len(run.run_study(path, out).records) == 4
    assert sorted(launched) == sorted(cell.name for cell in cells)
    assert not [lock for cell in cells for lock in cell.folder.parent.glob(".*.lock")]


STARTS = (
    FILE.replace("seeds = [0, 1]", "seeds = [0]").replace("[methods.turnopd]", "")
    + """student = "starts.warm"
teacher = "starts.strong"
[methods.grpo]
student = "starts.warm"
[starts.warm]
algorithm = "sft"
steps = 3
[starts.strong]
algorithm = "sft"
steps = 3
"""
)


def test_a_cell_begins_when_both_of_its_models_are_there(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS)
    works, strong, there = running.launch, "alfworld/start-strong", dict[str, bool]()
    teacher = next(cell for cell in cells_of(read_study_file(path), out) if cell.name == strong).model

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        """The teacher takes longer than the student, which is enough for the other cell."""
        if job.name != strong:
            there[job.name] = teacher.exists()
            return works(job, cores)
        launched.append(job.name)
        return subprocess.Popen(["sh", "-ec", 'sleep 2; mkdir -p "$1"', "sh", str(job.model)])

    monkeypatch.setattr(running, "launch", launch)
    assert len(run.run_study(path, out, parallel=2).records) == 2
    assert launched == ["alfworld/start-warm", strong, "alfworld/grpo-seed0", "alfworld/opd-seed0"]
    assert (there["alfworld/grpo-seed0"], there["alfworld/opd-seed0"]) == (False, True)


@pytest.mark.parametrize("failing", ["warm", "strong"])
def test_what_needs_a_failed_start_is_not_waited_for(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS)
    works = running.launch

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["false"]) if job.name.endswith(failing) else works(job, cores)

    monkeypatch.setattr(running, "launch", launch)
    with pytest.raises(TurngymError, match=f"failed: alfworld/start-{failing}; "):
        run.run_study(path, out)
    other = {"warm": "alfworld/start-strong", "strong": "alfworld/start-warm"}[failing]
    assert launched == [other, *(["alfworld/grpo-seed0"] if failing == "strong" else [])]


def test_one_start_may_be_both_models(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS.replace('"starts.strong"', '"starts.warm"'))
    assert len(run.run_study(path, out, parallel=2).records) == 2
    assert sorted(launched) == ["alfworld/grpo-seed0", "alfworld/opd-seed0", "alfworld/start-warm"]


def test_a_start_of_another_process_is_waited_for(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS)
    strong = next(cell for cell in cells_of(read_study_file(path), out) if cell.name.endswith("start-strong"))
    strong.folder.parent.mkdir(parents=True)
    seen: list[list[str]] = []

    def other() -> None:
        with locked_file(strong.folder):
            has_it.set()
            end = time.monotonic() + 60
            while len(launched) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.6)  # what is not waited for would begin at the next look
            seen.append(list(launched))
            strong.model.mkdir(parents=True)

    has_it = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert has_it.wait(60)
    assert len(run.run_study(path, out).records) == 2
    thread.join(60)
    assert seen == [["alfworld/start-warm", "alfworld/grpo-seed0"]]
    assert launched == [*seen[0], "alfworld/opd-seed0"]


def test_a_changed_file_adds_what_is_new_and_says_what_no_longer_fits(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = study(tmp_path)
    run.run_study(path, out)
    launched.clear()
    # a new method and a new seed
    path.write_text(FILE.replace("[methods.turnopd]", "[methods.tcod]").replace("[0, 1]", "[0, 1, 2]"))
    found = run.run_study(path, out)
    assert sorted(launched) == [
        "alfworld/opd-seed2",
        "alfworld/tcod-seed0",
        "alfworld/tcod-seed1",
        "alfworld/tcod-seed2",
    ]
    assert {record.method for record in found.records} == {"opd", "tcod"}
    said = capsys.readouterr().err
    assert "kept and not shown" in said
    assert "alfworld/turnopd-seed0, alfworld/turnopd-seed1" in said
    # another setting of cells that are there
    launched.clear()
    with pytest.raises(TurngymError, match=r"opd-seed0 in .* was run with optimizer.lr = 0.001, and .* says 0.5"):
        run.run_study(path, out, set=["train.optimizer.lr = 0.5"])
    assert not launched


def test_models_may_lie_elsewhere_on_another_machine(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    run.run_study(path, out)
    for cell in cells_of(read_study_file(path), out):
        text = cell.settings_file.read_text()
        cell.settings_file.write_text(text.replace(cell.settings["models"]["student"], "/elsewhere/alfworld/student"))
    assert len(run.run_study(path, out).records) == 4


def test_a_folder_is_the_same_by_another_path(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    path.write_text(FILE + "[methods.reads]\nalgorithm = 'grpo-minillm'\ntext = 'expert'\n")
    monkeypatch.setattr(run, "write_text", lambda *given: None)
    monkeypatch.chdir(tmp_path)
    run.run_study(path, "out")
    cells = cells_of(read_study_file(path), Path("out"))
    for cell in cells:
        (cell.folder / "command.txt").write_text(cell.command)
    launched.clear()
    for folder, below in ((".", "out"), (".", str(out)), ("out", "../out")):
        monkeypatch.chdir(tmp_path / folder)
        assert len(run.run_study(path, below).records) == 6
    monkeypatch.chdir(tmp_path)
    moved = out.rename(tmp_path / "moved")
    assert len(run.run_study(path, moved).records) == 6
    assert len(run.run_study(path, moved, processes=2).records) == 6
    assert not launched
    # what decides the run is compared all the same
    command = moved / "cells" / "alfworld" / "opd-seed0" / "command.txt"
    command.write_text(command.read_text().replace("train", "train --steps 9"))
    with pytest.raises(TurngymError, match="opd-seed0 holds a run with other options"):
        run.run_study(path, moved)


def test_an_unfinished_cell_of_a_folder_that_was_moved_finds_its_start(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS)
    run.run_study(path, out)
    moved = out.rename(tmp_path / "moved")
    (moved / "cells" / "alfworld" / "grpo-seed0" / "cell.json").unlink()
    launched.clear()
    assert len(run.run_study(path, moved).records) == 2
    (again,) = launched
    (cell,) = [cell for cell in cells_of(read_study_file(path), moved) if cell.name == again]
    assert read_toml(cell.settings_file)["models"]["student"].startswith(str(moved))


def test_another_start_is_another_setting(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    path.write_text(STARTS)
    run.run_study(path, out)
    path.write_text(STARTS.replace('student = "starts.warm"', 'student = "starts.strong"'))
    with pytest.raises(TurngymError, match=r"was run with models.student = '.*start-warm/.*start-strong/"):
        run.run_study(path, out)
    # as the line says
    for method in ("grpo", "opd"):
        shutil.rmtree(out / "cells" / "alfworld" / f"{method}-seed0")
    assert len(run.run_study(path, out).records) == 2


def test_files_of_ones_own_count_by_their_content(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    panel = tmp_path / "panel.json"
    panel.write_text(write_panel(shipped_panel("alfworld-quickstart-v1"), tmp_path / "kept").read_text())
    path.write_text(FILE.replace('world = "alfworld"', "") + f"[worlds.alfworld]\npanel = {str(panel)!r}\n")
    run.run_study(path, out)
    launched.clear()
    before = panel.read_text()
    panel.write_text(before + "\n")
    with pytest.raises(TurngymError, match=f"opd-seed0 in .* another content of evaluation.panel, {panel}: "):
        run.run_study(path, out, set=["seeds = [0, 1, 2]"])
    assert not launched
    panel.write_text(before)
    assert len(run.run_study(path, out, set=["seeds = [0, 1, 2]"]).records) == 6


def test_the_file_says_what_a_method_is(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    run.run_study(path, out)
    path.write_text(FILE + 'group = "more"\nabout = "other words"\n')
    found = {(record.method, record.group, record.about) for record in run.run_study(path, out).records}
    assert found == {("opd", "main", "opd"), ("turnopd", "more", "other words")}


def test_packed_evaluations_that_would_have_one_name_are_refused_before_anything_runs(
    tmp_path: Path, launched: list[str]
) -> None:
    path, out = study(tmp_path)
    text = FILE.replace('world = "alfworld"', 'worlds = ["search", "search-loops"]').replace("opd", "grpo")
    path.write_text(text.replace("turngrpo", "loops-grpo") + "algorithm = 'grpo'\n")
    with pytest.raises(
        TurngymError, match="search/loops-grpo-seed0 and search-loops/grpo-seed0 would both be search-loops-"
    ):
        run.run_study(path, out, pack=True)
    assert not launched
    assert not out.exists()


def test_an_evaluation_that_was_played_anew_is_packed_anew(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    made: list[str] = []

    def pack(trace: Path, result: Path, *, panel: str) -> None:
        made.append(result.name)
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_bytes(trace.read_bytes())

    monkeypatch.setattr(run, "pack_result", pack)
    monkeypatch.setattr(run, "write_table", lambda *given: None)
    cells = cells_of(read_study_file(path), out)
    for cell in cells:
        cell.last_trace.parent.mkdir(parents=True)
        cell.last_trace.write_text("played")
        os.utime(cell.last_trace, (1000, 1000))
    run.run_study(path, out, pack=True)
    assert len(made) == 4
    run.run_study(path, out, pack=True)
    assert len(made) == 4
    cells[2].last_trace.write_text("played anew")
    later = (out / "results" / made[0]).stat().st_mtime + 10
    os.utime(cells[2].last_trace, (later, later))
    run.run_study(path, out, pack=True)
    assert made[4:] == [f"alfworld-{cells[2].method}-seed{cells[2].seed}.result.xz"]


def test_every_command_that_wrote_records_is_kept(tmp_path: Path, launched: list[str]) -> None:
    path, out = study(tmp_path)
    for command, seeds in (("first", [0]), ("second", [0, 1]), ("nothing", [0, 1])):
        found = run.run_study(path, out, set=[f"seeds = {seeds}"], command=command)
    assert [made["command"] for made in found.made_by] == ["first", "second"]
    assert read_records(out).made_by == found.made_by


def test_processes_that_overlap_both_keep_their_commands(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    works, inner = running.launch, list[str]()

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        if not inner:
            inner.append("begun")
            monkeypatch.setattr(running, "launch", works)
            # another process does one of the cells while this one runs, and writes the records first
            run.run_study(path, out, set=["seeds = [1]"], command="inner", parallel=1)
        return works(job, cores)

    monkeypatch.setattr(running, "launch", launch)
    found = run.run_study(path, out, command="outer", parallel=1)
    assert {made["command"] for made in found.made_by} == {"inner", "outer"}
    assert len(found.records) == 4


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "status 3"),
        ("echo turngym train: no room; echo torchrun ends; exit 1", "turngym train: no room"),
        ("echo step 1; kill -9 $$", "ended by SIGKILL"),
    ],
)
def test_cells_that_fail_stop_no_others_and_their_reason_is_said_once(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    path, out = study(tmp_path)
    works = running.launch

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        if "/opd-" not in job.name:
            return works(job, cores)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            return subprocess.Popen(["sh", "-c", script], stdout=log)

    monkeypatch.setattr(running, "launch", launch)
    with pytest.raises(TurngymError, match=f"^failed: alfworld/opd-seed0, alfworld/opd-seed1; {why}[^;]*$"):
        run.run_study(path, out)
    assert sorted(launched) == ["alfworld/turnopd-seed0", "alfworld/turnopd-seed1"]
    # what is done can be looked at, though the study is not
    assert sorted(f"{one.world}/{one.method}-seed{one.seed}" for one in read_records(out).records) == sorted(launched)


def test_a_cell_without_a_record_does_not_stop_the_others(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    makes = run.make_record

    def record(cell: Cell) -> Any:
        if cell.name == "alfworld/opd-seed0":
            raise TurngymError("there is no trace file")
        return makes(cell)

    monkeypatch.setattr(run, "make_record", record)
    with pytest.raises(TurngymError, match=r"^failed: alfworld/opd-seed0; there is no trace file$"):
        run.run_study(path, out)
    assert len(read_records(out).records) == 3


def test_a_node_trains_a_cell_in_several_processes(tmp_path: Path) -> None:
    path, out = study(tmp_path)
    cell = cells_of(read_study_file(path), out)[0]
    assert cell.command.startswith("turngym train --config ")
    together = replace(cell, processes=8)
    assert together.command.startswith("torchrun --standalone --nproc-per-node 8 -m turngym train --config ")
    assert together.argv[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert RunJob(name="e", folder=out, words=(), steps=1, verb="eval", processes=8).argv[1:3] == [
        "-m",
        "turngym.scripts",
    ]


def test_a_world_of_a_model_that_is_not_here_is_refused_before_anything_runs(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study(tmp_path)
    path.write_text(FILE.replace("alfworld", "webshop-smollm2"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TurngymError, match="smollm2` makes it"):
        run.run_study(path, out)
    assert not out.exists()
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    run.run_study(path, out)
    assert len(launched) == 4


@pytest.mark.long
def test_the_command_writes_and_shows_tables(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = study(tmp_path)
    assert main(["study", "run", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "## alfworld: overview" in said
    names = {file.name for file in (out / "tables").iterdir()}
    assert {"study.md", "study.json", "alfworld-overview.csv", "alfworld-overview.tex", "alfworld-curves.pdf"} <= names
    assert main(["study", "show", str(out), "--tables", "accuracy", "--out", str(tmp_path / "shown")]) == 0
    assert "Same-Step" in capsys.readouterr().out
    assert (tmp_path / "shown" / "alfworld-accuracy.csv").is_file()
    assert main(["study", "show", str(out), "--tables", "acuracy"]) == 2
    assert "there is no table 'acuracy'. Did you mean 'accuracy'" in capsys.readouterr().err
    assert main(["study", "show", str(tmp_path / "nothing")]) == 2


@pytest.mark.long
def test_the_study_of_the_page_runs_from_its_file_to_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    file, code = (re.search(f"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ('toml title="mine.toml"', "python"))
    assert file is not None
    assert code is not None
    monkeypatch.chdir(tmp_path)
    path, out = Path("mine.toml"), Path("runs/mine")
    path.write_text(file[1].replace("seeds = [0, 1]", "seeds = [0]").replace("tasks = 6", "tasks = 2"))
    assert main(["study", "run", str(path), "--out", str(out)]) == 0
    exec(compile(code[1], "docs/compare.md", "exec"), {})
    # what is added to the file is run, too
    with path.open("a") as more:
        more.write('[methods.expert]\nagent = "expert"\n[methods.short]\nof = "opd"\ndepth = 3\n')
    packed = out / "results" / "alfworld-opd-seed0.result.xz"
    packed.parent.mkdir()
    packed.write_bytes(b"of a run that is there no longer")
    os.utime(packed, (0, 0))
    found = run.run_study(path, out, pack=True)
    assert len(read_result(packed).episodes) == 2
    by_name = {record.method: record for record in found.records}
    assert set(by_name) == {"grpo", "opd", "mine", "expert", "short"}
    assert set(by_name["expert"].evaluations[0].tasks.values()) == {1.0}
    assert by_name["short"].total.turns <= 3 * 8 * 2
    # all trainings begin with one evaluation
    assert by_name["opd"].evaluations[0].tasks == by_name["short"].evaluations[0].tasks
    assert len(list(packed.parent.iterdir())) == 5
