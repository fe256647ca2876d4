"""Which weights the servers should have, and the record of which ids they drew."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from turngym.agents.sglang.answers import VersionSpan
from turngym.agents.sglang.errors import WrongWeights

PolicySpan = tuple[int, int, int]
"""A policy version and the half-open range of response ids that it drew."""


@dataclass(slots=True)
class Ledger:
    """Names of weight versions in the order in which the servers were given them.

    A server says with every answer which named weights drew it. A name that is not here, or that was replaced before
    the request was sent, means that the server was restarted or changed by somebody else.
    """

    _known: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name to (place, policy version)."""
    _places: int = 0
    _owner: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def current(self) -> str | None:
        """Name of the newest weights; None before the first."""
        return max(self._known, key=lambda name: self._known[name][0]) if self._known else None

    @property
    def version(self) -> int:
        """Policy version of the newest weights."""
        return self._known[self.current][1] if self.current is not None else 0

    @property
    def place(self) -> int:
        """What an answer must not fall behind; note it when a request is sent."""
        return self._places

    def new_name(self, version: int) -> str:
        """A name that no server has by chance: neither `default`, nor another run's."""
        return f"turngym-{self._owner}-{self._places + 1}-v{version}"

    def add(self, name: str, version: int) -> None:
        """From now on the servers have the weights `name`."""
        self._places += 1
        self._known[name] = (self._places, version)

    def read(self, spans: tuple[VersionSpan, ...], floor: int, where: str) -> tuple[PolicySpan, ...]:
        """The spans in policy versions. Raises WrongWeights for a name that should not be there since `floor`."""
        found: list[PolicySpan] = []
        for name, start, end in spans:
            place, version = self._known.get(name, (-1, 0))
            if place < floor:
                raise WrongWeights(
                    f"{where}: drawn with weights {name!r}; the server was last given {self.current!r}. It was "
                    "restarted, or somebody else changed its weights"
                )
            found.append((version, start, end))
        return tuple(found)
