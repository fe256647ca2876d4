"""The study of told policies: every cell builds a run, and who reads the skills is what its name says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from turngym.scripts.study import main as study


def test_every_world_has_every_method_and_its_own_skills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["run", "told", "--set", "seeds = [0]", "--out", str(tmp_path / "told"), "--print"]
    assert not study.main(words)
    said = capsys.readouterr().out

    def cell(name: str) -> dict[str, Any]:
        """The settings of a cell, which are printed as the comment below its command."""
        lines = said.split(f"# {name}: ")[1].split("\n\n")[0].splitlines()[2:]
        return tomllib.loads("\n".join(line.removeprefix("#").strip() for line in lines))

    for world in ("alfworld", "webshop", "search"):
        skills = {"kind": "skills", "folder": world}
        for method in ("sdar", "rlsd", "skill-sd", "opid", "agent-opsd", "opd-hints"):
            found = cell(f"{world}/{method}-seed0")
            assert skills.items() <= found["method"]["judge"].items()
            assert found["examples"] == "none"
            # all of them begin with a model that has read such texts
            assert "start-reads" in found["models"]["student"]
        assert skills.items() <= cell(f"{world}/grpo-reads-seed0")["examples"].items()
        assert cell(f"{world}/sdar-wrong-seed0")["method"]["judge"]["folder"] == f"{world}/swapped.toml"
        for method in ("grpo", "opd"):
            assert "skills" not in repr(cell(f"{world}/{method}-seed0"))
        assert cell(f"{world}/start-reads")["method"]["sft"]["told"] == f"skills:{world}"
