"""Record of the weight versions given to the servers, and of which version sampled which ids."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from turngym.agents.sglang.client.answers import VersionSpan
from turngym.agents.sglang.errors import WrongWeights

PolicySpan = tuple[int, int, int]
"""A policy version and the half-open range of response ids that it drew."""


@dataclass(slots=True)
class WeightVersions:
    """Names of weight versions in the order in which the servers were given them.

    A server says with every answer which named weights drew it. A name that is not here, or that was replaced before
    the request was sent, means that the server was restarted or changed by another client.
    """

    _known: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name to (place, policy version)."""
    _place: int = 0
    _names: int = 0
    _owner: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def current(self) -> str | None:
        """Name of the weights that all servers have; None before the first."""
        # a list: another thread may be announcing others
        return next((name for name, (place, _) in list(self._known.items()) if place == self._place), None)

    @property
    def version(self) -> int:
        """Policy version of those weights."""
        return next((version for place, version in list(self._known.values()) if place == self._place), 0)

    @property
    def place(self) -> int:
        """What an answer must not fall behind; note it when a request is sent."""
        return self._place

    def new_name(self, version: int) -> str:
        """A name that no server has by chance: neither `default`, nor another run's, nor one of a failed attempt."""
        self._names += 1
        return f"turngym-{self._owner}-{self._names}-v{version}"

    def add(self, name: str, version: int) -> None:
        """From now on the servers have the weights `name`, and no others."""
        self.announce(name, version)
        self.settle(name)

    def announce(self, name: str, version: int) -> None:
        """The servers are getting the weights `name`: answers may be of these already, or of those before."""
        self._known[name] = (1 + max((place for place, _ in self._known.values()), default=0), version)

    def settle(self, name: str) -> None:
        """All servers have the weights `name`: what is sent from now on must be answered by them."""
        self._place = self._known[name][0]

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
