"""A package from outside, installed beside turngym in a throw-away environment, used by the installed command."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wheels import Turngym, installed_with

pytestmark = pytest.mark.long
HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
ENV = "turngym_example:example/Guess-v0"


@pytest.fixture(scope="module")
def turngym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turngym]:
    """Runs the installed command and returns what it printed."""
    with installed_with(HERE, tmp_path_factory.mktemp("outside")) as run:
        yield run


PAGES = {"write_an_environment.md": "guess", "write_a_judge.md": "judge", "write_an_algorithm.md": "loo"}


@pytest.mark.parametrize(("page", "module"), PAGES.items())
def test_the_page_shows_the_file_that_is_tested(page: str, module: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = re.search(rf'^```python title="turngym_example/{module}.py"\n(.*?)^```', text, flags=re.S | re.M)
    assert shown is not None
    assert shown[1] == (HERE / "turngym_example" / f"{module}.py").read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """The words after `turngym` of the page's commands that need the installed package (fenced as `sh`)."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```sh\n(.*?)^```", text, flags=re.S | re.M)
    return [shlex.split(line)[1:] for block in found for line in block.replace("\\\n", " ").splitlines()]


SHORT = ("--steps", "1", "--episodes", "8", "--threads", "1", "--device", "cpu", "--tracker", "none")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_work(turngym: Turngym, student: Path, tmp_path: Path, page: str) -> None:
    shutil.copytree(student, tmp_path / "models" / "student")
    lines = commands(page)
    assert len(lines) >= 2
    for words in lines:
        short = SHORT if words[0] == "train" and "--help" not in words else ()
        turngym(*words, *short, folder=tmp_path)


def test_rollout_plays_the_environment_also_in_workers(turngym: Turngym, tmp_path: Path) -> None:
    for workers in ("0", "2"):
        out = tmp_path / f"{workers}.jsonl"
        turngym("rollout", "--env", ENV, "--agent", "expert", "--tasks", "3", "--workers", workers, "--out", out)
        # the first line holds the settings
        _, *episodes = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [episode["task"]["env_id"] for episode in episodes] == ["example/Guess-v0"] * 3
        assert all(episode["success"] for episode in episodes)


def test_eval_scores_an_agent_on_the_package_s_panel(turngym: Turngym, tmp_path: Path) -> None:
    turngym("panel", "verify", "turngym_example:guess-eval")
    turngym("eval", "--panel", "turngym_example:guess-eval", "--agent", "expert", "--out", tmp_path / "eval")
    found: dict[str, Any] = json.loads((tmp_path / "eval" / "results.json").read_text(encoding="utf-8"))
    assert found["spec"]["play"]["tasks"]["panel"] == "turngym_example:guess-eval-v1"
    _, *episodes = (tmp_path / "eval" / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(episodes) == 5 * 4
    assert all(json.loads(episode)["success"] for episode in episodes)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that can say every action of the game."""
    from turngym.agents import ChatSettings
    from turngym.agents.saved_model import save_model
    from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
    from turngym.trainers.models import tiny_qwen3

    folder = tmp_path_factory.mktemp("student")
    phrases = [*(f"<action>guess {n}</action>" for n in range(1, 21)), "Higher.", "Lower.", "Guess the number."]
    words = build_phrase_tokenizer(phrases)
    save_model(tiny_qwen3(len(words), width=32, layers=1, heads=2, max_length=512, seed=0), folder)
    words.save_pretrained(str(folder))
    ChatSettings(system="Guess the number.", max_new_tokens=2, max_context=512).save(folder)
    return folder


def trained(turngym: Turngym, student: Path, out: Path, algorithm: str, *more: str) -> list[dict[str, Any]]:
    """The training rows of a run of two steps on the example's environment."""
    words = ("--student", student, "--out", out, "--env", ENV, "--split", "train", "--steps", "2", "--episodes", "8")
    turngym("train", algorithm, *words, "--threads", "1", "--device", "cpu", "--tracker", "none", *more)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def test_train_runs_the_algorithm(turngym: Turngym, student: Path, tmp_path: Path) -> None:
    panel = ("--panel", "turngym_example:guess-eval", "--eval-samples", "1", "--eval-every", "2")
    rows = trained(turngym, student, tmp_path / "run", "loo", "--loo.n", "4", "--loo.cap", "1.5", *panel)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0.0 <= row["token/baseline"] <= 1.0  # the target function's column, through the loss
        assert row["token/capped"] == 0.0  # on policy, every weight is 1
    config = (tmp_path / "run" / "config.toml").read_text(encoding="utf-8")
    assert "cap = 1.5" in config
    assert "--loo.cap" in turngym("train", "loo", "--help")
    assert "--loo.cap" in turngym("train", "grpo", "--loo.cap", "2", "--student", student, "--out", tmp_path, status=2)


def test_train_asks_the_judge(turngym: Turngym, student: Path, tmp_path: Path) -> None:
    rows = trained(turngym, student, tmp_path / "run", "prm-rl", "--judge", "guess")
    assert [row["step"] for row in rows] == [1, 2]
    rules = trained(turngym, student, tmp_path / "rules", "prm-rl", "--judge", "rules")
    assert [row["loss"] for row in rules] != [row["loss"] for row in rows]


def test_what_is_not_there_is_said_in_one_line(turngym: Turngym, tmp_path: Path) -> None:
    out = turngym("rollout", "--env", "turngym_example:example/Guss-v0", "--out", tmp_path / "a.jsonl", status=2)
    assert "Did you mean 'example/Guess-v0'" in out
    out = turngym("eval", "--panel", "turngym_exampel:guess-eval", "--agent", "expert", status=2)
    assert "there is no package 'turngym_exampel'" in out
    assert "Traceback" not in out


def test_panels_and_presets_of_an_installed_package_are_found_by_name(turngym: Turngym, tmp_path: Path) -> None:
    assert "turngym_example:guess-eval-v1" in turngym("panel", "list")
    assert "turngym_example:guess-eval-v1" in turngym("panel", "show", "guess-evil", status=2)
    words = ("--panel", "turngym_example:guess-eval", "--agent", "random", "--out", tmp_path / "eval")
    turngym("eval", *words, "--preset", "short")
    found: dict[str, Any] = json.loads((tmp_path / "eval" / "results.json").read_text(encoding="utf-8"))
    assert found["spec"]["play"]["env"]["max_turns"] == 5
    assert len(found["episodes"]) == 5 * 2
    assert "short" in turngym("eval", *words, "--preset", "shrot", status=2)
