"""Parameters of a model in a memory-mapped file, so that two processes have the same ones."""

from __future__ import annotations

import copy
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ALIGN = 64
"""Bytes at whose multiples a parameter begins."""
MEMORY = Path("/dev/shm")


def share_parameters(model: Any) -> Path:
    """Move the parameters of `model` (on the CPU) into a new file and map it; the caller removes the file.

    In memory where there is room, else in the folder for temporary files.
    """
    size = max((end for _, _, end in _layout(model)), default=0)
    path = _new_file(size)
    _map(model, path, size, keep=True)
    return path


def skeleton(model: Any) -> bytes:
    """`model` without its parameters; buffers come along."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    buffer = io.BytesIO()
    # deepcopy takes what is in the memo for the parameters, so that they are not copied
    torch.save(copy.deepcopy(model, memo), buffer)
    return buffer.getvalue()


def mapped_model(payload: bytes, path: Path) -> Any:
    """The model of a `skeleton` with the parameters that `share_parameters` put into `path`."""
    model = torch.load(io.BytesIO(payload), map_location=None, weights_only=False)
    _map(model, path, max((end for _, _, end in _layout(model)), default=0), keep=False)
    return model


def _layout(model: Any) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Every parameter once, with its first byte and the one behind its last."""
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel() * parameter.element_size()
        yield parameter, start, end
        start = -(-end // ALIGN) * ALIGN


def _map(model: Any, path: Path, size: int, *, keep: bool) -> None:
    """Replace the parameters by ones that lie in `path`; `keep` their values, else take those of the file."""
    memory: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=max(size, 1))
    made: dict[int, nn.Parameter] = {}
    for parameter, start, _ in _layout(model):
        view = _view(memory, parameter, start)
        if keep:
            view.copy_(parameter.detach())
        made[id(parameter)] = nn.Parameter(view, requires_grad=False)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                # by identity: a head that is tied to the embedding stays so
                module._parameters[name] = made[id(old)]


def _view(memory: Any, like: Tensor, start: int) -> Tensor:
    empty: Any = torch.empty(0, dtype=like.dtype)
    return empty.set_(memory, start // like.element_size(), like.shape)


def _new_file(size: int) -> Path:
    # half of what is free: a full memory disk kills whoever writes to it
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size
    number, name = tempfile.mkstemp(prefix="turngym-weights-", dir=MEMORY if roomy else None)
    os.truncate(number, size)
    os.close(number)
    return Path(name)
