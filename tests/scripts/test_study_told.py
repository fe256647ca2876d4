"""The study of told policies: every cell builds a run, and who reads the skills is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.scripts.study import main as study


def test_every_world_has_every_method_and_its_own_skills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["run", "told", "--set", "seeds = [0]", "--out", str(tmp_path / "told"), "--print"]
    assert not study.main(words)
    said = capsys.readouterr().out
    for world in ("alfworld", "webshop", "search"):
        told = f'"skills:{world}"'
        for method in ("sdar", "rlsd", "skill-sd", "opid", "agent-opsd", "opd-hints"):
            cell = said.split(f"# {world}/{method}-seed0: ")[1].split("\n\n")[0]
            assert f"judge = {told}" in cell
            assert "examples" not in cell
        assert f"examples = {told}" in said.split(f"# {world}/grpo-reads-seed0: ")[1].split("\n\n")[0]
        assert (
            f'judge = "skills:{world}/swapped.toml"' in said.split(f"# {world}/sdar-wrong-seed0: ")[1].split("\n\n")[0]
        )
        for method in ("grpo", "opd"):
            cell = said.split(f"# {world}/{method}-seed0: ")[1].split("\n\n")[0]
            assert "skills:" not in cell
        # all of them begin with a model that has read such texts
        assert f"told = {told}" in said.split(f"# {world}/start-reads: ")[1].split("\n\n")[0]
        assert "start-reads" in said.split(f"# {world}/sdar-seed0: ")[1].split("\n\n")[0]
