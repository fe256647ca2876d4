"""Sends new weights to running servers through files, and the steps that every way of sending shares."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.errors import ServerError, SyncError
from turngym.agents.sglang.options import Busy

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
