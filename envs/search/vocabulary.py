"""Every name and phrase that can occur in the episodes of a world, for phrase tokenizers of tiny models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from turngym.envs.search.documents import NOTHING
from turngym.envs.search.protocol import INVALID
from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.names import Namer
from turngym.envs.search.world.tables import relations

MOST_DOCUMENTS = 10
OBSERVATION = (
    *("Question: ", "?", "\n\n<information>", "</information>\n\n", NOTHING, INVALID, INVALID.strip()),
    *('") ', ". ", ".\n", ".", " ", "yes", "no"),
)
_SLOT = re.compile(r"\{[sox]\}")
_WORD = re.compile(r"\w+")


def vocabulary(config: WorldConfig) -> list[str]:
    """Sorted phrases into which questions, passages and sensible actions of a `plain` world can be cut.

    Names are cut into the parts that they are made of, which training and evaluation share; every wording of a relation
    is one phrase up to its slot. Single words are there too, for queries that make no sense; none begins with a space,
    because of two equally short ways to cut a sentence one would be rare.
    """
    phrases = {*OBSERVATION, *_documents(), *_wordings(config), *_names(config)}
    return sorted(phrases.union(word for phrase in phrases for word in _WORD.findall(phrase)))


def _documents() -> Iterable[str]:
    """What stands before and between documents of the `search_r1` layout."""
    heads = [f'Doc {number}(Title: "' for number in range(1, MOST_DOCUMENTS + 1)]
    return [*heads, *(f".\n{head}" for head in heads), *(f"\n{head}" for head in heads)]


def _names(config: WorldConfig) -> Iterable[str]:
    if config.worlds is not None:  # all of them put the same parts together
        config = replace(config, part="train")
    namer = Namer(config, np.random.default_rng([config.seed, config.version]))
    return namer.plain_parts(config.counts)


def _wordings(config: WorldConfig) -> Iterable[str]:
    """The relations' sentences and questions around their slots."""
    for relation in relations(config).values():
        for template in (*relation.say, *relation.np, *relation.ask):
            for part in _SLOT.split(template):
                yield part
                yield part.rstrip("?.")
