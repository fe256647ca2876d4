"""Every name and phrase that can occur in the games of a configuration, for phrase tokenizers of tiny models."""

from __future__ import annotations

from turngym.envs.alfworld.generate.config import GeneratorConfig
from turngym.envs.alfworld.generate.priors import Priors, load_priors

ROOM = (
    "-= Welcome to TextWorld, ALFRED! =-\n\n",
    "You are in the middle of a room. Looking quickly around you, you see ",
    "\n\nYour task is to: ",
    *(".", "a ", ", a ", ", and a ", "nothing", "nothing.", "Nothing happens."),
)
ACTIONS = (
    *("look", "inventory", "help", "go to ", "open ", "close ", "examine ", "use "),
    *("take ", " from ", "move ", " to ", "heat ", "cool ", "clean ", "slice ", " with "),
)
FEEDBACK = (
    *("You arrive at ", ". On the ", ", you see ", ". The ", "On the ", "The ", " is closed.", " is open. In it"),
    *("You open the ", "You close the ", "You pick up the ", " from the ", "You move the ", " to the "),
    *("You heat the ", "You cool the ", "You clean the ", " using the ", "You sliced the ", " with the "),
    *("You turn on the ", "You are carrying: a ", "You are not carrying anything."),
    *("You are facing the ", ", and ", ", ", ". Next to it", "There's nothing special about "),
    *("This is a ", "normal ", ". In it", "hot ", "cool ", "cold ", "clean ", "sliced ", "hot and clean "),
    *("cool and clean ", "hot and clean sliced ", "cool and clean sliced ", "clean sliced ", "hot sliced "),
    *("cool sliced ", "This ", " is on.", " is off."),
)


def vocabulary(config: GeneratorConfig) -> list[str]:
    """Sorted phrases into which every task, observation and command of `config`'s games can be cut.

    Each entity name (`cabinet 3`) and each type word (`cabinet`) is one phrase; the answer to `help` is left out.
    """
    priors = load_priors()
    phrases = {*ROOM, *ACTIONS, *FEEDBACK, *task_phrases(config, priors), *type_words(config, priors)}
    return sorted(phrases.union(entity_names(config, priors)))


def entity_names(config: GeneratorConfig, priors: Priors) -> list[str]:
    """All names with numbers that `config` can give to receptacles and objects, sorted."""
    numbers = receptacle_numbers(config, priors) | object_numbers(config, priors)
    return sorted(f"{kind.lower()} {n}" for kind, most in numbers.items() for n in range(1, most + 1))


def type_words(config: GeneratorConfig, priors: Priors) -> list[str]:
    """Lower-case type names, as task sentences use them, sorted."""
    return sorted(kind.lower() for kind in receptacle_numbers(config, priors) | object_numbers(config, priors))


def receptacle_numbers(config: GeneratorConfig, priors: Priors) -> dict[str, int]:
    """Receptacle type to the highest number one can have."""
    most: dict[str, int] = {}
    for room in config.rooms:
        for scene, _ in priors.scenes[room]:
            for kind, count in scene.items():
                most[kind] = max(most.get(kind, 0), count)
    if config.receptacle_caps is None:
        return most
    return {kind: cap for kind, cap in config.receptacle_caps if kind in most}


def object_numbers(config: GeneratorConfig, priors: Priors) -> dict[str, int]:
    """Object type to the highest number one can have."""
    allowed = priors.flags["pickupable"] | priors.flags["toggleable"]
    if config.object_types is not None:
        allowed = allowed & set(config.object_types)
    most: dict[str, int] = {}
    for room in config.rooms:
        for kind, counts in priors.number[room].items():
            # a two-object task puts two, however few real games have
            if kind in allowed:
                most[kind] = max(most.get(kind, 2), min(max(counts), config.instances))
    return {kind: min(count, config.instances) for kind, count in most.items()}


def task_phrases(config: GeneratorConfig, priors: Priors) -> list[str]:
    """What stands around the type words in the task sentences: `put a `, ` in `, ... sorted."""
    tasks = [task for task, weight in config.mix if weight > 0] if config.mix is not None else list(priors.sentences)
    sentences = [sentence + "." for task in tasks for sentence in priors.sentences[task]]
    parts = {part for sentence in sentences for half in sentence.split("{o}") for part in half.split("{r}")}
    return sorted(parts - {""})
