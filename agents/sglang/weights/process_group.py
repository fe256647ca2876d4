"""A process group of this process (rank 0) and the servers' workers, beside whatever group the trainer has."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

from turngym.agents.sglang.errors import SyncError


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
