"""Wheels built without network, and throw-away environments to install them into."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(folder: Path) -> list[str]:
    """Names of the files of a checkout, tracked and not ignored; of an unpacked source distribution all but caches."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (folder / ".git").exists():
        done = subprocess.run(listing, cwd=folder, capture_output=True, text=True, check=True)
        return [name for name in done.stdout.split("\0") if name]
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not re.search(r"(^|/)(\.\w+_cache|__pycache__|[^/]+\.egg-info)/", name)]


def clean_copy(folder: Path, work: Path, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """A copy of the tracked and not ignored files of `folder`, in `work`."""
    source = work / "source"
    for name in tracked(folder):
        if (folder / name).is_file() and keep(name):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((folder / name).read_bytes())
    return source


def build_wheel(folder: Path, work: Path, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """A wheel of a clean copy of `folder` (its tracked and not ignored files), built by the installed setuptools."""
    source, out = clean_copy(folder, work, keep), work / "wheel"
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def turngym_wheel(work: Path) -> Path:
    """The wheel of this checkout."""
    return build_wheel(ROOT, work, lambda name: not name.startswith("tests/"))


def clean_venv(folder: Path, *wheels: Path) -> Path:
    """The Python of a new environment with the wheels and, through a .pth file, the dependencies installed here.

    A .pth file adds a folder without running the .pth files in it, so an editable install here stays invisible there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    scheme = "nt" if os.name == "nt" else "venv"
    site = Path(sysconfig.get_path("purelib", scheme, vars={"base": str(folder), "platbase": str(folder)}))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    folders = {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n", encoding="utf-8")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


COMMANDS = """
import contextlib, io, json, os, sys
from importlib.metadata import entry_points
(point,) = {point.value: point for point in entry_points(group="console_scripts", name="turngym")}.values()
for line in sys.stdin:
    folder, *words = json.loads(line)
    os.chdir(folder)
    sys.argv[:] = ["turngym", *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            point.load()()
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, said.getvalue()]), flush=True)
"""
"""The installed command, again and again in one process: to import torch takes longer than most commands."""

Turngym = Callable[..., str]


@contextmanager
def installed_with(project: Path, work: Path) -> Iterator[Turngym]:
    """The command of an environment into which this checkout and another `project` are installed.

    It runs in `folder`, by default `work`, must end with `status`, and returns what was printed.
    """
    for name in ("turngym", "project"):
        (work / name).mkdir()
    python = clean_venv(work / "venv", turngym_wheel(work / "turngym"), build_wheel(project, work / "project"))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    line = [str(python), "-c", COMMANDS]
    with subprocess.Popen(line, cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*words: str | Path, status: int = 0, folder: Path = work) -> str:
            print(json.dumps([str(folder), *map(str, words)]), file=process.stdin, flush=True)
            ended, printed = json.loads(process.stdout.readline())
            assert ended == status, f"{' '.join(map(str, words))}\n{printed}"
            return str(printed)

        yield run
