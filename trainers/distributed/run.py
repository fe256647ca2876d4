"""Divides rollouts and scoring over the ranks of a run: each rank does its share, all_gather brings the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turngym.envs.episode import Episode, TopK
from turngym.envs.protocols import Collect, CollectRequest, DividedEvaluation, EvalPoint, Scorer, SupportScorer
from turngym.trainers.distributed.world import DistributedError, World, balanced_shares, on_all_ranks, on_rank_zero
from turngym.trainers.models.scorer import Ids, LocalScorer, Positions
from turngym.trainers.run.async_rollout import AsyncRollout
from turngym.trainers.run.progress import NoProgress

T = TypeVar("T")


class SharedServers(Protocol):
    """Engine servers that play with the student's weights and are shared by all processes of a run."""

    def publish_now(self) -> tuple[str | None, int]:
        """Send the weights if they are new; name and policy version of the weights that the servers have now."""

    def adopt(self, name: str, version: int) -> None:
        """Record weights that another process has sent."""


def update_servers(world: World, servers: SharedServers | None) -> None:
    """Before a rollout: rank 0 sends new weights to the servers, the other ranks record their version."""
    if servers is not None:
        name, version = on_rank_zero(world, servers.publish_now)
        # rank 0 has just recorded what it sent
        if world.rank and name is not None:
            servers.adopt(name, version)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCollect:
    """Implements `Collect`: each rank plays its share of a step's episodes; all_gather gives every rank all of them.

    The source must heed `CollectRequest.share`. An episode depends on its job alone, so the number of processes does
    not change it.
    """

    collect: Collect
    world: World
    model: Any
    """The policy; its full parameters are gathered while it plays."""
    servers: SharedServers | None = None

    def __call__(self, request: CollectRequest) -> list[Episode]:
        with self.world.full_params(self.model):
            update_servers(self.world, self.servers)
            return gather_shares(self.world, request, lambda: self.own(request))

    def own(self, request: CollectRequest) -> list[Episode]:
        """This rank's share, played without a word to the others."""
        rank, size = self.world.rank, self.world.size
        mine = replace(request, share=(rank, size))
        wanted = len(mine.own(range(request.episodes)))
        # with fewer episodes than processes some play none
        return self._checked(mine, wanted) if wanted else []

    def _checked(self, request: CollectRequest, wanted: int) -> list[Episode]:
        episodes = self.collect(request)
        if len(episodes) != wanted:
            raise DistributedError(
                f"step {request.step}: share {request.share[0]} of {request.share[1]} is {wanted} of "
                f"{request.episodes} episodes, but {type(self.collect).__name__} gave {len(episodes)}; with several "
                "processes a rollout source must play CollectRequest.own(...) of its jobs"
            )
        return episodes


def gather_shares(world: World, request: CollectRequest, own: Callable[[], list[Episode]]) -> list[Episode]:
    """All episodes of `request`, on every rank; all meet here, also those whose share is empty."""
    parts = world.all_gather(on_all_ranks(world, own))
    # `CollectRequest.own` deals the episodes out round robin
    return [parts[place % world.size][place // world.size] for place in range(request.episodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedAheadTogether:
    """Implements `Together` (`AsyncRollout`): threads play shares, ranks meet to gather them and to update servers."""

    world: World
    servers: SharedServers | None = None

    @property
    def in_turn(self) -> bool:
        return self.servers is not None

    def own(self, collect: Collect) -> Collect:
        return cast(SharedCollect, collect).own

    def begin(self) -> None:
        update_servers(self.world, self.servers)

    def gather(self, request: CollectRequest, own: Callable[[], list[Episode]]) -> list[Episode]:
        return gather_shares(self.world, request, own)


def _ahead_together(order: AsyncRollout, world: World, servers: SharedServers | None) -> AsyncRollout:
    """`order` for all ranks: a snapshot gathers the sharded student; the copy that plays is whole on each of them."""
    student = order.snapshot.student
    return AsyncRollout(
        staleness=order.staleness,
        last=order.last,
        snapshot=replace(order.snapshot, whole=lambda: world.full_params(student)),
        cancel=order.cancel,
        together=PlayedAheadTogether(world=world, servers=servers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScorer:
    """Implements `Scorer`: each process scores its share of the rows, about as many tokens as the others'."""

    scorer: Scorer
    world: World
    model: Any = None
    """The scorer's model, if it is sharded; its full parameters are gathered while it scores."""

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        return self._share(ids, lambda own: self.scorer.topk(_take(ids, own), _take(positions, own), k))

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        return self._share(ids, lambda own: self.scorer.logprobs(_take(ids, own), _take(positions, own)))

    def _share(self, ids: Ids, score: Callable[[NDArray[np.int64]], Sequence[T]]) -> list[T]:
        own = balanced_shares([len(row) for row in ids], self.world.size)[self.world.rank]
        with self.world.full_params(self.model):
            found = on_all_ranks(self.world, lambda: score(own) if len(own) else [])
        rows: dict[int, T] = {}
        for members, values in self.world.all_gather((own, list(found))):
            rows.update(zip(members.tolist(), values, strict=True))
        return [rows[row] for row in range(len(ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSupportScorer(SharedScorer):
    """A `SharedScorer` that can also look up log-probabilities of chosen ids (`gather`)."""

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        scorer = cast(SupportScorer, self.scorer)
        return self._share(ids, lambda own: scorer.gather(_take(ids, own), _take(positions, own), _take(support, own)))


def shared_scorer(scorer: Scorer, world: World, model: Any = None) -> Scorer:
    """`scorer` with its rows divided over the ranks; `scorer` itself with one process."""
    if world.size == 1:
        return scorer
    # a target function asks by hasattr what a scorer can do, so a shared one must not promise more
    kind = SharedSupportScorer if hasattr(scorer, "gather") else SharedScorer
    return kind(scorer=scorer, world=world, model=model)


def distribute_trainer(trainer: Any, world: World, *, shard_teacher: bool = False) -> Any:
    """A `Trainer` whose run is divided among the processes of `world`; only rank 0 logs and shows.

    `shard_teacher` divides the weights of teacher and reference too: each process holds all of them while it scores,
    and its share while it learns. Raises DistributedError for runs that cannot keep step.
    """
    if world.size == 1:
        return trainer
    if shard_teacher and (trainer.algorithm.teacher_mix or trainer.algorithm.guide):
        raise DistributedError(
            "a teacher that plays (teacher_mix, guided-opd) cannot be sharded; leave out --shard-teacher"
        )

    def scorer(own: Scorer | None) -> Scorer | None:
        model = own.model if shard_teacher and isinstance(own, LocalScorer) else None
        if model is not None:
            world.shard(model)
        return None if own is None else shared_scorer(own, world, model)

    policy = {"world": world, "model": trainer.model, "servers": trainer.servers}
    collect, order = SharedCollect(collect=trainer.collect, **policy), trainer.order
    if isinstance(order, AsyncRollout):
        # the servers follow the copy that plays ahead; the student itself evaluates, in its own processes
        order = _ahead_together(order, world, trainer.servers)
        policy["servers"] = None
    return replace(
        trainer,
        world=world,
        order=order,
        collect=collect,
        teacher=scorer(trainer.teacher),
        reference=scorer(trainer.reference),
        evaluate=trainer.evaluate and SharedEvaluation(evaluate=trainer.evaluate, **policy),
        progress=NoProgress() if world.rank else trainer.progress,
    )


class NullMetricsLog:
    """A metrics log that writes nothing, for all ranks but 0."""

    def truncate(self, step: int, evaluated: int) -> None:
        return

    def open(self, step: int) -> None:
        return

    def write(self, row: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEvaluation:
    """An evaluation whose episodes the ranks divide (`DividedEvaluation`); its result is broadcast.

    One that cannot be divided is played by rank 0 while the others wait.
    """

    evaluate: Callable[[int], EvalPoint] | DividedEvaluation
    world: World
    model: Any
    servers: SharedServers | None = None

    def __call__(self, step: int) -> EvalPoint:
        evaluation, world = self.evaluate, self.world
        with world.full_params(self.model):
            update_servers(world, self.servers)
            if callable(evaluation) and not hasattr(evaluation, "play_share"):
                return on_rank_zero(world, lambda: evaluation(step))
            divided = cast(DividedEvaluation, evaluation)
            on_rank_zero(world, lambda: divided.gather(step))
            on_all_ranks(world, lambda: divided.play_share(step, (world.rank, world.size)))
            return on_rank_zero(world, lambda: divided.finish(step))


def _take(items: Sequence[T], own: NDArray[np.int64]) -> list[T]:
    return [items[place] for place in own]
