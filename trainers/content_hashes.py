"""What is in the files, the models and the code of one's own that the settings of a run name.

A file keeps its name while somebody edits it, and folders move while files stay as they are. So runs are compared by
content: a run with the one that it goes on with (`RunFolder`), the cells of a study with each other
(`study/records.py`). A run's config.toml keeps what was in its files and its code when it began.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from turngym.agents.playing.env_maker import env_class
from turngym.agents.presets import Preset
from turngym.agents.rendering.skills import SKILLS_PREFIX, read_skills
from turngym.core.files import holds_weights, weights_hash
from turngym.core.nested import at, flat
from turngym.core.protocols import Scorer
from turngym.core.provenance import CONFIG_FILE
from turngym.core.resolve import PROVENANCE
from turngym.core.settings import read_toml
from turngym.core.task import content_hash
from turngym.core.user_files import user_path

CONTENTS = "contents"
"""The name of its table among what config.toml says of a run."""
CODE = ("algorithm", "play.env.id")
"""Settings that name code, of training runs and of evaluations."""
MODELS = ("student", "teacher", "folder")
"""The last parts of paths of settings that name the folder of a model."""


def of_all(settings: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> 16 hex digits of what is now in the files and the code that it names."""
    return of_files(settings) | of_code(settings)


def of_run(spec: Mapping[str, Any], teacher: Scorer | None = None, preset: Preset | None = None) -> dict[str, str]:
    """Setting -> hash of what it names, models and the preset included, for a training run with the settings `spec`.

    A `teacher` on servers that has no folder is known by the name that they give it.
    """
    hashes = of_all(spec) | of_models(spec)
    if preset is not None:
        hashes["play.preset"] = preset.sha256
    if teacher is not None and at(spec, "method.teacher.teacher") is None:
        hashes["method.teacher.teacher"] = teacher.fleet.servers[0].model  # type: ignore[attr-defined]
    return hashes


def kept(folder: Path) -> dict[str, str]:
    """The result of `of_all` when the training run in `folder` began. Raises SettingsError without a config.toml."""
    about = read_toml(folder / CONFIG_FILE, provenance=True).get(PROVENANCE, {})
    return dict(about.get(CONTENTS, {}))


def of_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> 16 hex digits of what is in the files that it names: panels, skills, texts, traces, presets.

    Settings that name no file of one's own are not in it.
    """
    hashes, values = {}, flat(settings)
    for path, value in values.items():
        table, _, last = path.rpartition(".")
        if last == "folder" and values.get(f"{table}.kind") == "skills":
            value = f"{SKILLS_PREFIX}{value}"
        texts = [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]
        if contents := [content for content in map(_of_file, texts) if content is not None]:
            hashes[path] = content_hash({"contents": contents})[:16]
    return hashes


def of_models(settings: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> hash of the weights in the folder that it names. It reads all of them."""
    folders = {
        path: user_path(value)
        for path, value in flat(settings).items()
        if path.rpartition(".")[2] in MODELS and isinstance(value, str) and value
    }
    return {path: weights_hash(folder) for path, folder in folders.items() if holds_weights(folder)}


def of_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> 16 hex digits of the module that it names, where that is one's own. Lines of comments do not count.

    What that module imports is not looked at, and one without a source has none.
    """
    hashes = {}
    for path in CODE:
        named = at(settings, path)
        if not isinstance(named, str):
            continue
        module = _module_of_algorithm(named) if path == "algorithm" else inspect.getmodule(env_class(named))
        if module is None or module.__name__.partition(".")[0] == "turngym":
            continue
        with contextlib.suppress(OSError):
            lines = inspect.getsource(module).splitlines()
            code = [line for line in lines if line.partition("#")[0].strip()]
            hashes[path] = content_hash({"code": code})[:16]
    return hashes


def _module_of_algorithm(name: str) -> ModuleType | None:
    # whoever reads records alone needs no torch
    from turngym.trainers.algorithm_spec import find_algorithm

    spec = find_algorithm(name)
    # what is in the module may have been put together of parts of others
    return sys.modules[name.partition(":")[0]] if ":" in name else inspect.getmodule(spec.build)


def _of_file(text: str) -> str | None:
    """The content of the file, or folder of skills, that `text` names; None for other texts and for files of this
    package."""
    named = text.removeprefix(SKILLS_PREFIX)
    # an empty text names nothing
    if "\0" in text or not named:
        return None
    path = user_path(named)
    if text.startswith(SKILLS_PREFIX):
        return read_skills(str(path)).identity if path.exists() else None
    # the name of a method or a split may be a file's in somebody's folder; `Path.is_file` raises for texts too long
    if not ("/" in text or path.suffix) or not os.path.isfile(path):
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
