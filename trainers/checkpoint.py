"""Checkpoints: everything a killed run needs to continue to the same numbers, written whole or not at all.

    checkpoints/step_000010/
        state.json         step, depth, the run's settings and hashes of what they name; with a checksum of its own
        model/             the weights as an ordinary model; LoRA adapters alone, as peft writes them
        optimizer.pt       AdamW's moments and torch's random stream, and critic.pt with a critic
        shards/            in their place where several processes train, or adapters: every rank writes its own
        turngym.sums       checksums of all files but state.json

A checkpoint of any number of processes can be read by any other number.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from turngym.agents.models import load_model
from turngym.agents.saved_model import save_model
from turngym.core.errors import TurngymError, full_disk
from turngym.core.files import check_sums, write_sums
from turngym.core.manifest import read_manifest, write_manifest
from turngym.trainers import lora
from turngym.trainers.critic import ValueCritic
from turngym.trainers.models import MOMENTS, load_full, trained
from turngym.trainers.ranks import SINGLE, DistributedError, Ranks, on_all_ranks, on_rank_zero
from turngym.trainers.shard_files import ShardReader, ShardWriter
from turngym.trainers.tensor_file import read_tensors

# Shards (torch.distributed.checkpoint): every rank writes its own, any number of ranks reads them.

SHARD_FOLDER = "shards"
Part = tuple[nn.Module, torch.optim.Optimizer]
"""A module, some of whose parameters are trained, and its AdamW."""


def save_shards(folder: Path, parts: Mapping[str, Part]) -> None:
    """Write trained parameters, AdamW's moments and torch's random stream; a collective: every rank must call.

    Raises DistributedError in all of them if one cannot write, with its error as the cause.
    """
    state = {name: _state(module, optimizer) for name, (module, optimizer) in parts.items()}
    with _checkpoint_errors("write"):
        full = {**state, "torch_rng": torch.get_rng_state()}
        dcp.save(full, storage_writer=ShardWriter(folder), no_dist=not dist.is_initialized())


def load_shards(folder: Path, parts: Mapping[str, Part]) -> None:
    """Put what `save_shards` wrote into place, from any number of processes into any number, one included."""
    reader = ShardReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {"torch_rng": torch.get_rng_state()}
    for name, (module, optimizer) in parts.items():
        # a checkpoint reads into tensors that exist; one from before the first update has no moments to read
        if f"{name}.step" in saved:
            for key, parameter in trained(module).items():
                if f"{name}.moments.{key}.{MOMENTS[0]}" in saved:
                    moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS}
                    optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        wanted[name] = _state(module, optimizer)
    with _checkpoint_errors("read"):
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    for name, (_, optimizer) in parts.items():
        for state in optimizer.state.values():
            # one for each: AdamW counts in place, and a shared counter would advance once per parameter
            state["step"] = wanted[name]["step"].clone()
    torch.set_rng_state(wanted["torch_rng"])


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


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors to be written, by name; reading into them is loading. Before the first update AdamW has no moments,
    and to make some would take an update."""
    named = trained(module)
    state: dict[str, Any] = {"weights": {name: parameter.detach() for name, parameter in named.items()}}
    if optimizer.state:
        # a parameter that never had a gradient has none
        state["moments"] = {
            name: {kind: optimizer.state[parameter][kind] for kind in MOMENTS}
            for name, parameter in named.items()
            if optimizer.state.get(parameter)
        }
        state["step"] = next(iter(optimizer.state.values()))["step"]
    return state


# Whole checkpoints.

FOLDER = "checkpoints"
MODEL = "model"
SCHEMA = 2
NAME = re.compile(r"step_(\d{6,})")


class CheckpointError(TurngymError):
    """A checkpoint that is missing, damaged, or of another configuration; nothing was overwritten."""


def save_checkpoint(
    run: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int = 2,
    save_extra: Callable[[Path], None] | None = None,
    critic: ValueCritic | None = None,
    ranks: Ranks = SINGLE,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write `run/checkpoints/step_K` (K from `state["step"]`) and drop all but the newest `keep`.

    Everything goes to a temporary folder that is renamed at the end: a killed process leaves the previous checkpoint,
    and so does a disk that is full (CheckpointError) or any other failure in any process. `state` must be JSON.
    `save_extra` may add files to the model folder (a tokenizer), `beside` to the checkpoint. With `ranks` of several
    processes, whose `run` must be one folder for all, each writes its own shard of the optimizer.
    """
    folder = run / FOLDER
    target, scratch = folder / f"step_{state['step']:06d}", folder / f".writing_{state['step']:06d}"
    with full_disk(run, f"checkpoint of step {state['step']}", CheckpointError, then=resume_hint(run)):
        if on_rank_zero(ranks, target.exists):
            # the same step of the same run: weights and optimizer are there already
            on_rank_zero(ranks, lambda: _write_state(target, state))
            return target
        with _new_folder(scratch, ranks):
            # a collective, so outside of what rank 0 does alone
            weights = ranks.state(model)
            on_rank_zero(ranks, lambda: _write_model(model, weights, scratch / MODEL, save_extra))
            _write_optimizer(scratch, model, optimizer, critic, ranks)
            if beside is not None:
                on_rank_zero(ranks, lambda: beside(scratch))
            on_rank_zero(ranks, lambda: _finish(scratch, target, state))
        on_rank_zero(ranks, lambda: _drop_old(run, keep))
    return target


@contextmanager
def _new_folder(scratch: Path, ranks: Ranks) -> Iterator[None]:
    """An empty folder that all processes see; gone again if anything fails inside."""
    try:
        on_rank_zero(ranks, lambda: _prepare(scratch.parent, scratch))
        on_all_ranks(ranks, lambda: _same_folder(scratch))
        yield
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def _prepare(folder: Path, scratch: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # left by a process that was killed while it wrote
    for leftover in folder.glob(".writing_*"):
        shutil.rmtree(leftover)
    scratch.mkdir()


def _same_folder(scratch: Path) -> None:
    if not scratch.is_dir():
        raise CheckpointError(
            f"{scratch}, which process 0 has just made, is not there: --out must be a folder that all machines share"
        )


def _write_model(
    model: Any, weights: Mapping[str, Any], folder: Path, save_extra: Callable[[Path], None] | None
) -> None:
    if lora.adapted(model):
        # the base, a hundred times as large, is where it was: `turngym model merge` makes one model of both
        lora.save_adapter(model, weights, folder)
    else:
        save_model(model, folder, weights)
    if save_extra is not None:
        save_extra(folder)


def _write_optimizer(
    scratch: Path, model: nn.Module, optimizer: torch.optim.Optimizer, critic: ValueCritic | None, ranks: Ranks
) -> None:
    if ranks.size > 1 or lora.adapted(model):  # merged adapters could not be taken apart again
        save_shards(scratch / SHARD_FOLDER, _parts(model, optimizer, critic))
        return
    torch.save({"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}, scratch / "optimizer.pt")
    if critic is not None:
        torch.save(critic.state_dict(), scratch / "critic.pt")


def _finish(scratch: Path, target: Path, state: Mapping[str, Any]) -> None:
    # the model's own, for it is also used alone; state.json, which may be written again, has its checksum inside
    write_sums(scratch / MODEL)
    write_sums(scratch, without=(MODEL, "state.json"))
    _write_state(scratch, state)
    # before the rename: a folder with a checkpoint's name is complete even after a power failure
    _flush(scratch)
    scratch.rename(target)


def _drop_old(run: Path, keep: int) -> None:
    # at least 1: [:-0] is empty, so that keep=0 would drop nothing
    for old in list_checkpoints(run)[: -max(keep, 1)]:
        shutil.rmtree(old)


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    # replaced as a whole: it is also written into checkpoints that are complete already
    write_manifest(folder / "state.json", {"schema": SCHEMA, **state})


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folders = [path for path in (run / FOLDER).glob("step_*") if NAME.fullmatch(path.name)]
    # as numbers: from step 1,000,000 on names no longer sort
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def resume_hint(run: Path) -> str:
    """Advice after a failure. It names --resume only if there is a checkpoint to go on from."""
    return f"Make room and {'continue with --resume' if list_checkpoints(run) else 'start the run again'}"


def latest_checkpoint(run: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError when there is none."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise CheckpointError(f"no checkpoint in {run / FOLDER}: start the run without --resume")
    return checkpoints[-1]


def latest_model(run: Path) -> Path:
    """Folder of the newest model of a run: valid wherever a model path is asked for."""
    return latest_checkpoint(run) / MODEL


def read_state(checkpoint: Path) -> dict[str, Any]:
    state = read_manifest(checkpoint / "state.json", dict[str, Any], CheckpointError)
    if state["schema"] != SCHEMA:
        raise CheckpointError(f"{checkpoint} has schema {state['schema']}; this version reads {SCHEMA}")
    return state


def load_checkpoint(
    checkpoint: Path, *, model: Any, optimizer: torch.optim.Optimizer, critic: ValueCritic | None = None
) -> None:
    """Put the weights, the optimizer's state, the critic and torch's random stream of `checkpoint` into place.

    The checkpoint and this run may have different numbers of processes. Raises CheckpointError where it does not fit
    this model or is damaged.
    """
    try:
        check_sums(checkpoint)
        if (checkpoint / SHARD_FOLDER).exists():
            load_shards(checkpoint / SHARD_FOLDER, _parts(model, optimizer, critic))
            return
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        saved = read_tensors(checkpoint / "optimizer.pt")
        load_full(model, load_model(checkpoint / MODEL, dtype=dtype).state_dict(), optimizer, saved["optimizer"])
        # after load_model: what making a model draws must not count
        torch.set_rng_state(saved["torch_rng"])
        if critic is not None:
            critic.load_state_dict(read_tensors(checkpoint / "critic.pt"))
    except Exception as error:  # readers of damaged files raise anything
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{checkpoint} is damaged or does not fit this model: {first}") from error


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer, critic: ValueCritic | None) -> dict[str, Part]:
    return {"model": (model, optimizer)} | ({} if critic is None else {"critic": (critic.module, critic.optimizer)})
