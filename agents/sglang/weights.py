"""How SGLang servers get new weights: through a folder that both sides see (`DiskSync`), or by broadcast."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.sglang.client import Busy, ServerError, SyncError
from turngym.agents.sglang.fleet import Fleet
from turngym.agents.sglang.policy import SglangPolicy
from turngym.envs.core.protocols import GenerateRequest, Generation, WeightSink

# torch is imported where a broadcast needs it: evaluation on servers works without it
if TYPE_CHECKING:
    from torch import Tensor

# A process group of this process (rank 0) and the servers' workers, beside whatever group the trainer has.


def free_port(host: str = "") -> int:
    """A TCP port that is free now."""
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])


def create_group(address: str, port: int, world: int, name: str, backend: str, timeout: float) -> Any:
    """Create the group `name` as its rank 0; blocks until all `world` members are there.

    The members find each other as SGLang's workers expect it: a TCP store at `address`:`port`, keys under `name`. The
    public torch.distributed.init_process_group would make it the process's default group, of which a trainer has one.

    Raises SyncError where they do not come within `timeout` seconds.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(address, port, world, is_master=True, timeout=limit, wait_for_workers=False)
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            world,
            0,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # a NewType that older releases of torch do not have
            timeout=limit,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise SyncError(f"no {backend} group of {world} members at {address}:{port}: {error}") from error
    # init_process_group and new_group do this for the groups that they make; the helper does not
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def destroy_group(group: Any) -> None:
    """Destroy the group; one that is broken already is fine."""
    import torch.distributed

    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        torch.distributed.destroy_process_group(group)


# Sends new weights to running servers through files, and the steps that every way of sending shares.

KEPT_FOLDERS = 2
"""Folders of weights that stay: the newest, and the one before for a server that is still reading it."""


@contextlib.contextmanager
def generation_paused(fleet: Fleet, busy: Busy) -> Iterator[None]:
    """Context in which the servers generate nothing; they resume on leaving it, also after an error."""
    if busy == "wait":
        yield
        return
    fleet.call_all("POST", "/pause_generation", {"mode": busy})
    try:
        yield
    finally:
        fleet.call_all("POST", "/continue_generation", {})


def check_weights_arrived(fleet: Fleet, name: str) -> None:
    """Raises SyncError unless every server says that it has the weights `name`."""
    for server, info in zip(fleet.servers, fleet.call_all("GET", "/model_info"), strict=True):
        if info.get("weight_version") != name:
            raise SyncError(f"{server.url} was given the weights {name!r}, but says {info.get('weight_version')!r}")


@dataclass(slots=True, kw_only=True)
class DiskSync:
    """Implements `WeightSink`: writes the weights to a folder that the servers can read, and has them read it.

    A folder is complete or absent: it gets its name when everything is in it. The newest two stay. A server that comes
    back with other weights (it was restarted) is given the newest again by itself, in the middle of a run.

    Raises (`publish`):
        SyncError: a disk that is full, a folder that a server cannot read, a server that is down. The run can be
            resumed from its last checkpoint.
    """

    fleet: Fleet
    save: Callable[[Path], None]
    """Writes config.json and safetensors of the weights as they are now."""
    folder: Path
    """Of this run alone: weights that an earlier process left there make room."""
    busy: Busy = "wait"
    published: int | None = field(default=None, init=False)
    """Version of the weights that the servers have."""
    _folders: list[Path] = field(default_factory=list, init=False)
    _newest: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        # what earlier processes of this run left; a killed one leaves a part
        self._folders += sorted([*self.folder.glob("turngym-*"), *self.folder.glob(".turngym-*.part")])
        self.fleet.repair = self._repair

    def publish(self, version: int) -> None:
        """Give every server the weights as they are now, as `version`; returns when all have them."""
        versions = self.fleet.versions
        name = versions.new_name(version)
        path = self._write(name)
        self._remove_old(path)
        versions.announce(name, version)
        try:
            with generation_paused(self.fleet, self.busy):
                self.fleet.call_all("POST", "/update_weights_from_disk", self._body(path, name))
            check_weights_arrived(self.fleet, name)
        # a ServerError too, but one that says already what is wrong
        except SyncError:
            raise
        except ServerError as error:
            raise SyncError(f"weights of version {version} in {path} did not reach every server: {error}") from error
        versions.settle(name)
        self.published, self._newest = version, path

    def close(self) -> None:
        """Remove the folders; servers keep what they have read."""
        self.fleet.repair = None
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)
        self._folders.clear()

    def _body(self, path: Path, name: str) -> dict[str, object]:
        return {"model_path": str(path), "weight_version": name, "flush_cache": True, "abort_all_requests": False}

    def _write(self, name: str) -> Path:
        path, part = self.folder / name, self.folder / f".{name}.part"
        try:
            part.mkdir(parents=True)
            self.save(part)
            part.rename(path)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise SyncError(
                f"cannot write the weights for the servers to {path}: {error}; make room and resume the run"
            ) from error
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return path

    def _remove_old(self, path: Path) -> None:
        self._folders.append(path)
        for old in self._folders[:-KEPT_FOLDERS]:
            if old != self._newest:  # after failures the servers' weights may be older than the newest two
                shutil.rmtree(old, ignore_errors=True)
                self._folders.remove(old)

    def _repair(self, url: str) -> None:
        """Runs in a thread of its own, while requests wait."""
        name = self.fleet.versions.current
        if self._newest is None or name != self._newest.name:
            raise SyncError(f"{url} has other weights than it was given, and there are none yet to give it again")
        urls = [server.url for server in self.fleet.servers]
        for one in [url] if url in urls else urls:
            # of the servers behind a router only those that need it: reading takes long
            if self.fleet.call_one(one, "GET", "/model_info").get("weight_version") != name:
                self.fleet.call_one(one, "POST", "/update_weights_from_disk", self._body(self._newest, name))


Named = tuple[str, "Tensor"]
SENT_AS = ("bfloat16", "float16")
"""A server in half precision rounds what it gets, so weights are sent rounded: half the work, the same result."""
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
        import torch

        dtype = self.fleet.servers[0].dtype
        target = getattr(torch, dtype) if dtype in SENT_AS else None
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


# A policy on servers that answer while a model in this process learns, and get its weights when it says so.


@dataclass(slots=True, kw_only=True)
class LivePolicy:
    """Implements `Policy`. `SyncedPolicy` looks at the model before each request; here it is being changed then.

    `weights_changed` may be called by another thread than the one that generates: responses that the servers are
    drawing meanwhile say which ids are whose. Nothing may be generated before its first call.
    """

    policy: SglangPolicy
    sink: WeightSink
    first: Callable[[], None] | None = None
    """Called when the servers have the weights for the first time: is what they compute what the model computes?"""
    _published: bool = field(default=False, init=False)

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.policy.max_length

    @property
    def policy_version(self) -> int:
        return self.policy.policy_version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request with the weights that the servers have."""
        return self.policy.generate(requests)

    def release(self, session: str) -> None:
        self.policy.release(session)

    def weights_changed(self, version: int) -> None:
        """Send the model's weights as they are now; returns when all servers have them.

        Raises SyncError as the sink does, and ServerError where the servers compute something else.
        """
        self.sink.publish(version)
        if not self._published and self.first is not None:
            self.first()
        self._published = True

    def as_json(self) -> dict[str, Any]:
        return {"servers_version": self.policy.policy_version}

    def close(self) -> None:
        """Close the connections; the servers go on with what they have."""
        self.sink.close()
        self.policy.fleet.close()


# A policy on servers whose weights follow a model in this process.


@dataclass(slots=True, kw_only=True)
class SyncedPolicy:
    """Implements `Policy`: the servers get the model's weights before the first request, and after each change.

    A change that was not announced is noticed, too (`stamp` differs), so that a resumed run and an evaluation
    before the first update never play with what the servers happened to have.
    """

    policy: SglangPolicy
    sink: WeightSink
    stamp: Callable[[], int]
    """Changes whenever the model's weights do; what it says counts beside the announced version."""
    first: Callable[[], None] | None = None
    """Called when the servers have the weights for the first time: is what they compute what the model computes?"""
    version: int = 0
    """Of the model's weights, as they were last announced."""
    _sent: tuple[int, int] | None = field(default=None, init=False)

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.policy.max_length

    @property
    def policy_version(self) -> int:
        return self.policy.policy_version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request with the model's weights as they are now."""
        self._publish()
        return self.policy.generate(requests)

    def for_workers(self) -> Any:
        """How worker processes make clients of the same servers, which get the model's weights as they are now."""
        self._publish()
        return self.policy.for_workers()

    def release(self, session: str) -> None:
        self.policy.release(session)

    def weights_changed(self, version: int) -> None:
        """The model has new weights; they are sent, as `version`, before the next request."""
        self.version = version

    def publish_now(self) -> tuple[str | None, int]:
        """Send the weights if others have been announced since; what the servers have then, for `adopt` elsewhere.

        For several processes that share the servers: one of them calls this before any of them plays.
        """
        if self._sent is None or self._sent[0] != self.version:
            self._publish()
        self._sent = self.version, self.stamp()
        return self.policy.fleet.versions.current, self.policy.fleet.versions.version

    def adopt(self, name: str, version: int) -> None:
        """The servers have the weights `name`, which another process has sent; this one does not send its own."""
        if name != self.policy.fleet.versions.current:
            self.policy.fleet.versions.add(name, version)
        self.version = version
        self._sent = version, self.stamp()

    def close(self) -> None:
        """Close the connections; the servers go on with what they have."""
        self.sink.close()
        self.policy.fleet.close()

    def _publish(self) -> None:
        now = self.version, self.stamp()
        if now == self._sent:
            return
        self.sink.publish(self.version)
        new = self._sent is None
        self._sent = now
        if new and self.first is not None:
            self.first()
