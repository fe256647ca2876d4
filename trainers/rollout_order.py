"""In which order a run plays and learns: each batch when its step comes, or ahead of it by an older student.

`RolloutSchedule` is the ordinary one. `AsyncRollout` plays batch t with the weights after step t - 1 - K, whatever the
timing, so that a run repeats itself exactly.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turngym.core.episode import Episode
from turngym.core.protocols import RolloutSource
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.trainers.algorithm import Algorithm, DepthPlan
from turngym.trainers.ranks import SINGLE, Ranks, on_all_ranks, on_rank_zero
from turngym.trainers.run_config import Stale
from turngym.trainers.tensor_file import read_tensors
from turngym.trainers.token_losses import TruncatedImportance

if TYPE_CHECKING:
    from turngym.agents.servers.weights import SyncedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch to be played, as it was planned when its episodes began."""

    plan: DepthPlan
    request: RolloutRequest


class RolloutSchedule:
    """Gives a step its episodes: each batch is planned and played when its step comes, by the student as it is then."""

    def __call__(
        self, step: int, planned: Callable[[int], Planned], source: RolloutSource
    ) -> tuple[Planned, list[Episode]]:
        current = planned(step)
        return current, source(current.request)

    def learned(self, step: int) -> None:
        """Tells the order that the weights have learned from the episodes of `step`, which later checkpoints need not
        hold."""

    def save(self, folder: Path) -> None:
        """Adds what is kept from step to step to a checkpoint that is being written."""

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""

    def close(self) -> None:
        """The run is over, or broken off."""


AHEAD_FILE = "ahead.pt"
"""File in a checkpoint: the batches that were planned and not yet learned from."""
Weights = Mapping[str, Tensor]


def truncated(algorithm: Algorithm, stale: Stale | None) -> Algorithm:
    """`algorithm` with its importance ratios truncated at `importance_cap`; itself where nothing is stale."""
    if stale is None:
        return algorithm
    settings = {"staleness": stale.staleness, "importance_cap": stale.importance_cap}
    loss = TruncatedImportance(loss=algorithm.token_loss, cap=stale.importance_cap)
    return replace(algorithm, token_loss=loss, settings={**algorithm.settings, **settings})


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """A copy of the student that plays: it gets the student's weights of some step, and its engine is told."""

    student: Any
    model: Any
    """The copy (`frozen_copy`), which nobody trains."""
    announce: Callable[[int], None]
    """Called with the version of the weights that have just been put in place."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, the student has all of its parameters; several processes hold shares of them otherwise."""

    def take(self) -> Weights:
        """The student's weights as they are now."""
        with self.whole():
            # cloned: the optimizer goes on changing the student's tensors in place
            return {name: value.detach().clone() for name, value in self.student.state_dict().items()}

    def put(self, weights: Weights, version: int) -> None:
        """Play with `weights` from now on."""
        # before the announcement, after which the engine generates under the new version
        self.model.load_state_dict(weights)
        self.announce(version)


def frozen_copy(student: Any) -> Any:
    """A copy of a model that takes no gradients."""
    return copy.deepcopy(student).requires_grad_(False)


def update_servers(ranks: Ranks, servers: SyncedPolicy | None) -> None:
    """Before a rollout: rank 0 sends new weights to the servers, the other ranks record their version."""
    if servers is not None:
        name, version = on_rank_zero(ranks, servers.publish_now)
        # rank 0 has just recorded what it sent
        if ranks.rank and name is not None:
            servers.adopt(name, version)


def gather_shares(ranks: Ranks, request: RolloutRequest, own: Callable[[], list[Episode]]) -> list[Episode]:
    """All episodes of `request`, on every rank; all meet here, also those whose share is empty."""
    if ranks.size == 1:
        return own()
    parts = ranks.all_gather(on_all_ranks(ranks, own))
    # `RolloutRequest.own` deals the episodes out round robin
    return [parts[index % ranks.size][index // ranks.size] for index in range(request.episodes)]


@dataclass(slots=True)
class _Batch:
    planned: Planned
    version: int
    """Steps done when it was planned: whose weights play it."""
    weights: Weights
    episodes: Future[list[Episode]] | None = None
    """Episodes that this process plays."""
    gathered: bool = False


@dataclass(slots=True, kw_only=True)
class AsyncRollout(RolloutSchedule):
    """Batch t is planned before step t - K and played while steps t - K to t - 1 run.

    The schedule is fixed: batch t is played with the weights after step max(0, t - 1 - K), its depth planned with the
    depth state of then, however long playing and learning take. One thread plays, a batch at a time, in order; it
    leaves the processor to training only if the episodes are played by other processes or servers.

    Of several processes each plays its share in a thread that talks to no other; they meet where a step waits for its
    batch. Where they share servers, one batch is played at a time, beside the step before it.

    A checkpoint holds the plans and weights of the batches that were not yet learned from; a resumed run plays them
    again (the same episodes, since those follow from weights and request). It costs K copies of the weights.
    """

    staleness: int
    last: int
    """Steps of the run: nothing is played for later ones."""
    snapshot: WeightSnapshot
    cancel: Callable[[], None] = lambda: None
    """Breaks off what is being played."""
    ranks: Ranks = SINGLE
    servers: SyncedPolicy | None = None
    """Servers that several processes share: one batch is then played at a time."""
    _batches: deque[_Batch] = field(default_factory=deque, init=False)
    _player: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        # one thread: all batches are played by one copy of the model, which gets other weights in between
        self._player = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def __call__(
        self, step: int, planned: Callable[[int], Planned], source: RolloutSource
    ) -> tuple[Planned, list[Episode]]:
        first = self._batches[-1].planned.request.step + 1 if self._batches else step
        weights: Weights | None = None
        for number in range(first, min(step + self.staleness, self.last) + 1):
            # batches that are planned together share one copy: at the start these are K + 1 batches
            weights = self.snapshot.take() if weights is None else weights
            self._batches.append(_Batch(planned(number), step - 1, weights))
        self._begin(source)
        due = self._batches[0]
        assert due.planned.request.step == step, f"batch {due.planned.request.step} is due at step {step}"
        assert due.episodes is not None
        episodes = gather_shares(self.ranks, due.planned.request, due.episodes.result)
        due.gathered = True
        self._begin(source)
        # not taken out yet: an interrupt before it is learned from writes a checkpoint that must still hold the batch
        return due.planned, episodes

    def _begin(self, source: RolloutSource) -> None:
        """Let the thread play what it may, in order."""
        # what this process plays of a batch; in it no process talks to another
        share: RolloutSource = source if self.ranks.size == 1 else source.own  # type: ignore[attr-defined]
        for batch in self._batches:
            # also the batches of a checkpoint, which come back without episodes
            if batch.episodes is not None:
                continue
            if self.servers is None:
                batch.episodes = self._player.submit(self._play, batch, share)
            elif all(earlier.gathered for earlier in self._batches if earlier.episodes is not None):
                self.snapshot.put(batch.weights, batch.version)
                update_servers(self.ranks, self.servers)
                batch.episodes = self._player.submit(share, batch.planned.request)

    def learned(self, step: int) -> None:
        while self._batches and self._batches[0].planned.request.step <= step:
            self._batches.popleft()

    def _play(self, batch: _Batch, source: RolloutSource) -> list[Episode]:
        self.snapshot.put(batch.weights, batch.version)
        return source(batch.planned.request)

    def save(self, folder: Path) -> None:
        """Write what was not yet learned from; weights that several batches share are written once."""
        # plain dicts, since weights_only reads no classes of ours
        plain = [
            {"plan": asdict(batch.planned.plan), "request": asdict(batch.planned.request), "version": batch.version}
            for batch in self._batches
        ]
        weights = {batch.version: {k: v.cpu() for k, v in batch.weights.items()} for batch in self._batches}
        torch.save({"batches": plain, "weights": weights}, folder / AHEAD_FILE)

    def load(self, folder: Path) -> None:
        """Read it; the batches are played again when the first of them is asked for."""
        saved = read_tensors(folder / AHEAD_FILE)
        self._batches = deque(
            _Batch(
                Planned(plan=DepthPlan(**batch["plan"]), request=_request(batch["request"])),
                batch["version"],
                saved["weights"][batch["version"]],
            )
            for batch in saved["batches"]
        )

    def close(self) -> None:
        """Stop playing; waits until the thread has noticed."""
        # also where an interrupt came between the start of a batch and the note of it
        if any(batch.episodes is None or not batch.episodes.done() for batch in self._batches):
            # shutdown alone would wait for the batch in progress to be played to its end
            self.cancel()
        # ends: a rollout that was canceled ends with its turn
        self._player.shutdown(wait=True, cancel_futures=True)


def _request(saved: Mapping[str, Any]) -> RolloutRequest:
    """Returns the request that `asdict` made plain, its plan included."""
    return RolloutRequest(**{**saved, "plan": PlayPlan(**saved["plan"])})
