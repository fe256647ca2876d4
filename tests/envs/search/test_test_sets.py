"""Search-R1's test sets as panels from a user's files: the official counts, ids and hashes of question and answers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from turngym.agents.presets import find_preset
from turngym.core.errors import TaskError
from turngym.envs.panels import load_panel, verify_panel
from turngym.envs.search.questions import Question
from turngym.envs.search.sources import SETS
from turngym.envs.search.test_sets import OFFICIAL, write_test_sets
from turngym.scripts import main as command

ROOT = Path(__file__).parents[3]


def rows(path: Path, count: int, source: str | None = None, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"id": f"test_{n}", "question": f"what is number {n} of {path.parent.name}", "golden_answers": [str(n), "x"]}
        | ({} if source is None else {"data_source": source})
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_official_counts() -> None:
    assert sum(OFFICIAL.values()) == 51_713


def test_a_set_becomes_a_panel_of_ids_and_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [rows(tmp_path / "bamboogle" / "test.jsonl", 125), rows(tmp_path / "all" / "musique.jsonl", 2417)]
    out = tmp_path / "out"
    assert command.main(["panel", "search-tests", *map(str, files), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "search-bamboogle-test-v1.json: 125 questions, the official number" in said
    assert "not in these files: 2wiki, hotpotqa, popqa, nq, triviaqa" in said
    panel = load_panel(str(out / "search-bamboogle-test-v1.json"))
    assert (panel.tasks[7].task_id, panel.tasks[7].category) == ("bamboogle/test_7", "bamboogle")
    asked = Question(
        id="test_7", question="what is number 7 of bamboogle", golden_answers=("7", "x"), data_source="bamboogle"
    )
    assert panel.tasks[7].sha256 == asked.sha256(None)
    env = panel.make_env(data=out)
    assert verify_panel(panel, env) == []
    assert env.get_wrapper_attr("max_turns") == 5
    env.close()
    # an answer that was changed is another task
    questions = out / "bamboogle_questions.jsonl"
    questions.write_text(questions.read_text().replace('"7", "x"', '"7", "y"'), encoding="utf-8")
    assert command.main(["panel", "verify", str(out / "search-bamboogle-test-v1.json"), "--data", str(out)]) == 1


def test_one_file_of_all_sets_is_told_apart_by_its_rows(tmp_path: Path) -> None:
    mixed = rows(tmp_path / "mixed.jsonl", 125, "bamboogle")
    other = rows(tmp_path / "part.jsonl", 3, "somewhere", 200)
    mixed.write_text(mixed.read_text() + other.read_text(), encoding="utf-8")
    assert [panel.name for panel in write_test_sets([mixed], tmp_path / "out")] == ["search-bamboogle-test"]


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("bamboogle", 124, "bamboogle has 124 questions in these files, Search-R1's test set has 125"),
        ("trivia", 5, "there is none of the test sets in these files; they are: nq, triviaqa"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, count: int, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        write_test_sets([rows(tmp_path / f"{name}.jsonl", count)], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.json"))
    twice = rows(tmp_path / "twice" / "bamboogle.jsonl", 125)
    twice.write_text(twice.read_text().replace('"test_1"', '"test_2"'), encoding="utf-8")
    with pytest.raises(TaskError):
        write_test_sets([twice], tmp_path / "out")


def test_the_commands_of_the_table_to_fill_name_panels_and_presets_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/research/to_fill.md: each command as it stands, for Search with three questions a set and a small corpus."""
    page = (ROOT / "docs" / "research" / "to_fill.md").read_text(encoding="utf-8")
    block = re.search(r"## A table to fill\n.*?```bash\n(.*?)```\n(.*?)\n## ", page, re.DOTALL)
    assert block is not None
    lines = [shlex.split(line)[1:] for line in block[1].splitlines()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("turngym.envs.search.test_sets.OFFICIAL", dict.fromkeys(OFFICIAL, 3))
    files = [str(rows(tmp_path / "files" / f"{source}.jsonl", 3)) for source in OFFICIAL]
    (write,) = (words for words in lines if words[0] == "panel")
    place = write.index("test.parquet")
    assert command.main([*write[:place], *files, *write[place + 1 :]]) == 0
    played = {}
    for words in (words for words in lines if words[0] == "eval"):
        panel = load_panel(words[words.index("--panel") + 1])
        assert find_preset(words[words.index("--preset") + 1], panel.env_id) is not None
        played[panel.env_id] = words
    # a row of the table for each benchmark that has a command, and the other way round
    assert {name: f"\n| {name} | " in page for name in ("ALFWorld", "WebShop", "Search")} == {
        env_id.partition("/")[2].partition("-")[0]: True for env_id in played
    }
    assert all((tmp_path / "search_tests" / f"search-{name}-test-v1.json").is_file() for name in SETS)
    assert all(f"`{name}`" in block[2] for name in SETS)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "\\"A\\"\\nnumber 1 is x"}\n', encoding="utf-8")
    words = list(played["turngym/Search-v0"])
    assert '"retriever": ' in words[words.index("--env-kwargs") + 1]
    words[words.index("--env-kwargs") + 1] = '{"retriever": "bm25:corpus.jsonl"}'
    words[words.index("--agent") + 1] = "random"
    capsys.readouterr()
    assert command.main([*words, "--workers", "0"]) == 0
    assert "verl-agent" in capsys.readouterr().out
