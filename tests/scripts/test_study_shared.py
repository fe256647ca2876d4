"""Studies in processes of their own: two share one folder, a killed one goes on, one only asks an endpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_fake import FakeOpenAI, served

from turngym.core.errors import TurngymError
from turngym.scripts.study.run import run_study
from turngym.scripts.study.show import write_tables
from turngym.trainers.study.records import read_records

pytestmark = pytest.mark.long
STUDENT = Path(__file__).parents[2] / "agents" / "worlds" / "checkpoints" / "alfworld" / "student"
PLAYED = """
world = "alfworld"
seeds = [0, 1]
baseline = "random"
evaluate = { times = 1, tasks = 3, samples = 2 }
[methods.random]
agent = "random"
[methods.expert]
agent = "expert"
"""
TRAINED = """
world = "alfworld"
train = { steps = 4, episodes = 8, checkpoint_every = 1 }
evaluate = { times = 2, tasks = 3, samples = 1 }
[methods.opd]
"""


def started(file: Path, out: Path) -> subprocess.Popen[str]:
    words = ["study", "run", str(file), "--out", str(out), "--parallel", "1"]
    command = [sys.executable, "-m", "turngym.scripts", *words]
    # a group of its own: the runs that it starts are killed with it
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    file, out = tmp_path / "played.toml", tmp_path / "out"
    file.write_text(PLAYED)
    said = [process.communicate(timeout=600)[1] for process in [started(file, out), started(file, out)]]
    begun = sorted(line for text in said for line in text.splitlines() if line.startswith("begins: "))
    cells = [f"begins: alfworld/{method}-seed{seed}" for method in ("expert", "random") for seed in (0, 1)]
    assert begun == cells, "each cell is played once, by one of both"
    assert not [line for text in said for line in text.splitlines() if "failed" in line]
    found = {(record.method, record.seed) for record in run_study(file, out).records}
    assert found == {(method, seed) for method in ("random", "expert") for seed in (0, 1)}


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    file, out = tmp_path / "trained.toml", tmp_path / "out"
    file.write_text(TRAINED)
    whole = run_study(file, tmp_path / "whole").records[0]
    process = started(file, out)
    checkpoints = out / "cells" / "alfworld" / "opd-seed0" / "checkpoints"
    end = time.monotonic() + 300
    while not (checkpoints.is_dir() and any(checkpoints.glob("step_*"))):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "cells" / "alfworld" / "opd-seed0" / "cell.json").exists()
    again = started(file, out)
    said = again.communicate(timeout=600)[1]
    assert again.returncode == 0, said
    assert "goes on: alfworld/opd-seed0" in said
    (record,) = read_records(out).records
    assert [(point.step, point.tasks) for point in record.evaluations] == [
        (point.step, point.tasks) for point in whole.evaluations
    ]
    assert record.total.turns == whole.total.turns


def test_a_study_over_an_endpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    fake = FakeOpenAI(message=lambda body: {"content": "<action>look</action>"})
    with served(fake):
        text = PLAYED.replace('agent = "random"', f'agent = "openai:tiny"\nbase_url = "{fake.url}"\nchannel = "text"')
        (tmp_path / "asked.toml").write_text(text.replace("random", "asked"))
        found = run_study(tmp_path / "asked.toml", tmp_path / "out", parallel=1)
    assert fake.requests
    asked = [record for record in found.records if record.method == "asked"]
    assert [record.seed for record in asked] == [0, 1]
    for record in asked:
        assert [point.step for point in record.evaluations] == [0]
        assert set(record.evaluations[0].tasks.values()) == {0.0}
        assert (record.total.turns, record.steps) == (0.0, [])
    shown = write_tables(found, tmp_path / "tables")
    (row,) = [line for line in shown.splitlines() if line.startswith("| expert |")]
    assert row.startswith("| expert | 2 | 100.0 | +100.0 [")


@pytest.mark.nightly
def test_a_ray_cluster_plays_the_same_cells_and_a_failed_one_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "played.toml"
    file.write_text(PLAYED)
    here = run_study(file, tmp_path / "here")
    shutil.copytree(STUDENT, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "model.safetensors", 4000)
    file.write_text(PLAYED + f'[methods.broken]\nagent = "model:{tmp_path / "broken"}"\n')
    capsys.readouterr()
    with pytest.raises(TurngymError, match=r"^failed: alfworld/broken-seed0; .*; failed: "):
        run_study(file, tmp_path / "there", ray="start")
    assert "(4 of 6)" in capsys.readouterr().err
    file.write_text(PLAYED)
    there = run_study(file, tmp_path / "there", ray="start")
    ours, theirs = ([[p.tasks for p in one.evaluations] for one in found.records] for found in (here, there))
    assert ours == theirs
