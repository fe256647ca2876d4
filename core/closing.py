"""Closes: what has a `close` is used in a `with`, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closes(ABC):
    """`with` closes it at its end."""

    @abstractmethod
    def close(self) -> None:
        """Releases what it holds. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
