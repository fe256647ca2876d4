"""The page about the first hour shows the commands that its script runs, and a step that fails ends the script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import first_hour
import pytest
from first_hour import LONGEST, STEPS, Ran, Step, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first_hour.md"


def test_the_page_shows_the_commands_that_are_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = [block.partition("\n```")[0] for block in text.split("```bash\n")[1:]]
    assert shown == [step.command for step in STEPS], "write it anew: python tests/tools/first_hour.py --page"


def test_what_ends_the_script() -> None:
    well = Ran(Step("A", "b", "turngym x"), 0, "fine\n", 1.4, 0.6, 55.2)
    assert (well.problem, well.cost) == (None, "1 s, 1 CPU s, 55 MB at most")
    assert replace(well, status=2).problem == "`turngym x` ended with status 2"
    torn = replace(well, output="Traceback (most recent call last):\n")
    assert torn.problem == "`turngym x` printed a traceback"
    long = replace(well, output="".join(f"row {number}\n" for number in range(60)))
    lines = list(page([well, long]))
    assert lines[lines.index("fine") - 1 : lines.index("fine") + 4] == [
        "```text",
        "fine",
        "```",
        "",
        "*1 s, 1 CPU s, 55 MB at most*",
    ]
    assert f"... ({60 - LONGEST} more lines)" in lines
    assert f"row {LONGEST}" not in lines


@pytest.mark.long
def test_steps_are_run_once_in_a_folder_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clone" / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "clone" / "agents").mkdir()
    monkeypatch.setattr(first_hour, "ROOT", tmp_path / "clone")
    good, bad = Step("Good", "", "turngym panel list"), Step("Bad", "", "turngym panel show nothing-like-it")
    monkeypatch.setattr(first_hour, "STEPS", (good,))
    monkeypatch.setattr(
        "sys.argv", ["first_hour.py", "--work", str(tmp_path / "work"), "--page", str(tmp_path / "p.md")]
    )
    assert first_hour.main() == 0
    assert "alfworld-quickstart-v1" in (tmp_path / "p.md").read_text(encoding="utf-8")
    capsys.readouterr()
    monkeypatch.setattr(first_hour, "STEPS", (good, bad))
    assert first_hour.main() == 1
    said = capsys.readouterr()
    assert "(as before)" in said.out
    assert said.err == "first_hour: `turngym panel show nothing-like-it` ended with status 2\n"
