"""Makes the folder of wheels that a machine with torch and transformers, and without a network, lacks for turngym.

python tests/gpu/wheels.py wheels --python 3.12
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
MOST = 60e6
"""Bytes that such a folder may have: what travels to a lent machine."""


def commands(folder: Path, python: str) -> list[list[str]]:
    """pip's: turngym's own wheel, and what its base install needs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    pip = [sys.executable, "-m", "pip"]
    places = [word for name in PLATFORMS for word in ("--platform", name)]
    return [
        [*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        [
            *pip,
            "download",
            "-q",
            "-d",
            str(folder),
            "--only-binary=:all:",
            "--python-version",
            python,
            *places,
            *needed,
        ],
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the Python there")
    options = parser.parse_args(argv)
    for command in commands(options.folder, options.python):
        if status := subprocess.run(command, check=False).returncode:
            return status
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(f"{len(list(options.folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB")
    return 0 if size <= MOST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
