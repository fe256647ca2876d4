"""Sharded checkpoints (torch.distributed.checkpoint): every rank writes its shard, any number of ranks reads them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from turngym.trainers.distributed.world import DistributedError

FOLDER = "shards"
MOMENTS = ("exp_avg", "exp_avg_sq")

Part = tuple[nn.Module, torch.optim.Optimizer]
"""A module, some of whose parameters are trained, and its AdamW."""


def save_shards(folder: Path, parts: Mapping[str, Part]) -> None:
    """Write trained parameters, AdamW's moments and torch's random stream; a collective: every rank must call.

    Raises DistributedError in all of them if one cannot write, with its error as the cause.
    """
    state = {name: _state(module, optimizer) for name, (module, optimizer) in parts.items()}
    with _checkpoint_errors("write"):
        full = {**state, "torch_rng": torch.get_rng_state()}
        dcp.save(full, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load_shards(folder: Path, parts: Mapping[str, Part]) -> None:
    """Put what `save_shards` wrote into place, from any number of processes into any number, one included."""
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {"torch_rng": torch.get_rng_state()}
    for name, (module, optimizer) in parts.items():
        # a checkpoint reads into tensors that exist; one from before the first update has no moments to read
        if f"{name}.step" in saved:
            _init_moments(module, optimizer)
        wanted[name] = _state(module, optimizer)
    with _checkpoint_errors("read"):
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    for name, (module, optimizer) in parts.items():
        if optimizer.state:
            for parameter in trained(module).values():
                # one for each: AdamW counts in place, and a shared counter would advance once per parameter
                optimizer.state[parameter]["step"] = wanted[name]["step"].clone()
    torch.set_rng_state(wanted["torch_rng"])


def load_full(module: nn.Module, weights: Mapping[str, Tensor], optimizer: Any, state: Mapping[str, Any]) -> None:
    """Put a checkpoint of one process into a module that may be sharded; `state` is its optimizer's `state_dict()`.

    Raises ValueError for weights of another module.
    """
    if differing := sorted(weights.keys() ^ module.state_dict().keys()):
        raise ValueError(f"the weights {', '.join(differing[:3])} are only in one of checkpoint and model")
    with torch.no_grad():
        for name, own in module.named_parameters():
            own.copy_(shard_like(weights[name], own))
    for number, parameter in enumerate(trained(module).values()):
        # torch knows parameters by their number in the optimizer; none has a state before the first update
        if number in state["state"]:
            old = state["state"][number]
            moments = {name: shard_like(old[name], parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": old["step"].clone(), **moments}


@contextmanager
def _checkpoint_errors(verb: str) -> Iterator[None]:
    """torch raises a BaseException that carries every process's error; `except Exception` would not see it."""
    try:
        with warnings.catch_warnings():
            # one process reads and writes shards on purpose
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise DistributedError(f"process {rank} could not {verb} its shard: {type(first).__name__}: {first}") from first


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that an optimizer changes, in its order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of `value`, which every rank holds in full, sharded and placed as `like` is."""
    if value.shape != like.shape:
        raise ValueError(f"a weight has shape {tuple(value.shape)}; the model's is {tuple(like.shape)}")
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is written, by name: the tensors themselves, so that reading into them is loading. Before the first update
    there are no moments, and asking torch for its optimizer state would take an update to make some."""
    named = trained(module)
    state: dict[str, Any] = {"weights": {name: parameter.detach() for name, parameter in named.items()}}
    if optimizer.state:
        state["moments"] = {
            name: {kind: optimizer.state[parameter][kind] for kind in MOMENTS} for name, parameter in named.items()
        }
        state["step"] = next(iter(optimizer.state.values()))["step"]
    return state


def _init_moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trained(module).values():
        moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
