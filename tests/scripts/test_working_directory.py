"""What somebody keeps in the working directory is found by `package:NAME`, as what is installed is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from turngym.core.errors import TurngymError
from turngym.core.named_module import import_named
from turngym.core.plugins import PluginError, find
from turngym.envs.panels import PanelError, load_panel, panel_of_env, write_panel
from turngym.envs.registration import require_env
from turngym.retrieval.encoders import find_encoder

LAMPS = Path(__file__).resolve().parents[1] / "support" / "lamps_env.py"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the package `own_lamps` that is on nobody's path."""
    package = tmp_path / "own_lamps"
    package.mkdir()
    (package / "__init__.py").write_text(LAMPS.read_text().replace('"tests/', '"own/'))
    (package / "more.py").write_text("def made(*anything):\n    return 7.0\n\n\nmade.name = 'made'\n")
    (tmp_path / "own_broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and Path(path) != tmp_path])
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, without the working directory on the path (-P), as it is where it is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, "-P", "-m", "turngym", *words]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_command_plays_what_lies_beside_it_in_workers_too(here: Path) -> None:
    words = ("rollout", "--env", "own_lamps:own/Lamps-v0", "--agent", "expert", "--tasks", "4")
    for more in ((), ("--workers", "2")):
        played = run(here, *words, *more)
        assert played.returncode == 0, played.stderr
        assert "4 episodes" in played.stdout
    gone = run(here.parent, *words)
    assert gone.returncode != 0
    assert f"it is not installed, and {here.parent} has neither a folder own_lamps nor own_lamps.py" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_every_kind_of_name_is_looked_up_in_one_way(here: Path) -> None:
    before = sys.path[:]
    assert require_env("own_lamps:own/Lamps-v0") == "own_lamps:own/Lamps-v0"
    try:
        assert sys.path == [*before, str(here)]  # last, and once
        panel = panel_of_env("lamps", "own_lamps:own/Lamps-v0", make_kwargs={"max_turns": 9}, task_ids=["kitchen/red"])
        write_panel(panel, here / "own_lamps" / "panel_data")
    finally:
        gym.registry.pop("own/Lamps-v0", None)
    assert find("turngym.rewards", "own_lamps.more:made", {})() == 7.0
    assert find_encoder("own_lamps.more:made")("cpu") == 7.0
    assert load_panel("own_lamps:lamps") == panel
    assert sys.path == [*before, str(here)]
    with pytest.raises(TurngymError, match="own_lamps was imported"):
        require_env("own_lamps:own/Lampz-v0")


def test_each_kind_by_itself(here: Path) -> None:
    """A panel's package is not imported, and an encoder is asked for before any environment."""
    (here / "own_lamps" / "panel_data").mkdir()
    with pytest.raises(PanelError, match="there is no panel 'lamps'; panels are: none"):
        load_panel("own_lamps:lamps")
    assert find_encoder("own_lamps.more:made")("cpu") == 7.0
    assert import_named("own_lamps.more").made() == 7.0


def test_what_is_not_there_is_said_with_where_was_looked(here: Path) -> None:
    for name in ("own_nothing:make", "own_nothing.part:make"):
        with pytest.raises(PluginError, match=f"{here} has neither a folder own_nothing"):
            find("turngym.rewards", name, {})
    # what lies there and needs something else is another matter
    with pytest.raises(PluginError, match=r"'own_broken' \(No module named 'nothing_of_that_name'\)"):
        find("turngym.rewards", "own_broken:make", {})
    with pytest.raises(PluginError, match=r"cannot import 'own_lamps\.absent'"):
        find("turngym.rewards", "own_lamps.absent:make", {})
    with pytest.raises(PanelError, match="there is no package 'own_nothing'"):
        load_panel("own_nothing:panel")


def test_nothing_that_is_installed_is_hidden(here: Path) -> None:
    (here / "numpy").mkdir()
    (here / "numpy" / "__init__.py").write_text("raise SystemExit\n")
    assert import_named("numpy").__name__ == "numpy"
    assert str(here) not in sys.path
