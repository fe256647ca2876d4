"""Where numbers come from: command line, versions, commit, machine; written beside a run's configuration."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from turngym.envs.common.settings import PROVENANCE, to_table, to_toml

FILE = "config.toml"
PACKAGES = ("turngym", "torch", "transformers", "numpy", "gymnasium", "textworld", "sglang", "peft", "ray")
"""Packages whose versions may change numbers; those that are not installed are left out."""


def provenance(command: str | Sequence[str] | None = None, **about: Any) -> dict[str, Any]:
    """What is known about this process: a table for `write_config`. `command` is the command line, in words or as
    it is to be shown; by default argv. `about`: what else is known, such as the seed."""
    commit = git_commit(Path(__file__).resolve().parent)
    versions = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {
        "command": command if isinstance(command, str) else shlex.join(sys.argv if command is None else command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **about,
        **({} if commit is None else {"git_commit": commit}),
        "packages": versions,
    }


def loaded_versions() -> dict[str, str]:
    """Versions of what this process has loaded: Python, turngym, and those of `PACKAGES` that are in use."""
    found = {name: _version(name) for name in PACKAGES if name == "turngym" or name in sys.modules}
    return {"python": platform.python_version(), **{name: known for name, known in found.items() if known is not None}}


def write_config(path: Path, config: Any, command: str | Sequence[str] | None = None, **about: Any) -> None:
    """Write the complete settings `config`, an object or its table, as a TOML file with their provenance.

    `--config` reads it back.
    """
    settings = config if isinstance(config, Mapping) else to_table(config)
    table: Mapping[str, Any] = {**settings, PROVENANCE: provenance(command, **about)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(table), encoding="utf-8")


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with `+changes` if files differ; None outside of one."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
