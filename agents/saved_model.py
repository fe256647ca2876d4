"""Writes the weights of a model to a folder, and reads back that they are there.

Whoever saves goes through `save_model` (an adapter: `write_tensors`), so that nothing goes on with a folder that would
load as another model. What stands beside the weights is copied (`companions`): a tokenizer that transformers writes
anew is one that older releases, and servers with them, do not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.models import lineage, load_model, require_plain
from turngym.agents.rendering.chat_settings import CHAT_FILE, ChatSettings
from turngym.core.errors import ModelError
from turngym.core.files import SUMS_FILE
from turngym.core.model_folder_check import TEMPLATES, model_files
from turngym.core.user_files import json_object, library_path

if TYPE_CHECKING:
    from torch import Tensor

COMPARED = 3
"""Tensors whose numbers are read back: the first, the one in the middle and the last, by name."""
OF_A_FILE = frozenset(("_name_or_path", "architectures", "transformers_version", "dtype", "use_cache"))
"""Settings of a configuration that say where it came from and how it is run, and nothing of what the model computes."""

TOKENIZER = re.compile(
    rf"(?:tokenizer|vocab|merges|added_tokens|special_tokens|chat_template|tekken)[\w.-]*|{TEMPLATES}/[\w.-]+"
    r"|[\w.-]+\.(?:model|tiktoken)"
)
"""Names of the files of a tokenizer and of its chat templates."""
BESIDE = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", CHAT_FILE)
"""Further files that a server reads, or we: what prepares images, and how the model is spoken to."""


def companions(*folders: Path) -> dict[str, bytes]:
    """The files that belong to a model beside its weights, by name, as the `folders` that it is made of have them.

    A later folder counts before an earlier one, as that of an adapter before its base's; a tokenizer comes whole from
    one of them.
    """
    named = "tokenizer_config.json"
    spoken = next((folder for folder in reversed(folders) if (folder / named).is_file()), folders[0])
    found = {}
    for folder in folders:
        for path in model_files(folder):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and (name in BESIDE or (folder == spoken and TOKENIZER.fullmatch(name))):
                found[name] = path.read_bytes()
    return found


def write_companions(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what `companions` found into a model's folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def companion_writer(student: Path, chat: ChatSettings) -> Callable[[Path], None]:
    """A function that writes into a model's folder what stands beside the weights of `student`, as it is now, and how
    the model is spoken to."""
    files = companions(*lineage(student))

    def write(folder: Path) -> None:
        write_companions(files, folder)
        chat.save(folder)

    return write


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that was made here, under the names that transformers 4 and servers with it know as well."""
    tokenizer.save_pretrained(str(library_path(folder)))
    file = folder / "tokenizer_config.json"
    settings = json_object(file, ModelError)
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [])
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save_model(model: Any, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write `config.json` and the weights of `model` to folder `path`, and read them back.

    Raises ModelError where the folder does not hold the model.

    Args:
        path: the folder; a model that is there is replaced.
        weights: a state dict that is written instead of the model's own.
    """
    folder = Path(path)
    require_plain(model, "the model")
    # those of an older model would not fit; servers load what an index names alone
    for name in (SUMS_FILE, "model.safetensors.index.json"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.state_dict() if weights is None else weights)
    # a copy, of which transformers takes out what it does not write
    model.save_pretrained(str(library_path(folder)), state_dict=dict(weights))
    _as_readable(folder, "config.json")
    _check_config(model.config, folder)
    _add_older_names(library_path(folder) / "config.json")
    _check_weights(model, weights, folder)


def write_tensors(tensors: Mapping[str, Tensor], file: Path, like: str) -> None:
    """Write one safetensors file, and read it back; it may be read by whoever may read the file `like` beside it.

    Raises ModelError where the file does not hold them.
    """
    from safetensors.torch import save_file

    save_file(dict(tensors), library_path(file.parent) / file.name)
    _as_readable(file.parent, like)
    _compare(tensors, _Stored(file.parent, [file]), file.parent)


def _as_readable(folder: Path, like: str) -> None:
    """safetensors writes files that their owner alone can read; Python's own obey the umask."""
    mode = (library_path(folder) / like).stat().st_mode
    for file in library_path(folder).glob("*.safetensors"):
        file.chmod(mode)


class _Stored:
    """The tensors in safetensors files: names and shapes from their headers, numbers when they are asked for."""

    def __init__(self, folder: Path, files: list[Path] | None = None) -> None:
        from safetensors import safe_open

        files = sorted(library_path(folder).glob("*.safetensors")) if files is None else files
        self.opened = [safe_open(library_path(file.parent) / file.name, "pt") for file in files]
        self.place = {name: one for one in self.opened for name in one.keys()}  # noqa: SIM118

    def shape(self, name: str) -> list[int]:
        found: list[int] = self.place[name].get_slice(name).get_shape()
        return found

    def tensor(self, name: str) -> Any:
        return self.place[name].get_tensor(name)


def _check_config(config: Any, folder: Path) -> None:
    read = type(config).from_pretrained(str(library_path(folder)))
    if getattr(read, "quantization_config", None) is not None:
        raise ModelError(f"{folder} was saved with a quantization_config, and its weights are not quantized")
    own, found = (_settings(one.to_dict()) for one in (config, read))
    if other := sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name)):
        name = other[0]
        said = f"{name} is {found.get(name)!r} in the file, {own.get(name)!r} in the model"
        raise ModelError(f"{folder}: config.json does not say what the model is: {said}")


def _add_older_names(file: Path) -> None:
    """Write rotary positions and precision of a configuration under their names of transformers 4, too.

    A server with it reads the new names as none, and rotates by the defaults of the family without a word.
    """
    config = json_object(file, ModelError)
    for part in (config, config.get("text_config") or {}):
        rope = dict(part.get("rope_parameters") or {})
        # those of several kinds of layers had names of their families' own
        if "rope_theta" in rope:
            plain = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            part |= {**plain, "rope_scaling": None if rope == {"rope_type": "default"} else rope}
        if "dtype" in part:
            part["torch_dtype"] = part["dtype"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _settings(found: Any) -> Any:
    """A configuration without `OF_A_FILE`, at any depth; numbers of layers are texts, as in JSON."""
    if isinstance(found, Mapping):
        return {str(name): _settings(value) for name, value in found.items() if name not in OF_A_FILE}
    return [_settings(value) for value in found] if isinstance(found, (list, tuple)) else found


def _check_weights(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    stored = _Stored(folder)
    if stored.place.keys() <= weights.keys():
        missing = weights.keys() - stored.place.keys() - _written_elsewhere(model, stored.place.keys())
        if missing:
            raise ModelError(f"{folder} was saved without the weight {min(missing)}")
        _compare({name: weights[name] for name in stored.place}, stored, folder)
        return
    # transformers writes some families under other names than it computes with (experts one by one): loading tells
    read = load_model(folder, dtype=str(next(model.parameters()).dtype).removeprefix("torch."))
    _compare(weights, read.state_dict(), folder)


def _written_elsewhere(model: Any, stored: Any) -> set[str]:
    """Names that need not be in a file: of a weight that is there under another name, and what the model leaves out."""
    shared: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), set()).add(name)
    found = {name for names in shared.values() if names & stored for name in names}
    return found | set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _compare(expected: Mapping[str, Tensor], found: Any, folder: Path) -> None:
    """Raises ModelError where the tensors `found`, stored or a state dict, are not those that are `expected`."""
    import torch

    stored = isinstance(found, _Stored)
    names = sorted(expected)
    have = found.place.keys() if stored else found.keys()
    if other := sorted(have ^ expected.keys()):
        where = "the file" if other[0] in have else "the model"
        raise ModelError(f"{folder} was saved with other weights: {other[0]} is in {where} alone")
    for name in names:
        shape = found.shape(name) if stored else list(found[name].shape)
        if shape != list(expected[name].shape):
            raise ModelError(f"{folder}: {name} was saved as {shape}, the model has {list(expected[name].shape)}")
    for name in dict.fromkeys(names[int(part * (len(names) - 1) / (COMPARED - 1))] for part in range(COMPARED)):
        own, read = expected[name].detach().cpu(), found.tensor(name) if stored else found[name]
        if own.dtype != read.dtype or not torch.equal(own.nan_to_num(), read.nan_to_num()):
            raise ModelError(
                f"{folder}: {name} was saved with other numbers ({read.dtype}) than the model's ({own.dtype})"
            )
