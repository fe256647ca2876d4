"""What `turngym.envs` offers: lazily, lightly, and the same to people and to type checkers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import turngym.envs
import turngym.retrieval

MODULES = [turngym.envs, turngym.retrieval]


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
        assert getattr(module, name) is getattr(importlib.import_module(f".{home}", module.__name__), name)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_other_names_are_attribute_errors(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="TextEnvy"):
        module.TextEnvy  # noqa: B018


@pytest.mark.parametrize("name", ["envs", "retrieval"])
def test_importing_is_light(name: str) -> None:
    """Only what gymnasium loads anyway: processor time, because a busy machine stretches the other kind."""
    code = (
        "import sys, time, gymnasium; began = time.process_time(); import turngym." + name + "; "
        "print(time.process_time() - began); "
        "print([x for x in ('torch', 'transformers', 'faiss', 'pyarrow', 'flask', 'tyro') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert float(seconds) < 0.3
    assert heavy == "[]"
