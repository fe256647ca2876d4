"""What a real cell leaves: costs are those of its metrics, accuracies those of its evaluations."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.packed import check_result, play_again
from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.episode import Status
from turngym.core.trace import TraceWriter, iter_episodes
from turngym.scripts.main import main
from turngym.scripts.study.cells import Cell, cells_of
from turngym.scripts.study.run import make_record
from turngym.scripts.study.study_file import read_study_file
from turngym.trainers.diagnostics.depth_regime import full_depth_rows, measure_regime, turn_sums
from turngym.trainers.metrics import read_metrics
from turngym.trainers.study.portable import portable
from turngym.trainers.study.records import pooled_sums, read_record

pytestmark = pytest.mark.long  # two cells of a study are trained and played
FILE = """
world = "search"
baseline = "opd"
tables = ["accuracy"]
train = { steps = 4, episodes = 4 }
evaluate = { times = 4, tasks = 3, samples = 2, average = true }
[methods.opd]
[methods.turnopd]
"""
WORDS = ["--parallel", "1", "--pack"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    (out / "file.toml").write_text(FILE)
    assert main(["study", "run", str(out / "file.toml"), *WORDS, "--out", str(out)]) == 0
    return out


def cells(out: Path) -> dict[str, Cell]:
    return {cell.method: cell for cell in cells_of(read_study_file(out / "file.toml"), out)}


def test_a_record_says_what_metrics_and_traces_say(study: Path) -> None:
    cell = cells(study)["turnopd"]
    record, rows = read_record(cell.folder), read_metrics(cell.folder)
    train = [row for row in rows if row["kind"] == "train"]
    assert (record.world, record.method, record.seed, record.samples) == ("search", "turnopd", 0, 2)
    assert record.total.seconds == train[-1]["time/train_s"]
    assert record.total.tokens == sum(row["tokens"] for row in train)
    assert record.total.turns == sum(row["cost/turns"] for row in train)
    assert record.total.turns == pytest.approx(sum(4 * row["turns_mean"] for row in train))
    # every token that was drawn is trained on here
    assert record.total.sampled == sum(row["cost/sampled"] for row in train) >= record.total.tokens
    names = ("rollout", "teacher", "update")
    assert record.total.cpu == pytest.approx(sum(row[f"time/{name}_cpu_s"] for row in train for name in names))
    assert record.total.cpu > 0
    for name in names:
        wall, cpu = record.phases[name]
        assert wall == pytest.approx(sum(row[f"time/{name}_s"] for row in train))
        assert cpu == pytest.approx(sum(row[f"time/{name}_cpu_s"] for row in train))
    evals = [row for row in rows if row["kind"] == "eval"]
    assert [point.step for point in record.evaluations] == [row["step"] for row in evals] == [0, 1, 2, 3, 4]
    for point, row in zip(record.evaluations, evals, strict=True):
        assert fmean(point.tasks.values()) == pytest.approx(row["eval/avg"])
        assert set(point.tasks) == set(record.categories)
        assert len(point.tasks) == 3
    assert record.evaluations[0].cost.seconds == 0.0
    assert record.evaluations[-1].cost == record.total
    assert [step["depth/probe"] for step in record.steps] == [1, 1, 1, 0]
    assert [step["weight/alpha"] for step in record.steps] == [0.25, 0.5, 0.75, 1.0]
    averaged = rescore(cell.folder / "average").scores.overall
    assert record.averaged is not None
    assert fmean(record.averaged.values()) == averaged.avg.mean
    assert (averaged.samples, averaged.avg.tasks) == (2, 3)
    pooled = measure_regime(pooled_sums([record.regime["all"]]))
    assert pooled == measure_regime(turn_sums(full_depth_rows(rows)))


def test_both_methods_begin_with_the_same_evaluation(study: Path) -> None:
    found = cells(study)
    first = [read_record(found[name].folder).evaluations[0].tasks for name in ("opd", "turnopd")]
    assert first[0] == first[1]
    assert (study / "tables" / "search-accuracy.csv").exists()


def test_a_cell_without_its_record_goes_on_and_plays_nothing_again(study: Path) -> None:
    cell = cells(study)["opd"]
    packed = sorted((study / "results").iterdir())
    assert [path.name for path in packed] == [f"search-{name}-seed0.result.xz" for name in ("opd", "turnopd")]
    assert [check_result(path) for path in packed] == [[], []]
    # date, versions and model are the run's: whoever has the checkpoint can let it play again
    result, config = read_result(packed[0]), tomllib.loads((cell.folder / "config.toml").read_text())["provenance"]
    assert (result.date, result.versions["torch"]) == (config["started"], config["packages"]["torch"])
    assert play_again(result, f"model:{cell.model}", workers=0, progress=False) == []
    stamps = [path.stat().st_mtime_ns for path in packed]
    assert "search-turnopd-seed0" in (study / "results-table" / "results.csv").read_text()
    before, metrics = read_record(cell.folder), (cell.folder / "metrics.jsonl").read_bytes()
    cell.record.unlink()
    assert not cell.finished
    assert main(["study", "run", str(study / "file.toml"), *WORDS, "--out", str(study)]) == 0
    assert (cell.folder / "metrics.jsonl").read_bytes() == metrics
    assert make_record(cell) == before == read_record(cell.folder)
    assert [path.stat().st_mtime_ns for path in packed] == stamps


def test_a_task_that_was_lost_everywhere_is_one_of_the_study(study: Path, tmp_path: Path) -> None:
    cell = replace(cells(study)["opd"], folder=tmp_path / "opd-seed0")
    shutil.copytree(cells(study)["opd"].folder, cell.folder)
    for path in (cell.folder / "eval").glob("*.jsonl"):
        episodes = [*iter_episodes(path)]
        gone = episodes[0].task.task_id
        path.unlink()
        with TraceWriter(path) as writer:
            for one in episodes:
                writer.write(replace(one, status=Status.ERROR_ENGINE) if one.task.task_id == gone else one)
    record, other = make_record(cell), read_record(cells(study)["turnopd"].folder)
    assert {len(point.tasks) for point in record.evaluations} == {2}
    assert (record.samples, record.categories) == (other.samples, other.categories)


def test_records_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    cells, start = tmp_path / "out" / "cells", "alfworld/start-sft/checkpoints/step_000002/model"
    files = [str(tmp_path / "out" / "texts" / "a.txt"), "own.txt"]
    teacher = {"teacher": {"teacher": str(CHECKPOINTS / "alfworld" / "teacher")}}
    given = {"models": {"student": str(cells / start)}, "method": {**teacher, "lm_loss": {"files": files}}}
    assert portable(given, cells) == {
        "models": {"student": start},
        "method": {"teacher": {"teacher": "alfworld/teacher"}, "lm_loss": {"files": ["texts/a.txt", "own.txt"]}},
    }
    own = {"models": {"student": "/models/mine"}}
    assert portable(own, cells) == own
