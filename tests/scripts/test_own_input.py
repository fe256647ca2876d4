"""No verb writes onto what it reads, nor onto a file of somebody else's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from turngym.agents import evaluate, play_episodes
from turngym.scripts import main
from turngym.scripts.options import read_options
from turngym.scripts.result import Pack

PANEL = "search-quickstart"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    play_episodes("turngym/Search-v0", "expert", tasks=1, out=tmp_path / "t.jsonl", progress=False, workers=0)
    (tmp_path / "link.jsonl").symlink_to("t.jsonl")
    os.link(tmp_path / "t.jsonl", tmp_path / "hard.jsonl")
    return tmp_path / "t.jsonl"


@pytest.mark.parametrize("name", ["t.jsonl", "link.jsonl", "hard.jsonl", "./x/../t.jsonl"])
def test_traces_outlive_every_verb(trace: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, out = trace.read_bytes(), str(trace.parent / name)
    (trace.parent / "x").mkdir()
    for words in (["filter"], ["html"], ["html", "--overwrite"], ["parquet"], ["picture"]):
        assert main.main(["trace", words[0], str(trace), *words[1:], "--out", out]) == 2
        assert "kept as it is" in capsys.readouterr().err
        assert trace.read_bytes() == before
    assert (
        main.main(["rollout", "--agent", f"replay:{trace}", "--env", "turngym/Search-v0", "--append", "--out", out])
        == 2
    )
    assert trace.read_bytes() == before


def test_the_file_of_settings_is_an_input_too(trace: Path) -> None:
    settings = trace.parent / "c.toml"
    settings.write_text('outcome = "won"\n')
    words = ["trace", "html", str(trace), "--config", str(settings), "--overwrite", "--out"]
    assert main.main([*words, str(settings)]) == 2
    assert settings.read_text() == 'outcome = "won"\n'
    assert main.main([*words, str(trace.parent / "page.html")]) == 0


def test_a_page_replaces_no_folder(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trace", "html", str(trace), "--overwrite", "--out", str(trace.parent)]) == 2
    said = capsys.readouterr().err
    assert str(trace.parent) in said
    assert ".tmp" not in said


def test_a_picture_replaces_no_other_file(trace: Path) -> None:
    (trace.parent / "notes.md").write_text("mine")
    assert main.main(["trace", "picture", str(trace), "--out", str(trace.parent / "notes.md")]) == 2
    assert (trace.parent / "notes.md").read_text() == "mine"


def test_a_table_computed_again_replaces_no_other_evaluation(tmp_path: Path) -> None:
    for name, agent in (("a", "expert"), ("b", "random")):
        evaluate(PANEL, agent, samples=1, limit=1, out=tmp_path / name, progress=False, workers=0)
    before = (tmp_path / "b" / "results.json").read_bytes()
    for source in ("a", "b"):
        assert main.main(["eval", "--rescore", str(tmp_path / source), "--out", str(tmp_path / "b")]) == 2
    assert (tmp_path / "b" / "results.json").read_bytes() == before


def test_prompts_are_not_written_onto_the_questions(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": "Which river is it?", "golden_answers": ["Tane"]}) + "\n")
    given = json.dumps({"source": str(questions)})
    words = ["panel", "export-prompts", "--env", "turngym/Search-v0", "--env-kwargs", given, "--out", str(questions)]
    before = questions.read_bytes()
    assert main.main(words) == 2
    assert questions.read_bytes() == before


def test_what_a_text_names_counts(trace: Path) -> None:
    """Every verb reads its options at one place, which compares; here a packed result named like its run."""
    with pytest.raises(Exception, match="kept as it is"):
        read_options(Pack, [str(trace), "--out", str(trace)], prog="x", about="")
    with pytest.raises(Exception, match="kept as it is"):
        read_options(Pack, ["run", "--panel", f"name={trace}", "--out", str(trace)], prog="x", about="")
