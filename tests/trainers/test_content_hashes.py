"""Files and code of one's own count by what is in them: for a run that goes on, and for the cells of a study."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_runs import save_tiny

from turngym.core.settings import read_toml
from turngym.envs.panels import shipped_panel, write_panel
from turngym.scripts.main import main
from turngym.trainers import content_hashes
from turngym.trainers.study.records import read_records, record_of_run

METHOD = """
from turngym.core import Spec
from turngym.trainers import AlgorithmSpec
from turngym.trainers.algorithms import grpo
class Config(Spec):
    power: float = 1.0
ALGORITHM = AlgorithmSpec(name="credit", config=Config, uses=frozenset({"reward"}), build=grpo.build)
"""


def skills(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text(text)
    (folder / "skills.toml").write_text("always = 'a.txt'\n")
    return f"skills:{folder}"


def test_files_count_by_content_wherever_they_lie(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "panel.json").write_text("{}")
        (tmp_path / folder / "words.txt").write_text("words")
        skills(tmp_path / folder / "skills", "look around first")

    def found(folder: Path) -> dict[str, str]:
        texts = {"files": [str(folder / "words.txt"), str(folder / "panel.json")]}
        told = f"skills:{folder / 'skills'}"
        settings = {"panel": str(folder / "panel.json"), "lm_loss": texts, "judge": told, "sft": {"told": told}}
        return content_hashes.of_files({**settings, "seed": 0, "split": "train", "examples": "skills:alfworld"})

    first = found(tmp_path / "one")
    assert sorted(first) == ["judge", "lm_loss.files", "panel", "sft.told"]
    assert first == found(tmp_path / "two")
    for name, file in (("panel", "panel.json"), ("lm_loss.files", "words.txt"), ("judge", "skills/a.txt")):
        (tmp_path / "two" / file).write_text("other words than before")
        assert found(tmp_path / "two")[name] != first[name]


def test_files_of_an_environment_count(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{}")
    settings = {"env_kwargs": {"topk": 3, "corpus": str(corpus)}}
    first = content_hashes.of_files(settings)
    assert [*first] == ["env_kwargs.corpus"]
    corpus.write_text("{}\n")
    assert content_hashes.of_files(settings) != first


@pytest.mark.parametrize("replaced", ["link", "order", "folder"])
def test_another_way_to_the_same_name_is_another_content(tmp_path: Path, replaced: str) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("first")
    two.write_text("second")
    settings = {"lm_loss": {"files": [str(one), str(two)]}}
    first = content_hashes.of_files(settings)
    if replaced == "link":
        one.unlink()
        one.symlink_to(two)
    elif replaced == "order":
        settings = {"lm_loss": {"files": [str(two), str(one)]}}
    else:
        one.unlink()
        one.mkdir()
    assert content_hashes.of_files(settings) != first


def test_the_record_of_a_cell_keeps_what_it_was_evaluated_on(tmp_path: Path) -> None:
    panel = tmp_path / "mine.json"
    panel.write_text(write_panel(shipped_panel("alfworld-quickstart-v1"), tmp_path / "kept").read_text())
    study = tmp_path / "study.toml"
    study.write_text(
        "evaluate = { tasks = 1, samples = 1 }\n[worlds.alfworld]\n"
        f"panel = {str(panel)!r}\n[methods.expert]\nagent = 'expert'\n"
    )
    words = ["study", "run", str(study), "--out", str(tmp_path / "out"), "--parallel", "1"]
    assert main(words) == 0
    (record,) = read_records(tmp_path / "out").records
    assert record.contents == content_hashes.of_files({"play": {"tasks": {"panel": str(panel)}}}) != {}
    panel.write_text(panel.read_text() + "\n")
    assert main(words) != 0


def test_texts_that_name_no_file_of_ones_own_have_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("a file of this name says nothing of the split")
    settings = {"split": "train", "panel": "alfworld-quickstart", "judge": "skills:webshop/swapped.toml"}
    assert content_hashes.of_files({**settings, "system": "a/" * 5000, "out": str(tmp_path), "x": "\0/", "y": ""}) == {}
    assert content_hashes.of_code({"algorithm": "grpo", "env": "turngym/WebShop-v0"}) == {}


def test_code_of_ones_own_counts_without_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"algorithm": "own_credit:ALGORITHM"}

    def found(code: str) -> dict[str, str]:
        (tmp_path / "own_credit.py").write_text(code)
        sys.modules.pop("own_credit", None)
        return content_hashes.of_code(settings)

    first = found(METHOD)
    assert [*first] == ["algorithm"]
    assert found("# about it\n\n" + METHOD) == first
    assert found(METHOD.replace("1.0", "1.25")) != first
    sys.modules.pop("own_credit")


def test_a_run_goes_on_with_the_files_that_it_began_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, told, out = save_tiny(tmp_path / "model", length=4096), tmp_path / "skills", tmp_path / "run"
    words = ["train", "--algorithm", "sdar", "--student", str(student), "--out", str(out), "--episodes", "2"]
    words += ["--sdar.n", "2", "--max-turns", "2", "--env-kwargs", '{"on_invalid": "noop"}', "--tracker", "none"]
    words += ["--threads", "1", "--device", "cpu", "--eval-every", "0", "--judge", skills(told, "look around first")]
    assert main([*words, "--steps", "1"]) == 0
    kept = content_hashes.kept(out)
    assert kept == content_hashes.of_files({"method": {"judge": {"kind": "skills", "folder": str(told)}}})
    assert read_toml(out / "config.toml", provenance=True)["provenance"]["contents"] == kept
    named = {"world": "w", "method": "m", "group": "main", "about": "", "seed": 0}
    assert record_of_run(out, {}, {}, **named).contents == kept
    capsys.readouterr()
    skills(told, "open every drawer first")
    assert main([*words, "--steps", "2", "--resume"]) != 0
    said = capsys.readouterr().err
    assert f"content of method.judge.folder: checkpoint '{kept['method.judge.folder']}', now '" in said
    skills(told, "look around first")
    assert main([*words, "--steps", "2", "--resume"]) == 0


def test_code_that_changed_is_said_where_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = METHOD.replace("build=grpo.build", "build=lambda config, context: grpo.build(grpo.GrpoConfig(n=2), context)")
    (tmp_path / "own_credit.py").write_text(code)
    student, out = save_tiny(tmp_path / "model", length=4096), tmp_path / "run"
    words = ["train", "--algorithm", "own_credit:ALGORITHM", "--student", str(student), "--out", str(out)]
    words += ["--episodes", "2", "--max-turns", "2", "--env-kwargs", '{"on_invalid": "noop"}', "--tracker", "none"]
    words += ["--threads", "1", "--device", "cpu", "--eval-every", "0"]
    assert main([*words, "--steps", "1"]) == 0
    assert main([*words, "--steps", "2", "--resume"]) == 0
    assert "not as when" not in capsys.readouterr().err
    (tmp_path / "own_credit.py").write_text(code.replace("power: float = 1.0", "power: float = 1.0\n    more: int = 0"))
    sys.modules.pop("own_credit")
    assert main([*words, "--steps", "3", "--resume"]) == 0
    assert "not as when the run began: the content of algorithm" in capsys.readouterr().err
    sys.modules.pop("own_credit")
