"""Encoders of other packages: found as `package.module:name`, or by an entry point of `turngym.encoders`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from turngym.retrieval.core import Encoder, RetrievalError

GROUP = "turngym.encoders"
BUILT_IN = ("hashing", "hf:MODEL")


class MakeEncoder(Protocol):
    """What another package brings: a function, or a class, that makes its encoder.

    An index stores the name and the encoder's `fingerprint`, and is opened with what the name stands for then: an
    encoder whose vectors change must change its fingerprint, and is refused.
    """

    def __call__(self, device: str, /) -> Encoder:
        """`device` is where a model should run (`cpu`, `cuda`, ...)."""


def is_built_in(name: str) -> bool:
    """Whether `name` stands for an encoder that comes with turngym."""
    return name == "hashing" or name.startswith("hf:")


def find_encoder(name: str) -> MakeEncoder:
    """What makes the encoder `name`.

    Raises RetrievalError where there is none of that name, or it cannot be imported.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    _, colon, attribute = name.partition(":")
    if colon and attribute and "/" not in name:
        point = EntryPoint(name=name, value=name, group=GROUP)
    elif name in points:
        point = points[name]
    else:
        known = [*BUILT_IN, *sorted(points)]
        near = get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RetrievalError(f"unknown encoder {name!r}; name {', '.join(known)} or package.module:name.{hint}")
    try:
        found: MakeEncoder = point.load()
    except (ImportError, AttributeError) as error:
        raise RetrievalError(f"encoder {name!r}: {point.value} cannot be loaded ({error})") from error
    return found
