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
    """Reads the files that belong to a model beside its weights, by name, from the `folders` that it is made of.

    A file of a later folder (an adapter) replaces that of an earlier one (its base). All files of the tokenizer come
    from the same folder.
    """
    named = "tokenizer_config.json"
    spoken = next((folder for folder in reversed(folders) if (folder / named).is_file()), folders[0])
    files = {}
    for folder in folders:
        for path in model_files(folder):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and (name in BESIDE or (folder == spoken and TOKENIZER.fullmatch(name))):
                files[name] = path.read_bytes()
    return files


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
    # files of an older model would not fit, and servers load only the files that an index names
    for name in (SUMS_FILE, "model.safetensors.index.json"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.state_dict() if weights is None else weights)
    # a copy: transformers removes the entries that it does not write
    model.save_pretrained(str(library_path(folder)), state_dict=dict(weights))
    _as_readable(folder, "config.json")
    _check_config(model.config, folder)
    _add_older_names(library_path(folder) / "config.json")
    _check_weights(model, weights, folder)


def write_tensors(tensors: Mapping[str, Tensor], file: Path, like: str) -> None:
    """Write one safetensors file with the permissions of the file `like` beside it, and read it back.

    Raises ModelError if the file does not hold the tensors.
    """
    from safetensors.torch import save_file

    save_file(dict(tensors), library_path(file.parent) / file.name)
    _as_readable(file.parent, like)
    _compare(tensors, _Stored(file.parent, [file]), file.parent)


def _as_readable(folder: Path, like: str) -> None:
    """Give safetensors files, which their owner alone can read, the permissions of `like`, which obey the umask."""
    mode = (library_path(folder) / like).stat().st_mode
    for file in library_path(folder).glob("*.safetensors"):
        file.chmod(mode)


class _Stored:
    """The tensors in safetensors files: names and shapes from their headers, numbers when they are asked for."""

    def __init__(self, folder: Path, files: list[Path] | None = None) -> None:
        from safetensors import safe_open

        files = sorted(library_path(folder).glob("*.safetensors")) if files is None else files
        self.opened = [safe_open(library_path(file.parent) / file.name, "pt") for file in files]
        self.place = {name: weights for weights in self.opened for name in weights.keys()}  # noqa: SIM118

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self.place[name].get_slice(name).get_shape()
        return shape

    def tensor(self, name: str) -> Any:
        return self.place[name].get_tensor(name)


def _check_config(config: Any, folder: Path) -> None:
    read = type(config).from_pretrained(str(library_path(folder)))
    if getattr(read, "quantization_config", None) is not None:
        raise ModelError(f"{folder} was saved with a quantization_config, and its weights are not quantized")
    ours, stored = (_settings(part.to_dict()) for part in (config, read))
    if differing := sorted(name for name in ours.keys() | stored.keys() if ours.get(name) != stored.get(name)):
        name = differing[0]
        difference = f"{name} is {stored.get(name)!r} in the file, {ours.get(name)!r} in the model"
        raise ModelError(f"{folder}: config.json does not say what the model is: {difference}")


def _add_older_names(file: Path) -> None:
    """Write rotary positions and precision of a configuration under their names of transformers 4, too.

    A server with that version ignores the new names, and silently rotates by the defaults of the family.
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


def _settings(config: Any) -> Any:
    """A configuration without `OF_A_FILE`, at any depth; numbers of layers are texts, as in JSON."""
    if isinstance(config, Mapping):
        return {str(name): _settings(value) for name, value in config.items() if name not in OF_A_FILE}
    return [_settings(value) for value in config] if isinstance(config, (list, tuple)) else config


def _check_weights(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    stored = _Stored(folder)
    if stored.place.keys() <= weights.keys():
        missing = weights.keys() - stored.place.keys() - _written_elsewhere(model, stored.place.keys())
        if missing:
            raise ModelError(f"{folder} was saved without the weight {min(missing)}")
        _compare({name: weights[name] for name in stored.place}, stored, folder)
        return
    # transformers stores some families under other names than it computes with (experts one by one): load the model
    read = load_model(folder, dtype=str(next(model.parameters()).dtype).removeprefix("torch."))
    _compare(weights, read.state_dict(), folder)


def _written_elsewhere(model: Any, stored: Any) -> set[str]:
    """Returns the names that a file may lack: aliases of stored weights, and those that the model leaves out."""
    shared: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), set()).add(name)
    aliases = {name for names in shared.values() if names & stored for name in names}
    return aliases | set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _compare(expected: Mapping[str, Tensor], actual: Any, folder: Path) -> None:
    """Raises ModelError unless the tensors `actual`, stored or a state dict, are those that are `expected`."""
    import torch

    stored = isinstance(actual, _Stored)
    names = sorted(expected)
    have = actual.place.keys() if stored else actual.keys()
    if differing := sorted(have ^ expected.keys()):
        where = "the file" if differing[0] in have else "the model"
        raise ModelError(f"{folder} was saved with other weights: {differing[0]} is in {where} alone")
    for name in names:
        shape = actual.shape(name) if stored else list(actual[name].shape)
        if shape != list(expected[name].shape):
            raise ModelError(f"{folder}: {name} was saved as {shape}, the model has {list(expected[name].shape)}")
    for name in dict.fromkeys(names[int(part * (len(names) - 1) / (COMPARED - 1))] for part in range(COMPARED)):
        tensor, read = expected[name].detach().cpu(), actual.tensor(name) if stored else actual[name]
        if tensor.dtype != read.dtype or not torch.equal(tensor.nan_to_num(), read.nan_to_num()):
            raise ModelError(
                f"{folder}: {name} was saved with other numbers ({read.dtype}) than the model's ({tensor.dtype})"
            )
