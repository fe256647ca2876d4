"""New weights: files that are whole or absent, transfers that nobody waits for in vain, versions that never mix."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_fake as fake
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from turngym.agents.servers import policy as worker_client
from turngym.agents.servers.fleet import Fleet, WeightVersions
from turngym.agents.servers.policy import ServerPolicy
from turngym.agents.servers.server_connection import ServerError, SyncError, WrongWeights
from turngym.agents.servers.weights import BroadcastSync, DiskSync, SyncedPolicy, buckets
from turngym.core.protocols import GenerateRequest, PartialFailure

FakeServer = fake.FakeServer
QUICK = fake.QUICK


@pytest.fixture
def servers() -> Iterator[tuple[Any, Any]]:
    with FakeServer() as one, FakeServer() as two:
        yield one, two


@pytest.fixture
def fleet(servers: Any) -> Iterator[Fleet]:
    one = Fleet(urls=[server.url for server in servers], settings=QUICK).open()
    yield one
    one.close()


def write(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def ask(turn: int = 0) -> GenerateRequest:
    return fake.ask(5, 6, most=4, stream=(turn,))


def test_the_ledger_by_hand() -> None:
    versions = WeightVersions()
    versions.add("default", 0)
    first = versions.place
    versions.announce("new", 3)
    assert versions.read((("default", 0, 2), ("new", 2, 5)), first, "here") == ((0, 0, 2), (3, 2, 5))
    assert (versions.current, versions.version) == ("default", 0)
    versions.settle("new")
    assert (versions.current, versions.version) == ("new", 3)
    assert versions.read((("default", 0, 2),), first, "here") == ((0, 0, 2),)  # sent before the change
    with pytest.raises(WrongWeights, match="weights 'default'; the server was last given 'new'"):
        versions.read((("default", 0, 2),), versions.place, "here")
    with pytest.raises(WrongWeights, match="'stranger'"):
        versions.read((("stranger", 0, 2),), first, "here")
    assert versions.new_name(4) != WeightVersions().new_name(4)


def test_files_reach_every_server_and_only_two_stay(servers: Any, fleet: Fleet, tmp_path: Path) -> None:
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path / "w")
    for version in (1, 2, 3):
        sink.publish(version)
        assert (fleet.versions.version, sink.published) == (version, version)
        assert len({server.weights for server in servers}) == 1
        for server in servers:
            (body,) = server.of("/update_weights_from_disk")[version - 1 :]
            assert (Path(body["model_path"]) / "model.safetensors").read_bytes() == b"weights"
            assert (body["weight_version"], body["flush_cache"]) == (fleet.versions.current, True)
            assert body["weight_version"].endswith(f"-v{version}")
    assert len(list((tmp_path / "w").iterdir())) == 2
    sink.close()
    assert not list((tmp_path / "w").iterdir())


def test_what_earlier_processes_left_makes_room(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("turngym-0a-1-v1", "turngym-0a-2-v2", ".turngym-0a-3-v3.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").mkdir()
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    sink.publish(1)
    sink.publish(2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 3
    assert left[0] == "notes"
    assert left[2] == fleet.versions.current


def test_a_full_disk_leaves_nothing_and_the_old_weights(servers: Any, fleet: Fleet, tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    sink = DiskSync(fleet=fleet, save=full, folder=tmp_path / "w")
    with pytest.raises(SyncError, match="no room left on the disk"):
        sink.publish(1)
    assert not list((tmp_path / "w").iterdir())
    assert fleet.versions.version == 0
    assert not servers[0].of("/update_weights_from_disk")


def test_a_server_that_cannot_read_the_folder(servers: Any, fleet: Fleet, tmp_path: Path) -> None:
    refusal = {"success": False, "message": "Failed to get weights iterator: no such folder"}
    servers[1].orders.append(lambda path, body: (400, refusal) if path == "/update_weights_from_disk" else None)
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    with pytest.raises(SyncError, match="no such folder") as caught:
        sink.publish(1)
    assert servers[1].url in str(caught.value)
    assert fleet.versions.version == 0
    servers[1].orders.clear()
    sink.publish(1)
    assert fleet.versions.version == 1


def test_a_server_that_says_yes_and_does_not(servers: Any, fleet: Fleet, tmp_path: Path) -> None:
    servers[0].orders.append(
        lambda path, body: (200, {"success": True, "message": ""}) if path == "/update_weights_from_disk" else None
    )
    with pytest.raises(SyncError, match="but says 'default'"):
        DiskSync(fleet=fleet, save=write, folder=tmp_path).publish(1)


@pytest.mark.parametrize("busy", ["retract", "abort"])
def test_servers_are_held_and_go_on_whatever_happens(servers: Any, fleet: Fleet, tmp_path: Path, busy: Any) -> None:
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path, busy=busy)
    sink.publish(1)
    servers[0].orders.append(lambda path, body: (400, {}) if path == "/update_weights_from_disk" else None)
    with pytest.raises(SyncError):
        sink.publish(2)
    for server in servers:
        assert server.of("/pause_generation") == [{"mode": busy}] * 2
        assert len(server.of("/continue_generation")) == 2
        assert server.paused is None
    servers[0].orders[:] = [lambda path, body: (400, {}) if path == "/pause_generation" else None]
    with pytest.raises(SyncError):
        sink.publish(3)
    assert servers[1].paused is None


def test_a_restarted_server_gets_the_newest_weights_again(servers: Any, fleet: Fleet, tmp_path: Path) -> None:
    policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    sink.publish(4)
    name = fleet.versions.current
    wanted = policy.generate([ask(n) for n in range(4)])
    for server in servers:
        server.weights = "default"
    found = policy.generate([ask(n) for n in range(4)])
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in wanted]
    assert {one.policy_version for one in found} == {4}
    assert name in {server.weights for server in servers}


def test_a_restarted_server_reads_the_weights_once_for_all_its_requests(tmp_path: Path) -> None:
    with FakeServer() as server:
        fleet = Fleet(urls=[server.url], settings=QUICK).open()
        policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
        DiskSync(fleet=fleet, save=write, folder=tmp_path).publish(4)
        for restarts in (1, 2):
            server.weights = "default"
            asked = [replace(ask(n), session=str(n)) for n in range(6)]
            assert [one.policy_version for one in policy.generate(asked)] == [4] * 6
            assert len(server.of("/update_weights_from_disk")) == 1 + restarts
        fleet.close()


def test_behind_a_router_the_restarted_server_alone_reads_the_weights_again(servers: Any, tmp_path: Path) -> None:
    with FakeServer(workers=[server.url for server in servers]) as router:
        fleet = Fleet(urls=[router.url], settings=QUICK).open()
        DiskSync(fleet=fleet, save=write, folder=tmp_path).publish(4)
        servers[1].weights = "default"
        assert fleet.repair is not None
        fleet.repair(router.url)
        assert [len(server.of("/update_weights_from_disk")) for server in servers] == [1, 2]
        assert {server.weights for server in servers} == {fleet.versions.current}
        fleet.close()


def test_the_model_is_sent_before_the_first_request_and_after_each_change(
    servers: Any, fleet: Fleet, tmp_path: Path
) -> None:
    stamp = [0]
    policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    synced = SyncedPolicy(policy=policy, sink=sink, stamp=lambda: stamp[0])
    assert synced.generate([ask()])[0].policy_version == 0
    synced.generate([ask()])
    assert len(servers[0].of("/update_weights_from_disk")) == 1
    synced.weights_changed(1)
    assert len(servers[0].of("/update_weights_from_disk")) == 1
    assert synced.generate([ask()])[0].policy_version == 1
    stamp[0] = 1  # changed without a word
    synced.generate([ask()])
    assert len(servers[0].of("/update_weights_from_disk")) == 3
    assert synced.max_length == policy.max_length


class Listener:
    """The servers' side of a broadcast: joins the group, hears the tensors, in threads of its own."""

    def __init__(self, server: Any) -> None:
        self.heard: dict[str, Any] = {}
        self.server = server
        self.group: Any = None
        server.orders.append(self.order)

    def order(self, path: str, body: Any) -> Any:
        if path == "/init_weights_update_group":
            store = TCPStore(body["master_address"], body["master_port"], is_master=False)
            name = body["group_name"]
            prefix = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            self.group = ProcessGroupGloo(prefix, body["rank_offset"], body["world_size"])
            return 200, {"success": True, "message": ""}
        if path == "/destroy_weights_update_group":
            self.group = None
            return 200, {"success": True, "message": ""}
        if path == "/update_weights_from_distributed":
            if self.group is None or not self.server.session:
                return 400, {"success": False, "message": "Group is not there"}
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast([tensor]).wait()
                self.heard[name] = tensor
            if body["weight_version"] is not None:
                self.server.weights = body["weight_version"]
            return 200, {"success": True, "message": ""}
        return None


def tensors(count: int = 3) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{n}", torch.arange(4.0) + n) for n in range(count)]


def test_buckets_by_hand() -> None:
    assert [[name for name, _ in one] for one in buckets(tensors(3), 32)] == [["w0", "w1"], ["w2"]]
    assert [[name for name, _ in one] for one in buckets(tensors(2), 1)] == [["w0"], ["w1"]]
    assert not list(buckets([], 8))


def test_a_broadcast_is_heard_by_every_server(servers: Any, fleet: Fleet) -> None:
    listeners = [Listener(server) for server in servers]
    weights = tensors()
    sink = BroadcastSync(fleet=fleet, weights=lambda: weights, bucket_bytes=32, timeout=60.0)
    sink.publish(1)
    weights[1][1].mul_(10)
    sink.publish(2)
    sink.close()
    for server, listener in zip(servers, listeners, strict=True):
        assert listener.heard["w0"].tolist() == [0, 1, 2, 3]
        assert listener.heard["w1"].tolist() == [10, 20, 30, 40]
        versions = [body["weight_version"] for body in server.of("/update_weights_from_distributed")]
        assert [version is None for version in versions] == [True, False, True, False]  # the last bucket names them
        assert server.weights == fleet.versions.current
        paths = [path for path, _ in server.asked]
        assert paths.count("/begin_weight_update") == paths.count("/end_weight_update") == 2
        assert paths.count("/init_weights_update_group") == 1
        assert listener.group is None
    assert fleet.versions.version == 2


def test_a_refusal_before_the_broadcast_is_an_error_at_once(servers: Any, fleet: Fleet) -> None:
    listeners = [Listener(server) for server in servers]
    sink = BroadcastSync(fleet=fleet, weights=tensors, timeout=60.0)
    sink.publish(1)
    listeners[0].group = listeners[1].group = None
    with pytest.raises(SyncError, match=r"theirs are as before: .*Group is not there"):
        sink.publish(2)
    assert fleet.versions.version == 1
    sink.publish(3)  # in a new group
    assert fleet.versions.version == 3
    sink.close()


def test_a_transfer_that_fails_half_way_leaves_weights_that_nobody_uses(servers: Any, fleet: Fleet) -> None:
    [Listener(server) for server in servers]
    sink = BroadcastSync(fleet=fleet, weights=tensors, bucket_bytes=16, timeout=60.0)
    sink.publish(1)
    for server in servers:
        server.orders.insert(
            0,
            lambda path, body: (
                (400, {"message": "shape"})
                if path == "/update_weights_from_distributed" and body["names"] == ["w1"]
                else None
            ),
        )
    with pytest.raises(SyncError, match="a mixture"):
        sink.publish(2)
    for server in servers:
        assert server.weights.endswith("-incomplete")
    fleet.repair = None
    policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
    with pytest.raises(PartialFailure):
        policy.generate([ask()])
    for server in servers:
        server.orders.pop(0)
    sink.publish(2)
    assert policy.generate([ask()])[0].policy_version == 2
    sink.close()


def test_servers_that_do_not_join(servers: Any, fleet: Fleet) -> None:
    for server in servers:
        server.orders.append(
            lambda path, body: (400, {"message": "no gloo here"}) if path == "/init_weights_update_group" else None
        )
    sink = BroadcastSync(fleet=fleet, weights=tensors, timeout=2.0)
    with pytest.raises(SyncError, match="no gloo here"):
        sink.publish(1)


def test_copies_need_the_disk() -> None:
    with FakeServer() as server:
        more = {"version": "0.5.23", "max_req_input_len": 60, "dp_size": 2}
        server.orders.append(lambda path, body: (200, more) if path == "/server_info" else None)
        fleet = Fleet(urls=[server.url], settings=QUICK).open()
        with pytest.raises(ServerError, match="data-parallel"):
            BroadcastSync(fleet=fleet, weights=tensors)
        fleet.close()


def test_weights_that_come_while_ids_are_drawn(servers: Any, tmp_path: Path) -> None:
    """One response under way, two versions: the turn says which ids are whose."""
    server = servers[0]
    fleet = Fleet(urls=[server.url], settings=QUICK).open()
    server.token_seconds = 0.05
    policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY)
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path, busy="retract")
    sink.publish(1)
    found: list[Any] = []
    request = fake.ask(5, 6, most=40, stream=(11,))
    thread = threading.Thread(target=lambda: found.extend(policy.generate([request])))
    thread.start()
    server.hung.wait(0.3)
    sink.publish(2)
    thread.join(30)
    fleet.close()
    (one,) = found
    if len(one.version_spans) == 2:  # unless the machine was so slow that all of it was drawn before or after
        assert [version for version, _, _ in one.version_spans] == [1, 2]
        assert one.version_spans[0][1:] == (0, one.version_spans[1][1])
        assert one.policy_version == 1


def test_workers_are_clients_that_know_the_weights(fleet: Fleet, servers: Any, tmp_path: Path) -> None:
    """What an executor sends to a worker process, opened here."""
    from turngym.agents.executor.processes import pack, unpack

    policy = ServerPolicy(fleet, vocabulary=fake.VOCABULARY, max_length=40)
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    synced = SyncedPolicy(policy=policy, sink=sink, stamp=lambda: 0)
    synced.weights_changed(3)
    data, engines = pack({"engine": synced})
    assert engines == []
    assert len(servers[0].of("/update_weights_from_disk")) == 1
    copy = unpack(data, {})["engine"]
    try:
        mine, theirs = synced.generate([ask()])[0], copy.generate([ask()])[0]
        assert (mine.ids.tolist(), mine.policy_version) == (theirs.ids.tolist(), theirs.policy_version)
        assert theirs.policy_version == 3
        assert copy.max_length == 40
        assert len(servers[0].of("/update_weights_from_disk")) == 1
        again = unpack(pack(policy)[0], {})
        assert again.fleet is copy.fleet is not fleet
    finally:
        copy.fleet.close()
        worker_client._FLEETS.clear()
