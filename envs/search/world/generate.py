"""Makes a fictional world: graph, passages and questions from nothing but settings and a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from turngym.envs.core import TaskError
from turngym.envs.search.questions import Question
from turngym.envs.search.world.articles import Writer
from turngym.envs.search.world.config import WorldConfig, preset
from turngym.envs.search.world.families import FAMILY
from turngym.envs.search.world.graph import PARTS, Graph, Part
from turngym.envs.search.world.link import make_graph
from turngym.envs.search.world.teller import Teller
from turngym.retrieval.core import Passage

Triple = tuple[str, str, str]
ATTEMPTS = 400
"""Draws per question before a family is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FictionalWorld:
    """A corpus with questions about it, all invented."""

    config: WorldConfig
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    """Training and evaluation questions (`split`); no entity, or no fact, is touched by both (`config.disjoint`)."""
    chains: Mapping[str, tuple[Triple, ...]]
    """Task id of a question to its gold facts (subject's name, relation, object), one per hop."""
    graph: Graph


def generate_world(config: WorldConfig) -> FictionalWorld:
    """The world of `config`: the same bytes every time. Raises TaskError where a family finds too few questions."""
    graph = make_graph(config)
    library = Writer(config, graph).write()
    teller = Teller(config, graph, library)
    questions: list[Question] = []
    chains: dict[str, tuple[Triple, ...]] = {}
    for family, counts in config.questions.items():
        for part, count in zip(PARTS, counts, strict=True):
            for question, chain in _questions(teller, family, part, count):
                questions.append(question)
                chains[question.task_id] = chain
    return FictionalWorld(
        config=config, passages=library.passages, questions=tuple(questions), chains=chains, graph=graph
    )


def generate_worlds(config: WorldConfig) -> Iterator[FictionalWorld]:
    """The training worlds of `config` and then its evaluation worlds; the one world where `config.worlds` is None."""
    if config.worlds is None:
        yield generate_world(config)
        return
    for place, part in enumerate(PARTS):
        for number in range(config.worlds[place]):
            yield generate_world(one_world(config, part, number))


def one_world(config: WorldConfig, part: Part, number: int) -> WorldConfig:
    """The settings of one among several worlds."""
    training = part == "train"
    counts = {family: (most[0], 0) if training else (0, most[1]) for family, most in config.questions.items()}
    seed = 2 * number + (not training)
    name = f"{config.name}-{part}{number}"
    # every configuration seed makes other worlds, every world has a seed of its own
    return replace(config, name=name, seed=config.seed * 2**20 + seed, worlds=None, part=part, questions=counts)


@lru_cache(maxsize=4)
def open_world(name: str) -> FictionalWorld:
    """The world of a preset, made once per process. Raises TaskError for unknown names, and for many worlds."""
    config = preset(name)
    if config.worlds is not None:
        raise TaskError(f"{name!r} is many worlds: generate_worlds makes them")
    return generate_world(config)


def _questions(teller: Teller, family: str, part: Part, count: int) -> list[tuple[Question, tuple[Triple, ...]]]:
    found: list[tuple[Question, tuple[Triple, ...]]] = []
    entities = teller.graph.entities
    teller.family, teller.part = family, part
    for _ in range(count * ATTEMPTS):
        if len(found) == count:
            return found
        draft = FAMILY[family](teller)
        question = None if draft is None else teller.finish(draft, len(found))
        if draft is not None and question is not None:
            found.append((question, tuple((entities[f.subject].name, f.relation, f.value) for f in draft.facts)))
    if len(found) < count:
        raise TaskError(
            f"world {teller.config.name!r}: only {len(found)} of {count} {part} questions of family {family!r} "
            f"could be made; ask for fewer questions or make the world larger"
        )
    return found
