"""Threads, locks and connections do not survive a fork; objects that hold some are told so in the child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Holds what a forked child must not share."""

    def renew(self) -> None:
        """Start afresh in a child process: new locks, no threads, no connections; forget, do not close."""


_LIVING: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Call `thing.renew()` in every child that this process forks while `thing` lives."""
    _LIVING.add(thing)


def _renew_all() -> None:
    for thing in list(_LIVING):
        thing.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
