"""Is a folder that somebody sent a model's, before any library opens a file of it?

A pipe would be waited for without an end, a device has none, an index of shards may name the weights of another folder,
of which no fingerprint says anything, and a few kilobytes of JSON can take gigabytes.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from turngym.core.errors import ModelError
from turngym.core.redaction import brief
from turngym.core.user_files import json_file, read_text

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
        elif path.suffix == ".jinja" and stat.S_ISREG(mode):
            read_text(path, ModelError)


class _Added(msgspec.Struct):
    content: str


Token = str | _Added | None
Place = Annotated[str, Meta(max_length=4096, pattern=r"^[^\0]*$")]
"""A path or a name on the hub."""


class _Index(msgspec.Struct):
    """What transformers needs in an index of shards; `metadata` may be empty."""

    metadata: dict[str, Any]
    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


class _Generation(msgspec.Struct):
    """Ids beside those that end an answer, which `end_ids` checks: it knows the model."""

    bos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class _Tokenizer(msgspec.Struct):
    """The settings of a tokenizer that transformers takes as they are."""

    tokenizer_class: str | None = None
    model_max_length: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)] | None = None
    extra_special_tokens: list[str | _Added] | dict[str, Token] | None = None
    additional_special_tokens: list[str | _Added] | None = None
    bos_token: Token = None
    eos_token: Token = None
    pad_token: Token = None
    unk_token: Token = None
    sep_token: Token = None
    cls_token: Token = None
    mask_token: Token = None


class _Processor(msgspec.Struct):
    chat_template: Any


class _Adapter(msgspec.Struct):
    """Who merges an adapter says which of these LoRA needs."""

    base_model_name_or_path: Place | None = None
    revision: Place | None = None
    r: int | None = None
    lora_alpha: float | None = None
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, int] | None = None
    use_rslora: bool | None = None


KINDS: dict[str, Any] = {
    "chat_template.json": _Processor,
    "config.json": dict[str, Any],
    GENERATION: _Generation,
    "tokenizer_config.json": _Tokenizer,
    "special_tokens_map.json": dict[str, Token | list[Token]],
    "adapter_config.json": _Adapter,
    INDEX: _Index,
}
"""What the small files of a model hold, by name."""


def _check_json(folder: Path, path: Path) -> None:
    kind = next((kind for name, kind in KINDS.items() if path.match(name)), None)
    if kind is None and path.stat().st_size <= SMALL_JSON:
        return
    content = json_file(path, ModelError)
    try:
        holds = msgspec.convert(content, Any if kind is None else kind)
    # half a surrogate pair, in which msgspec could look for no number, is a ValueError, too
    except ValueError as error:
        raise ModelError(f"cannot load the model in {folder}: {path.name}: {error}") from error
    for name in holds.weight_map.values() if isinstance(holds, _Index) else ():
        if Path(name).name != name or name in ("", ".", ".."):
            raise ModelError(
                f"cannot load the model in {folder}: {path.name} names {brief(name, 80)} as a file of weights; "
                "valid: the name of a file in this folder"
            )
