"""The package list is complete, and an installed wheel holds everything that a checkout holds."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from import_graph import ROOMS
from wheels import build_wheel, clean_venv, turngym_wheel

import turngym

ROOT = Path(__file__).resolve().parents[2]
ROOT_PACKAGE = ROOT / "scripts" / "turngym"
"""`turngym` itself: the version and `python -m turngym`."""
MODELS = ROOT / "agents" / "worlds" / "checkpoints"
HUB = ROOT / "agents" / "adapters" / "hub"
"""Packages beside `turngym`: verifiers finds environments by the names of top-level modules."""


def installed(path: Path) -> str:
    """Where a file of the checkout lies in a wheel."""
    if path.is_relative_to(ROOT_PACKAGE):
        return f"turngym/{path.relative_to(ROOT_PACKAGE).as_posix()}"
    if path.is_relative_to(HUB):
        return path.relative_to(HUB).as_posix()
    return f"turngym/{path.relative_to(ROOT).as_posix()}"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def in_rooms(pattern: str) -> list[Path]:
    """Files of the rooms with such a name, without those of projects with a `pyproject.toml` of their own."""
    found = (path for room in ROOMS for path in (ROOT / room).rglob(pattern))
    apart = [path.parent for room in ROOMS for path in (ROOT / room).rglob("pyproject.toml")]
    return [path for path in found if not any(path.is_relative_to(folder) for folder in apart)]


def package_folders() -> dict[str, Path]:
    """`turngym` and `turngym.<room>...` -> folder, for every folder with `__init__.py`."""
    found = {init.parent for init in in_rooms("__init__.py")} - {ROOT_PACKAGE}
    beside = {folder.name: folder for folder in sorted(found) if folder.parent == HUB}
    inside = sorted(found - set(beside.values()))
    named = {"turngym." + ".".join(folder.relative_to(ROOT).parts): folder for folder in inside}
    return {"turngym": ROOT_PACKAGE, **named, **beside}


def test_the_list_equals_the_folders() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(package_folders())


@pytest.mark.parametrize("folder", ["tools", "bench", "gpu"])
def test_programs_that_no_test_imports_import_what_there_is(folder: str) -> None:
    wanted = [
        (path.name, node.module, name.name)
        for path in sorted((ROOT / "tests" / folder).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turngym")
        for name in node.names
    ]
    assert wanted
    assert not [one for one in wanted if not there_is(str(one[1]), one[2])]


def there_is(module: str, name: str) -> bool:
    """Whether `from module import name` finds something: a name in it, or a module below it."""
    found = importlib.import_module(module)
    below = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    return below or hasattr(found, name)


def test_no_module_lives_outside_a_package() -> None:
    stray = [str(path.relative_to(ROOT)) for path in in_rooms("*.py") if not (path.parent / "__init__.py").exists()]
    assert not stray, f"folders without __init__.py are not installed: {stray}"


def test_nothing_puts_bare_names_on_the_path() -> None:
    for wrong in ("turngym", "conftest.py", "__init__.py", "tests/__init__.py", "setup.py"):
        assert not (ROOT / wrong).exists(), f"{wrong} would break the namespace mapping"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a clean copy of the checkout."""
    return turngym_wheel(tmp_path_factory.mktemp("build"))


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = project()["tool"]["setuptools"]["package-data"]
    for package, folder in package_folders().items():
        for pattern in ("*.py", *listed.get(package, ())):
            for path in folder.glob(pattern):
                assert installed(path) in names, f"{path} is missing from the wheel"
    data = [
        path
        for path in in_rooms("*")
        if path.suffix in (".json", ".npy", ".html", ".pddl") and not path.is_relative_to(MODELS)
    ]
    assert wheel.stat().st_size < 10e6  # models of other worlds than the quickstart's are a wheel of their own
    assert all(installed(path) in names for path in data), "a data file is not packaged"
    assert not [
        name for name in names if re.match(r"(core|envs|agents|trainers|scripts|tests|turngym/scripts/turngym)", name)
    ]


IMPORT_ALL = """
import importlib.util, pathlib, pkgutil, sys
import turngym

here = str(pathlib.Path(sys.prefix).resolve())
assert turngym.__version__[0].isdigit(), turngym.__version__
assert [str(pathlib.Path(path).resolve()).startswith(here) for path in turngym.__path__] == [True], turngym.__path__
for name in ("core", "envs", "agents", "trainers", "retrieval", "scripts", "turngym.tests"):
    assert importlib.util.find_spec(name) is None, name + " is importable under its bare name"
for module in pkgutil.walk_packages(turngym.__path__, "turngym."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
        print("imported", module.name)
    except ModuleNotFoundError as error:
        print("lacks", error.name, module.name)
import gymnasium
assert "turngym/ALFWorld-v0" in gymnasium.registry
"""
EXTRAS = {"torch", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib", "textworld", "pyarrow"}
EXTRAS |= {"anyio", "httpx", "inspect_ai", "verifiers"}


@pytest.mark.long
def test_a_wheel_in_a_clean_venv_imports_everything(wheel: Path, tmp_path: Path) -> None:
    python = clean_venv(tmp_path / "venv", wheel)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", IMPORT_ALL], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    lacking = [row for row in rows if row[0] == "lacks" and row[1].partition(".")[0] not in EXTRAS]
    assert not lacking, f"modules need something that is no extra: {lacking}"
    wanted = {
        f"{package}.{path.stem}" if path.stem != "__init__" else package
        for package, folder in package_folders().items()
        for path in folder.glob("*.py")
        if path.stem != "__main__"
    }
    # walk_packages does not name what is inside a package that could not be imported
    assert {"turngym", *(row[-1] for row in rows)} >= {
        name for name in wanted if not any(row[0] == "lacks" for row in rows)
    }
    for command in (["-m", "turngym.scripts", "panel", "list"], ["-m", "turngym", "--version"]):
        assert subprocess.run([python, *command], cwd=tmp_path, capture_output=True, env=env).returncode == 0


def test_every_file_names_the_version() -> None:
    models = tomllib.loads((MODELS / "pyproject.toml").read_text(encoding="utf-8"))
    assert models["project"]["version"] == turngym.__version__
    assert project()["project"]["optional-dependencies"]["worlds"] == [f"turngym-worlds=={turngym.__version__}"]
    assert f"version: {turngym.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()


@pytest.mark.long
def test_models_of_other_worlds_are_a_wheel_of_their_own(wheel: Path, tmp_path: Path) -> None:
    shipped = {path.relative_to(MODELS).as_posix() for path in MODELS.glob("*/*/*")}
    models = build_wheel(MODELS, tmp_path)
    packed = {name.removeprefix("turngym_worlds/") for name in zipfile.ZipFile(models).namelist()}
    assert {name for name in packed if "dist-info" not in name} == {
        name for name in shipped if not name.startswith("alfworld/")
    }
    code = "import turngym; print(turngym.load_world('search').checkpoint('teacher').parent.parent.name)"
    for wheels, said in (((wheel,), "turngym[worlds]"), ((wheel, models), "turngym_worlds")):
        python = clean_venv(tmp_path / f"venv{len(wheels)}", *wheels)
        done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert said in done.stdout + done.stderr
