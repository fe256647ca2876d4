"""Sends new weights to servers by torch.distributed broadcast (gloo or NCCL), without a disk in between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.errors import ServerError, SyncError
from turngym.agents.sglang.options import Busy
from turngym.agents.sglang.weights.process_group import create_group, destroy_group, free_port
from turngym.agents.sglang.weights.sync import check_weights_arrived, generation_paused

Named = tuple[str, Tensor]
SENT_AS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""A server in half precision rounds what it gets: sending it rounded is half the work and the same result."""
POLL = 0.002


def buckets(weights: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Groups of at most `limit` bytes; one that is larger by itself is alone."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in weights:
        more = tensor.numel() * tensor.element_size()
        if bucket and size + more > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket


@dataclass(slots=True, kw_only=True)
class BroadcastSync:
    """Implements `WeightSink`: the servers listen in a process group of which this process is rank 0.

    Every stretch of weights is announced over HTTP first. A server that refuses says so at once, and only where none
    does is anything sent, so that no process waits in a broadcast that will not happen. A transfer that fails half
    way leaves a mixture: the servers' weights get a name that no run knows, their answers are refused, and the next
    `publish` that succeeds puts an end to that. A server that was restarted is given everything again, in a new group.

    `weights` is read while nothing is drawn for `publish`, but in a thread of its own after a restart: the weights must
    not change while requests are under way.

    Raises (`publish`):
        SyncError: a server that is down or refuses, or does not listen within `timeout` seconds.
    """

    fleet: Fleet
    weights: Callable[[], Iterable[Named]]
    """Name, as in the checkpoint, and tensor of everything that the servers load; tied ones once."""
    address: str = "127.0.0.1"
    """Where the servers reach this machine."""
    backend: str = "gloo"
    """`nccl` where both sides are on GPUs."""
    busy: Busy = "wait"
    bucket_bytes: int = 1 << 29
    timeout: float = 120.0
    published: int | None = field(default=None, init=False)
    _group: Any = field(default=None, init=False)
    _name: str = field(default="", init=False)
    _numbers: Any = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        if any(server.replicas > 1 for server in self.fleet.servers):
            raise SyncError("a broadcast does not reach data-parallel copies: use --dp-size 1, or the disk")
        self.fleet.repair = self._repair

    def publish(self, version: int) -> None:
        """Give every server the weights as they are now, as `version`; returns when all have them."""
        versions = self.fleet.versions
        name = versions.new_name(version)
        self._create_group()
        versions.announce(name, version)
        with generation_paused(self.fleet, self.busy):
            self._transfer(name)
        check_weights_arrived(self.fleet, name)
        versions.settle(name)
        self.published = version

    def close(self) -> None:
        """Dissolve the group."""
        self.fleet.repair = None
        self._destroy_group()

    def _transfer(self, name: str) -> None:
        sent = False
        try:
            self.fleet.call_all("POST", "/begin_weight_update", {})
            try:
                for bucket, last in _with_last(buckets(self._tensors(), self.bucket_bytes)):
                    self._send(bucket, name if last else None)
                    sent = True
            finally:
                self.fleet.call_all("POST", "/end_weight_update", {})
        except (ServerError, RuntimeError) as error:
            self._destroy_group()
            if sent:
                self._mark_incomplete(name)
            state = "a mixture, not used until new weights arrive" if sent else "as before"
            raise SyncError(f"weights {name!r} did not reach every server; theirs are {state}: {error}") from error

    def _send(self, bucket: Sequence[Named], version: str | None) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            # with the last stretch only: until then the weights are a mixture
            "flush_cache": version is not None,
            "weight_version": version,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.fleet.call_all, "POST", "/update_weights_from_distributed", body)
            raise_early_refusal(answer)
            # polled below: wait() would not notice a server that fails meanwhile
            works = [self._group.broadcast(tensor, 0) for _, tensor in bucket]
            end = time.monotonic() + self.timeout
            while not all(work.is_completed() for work in works):
                if (answer.done() and answer.exception() is not None) or time.monotonic() > end:
                    break
                time.sleep(POLL)
            else:
                answer.result(self.timeout)
                return
            # the group ends before the pool does: a server that still listens is let go
            self._destroy_group()
            answer.result(self.timeout)
            raise SyncError(f"the servers did not join the broadcast within {self.timeout:.0f} s")

    def _tensors(self) -> Iterator[Named]:
        """Contiguous, in the precision of the servers, on the device of the group."""
        target = SENT_AS.get(self.fleet.servers[0].dtype)
        device = "cuda" if self.backend == "nccl" else "cpu"
        for name, tensor in self.weights():
            yield name, tensor.detach().to(device=device, dtype=target or tensor.dtype).contiguous()

    def _create_group(self) -> None:
        if self._group is not None:
            return
        self._name = f"turngym-{self.fleet.versions.new_name(0)}-{next(self._numbers)}"
        port, ranks = free_port(), [server.ranks for server in self.fleet.servers]
        offsets = [1 + sum(ranks[:number]) for number in range(len(ranks))]
        common = {"master_address": self.address, "master_port": port, "world_size": 1 + sum(ranks)}
        common |= {"group_name": self._name, "backend": self.backend}
        at, path = self.fleet.call_one, "/init_weights_update_group"
        # all at once: each side blocks until every member is there
        with ThreadPoolExecutor(1 + len(ranks)) as pool:
            mine = pool.submit(create_group, self.address, port, 1 + sum(ranks), self._name, self.backend, self.timeout)
            theirs = [
                pool.submit(at, server.url, "POST", path, common | {"rank_offset": offset})
                for server, offset in zip(self.fleet.servers, offsets, strict=True)
            ]
            try:
                for one in theirs:
                    one.result(self.timeout)
                self._group = mine.result(self.timeout)
            except (ServerError, TimeoutError) as error:
                raise SyncError(f"the servers and this process do not come together: {error}") from error

    def _destroy_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for server in self.fleet.servers:
            try:
                self.fleet.call_one(server.url, "POST", "/destroy_weights_update_group", {"group_name": self._name})
            except ServerError:
                continue  # it was restarted, and knows nothing of the group
        destroy_group(group)

    def _mark_incomplete(self, name: str) -> None:
        """Give the servers' weights a name that no run knows, so that their answers are refused."""
        for server in self.fleet.servers:
            body = {"new_version": f"{name}-incomplete", "abort_all_requests": False}
            try:
                self.fleet.call_one(server.url, "POST", "/update_weight_version", body)
            except ServerError:
                continue

    def _repair(self, url: str) -> None:
        """Runs in a thread of its own, while requests wait."""
        if self.published is None:
            raise SyncError(f"{url} has other weights than it was given, and there are none yet to give it again")
        self._destroy_group()
        self.publish(self.published)


def raise_early_refusal(answer: Future[Any], patience: float = 0.05) -> None:
    """Raises what a server refuses at once; a server that listens does not answer before it has heard."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if answer.done():
            answer.result()
            return
        time.sleep(POLL)


def _with_last(items: Iterable[list[Named]]) -> Iterator[tuple[list[Named], bool]]:
    """Each item, and whether it is the last."""
    before: list[Named] | None = None
    for item in items:
        if before is not None:
            yield before, False
        before = item
    if before is not None:
        yield before, True
