"""The seven embedded worlds: generated household, shop and search, each also with loops, and search for long chains of
facts. And household and shop of a real language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.worlds import DistillRecipe, EmbeddedWorld, TinyRecipe, loop_recipes
from turngym.core.spec import changed

# The environments' generators are imported when a vocabulary is built, so that naming a world stays cheap.


def _household_phrases() -> Iterable[str]:
    """Each phrase that the generated games can say, the answer to `help` included."""
    from turngym.envs.alfworld.engine import NativeEngine
    from turngym.envs.alfworld.game import load_game
    from turngym.envs.alfworld.generate import generate
    from turngym.envs.alfworld.priors import SMALL, vocabulary

    engine = NativeEngine(load_game(generate(SMALL, "train", 0)))
    engine.reset()
    return [*vocabulary(SMALL), engine.step("help")[0]]


def _shop_phrases() -> Iterable[str]:
    from turngym.envs.webshop.catalog_config import SMALL
    from turngym.envs.webshop.terse_shop import vocabulary

    return vocabulary(SMALL)


def _search_phrases() -> Iterable[str]:
    from turngym.envs.search.fiction import TINY
    from turngym.envs.search.fiction_questions import vocabulary

    return vocabulary(TINY)


def _chat(system: str, max_context: int) -> ChatSettings:
    return ChatSettings(
        channel="text", observation_role="user", system=system, max_new_tokens=12, max_context=max_context
    )


HOUSEHOLD = EmbeddedWorld(
    name="alfworld",
    env_id="turngym/ALFWorld-v0",
    split="generated",
    make={"config": "small", "on_invalid": "noop"},
    max_turns=24,
    panel="alfworld-quickstart",
    expert="searching",
    chat=_chat("You are in a house. Do the task.", 1024),
    phrases=_household_phrases,
    # Both start from the same random weights, but the student has never seen what the house answers to a mistake. The
    # effects of other choices are in docs/quickstart.md under "What the tiny models taught us".
    recipes={"teacher": TinyRecipe(steps=500), "student": TinyRecipe(steps=300, mistakes=0.0)},
)
SHOP = EmbeddedWorld(
    name="webshop",
    env_id="turngym/WebShop-v0",
    split="train",
    # the expert may search only for words of the instruction, since a student could not know a product's title
    make={"profile": "embedded-small", "on_invalid": "noop", "oracle_query": "instruction"},
    max_turns=12,
    panel="webshop-quickstart",
    chat=_chat("You are in a shop. Buy what is asked for.", 1536),
    phrases=_shop_phrases,
    # the student has only seen clean episodes: it knows neither refusals nor a way back from a wrong page
    recipes={"teacher": TinyRecipe(steps=300), "student": TinyRecipe(steps=160, noise=(0.0, 0.0), mistakes=0.0)},
)
SHOP_LOOPS = replace(
    SHOP,
    name="webshop-loops",
    max_turns=30,
    panel="webshop-loops",
    chat=changed(SHOP.chat, max_context=4096),
    # Loops go to and fro between two pages: a button is one token. An action that is repeated word for word is several,
    # of which a model that samples soon gets one wrong, and is out of the loop.
    recipes=loop_recipes("webshop/teacher", loops=("wander",)),
    # the student knows how to buy: at 1e-4 it has left its loops after two steps, too fast to compare methods
    distill=DistillRecipe(lr=2e-5),
)
SEARCH = EmbeddedWorld(
    name="search",
    env_id="turngym/Search-v0",
    split="train",
    # one passage a search: a name finds its article, and contexts stay short
    make={"source": "world", "config": "tiny", "topk": 1},
    max_turns=8,
    panel="search-quickstart",
    tags=("search", "answer"),
    chat=_chat("Search, then answer.", 1024),
    phrases=_search_phrases,
    # Models of this size cannot copy names before about step 70. The student has only just learned to, from clean
    # episodes: it often gets one part of a name wrong, and has never seen what follows.
    recipes={
        "teacher": TinyRecipe(steps=600, mistakes=1.0),
        "student": TinyRecipe(steps=220, noise=(0.0, 0.0), mistakes=0.0),
    },
)
HOUSEHOLD_LOOPS = replace(
    HOUSEHOLD,
    name="alfworld-loops",
    # at 24 turns half of the episode is over before a loop has settled
    max_turns=48,
    panel="alfworld-loops",
    chat=changed(HOUSEHOLD.chat, max_context=2048),
    recipes=loop_recipes("alfworld/teacher"),
)
SEARCH_LOOPS = replace(
    SEARCH,
    name="search-loops",
    # as many turns as the paper allows; within 8 turns no loop would settle
    max_turns=30,
    panel="search-loops",
    chat=changed(SEARCH.chat, max_context=2048),
    recipes=loop_recipes("search/teacher", mistakes=1.0),
    # The student already knows what it needs to leave a loop. At ten times this rate it learns the rest within twenty
    # steps, too fast to compare methods.
    distill=DistillRecipe(lr=1e-4),
)
SEARCH_CHAINS = replace(
    SEARCH_LOOPS,
    name="search-chains",
    make={**SEARCH.make, "config": "chains"},
    panel="search-chains",
    recipes={
        # what to search for next in a question of six relations is learned late, and from nearly clean episodes
        "searcher": TinyRecipe(steps=240, mistakes=1.0, lr=2e-3, start="search/teacher"),
        "solver": TinyRecipe(steps=300, mistakes=1.0, lr=2e-3, noise=(0.0, 0.2), seed=1, start="searcher"),
        **loop_recipes("solver", mistakes=1.0),
    },
)
WORLDS: Mapping[str, EmbeddedWorld] = {
    world.name: world for world in (HOUSEHOLD, HOUSEHOLD_LOOPS, SHOP, SHOP_LOOPS, SEARCH, SEARCH_LOOPS, SEARCH_CHAINS)
}
"""The embedded worlds by their name on the command line."""

SMOLLM2_SETTINGS = {
    # the reverse KL makes this student worse (docs/research/real_model.md, "Which divergence")
    "distill": {"form": "forward"},
    # an action has about 12; a response that runs on would be copied turn after turn
    "max_new_tokens": 32,
    "lora": {"rank": 16},
    "autocast": "bfloat16",
    "teacher_dtype": "bfloat16",
    "rollout_dtype": "bfloat16",
    "head_chunk": 256,
}
"""Settings of every training of SmolLM2 in a world."""


def _of_smollm2(world: EmbeddedWorld, distill: DistillRecipe) -> EmbeddedWorld:
    """`world` as SmolLM2-135M-Instruct plays it: with its own tokenizer and template, and with adapters of it."""
    return replace(
        world,
        name=f"{world.name}-smollm2",
        chat=ChatSettings(),
        phrases=tuple,
        recipes={},
        dtype="bfloat16",
        base=Path("models/smollm2"),
        distill=distill,
    )


HOUSEHOLD_SMOLLM2 = _of_smollm2(
    HOUSEHOLD,
    DistillRecipe(
        # with two methods at once 48 steps of 8 episodes are all that fits into an hour, and teach little
        methods=("opd",),
        steps=48,
        episodes=12,
        lr=1e-3,
        warmup=4,
        max_turns=10,
        eval_every=0,
        samples=2,
        tasks=50,
        # 4.4 GB at most in 48 steps
        settings={**SMOLLM2_SETTINGS, "micro_tokens": 1024},
    ),
)
SHOP_SMOLLM2 = _of_smollm2(
    SHOP,
    DistillRecipe(
        methods=("opd",),
        steps=12,
        episodes=4,
        lr=7e-4,
        warmup=2,
        eval_every=0,
        samples=2,
        tasks=50,
        # Twelve turns are up to 4,700 tokens. The update of such an episode takes 12 GB without checkpointing, and as
        # much are the caches of an evaluation of 64.
        settings={**SMOLLM2_SETTINGS, "micro_tokens": 2048, "gradient_checkpointing": True, "slots": 24},
    ),
)
REAL_WORLDS: Mapping[str, EmbeddedWorld] = {world.name: world for world in (HOUSEHOLD_SMOLLM2, SHOP_SMOLLM2)}
"""Worlds of models that do not come along, by name: their adapters do (docs/research/real_model.md)."""
ALL_WORLDS: Mapping[str, EmbeddedWorld] = {**WORLDS, **REAL_WORLDS}
"""Both, by name."""
