"""Where the numbers of a run come from: its settings, command line, versions, commit and machine, in a TOML file."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from turngym.core.clean_keys import recorded_command
from turngym.core.redaction import redacted
from turngym.core.settings import PROVENANCE, toml_table, write_toml

CONFIG_FILE = "config.toml"
PACKAGES = ("turngym", "torch", "transformers", "numpy", "gymnasium", "textworld", "sglang", "peft", "ray")
"""Packages whose versions may change numbers; those that are not installed are left out."""


def provenance(command: str | Sequence[str] | None = None, **about: Any) -> dict[str, Any]:
    """Where the numbers of this process come from, as a table for `write_config`.

    `command` is the command line as argv or as one string, by default that of this process. `about` has further facts,
    such as the seed.
    """
    commit = git_commit(Path(__file__).resolve().parent)
    versions = {name: known for name in PACKAGES if (known := _version(name)) is not None}
    return {
        "command": recorded_command(sys.argv if command is None else command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **about,
        **({} if commit is None else {"git_commit": commit}),
        "packages": versions,
    }


def loaded_versions() -> dict[str, str]:
    """Versions of Python, turngym, and those of `PACKAGES` that this process has imported."""
    versions = {name: _version(name) for name in PACKAGES if name == "turngym" or name in sys.modules}
    return {"python": platform.python_version(), **{name: known for name, known in versions.items() if known}}


def write_config(path: Path, config: Any, command: str | Sequence[str] | None = None, **about: Any) -> None:
    """Writes all settings of `config`, an object or its table, and their provenance as TOML, for `--config` to read.

    What may be a key is written as ***.
    """
    settings = redacted(config if isinstance(config, Mapping) else toml_table(config))
    table: Mapping[str, Any] = {**settings, PROVENANCE: provenance(command, **about)}
    write_toml(path, table)


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with `+changes` if files differ; None outside a checkout."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *argv], capture_output=True, text=True, timeout=10, check=True)
            for argv in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
