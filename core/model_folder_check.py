"""Is a folder that somebody sent a model's, before any library opens a file of it?

A pipe would be waited for without an end, a device has none, an index of shards may name the weights of another folder,
of which no fingerprint says anything, and a few kilobytes of JSON can take gigabytes.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec

from turngym.core.errors import ModelError
from turngym.core.redaction import brief
from turngym.core.user_files import json_file

TEMPLATES = "additional_chat_templates"
"""The folder in a model's folder from which transformers reads further chat templates, such as the one for tools."""
SMALL_JSON = 1 << 24
"""Bytes of JSON that no reader needs to fear, whatever they hold."""
INDEX = "*.index.json"
GENERATION = "generation_config.json"
"""Names further ids that end an answer; transformers goes on without one that cannot be read."""


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that may be read, in a fixed order."""
    return [*sorted(folder.iterdir()), *sorted((folder / TEMPLATES).glob("*"))]


def check_model_files(folder: Path) -> None:
    """Raises ModelError for a folder that holds pipes or devices, or JSON that no model's file can be."""
    for path in model_files(folder):
        try:
            mode = path.stat().st_mode
        except OSError:
            # a link to nothing; who needs the file says that it is not there
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelError(f"{folder} holds {path.name}, which is no file (a pipe, or a device): it is no model")
        if path.suffix == ".json" and stat.S_ISREG(mode):
            _check_json(folder, path)


class _Index(msgspec.Struct):
    """What transformers needs in an index of shards; `metadata` may be empty."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]


def _check_json(folder: Path, path: Path) -> None:
    small = path.stat().st_size <= SMALL_JSON
    if small and path.name != GENERATION and not path.match(INDEX):
        return
    content = json_file(path, ModelError)
    if path.match(INDEX):
        try:
            shards = msgspec.convert(content, _Index).weight_map
        except msgspec.ValidationError as error:
            raise ModelError(f"cannot load the model in {folder}: {path.name}: {error}") from error
        for name in shards.values():
            if Path(name).name != name or name in ("", ".", ".."):
                raise ModelError(
                    f"cannot load the model in {folder}: {path.name} names {brief(name, 80)} as a file of weights; "
                    "valid: the name of a file in this folder"
                )
    if path.name == GENERATION and not isinstance(content, dict):
        raise ModelError(f"cannot load the model in {folder}: {path.name} is {brief(content, 80)}; valid: a table")
