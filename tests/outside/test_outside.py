"""A package from outside, installed beside turngym in a throw-away environment, used by the installed command."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wheels import build_wheel, clean_venv, turngym_wheel

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
ENV = "turngym_example:example/Guess-v0"
COMMAND = """
import sys
from importlib.metadata import entry_points
(command,) = {point.value: point for point in entry_points(group="console_scripts", name="turngym")}.values()
sys.argv[0] = "turngym"
sys.exit(command.load()())
"""

Turngym = Callable[..., str]


@pytest.fixture(scope="module")
def turngym(tmp_path_factory: pytest.TempPathFactory) -> Turngym:
    """Runs the installed command and returns what it printed."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("outside")
    for name in ("turngym", "example"):
        (work / name).mkdir()
    wheels = turngym_wheel(work / "turngym"), build_wheel(HERE, work / "example")
    python = clean_venv(work / "venv", *wheels)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*words: str | Path, status: int = 0) -> str:
        line = [str(python), "-c", COMMAND, *map(str, words)]
        done = subprocess.run(line, cwd=work, capture_output=True, text=True, env=env, timeout=300)
        assert done.returncode == status, f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(("page", "module"), [("write_an_environment.md", "guess")])
def test_the_page_shows_the_file_that_is_tested(page: str, module: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    assert blocks[0] == (HERE / "turngym_example" / f"{module}.py").read_text(encoding="utf-8")


def test_rollout_plays_the_environment_also_in_workers(turngym: Turngym, tmp_path: Path) -> None:
    for workers in ("0", "2"):
        out = tmp_path / f"{workers}.jsonl"
        turngym("rollout", "--env", ENV, "--agent", "expert", "--tasks", "3", "--workers", workers, "--out", out)
        episodes = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [episode["task"]["env_id"] for episode in episodes] == ["example/Guess-v0"] * 3
        assert all(episode["success"] for episode in episodes)


def test_eval_scores_an_agent_on_the_package_s_panel(turngym: Turngym, tmp_path: Path) -> None:
    turngym("panel", "verify", "turngym_example:guess-eval")
    turngym("eval", "--panel", "turngym_example:guess-eval", "--agent", "expert", "--out", tmp_path / "eval")
    found: dict[str, Any] = json.loads((tmp_path / "eval" / "results.json").read_text(encoding="utf-8"))
    assert found["panel"] == "guess-eval-v1"
    episodes = (tmp_path / "eval" / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(episodes) == 5 * 4
    assert all(json.loads(episode)["success"] for episode in episodes)


def test_what_is_not_there_is_said_in_one_line(turngym: Turngym, tmp_path: Path) -> None:
    out = turngym("rollout", "--env", "turngym_example:example/Guss-v0", "--out", tmp_path / "a.jsonl", status=2)
    assert "Did you mean 'example/Guess-v0'" in out
    out = turngym("eval", "--panel", "turngym_exampel:guess-eval", "--agent", "expert", status=2)
    assert "there is no package 'turngym_exampel'" in out
    assert "Traceback" not in out
