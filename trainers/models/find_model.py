"""Whether a model and a device are there, said at once and in one line."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from turngym.envs.common.folder_sums import check_sums
from turngym.envs.core import TurngymError

HUB_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")


class ModelError(TurngymError):
    """A model that cannot be loaded or used for training."""


def find_device(device: str) -> str:
    """`device`, with `auto` resolved. Raises ModelError for one that this machine does not have."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, number = torch.device(device).type, torch.device(device).index
    except RuntimeError:
        raise ModelError(f"--device {device!r} is no device; valid: auto, cpu, cuda, cuda:1, ...") from None
    found = torch.cuda.device_count() if kind == "cuda" else 1
    if found <= (number or 0):
        has = f"this torch sees {found} CUDA GPUs" if found else "this torch sees no CUDA GPU"
        raise ModelError(f"--device {device}: {has}; use --device cpu or auto")
    return device


def find_model(path: str | Path) -> None:
    """Raises ModelError where `path` is no model folder and cannot be a name on the hub; ChangedFileError for one of
    ours that is damaged.

    from_pretrained takes a folder that is missing for a hub name, and answers after minutes of tries.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").exists():
        check_sums(folder)
        return
    words = str(path).split("/")
    # NAME or OWNER/NAME; what has a folder of ours above it was meant as one
    named = len(words) <= 2 and all(HUB_WORD.fullmatch(word) for word in words)
    if folder.exists() or not named or (len(words) == 2 and Path(words[0]).is_dir()):
        there = "it holds no config.json" if folder.is_dir() else "there is no such folder"
        raise ModelError(f"no model in {path}: {there}; a model's folder holds config.json and model.safetensors")
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(str(path), "config.json"), str)
    if not cached and (constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)):
        raise ModelError(
            f"no model {path}: there is no such folder, and as a name on the Hugging Face hub it is not in the cache "
            "and the hub cannot be reached from here"
        )


def _reachable(endpoint: str, seconds: float = 5.0) -> bool:
    """Whether a connection can be made; behind a proxy nobody knows without trying."""
    address = urlsplit(endpoint)
    if getproxies().get(address.scheme):
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True
