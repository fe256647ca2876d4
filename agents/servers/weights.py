"""How servers get the weights of a model in this process.

`DiskSync` writes them to a folder that both sides see, `BroadcastSync` sends them through a process group.
`SyncedPolicy` does either whenever the model has changed, sees what the servers compute then (`canary.py`), and
generates with them.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.servers.canary import Canary, CanaryError
from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.policy import ServerPolicy
from turngym.agents.servers.server_connection import Call, ServerError, SyncError, WeightGroup
from turngym.agents.servers.server_options import Busy
from turngym.core.errors import is_disk_full
from turngym.core.protocols import GenerateRequest, Generation, WeightSink

# torch is imported where a broadcast needs it: evaluation on servers works without it
if TYPE_CHECKING:
    from torch import Tensor


def free_port(host: str = "") -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


KEPT_FOLDERS = 2
"""Number of weight folders to keep: the newest, and the one before, which a server may still be reading."""


@contextlib.contextmanager
def handed_over(fleet: Fleet, name: str, version: int, busy: Busy) -> Iterator[None]:
    """Context in which the servers get the weights `name`; they draw nothing meanwhile from what they hold half.

    Raises SyncError unless every server reports them at its end.
    """
    before, after = fleet.dialect.hold_calls(busy)
    # requests name their adapter: those in flight end with the one that they began with
    if fleet.versions.adapters and busy == "wait":
        before, after = [], []
    fleet.versions.announce(name, version)
    try:
        # within the try: where one server refuses, the others may be paused already
        if before:
            fleet.call_all(*before)
        yield
    finally:
        if after:
            fleet.call_all(*after)
    for server in fleet.servers:
        if not fleet.versions.adapters and (served_name := fleet.weights_of(server.url)) != name:
            raise SyncError(f"{server.url} was given the weights {name!r}, but says {served_name!r}")
    fleet.versions.settle(name)


@dataclass(slots=True, kw_only=True)
class DiskSync:
    """Implements `WeightSink`: writes the weights to a folder, and makes the servers read it.

    A folder is complete or absent, since it gets its name when everything is in it. The newest two are kept. A server
    that was restarted with other weights is given the newest again during the run.

    Raises (`publish`):
        SyncError: the disk is full, a server cannot read the folder, or a server is down. The run can be resumed from
            its last checkpoint.
    """

    fleet: Fleet
    save: Callable[[Path], None]
    """Writes config.json and safetensors of the weights as they are now; with `versions.adapters`, an adapter alone."""
    folder: Path
    """A folder of this run alone: weights that an earlier process left there are removed."""
    busy: Busy = "wait"
    restart: Callable[[Path], None] | None = None
    """Starts this run's own server again, with the weights in a folder; for one that cannot take new ones."""
    published: int | None = field(default=None, init=False)
    """Version of the weights that the servers have."""
    _folders: list[Path] = field(default_factory=list, init=False)
    _newest: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        # left by earlier processes of this run; a killed one leaves a part
        self._folders += sorted([*self.folder.glob("turngym-*"), *self.folder.glob(".turngym-*.part")])
        self.fleet.repair = self._repair

    def publish(self, version: int) -> None:
        """Give every server the weights as they are now, as `version`; returns when all have them."""
        name = self.fleet.versions.new_name(version)
        path = self._write(name)
        self._folders.append(path)
        for old in self._folders[:-KEPT_FOLDERS]:
            if old != self._newest:  # after failures the servers may still have weights older than the newest two
                self._remove(old)
        try:
            with handed_over(self.fleet, name, version, self.busy):
                self.fleet.call_all(*self._calls(path))
        # a ServerError too, but one that already says what is wrong
        except SyncError:
            raise
        except ServerError as error:
            raise SyncError(f"weights of version {version} in {path} did not reach every server: {error}") from error
        self.published, self._newest = version, path

    def close(self) -> None:
        """Remove the folders; the servers keep what they have read, but for adapters."""
        self.fleet.repair = None
        for path in list(self._folders):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self._folders.remove(path)
        if self.fleet.versions.adapters:
            # a server that was restarted does not know it
            with contextlib.suppress(ServerError):
                self.fleet.call_all(self.fleet.dialect.adapter_calls(str(path), path.name)[1])

    def start_again(self) -> None:
        """Has this run's own server started again with the newest folder. Raises SyncError where it cannot."""
        if self.restart is None or self._newest is None or self.fleet.versions.adapters:
            raise SyncError("the servers were not started by this run")
        self.restart(self._newest)
        self.fleet.call_all(("POST", "/update_weight_version", {"new_version": self._newest.name}))

    def _calls(self, path: Path) -> list[Call]:
        dialect = self.fleet.dialect
        if self.fleet.versions.adapters:
            return [dialect.adapter_calls(str(path), path.name)[0]]
        return dialect.folder_calls(str(path), path.name)

    def _write(self, name: str) -> Path:
        path, part = self.folder / name, self.folder / f".{name}.part"
        try:
            part.mkdir(parents=True)
            self.save(part)
            part.rename(path)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            why = "no room left on the disk, make room" if is_disk_full(error) else error.strerror or str(error)
            raise SyncError(
                f"cannot write the weights for the servers to {path}: {why}; then resume the run"
            ) from error
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return path

    def _repair(self, url: str) -> None:
        """Called in a thread of its own, while requests wait."""
        name = self.fleet.versions.current
        if self._newest is None or name != self._newest.name:
            raise SyncError(f"{url} has other weights than it was given, and there are none yet to give it again")
        urls = [server.url for server in self.fleet.servers]
        for target in [url] if url in urls else urls:
            # reading takes long, so of the servers behind a router only those that need it do it
            if self.fleet.versions.adapters or self.fleet.weights_of(target) != name:
                self.fleet.call_one(target, *self._calls(self._newest))


Named = tuple[str, "Tensor"]
SENT_AS = ("bfloat16", "float16")
"""A server in half precision rounds what it gets, so weights are sent rounded: half the bytes, the same result."""
POLL = 0.002
"""Seconds between looks at a broadcast."""
REFUSAL_WAIT = 0.05
"""Seconds in which a server refuses a bucket, if it does."""


def buckets(weights: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Groups of at most `limit` bytes; a larger tensor is a group of its own."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in weights:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + tensor_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor_bytes
    if bucket:
        yield bucket


@dataclass(slots=True, kw_only=True)
class BroadcastSync:
    """Implements `WeightSink`: broadcasts the weights in a process group of this process (rank 0) and the servers.

    Every bucket is announced over HTTP first. A bucket is only sent if no server refuses it, so that no process waits
    for a broadcast that does not happen. If a transfer fails half way, the servers hold a mixture. They are then told a
    name for it that no run knows, so that their answers are refused until a `publish` succeeds. A server that was
    restarted is given everything again, in a new group.

    After a restart `weights` is read in a thread of its own, so the weights must not change while requests are in
    flight.

    Raises (`publish`):
        SyncError: a server is down or refuses, or does not join within `timeout` seconds.
    """

    fleet: Fleet
    weights: Callable[[], Iterable[Named]]
    """Name, as in the checkpoint, and tensor of everything that the servers load; tied tensors once."""
    address: str = "127.0.0.1"
    """Where the servers reach this machine."""
    backend: str = "gloo"
    """`nccl` if both sides are on GPUs."""
    busy: Busy = "wait"
    bucket_bytes: int = 1 << 29
    timeout: float = 120.0
    published: int | None = field(default=None, init=False)
    _kind: type[WeightGroup] = field(init=False)
    _group: Any = field(default=None, init=False)
    _name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if any(server.replicas > 1 for server in self.fleet.servers):
            raise SyncError("a broadcast does not reach data-parallel copies: use --dp-size 1, or the disk")
        self._kind = self.fleet.dialect.group(self.backend)
        self.fleet.repair = self._repair

    def publish(self, version: int) -> None:
        """Give every server the weights as they are now, as `version`; returns when all have them."""
        name = self.fleet.versions.new_name(version)
        self._create_group()
        with handed_over(self.fleet, name, version, self.busy):
            self._transfer(name)
        self.published = version

    def close(self) -> None:
        self.fleet.repair = None
        self._destroy_group()

    def _transfer(self, name: str) -> None:
        sent = False
        try:
            self.fleet.call_all(self._kind.begin)
            try:
                # the last bucket, behind which None follows, names the weights
                bounded = itertools.chain(buckets(self._tensors(), self.bucket_bytes), [None])
                for bucket, following in itertools.pairwise(bounded):
                    assert bucket is not None
                    self._send(bucket, name if following is None else None)
                    sent = True
            finally:
                self.fleet.call_all(self._kind.end(name))
        except (ServerError, RuntimeError) as error:
            self._destroy_group()
            # theirs get a name that no run knows, so that their answers are refused
            body = {"new_version": f"{name}-incomplete", "abort_all_requests": False}
            for server in self.fleet.servers if sent else ():
                with contextlib.suppress(ServerError):
                    self.fleet.call_one(server.url, ("POST", "/update_weight_version", body))
            state = "a mixture, not used until new weights arrive" if sent else "as before"
            raise SyncError(f"weights {name!r} did not reach every server; theirs are {state}: {error}") from error

    def _send(self, bucket: Sequence[Named], version: str | None) -> None:
        call = self._kind.bucket(bucket, self._name, version)
        # ends: an administrative call has a limit
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.fleet.call_all, call)
            # a server that refuses says so at once; one that accepts answers only after the broadcast
            wait([answer], REFUSAL_WAIT)
            if answer.done():
                answer.result()  # ends: it is done
            # polled below, since wait() would not notice a server that fails meanwhile
            broadcasts = [self._group.send(tensor) for _, tensor in bucket]
            end = time.monotonic() + self.timeout
            while not all(done() for done in broadcasts):
                # ends: it is asked where it is done
                if (answer.done() and answer.exception() is not None) or time.monotonic() > end:
                    break
                time.sleep(POLL)
            else:
                answer.result(self.timeout)
                return
            # the group is destroyed before the pool waits for its thread, so that a listening server is released
            self._destroy_group()
            answer.result(self.timeout)
            raise SyncError(f"the servers did not join the broadcast within {self.timeout:.0f} s")

    def _tensors(self) -> Iterator[Named]:
        """The weights, contiguous, in the servers' precision and on the group's device."""
        import torch

        dtype = self.fleet.servers[0].dtype
        target = getattr(torch, dtype) if dtype in SENT_AS else None
        device = "cuda" if self.backend == "nccl" else "cpu"
        for name, tensor in self.weights():
            yield name, tensor.detach().to(device=device, dtype=target or tensor.dtype).contiguous()

    def _create_group(self) -> None:
        if self._group is not None:
            return
        self._name = f"group-{self.fleet.versions.new_name(0)}"
        port, ranks = free_port(), [server.ranks for server in self.fleet.servers]
        offsets = [1 + sum(ranks[:number]) for number in range(len(ranks))]
        world = 1 + sum(ranks)
        # all at the same time, since each call blocks until every member has joined; ends: each has a limit
        with ThreadPoolExecutor(1 + len(ranks)) as pool:
            group = pool.submit(self._kind, self.address, port, world, self._name, self.timeout)
            joins = [self._kind.join(self.address, port, world, self._name, offset) for offset in offsets]
            urls = [server.url for server in self.fleet.servers]
            answers = [pool.submit(self.fleet.call_one, url, join) for url, join in zip(urls, joins, strict=True)]
            try:
                for answer in answers:
                    answer.result(self.timeout)
                self._group = group.result(self.timeout)
            except (ServerError, TimeoutError) as error:
                raise SyncError(f"the servers did not join the process group: {error}") from error

    def _destroy_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for server in self.fleet.servers:
            # a server that was restarted does not know the group
            with contextlib.suppress(ServerError):
                self.fleet.call_one(server.url, self._kind.leave(self._name))
        # the group may be broken already
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            group.close()

    def _repair(self, url: str) -> None:
        """Called in a thread of its own, while requests wait."""
        if self.published is None:
            raise SyncError(f"{url} has other weights than it was given, and there are none yet to give it again")
        self._destroy_group()
        self.publish(self.published)


@dataclass(slots=True, kw_only=True)
class SyncedPolicy:
    """Implements `Policy` on servers that have the weights of a model in this process.

    With `stamp` the servers get the weights before the first request and after each change, announced or not. So a
    resumed run, or an evaluation before the first update, never plays with the weights that a server happens to have.

    Without `stamp` they get them in `weights_changed` alone, because the model changes while they answer. Another
    thread may call it while requests are in flight: their responses record which weights sampled which ids. Nothing may
    be generated before its first call.
    """

    policy: ServerPolicy
    sink: WeightSink
    stamp: Callable[[], int] | None
    """A number that changes when the model's weights change, whatever version was announced."""
    canary: Canary | None = None
    """Sees what the servers compute whenever they have got weights."""
    sleeps: bool = False
    """Whether the servers give their memory back in `sleep`."""
    version: int = 0
    """Version of the model's weights that was announced last."""
    _asleep: bool = field(default=False, init=False)
    _sent: tuple[int, int] | None = field(default=None, init=False)
    """Version and stamp of the weights that the servers have."""

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.policy.max_length

    @property
    def vocab_size(self) -> int | None:
        """Only the first so many ids are drawn; None: all of the model's."""
        return self.policy.vocab_size

    @property
    def policy_version(self) -> int:
        """Version of the weights that the servers were given last."""
        return self.policy.policy_version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request, with the model's weights as they are now if `stamp` tells."""
        self._follow()
        return self.policy.generate(requests)

    def for_workers(self) -> Any:
        """How worker processes make clients of the same servers, which get the model's weights as they are now."""
        self._follow()
        return self.policy.for_workers()

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self.policy.release(session)

    def weights_changed(self, version: int) -> None:
        """The model has new weights; with `stamp` they are sent before the next request, else now.

        Raises SyncError as the sink does, and ServerError if the servers compute something else than the model.
        """
        self.version = version
        if self.stamp is None:
            self._publish()

    def publish_now(self) -> tuple[str | None, int]:
        """Send the weights if a new version was announced; returns name and version of those the servers have then.

        For several processes that share the servers: one of them calls this before any of them plays, and the others
        pass the result to `adopt`.
        """
        if self._sent is None or self._sent[0] != self.version:
            self._publish()
        self._sent = self._now()
        return self.policy.fleet.versions.current, self.policy.fleet.versions.version

    def adopt(self, name: str, version: int) -> None:
        """Record that another process has sent the servers the weights `name`; this one does not send its own."""
        if name != self.policy.fleet.versions.current:
            self.policy.fleet.versions.add(name, version)
        self.version = version
        self._sent = self._now()

    def close(self) -> None:
        """Close the connections; the servers keep what they have."""
        self.sink.close()
        self.policy.fleet.close()

    def _now(self) -> tuple[int, int]:
        return self.version, 0 if self.stamp is None else self.stamp()

    def sleep(self) -> None:
        """Nothing is generated for a while; the servers wake, and get the weights again, with the next request."""
        if self.sleeps and not self._asleep:
            self._asleep, self._sent = True, None
            self.policy.fleet.call_all(self.policy.fleet.dialect.sleep_calls()[0])

    def _follow(self) -> None:
        if self.stamp is not None and self._now() != self._sent:
            self._publish()

    def _publish(self) -> None:
        sent = self._now()
        if self._asleep:
            self.policy.fleet.call_all(self.policy.fleet.dialect.sleep_calls()[1])
            self._asleep = False
        self.sink.publish(self.version)
        if self.canary is not None:
            try:
                self.canary.check()
            except CanaryError as error:
                if not isinstance(self.sink, DiskSync) or self.sink.restart is None:
                    raise
                print(f"note: {error}. It is started again with them", file=sys.stderr)
                self.sink.start_again()
                self.canary.check()
        self._sent = sent
