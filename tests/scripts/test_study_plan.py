"""`turngym study plan`: pilots from packed results, folders and study files; its tables; what it refuses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate
from turngym.agents.evaluation.packed import pack_result
from turngym.scripts.main import main
from turngym.scripts.study.plan import StudyPlanOptions, read_pilot
from turngym.trainers.study.records import read_records
from turngym.trainers.study.tables import StudyWorld, overview

DATA = Path(__file__).parents[2] / "docs" / "data"
(WORLD,) = read_records(DATA / "study-search-loops.json.gz").worlds.values()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Two "training seeds" of a poor and of a better player, as folders and as packed results."""
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, list[str]] = {"poor": [], "good": []}
    for seed in (0, 1):
        for name, noise in (("poor", 0.7), ("good", 0.3)):
            out = folder / f"{name}{seed}"
            evaluate(
                "alfworld-quickstart",
                "expert",
                noise=noise,
                samples=2,
                limit=8,
                seed=seed,
                workers=0,
                out=out,
                progress=False,
            )
            found[name].append(str(out))
    packed = folder / "good1.result.xz"
    pack_result(found["good"][1], packed)
    found["good"][1] = str(packed)
    return found


def test_a_pilot_of_evaluations(runs: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    pilot = read_pilot(StudyPlanOptions(first=tuple(map(Path, runs["poor"])), second=tuple(map(Path, runs["good"]))))
    assert (pilot.design.seeds, pilot.design.tasks, pilot.design.samples) == (2, 8, 2)
    assert pilot.train_hours is None
    assert pilot.episode_seconds > 0
    words = ["study", "plan", "--first", *runs["poor"], "--second", *runs["good"], "--seeds", "3", "8"]
    assert main([*words, "--tasks", "100", "--samples", "2", "--difference", "20"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"pilot: 2 seeds x 8 tasks x 2 samples: \+\d+\.\d points \[", said)
    assert "fewest episodes" in said
    assert "fewest hours" not in said, "nobody said how long a training takes"
    assert main([*words, "--difference", "20", "--train-hours", "2"]) == 0
    assert "fewest hours" in capsys.readouterr().out


@pytest.mark.long
def test_a_recorded_study_is_a_pilot(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["study", "plan", "--data", str(DATA / "study-search-loops.json.gz")]
    assert main([*data, "--methods", "opd", "atod", "--seeds", "3", "--tasks", "100", "--samples", "4"]) == 0
    said = capsys.readouterr().out
    # what the study's own table says of the same runs
    shown = overview(StudyWorld(rows=WORLD, baseline="opd", against={}))[1]
    (minus,) = [line[3] for line in shown if line[0] == "atod"]
    found = re.search(r"x 4 samples, Same-Step \(mean of the last 4 evaluations\): (\S+) points (\[.*?\])", said)
    assert found is not None
    assert " ".join(found.groups()) == minus == "-7.1 [-11.0, -3.0]"
    row = next(line for line in said.splitlines() if re.match(r"\W*3\W+\d", line) and "100" not in line)
    cautious = float(re.findall(r"\d+\.\d", row)[0])
    assert (
        main(
            [*data, "--methods", "opd", "atod", "--seeds", "3", "--tasks", "100", "--samples", "4", "--spread", "seen"]
        )
        == 0
    )
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if re.match(r"\W*3\W+\d", line) and "100" not in line)
    # by what the pilot's seeds happened to show, a smaller difference would do
    assert float(re.findall(r"\d+\.\d", row)[0]) < cautious
    assert "--spread seen; seen" in said
    assert main([*data, "--difference", "0.2", "--most-seeds", "3"]) == 1
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--first", "a", "b", "--second", "c"], "name as many --first (2) as --second (1)"),
        (["--data", "DATA", "--methods", "opd", "turnop"], "Did you mean 'turnopd'"),
        (["--data", "DATA", "--seeds", "1"], "--seeds is "),
        (["--data", "DATA", "--methods", "opd", "opd"], "--methods names opd twice"),
        (["--data", "DATA", "--episode-seconds", "3"], "episode_seconds is 3.0; it needs --difference"),
        (["--data", "DATA", "--methods", "opd", "p0.4-all"], "a pilot needs two of each"),
    ],
)
def test_what_is_no_pilot_is_said_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(DATA / "study-alfworld-loops.json.gz") if word == "DATA" else word for word in words]
    assert main(["study", "plan", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert said in error


@pytest.mark.long
def test_a_run_is_one_seed_of_one_method(
    runs: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poor, good = runs["poor"], runs["good"]
    other = tmp_path / "other"
    options: dict[str, Any] = {"samples": 2, "limit": 8, "seed": 1, "workers": 0, "progress": False}
    evaluate("alfworld-quickstart", "expert", noise=0.7, max_turns=7, out=other, **options)
    copied, again = (str(shutil.copytree(run, tmp_path / f"copied{seed}")) for seed, run in enumerate(poor))
    for first, second, said in (
        ([poor[0], poor[0]], [good[0], good[0]], f"name {poor[0]} 2 times"),
        ([poor[0], copied], good, "are one run: "),
        (poor, [copied, again], f"--first {poor[0]} and --second {copied} are one run: "),
        ([poor[0], str(other)], good, "max_turns 24 and 7"),
        ([poor[0], good[0]], [poor[1], good[1]], "noise 0.7 and 0.3"),
    ):
        assert main(["study", "plan", "--first", *first, "--second", *second]) == 2
        error = capsys.readouterr().err.strip()
        assert len(error.splitlines()) == 1
        assert said in error
