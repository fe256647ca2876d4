"""The world of several processes under `torchrun`: FSDP2 for parameters, gloo on the CPU for everything else."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from turngym.trainers.distributed import model as sharded
from turngym.trainers.distributed.world import SINGLE, DistributedError, World

T = TypeVar("T")
LOST_PEER_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL",
    "Connection refused",
)
"""Parts of the messages of gloo and NCCL when another process is gone."""


class ProcessGroupWorld:
    """Implements `World` on the process group that is initialized."""

    def __init__(self, device: str = "cpu") -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._mesh = dist.device_mesh.init_device_mesh(device, (self.size,))
        self._open: set[int] = set()

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def shard(self, model: Any) -> None:
        sharded.shard(model, self._mesh)

    def full_params(self, model: Any) -> AbstractContextManager[None]:
        """May be nested: the outermost block gathers the parameters and frees them."""
        return nullcontext() if model is None or id(model) in self._open else self._gathered(model)

    @contextmanager
    def _gathered(self, model: Any) -> Iterator[None]:
        self._open.add(id(model))
        try:
            with sharded.full_params(model):
                yield
        finally:
            self._open.discard(id(model))

    def state(self, model: Any) -> Mapping[str, Tensor]:
        return sharded.full_state(model)

    def close(self) -> None:
        """Destroy the process group and wait for its threads to end.

        torch's caches of shardings keep the mesh, and the mesh would keep the group's threads: one that drops its last
        tensor while the interpreter ends takes the whole process down (SIGABRT, "terminate called without an active
        exception"), after everything was saved.
        """
        dist.destroy_process_group()
        getattr(self._mesh, "_pg_registry", {}).clear()
        gc.collect()  # sharded modules are reference cycles that hold the group, too


@contextmanager
def world_of(environment: Mapping[str, str] = os.environ, *, timeout: float = 120.0) -> Iterator[World]:
    """The world that `torchrun` describes in the environment: `SINGLE` without one, or with a single process.

    `timeout`: minutes that a process waits for another (one that plays, evaluates or saves) before it gives up. Raises
    DistributedError if the processes cannot find each other.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_device(environment))
    # objects travel through gloo: a tensor on the GPU for every pickled episode would only be copied back
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout))
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise DistributedError(
            f"process {environment.get('RANK')} of {size} cannot reach the others: {str(error).splitlines()[0]}. Start "
            "training with torchrun --nproc-per-node N -m turngym train ..."
        ) from error
    try:
        world = ProcessGroupWorld("cuda" if cuda else "cpu")
        try:
            yield world
        finally:
            world.close()
    except RuntimeError as error:
        if not any(word in str(error) for word in LOST_PEER_MESSAGES):
            raise
        raise DistributedError(
            f"process {environment.get('RANK')} of {size} lost another one, which was killed, crashed or did not "
            f"answer for {timeout:g} minutes (torchrun names the first to fail below). Continue with --resume, "
            "or without it where no checkpoint was written yet"
        ) from error


def local_device(environment: Mapping[str, str] = os.environ) -> str:
    """Where this process computes: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    number, count = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise DistributedError(
            f"local process {number} has no GPU: this machine has {count}; valid: --nproc-per-node up to {count}"
        )
    return f"cuda:{number}"
