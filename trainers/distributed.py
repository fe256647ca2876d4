"""A run divided among processes that `torchrun` starts: parameters by FSDP2, rollouts and scoring by shares.

Everything that is decided is decided by every process alike, from the whole batch (see `ranks.py`). First stands what
is done to a model (shard it, gather its parameters for a while, read its whole state), then the ranks that
`torchrun` starts, then `distribute_trainer`, which divides playing, scoring and evaluations of a run.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from turngym.agents.local_engine.lora_weights import shared_weights
from turngym.core.cpu_cores import counted
from turngym.core.episode import Episode
from turngym.core.protocols import DivisibleEvaluation, EvalPoint, RolloutSource, Scorer
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.models import final_states
from turngym.trainers.progress import Progress
from turngym.trainers.ranks import SINGLE, DistributedError, Ranks, on_all_ranks, on_rank_zero
from turngym.trainers.rollout_order import AsyncRollout, gather_shares, update_servers
from turngym.trainers.scorer import LocalScorer, shared_scorer
from turngym.trainers.train_loop import Trainer

if TYPE_CHECKING:
    from turngym.agents.servers.weights import SyncedPolicy


def shard(model: Any, mesh: Any) -> None:
    """Divide the parameters among the processes of `mesh`, in place: a group per transformer block, one for the rest.

    The rest (embeddings, last norm, head; in one group, because heads are often tied to embeddings) stays gathered
    between the hidden states and the head's gradient, so that the head may be called on its own, chunk by chunk.
    Modules with parameters of another precision than most have groups of their own: a group has one.

    Raises DistributedError for a module that itself learns in two precisions.
    """
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
    # inner ones before those around them, as below
    for name, part in reversed([*model.named_modules()]):
        learned = {parameter.dtype for parameter in part.parameters(recurse=False) if parameter.requires_grad}
        if len(learned) > 1:
            raise DistributedError(
                f"{name} of {type(model).__name__} learns in {' and '.join(sorted(map(str, learned)))}, which several "
                "processes cannot divide; valid: --dtype float32, or adapters (--lora.rank)"
            )
        if learned and learned != {max(sizes, key=sizes.__getitem__)}:
            fully_shard(part, mesh=mesh)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    # blocks before the whole: a group takes in the parameters that no group inside of it has
    fully_shard(model, mesh=mesh)
    if hasattr(model, "get_output_embeddings"):
        model.final_states = partial(final_states, model)
        register_fsdp_forward_method(model, "final_states")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: what transformers says may not be split, or else the entries of the longest module list.

    Of layers inside of others the outer ones; one whose weights are another's too (Zamba) stays with the rest.
    """
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    by_name = {name: part for name, part in model.named_modules() if type(part).__name__ in names}
    if by_name:
        shared = shared_weights(model)
        outer = [part for name, part in by_name.items() if not any(name.startswith(f"{above}.") for above in by_name)]
        return [part for part in outer if not any(id(parameter) in shared for parameter in part.parameters())]
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Inside, every process holds all parameters and may run the model as often as it likes, without gradient.

    Nothing is communicated inside. `named_parameters` and `state_dict` (FSDP's own would shard again) give all weights.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        # else the first forward pass frees them, and processes gather out of step: they run different numbers of passes
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    model.state_dict = lambda: plain_weights(model)  # type: ignore[method-assign, assignment, misc]
    try:
        yield
    finally:
        del model.state_dict
        for number, part in enumerate(parts):
            part.reshard()
            # as FSDP2 has it by default: the root, which comes first, stays gathered until the backward pass
            part.set_reshard_after_forward(number > 0, recurse=False)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `state_dict` gives for an unsharded model: every name of a tied weight, no non-persistent buffers."""
    weights = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    for prefix, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                weights[f"{prefix}.{name}".lstrip(".")] = value
    return weights


def full_state(model: nn.Module) -> dict[str, Any]:
    """The full state dict on the CPU, tied weights as one tensor; on other ranks than 0, which must call too, empty."""
    # late: slow to import, and only sharded models need it
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # save_pretrained finds tied weights by their memory, and gathering has copied every name apart
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if name in state:
            state[name] = state[owner]
    return dict(state)


# Several processes under `torchrun`: FSDP2 for parameters, gloo on the CPU for everything else.

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


class TorchRanks(Ranks):
    """The process group that is initialized."""

    def __init__(self, device: str) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._mesh = dist.device_mesh.init_device_mesh(device, (self.size,))
        self._open: set[int] = set()

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def shard(self, model: Any) -> None:
        shard(model, self._mesh)

    @contextmanager
    def full_params(self, model: Any) -> Iterator[None]:
        """May be nested: the outermost block gathers the parameters and frees them."""
        if model is None or id(model) in self._open:
            yield
            return
        self._open.add(id(model))
        try:
            with full_params(model):
                yield
        finally:
            self._open.discard(id(model))

    def state(self, model: Any) -> Mapping[str, Tensor]:
        return full_state(model)

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
def open_ranks(environment: Mapping[str, str] = os.environ, *, timeout: float = 720.0) -> Iterator[Ranks]:
    """The ranks that `torchrun` describes in the environment: `SINGLE` without one, or with a single process.

    `timeout`: minutes that a process waits for another (one that plays, evaluates or saves) before it gives up. Raises
    DistributedError if the processes cannot find each other.
    """
    size = counted(environment, "WORLD_SIZE", 1)
    if size < 2:
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
        ranks = TorchRanks("cuda" if cuda else "cpu")
        try:
            yield ranks
        finally:
            ranks.close()
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
    number, count = counted(environment, "LOCAL_RANK", 0), torch.cuda.device_count()
    if number >= count:
        raise DistributedError(
            f"local process {number} has no GPU: this machine has {count}; valid: --nproc-per-node up to {count}"
        )
    return f"cuda:{number}"


# Divides rollouts and scoring over the ranks of a run: each rank does its share, all_gather brings the results.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSource:
    """Implements `RolloutSource`: each rank plays its share of a step's episodes; all_gather brings all to every rank.

    The source must heed `RolloutRequest.share`. An episode depends on its job alone, so the number of processes does
    not change it.
    """

    source: RolloutSource
    ranks: Ranks
    model: Any
    """The policy; its full parameters are gathered while it plays."""
    servers: SyncedPolicy | None = None

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        with self.ranks.full_params(self.model):
            update_servers(self.ranks, self.servers)
            return gather_shares(self.ranks, request, lambda: self.own(request))

    def own(self, request: RolloutRequest) -> list[Episode]:
        """Plays this rank's share of the episodes without telling the others."""
        rank, size = self.ranks.rank, self.ranks.size
        mine = replace(request, share=(rank, size))
        wanted = len(mine.own(range(request.episodes)))
        # with fewer episodes than processes some play none
        episodes = self.source(mine) if wanted else []
        if len(episodes) != wanted:
            raise DistributedError(
                f"step {request.step}: share {rank} of {size} is {wanted} of {request.episodes} episodes, but "
                f"{type(self.source).__name__} gave {len(episodes)}; with several processes a rollout source must play "
                "RolloutRequest.own(...) of its jobs"
            )
        return episodes


def distribute_trainer(trainer: Trainer, ranks: Ranks, *, shard_teacher: bool = False) -> Trainer:
    """`trainer` with its run divided among the processes of `ranks`; only rank 0 logs and shows.

    `shard_teacher` divides the weights of teacher and reference too: each process holds all of them while it scores,
    and its share while it learns. Raises DistributedError for runs that cannot keep step.
    """
    if ranks.size == 1:
        return trainer
    if shard_teacher and (trainer.algorithm.teacher_mix or trainer.algorithm.guide):
        raise DistributedError(
            "a teacher that plays (teacher_mix, guided-opd) cannot be sharded; leave out --shard-teacher"
        )

    def scorer(own: Scorer | None) -> Scorer | None:
        if isinstance(own, LocalScorer) and own.bare:
            # the student without its adapters, which is divided as the student is
            return shared_scorer(own, ranks, trainer.model)
        model = own.model if shard_teacher and isinstance(own, LocalScorer) else None
        if model is not None:
            ranks.shard(model)
        return None if own is None else shared_scorer(own, ranks, model)

    policy = {"ranks": ranks, "model": trainer.model, "servers": trainer.servers}
    source, order = SharedSource(source=trainer.source, **policy), trainer.order
    if isinstance(order, AsyncRollout):
        # a snapshot gathers the sharded student; the copy that plays is whole on each rank
        student = order.snapshot.student
        snapshot = replace(order.snapshot, whole=lambda: ranks.full_params(student))
        order = replace(order, snapshot=snapshot, ranks=ranks, servers=trainer.servers)
        # the servers follow the copy that plays ahead; the student itself evaluates, in its own processes
        policy["servers"] = None
    return replace(
        trainer,
        ranks=ranks,
        order=order,
        source=source,
        teacher=scorer(trainer.teacher),
        reference=scorer(trainer.reference),
        evaluate=None if trainer.evaluate is None else SharedEvaluation(evaluate=trainer.evaluate, **policy),
        progress=Progress() if ranks.rank else trainer.progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEvaluation:
    """An evaluation whose episodes the ranks divide; its result is broadcast.

    One that is no `DivisibleEvaluation` is played by rank 0 while the others wait.
    """

    evaluate: Callable[[int], EvalPoint]
    """Called with the step."""
    ranks: Ranks
    model: Any
    servers: SyncedPolicy | None = None

    def __call__(self, step: int) -> EvalPoint:
        evaluation, ranks = self.evaluate, self.ranks
        with ranks.full_params(self.model):
            update_servers(ranks, self.servers)
            if not isinstance(evaluation, DivisibleEvaluation):
                return on_rank_zero(ranks, lambda: evaluation(step))
            on_rank_zero(ranks, lambda: evaluation.gather(step))
            on_all_ranks(ranks, lambda: evaluation.play_share(step, (ranks.rank, ranks.size)))
            return on_rank_zero(ranks, lambda: evaluation.finish(step))
