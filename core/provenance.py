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
from turngym.core.nested import differing
from turngym.core.redaction import redacted
from turngym.core.resolve import ASKED, FOUND, PROVENANCE, Resolved
from turngym.core.settings import NOT_READ, to_toml, toml_table, write_toml_text
from turngym.core.spec import to_table

CONFIG_FILE = "config.toml"
PACKAGES = ("turngym", "torch", "transformers", "numpy", "gymnasium", "textworld", "sglang", "peft", "ray")
"""Packages whose versions may change numbers; those that are not installed are left out."""


def provenance(command: str | Sequence[str] | None = None, **about: Any) -> dict[str, Any]:
    """Where the numbers of this process come from, as a table for `write_config`.

    `command` is the command line as argv or as one string, by default that of this process. `about` has further facts,
    such as the seed.
    """
    commit = git_commit(Path(__file__).resolve().parent)
    releases = {name: release for name in PACKAGES if (release := _version(name)) is not None}
    return {
        "command": recorded_command(sys.argv if command is None else command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **about,
        **({} if commit is None else {"git_commit": commit}),
        "packages": releases,
    }


def loaded_versions() -> dict[str, str]:
    """Versions of Python, turngym, and those of `PACKAGES` that this process has imported."""
    loaded = {name: _version(name) for name in PACKAGES if name == "turngym" or name in sys.modules}
    return {"python": platform.python_version(), **{name: release for name, release in loaded.items() if release}}


def write_config(
    path: Path,
    spec: Any,
    command: str | Sequence[str] | None = None,
    resolved: Resolved[Any] | None = None,
    **about: Any,
) -> None:
    """Writes settings and their provenance as TOML, for `--config` to read. What may be a key is written as ***.

    Args:
        spec: the settings that were opened, an object or its table.
        command: as for `provenance`.
        resolved: what people asked for, and who gave each value, so far as that is known; what opening has changed of
            it is listed (`FOUND`).
        about: further facts.
    """
    table, origins = spec if isinstance(spec, Mapping) else toml_table(to_table(spec), type(spec)), dict[str, str]()
    if resolved is not None:
        opened = [*differing(to_table(spec), to_table(resolved.spec))]
        origins = {**resolved.origins, **dict.fromkeys(opened, FOUND)}
        if resolved.asked is not None:
            about |= {ASKED: toml_table(resolved.asked, type(resolved.spec)), FOUND: opened}
    settings, record = redacted(table), redacted({PROVENANCE: provenance(command, **about)})
    write_toml_text(path, to_toml(settings, origins) + f"\n{NOT_READ}" + to_toml(record))


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
