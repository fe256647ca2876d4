"""Wheels built without network, and throw-away environments to install them into."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path, work: Path, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """A wheel of a clean copy of `folder` (its tracked and not ignored files), built by the installed setuptools."""
    source, out = work / "source", work / "wheel"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, files):
        if (folder / name).is_file() and keep(name):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((folder / name).read_bytes())
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
