"""A result in the formats of others: read back by their own readers, the numbers are those of the table."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate
from turngym.agents.adapters.exported_numbers import numbers_of, panel_of_result, times_of
from turngym.agents.evaluation.packed_file import PackedResult, read_result
from turngym.core.spec import changed
from turngym.envs.panels import load_panel
from turngym.scripts.main import main

STUDENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "alfworld-student.result.xz"
PANEL = "alfworld-quickstart-v1"


@pytest.fixture(scope="module")
def result() -> PackedResult:
    return read_result(STUDENT)


def export(out: Path, to: str, *words: str) -> int:
    return main(["result", "export", str(STUDENT), "--to", to, "--out", str(out), *words])


def read_files(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    words = ("--model", "turngym/student", "--organization", "me", "--relationship", "first_party")
    assert export(out, "every-eval-ever", *words) == 0
    (whole,) = out.rglob("*[0-9a-f].json")
    (rows,) = out.rglob("*_samples.jsonl")
    assert whole.relative_to(out).parts[:-1] == ("data", PANEL, "turngym", "student")
    head = json.loads(whole.read_text(encoding="utf-8"))
    stated = head["detailed_evaluation_results"]
    assert stated["file_path"] == rows.relative_to(out).as_posix()
    assert stated["checksum"] == sha256(rows.read_bytes()).hexdigest()
    return head, [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]


def test_every_eval_ever_holds_the_table_and_every_turn(tmp_path: Path, result: PackedResult) -> None:
    head, rows = read_files(tmp_path)
    main_one, *others = head["evaluation_results"]
    assert (main_one["evaluation_result_id"], main_one["score_details"]["score"]) == ("avg-4", 0.31)
    interval = main_one["score_details"]["uncertainty"]["confidence_interval"]
    table = result.scores["overall"]["avg"]
    assert (interval["lower"], interval["upper"]) == (table["low"], table["high"])
    assert {one["evaluation_result_id"] for one in others} >= {"pass-at-4", "score", "invalid", "avg-4.heat"}
    assert head["source_metadata"]["evaluator_relationship"] == "first_party"
    assert len(rows) == 400
    for row, episode in zip(rows, result.episodes, strict=True):
        assert row["evaluation_id"] == head["evaluation_id"]
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert said == [turn.response for turn in episode.turns]
        found = [row["messages"][one["turn_idx"]]["content"] for one in row["answer_attribution"]]
        assert found == said
        assert row["evaluation"]["is_correct"] == episode.success


def test_the_validator_of_every_eval_ever_takes_both_files(tmp_path: Path) -> None:
    validate = pytest.importorskip("every_eval_ever.validator.validate", reason="bootstrap.py evaluators")
    read_files(tmp_path)
    assert validate.main([str(path) for path in tmp_path.rglob("*.json*")]) == 0


def test_the_hub_reads_its_entries(tmp_path: Path, result: PackedResult) -> None:
    import huggingface_hub as hub
    import yaml

    assert export(tmp_path, "hf-eval-results", "--dataset", "turngym/panels") == 0
    rows = yaml.safe_load((tmp_path / ".eval_results" / f"{PANEL}.yaml").read_text(encoding="utf-8"))
    benchmark = yaml.safe_load((tmp_path / "eval.yaml").read_text(encoding="utf-8"))
    entries = hub.parse_eval_result_entries(rows)
    assert [one.task_id for one in entries] == [task["id"] for task in benchmark["tasks"]]
    first = entries[0]
    assert (first.dataset_id, first.task_id, first.value) == ("turngym/panels", f"{PANEL}-avg-4", 31.0)
    assert first.date == result.date
    assert "25.1 to 37.7" in first.notes


def test_an_evaluation_s_folder_is_exported_as_it_is(tmp_path: Path) -> None:
    evaluate("alfworld-quickstart", "random", samples=1, limit=2, max_turns=2, out=tmp_path / "run", progress=False)
    words = ["--to", "hf-eval-results", "--dataset", "me/panels", "--out", str(tmp_path / "out")]
    assert main(["result", "export", str(tmp_path / "run"), *words]) == 0
    written = (tmp_path / "out" / ".eval_results" / f"{PANEL}.yaml").read_text(encoding="utf-8")
    assert f"{PANEL}-avg-1" in written
    assert "at most 2 turns" in written
    assert "2 of 100 tasks" in written


def named(result: PackedResult, panel: str) -> PackedResult:
    tasks = changed(result.spec.play.tasks, panel=panel)
    return replace(result, spec=changed(result.spec, play=changed(result.spec.play, tasks=tasks)))


@pytest.mark.parametrize("changes", [{"panel": "../../../elsewhere"}, {"date": "yesterday"}])
def test_a_result_of_anyone_is_written_where_it_was_asked_for_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], result: PackedResult, changes: dict[str, Any]
) -> None:
    few = replace(result, episodes=result.episodes[:4])
    made = named(few, changes["panel"]) if "panel" in changes else replace(few, **changes)
    file = made.write(tmp_path / "one.result.xz")
    eee = ("every-eval-ever", "--model", "a/b", "--organization", "me")
    for words in (eee, ("hf-eval-results", "--dataset", "a/b")):
        assert main(["result", "export", str(file), "--out", str(tmp_path / "a" / "out"), "--to", *words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert "panel" in said or "date" in said
    assert [path.name for path in tmp_path.iterdir()] == ["one.result.xz"]


def test_a_panel_of_a_path_is_named_by_its_file(result: PackedResult) -> None:
    assert panel_of_result(named(result, "/somewhere/mine-v1.json")).panel == "mine-v1"
    assert panel_of_result(named(result, "pack:/somewhere/mine-v1.json")).panel == "pack:mine-v1"
    assert panel_of_result(named(result, "pack:mine-v1")).panel == "pack:mine-v1"


def test_a_date_without_a_zone_is_utc(result: PackedResult) -> None:
    began, ended = times_of(replace(result, date="2026-11-25T03:02:16", seconds=16.0)) or ("", "")
    assert (str(began), str(ended)) == ("2026-11-25 03:02:00+00:00", "2026-11-25 03:02:16+00:00")


@pytest.mark.long
def test_inspect_reads_its_log(tmp_path: Path, result: PackedResult) -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra turngym[inspect]")
    from inspect_ai.log import read_eval_log

    assert export(tmp_path, "inspect") == 0
    log = read_eval_log(str(tmp_path / f"{PANEL}.eval"))
    assert (log.status, log.eval.task, log.eval.config.epochs) == ("success", PANEL, 4)
    metrics = log.results.scores[0].metrics
    assert {name: one.value for name, one in metrics.items()} == {one.name: one.value for one in numbers_of(result)}
    assert len(log.samples) == 400
    samples = {(sample.id, sample.epoch): sample for sample in log.samples}
    for episode in result.episodes:
        sample = samples[episode.task.task_id, episode.sample + 1]
        answers = [message for message in sample.messages if message.role == "assistant"]
        assert [one.text for one in answers] == [turn.response for turn in episode.turns]
        assert [one.metadata["verdict"] for one in answers] == [turn.verdict.value for turn in episode.turns]
        assert sample.scores["success"].value == float(episode.success)


def croissant(out: Path, *panels: str) -> int:
    about = ("--name", "panels", "--url", "https://example.org/panels", "--license", "MIT", "--creator", "me")
    return main(["panel", "croissant", *panels, "--out", str(out), *about])


def test_panels_are_a_data_set_in_croissant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert croissant(tmp_path, "alfworld-valid-unseen-v1", "search-quickstart") == 0
    about = json.loads((tmp_path / "croissant.json").read_text(encoding="utf-8"))
    assert [one["@id"] for one in about["recordSet"]] == ["alfworld-valid-unseen-v1", "search-quickstart-v1"]
    for one in about["distribution"]:
        assert one["sha256"] == sha256((tmp_path / one["contentUrl"]).read_bytes()).hexdigest()
    assert croissant(tmp_path / "twice", "search-quickstart", "search-quickstart-v1") == 2
    assert "search-quickstart-v1" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_mlcroissant_reads_every_task(tmp_path: Path) -> None:
    mlc = pytest.importorskip("mlcroissant", reason="bootstrap.py evaluators")
    assert croissant(tmp_path, "search-quickstart") == 0
    dataset = mlc.Dataset(jsonld=str(tmp_path / "croissant.json"))
    panel = load_panel("search-quickstart")
    rows = list(dataset.records(panel.full_name))
    for column in ("task_id", "sha256", "split", "category"):
        found = [row[f"{panel.full_name}/{column}"].decode() for row in rows]
        assert found == [getattr(task, column) for task in panel.tasks]


@pytest.mark.parametrize(
    ("to", "words", "named"),
    [
        ("every-eval-ever", ("--organization", "me"), "--model"),
        ("hf-eval-results", (), "--dataset"),
        ("inspect", ("--dataset", "a/b"), "dataset"),
        ("croissant", (), "croissant"),
    ],
)
def test_what_a_format_needs_or_does_not_read_is_said_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, words: tuple[str, ...], named: str
) -> None:
    assert export(tmp_path / "out", to, *words) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
