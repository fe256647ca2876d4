"""What the packages offer by name: the same to people and to type checkers, and without loading what is heavy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import turngym.agents
import turngym.core
import turngym.envs
import turngym.retrieval
import turngym.trainers

MODULES = [turngym.core, turngym.envs, turngym.retrieval, turngym.agents, turngym.trainers]


def stub(module: ModuleType) -> dict[str, str]:
    """Public name -> module that it comes from, as the .pyi file says."""
    tree = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"type checkers take {alias.name} for private"
                found[alias.name] = str(node.module)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_type_checkers_see_the_names_that_can_be_imported(module: ModuleType) -> None:
    homes = stub(module)
    assert sorted(homes) == sorted(module.__all__)
    assert set(homes) <= set(dir(module))
    for name, home in homes.items():
        # a module of the same name, once it is imported, does not take the place of the object
        source = importlib.import_module(f".{home}", module.__name__)
        assert getattr(module, name) is getattr(source, name)
    with pytest.raises(AttributeError, match="TextEnvy"):
        module.TextEnvy  # noqa: B018


LIGHT = """if True:
    import sys, time, gymnasium
    began = time.process_time()
    import turngym.envs, turngym.retrieval
    # what gymnasium loads is there anyway; processor time, because a busy machine stretches the other kind
    assert time.process_time() - began < 0.5
    def loaded(*names):
        return {*names, "torch", "transformers", "faiss", "textworld", "matplotlib", "tyro"} & {*sys.modules}
    assert not loaded("pyarrow", "flask")
    import turngym.agents, turngym.scripts.report, turngym.trainers
    turngym.agents.evaluate, turngym.agents.play_episodes, turngym.agents.ModelAgent, dir(turngym.trainers)
    assert not loaded("httpx", "ray")
"""


def test_importing_is_light() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
