"""The CI file of docs/evaluation.md, both ways: it fails when a model gets worse, and not when it gets better."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from late import late

from turngym.agents.evaluation.packed import pack_result
from turngym.scripts.main import main

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
NOISE = {"good": 0.0, "bad": 0.9}


def commands() -> list[list[str]]:
    """The commands of its steps that are ours."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) == 12
    (job,) = yaml.safe_load(text)["jobs"].values()
    runs = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    return [words[1:] for words in runs if words[0] == "turngym"]


@pytest.mark.parametrize(("accepted", "now", "status"), late([("good", "bad", 1), ("bad", "good", 0)], "good"))
def test_the_job_fails_when_a_model_gets_worse(
    accepted: str, now: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluation, comparison = commands()

    def play(model: str) -> None:
        settings = f'panel = "alfworld-quickstart"\nagent = "expert"\nnoise = {NOISE[model]}\nlimit = 20\nsamples = 1\n'
        Path("eval.toml").write_text(settings + "workers = 0\n")
        assert main(evaluation) == 0

    play(accepted)
    pack_result(Path("new").rename("old"), Path("accepted.result.xz"))
    play(now)
    assert main(comparison) == status
