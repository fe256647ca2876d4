"""The scenarios: a place with two panels, a start, a method, and the control that its claim is measured against.

Settings were chosen on seed 0 and the `chosen` panels, in the few tries that docs/scenarios.md describes. What is not
set here is as in `turngym study learn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, checked_int, did_you_mean
from turngym.envs.core.tables import atomic_write
from turngym.envs.panels import assert_disjoint, load_panel, panel_of_env, write_panel
from turngym.envs.search.world import TINY, Part
from turngym.envs.search.world_questions import generate_world, one_world
from turngym.scripts.study.learn_recipes import FREE_CRITIC, REWARD, Imitation, Recipe, Size, hinted, setup_of

# --- What a scenario is

Measure = Literal["success", "text", "critic"]
"""What the report shows beside success: nothing; nats per token of held-out text; the critic's explained variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scenario plays, and the tasks that its settings were chosen on and that it is reported on."""

    name: str
    """Names its folder and panels too."""
    world: str
    """Embedded world whose environment and models these are."""
    make: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of gym.make in place of the world's."""
    max_turns: int | None = None
    """Turn limit in place of the world's."""
    evaluated: Mapping[str, Any]
    """Arguments of gym.make that only evaluations have: the split or part that training never plays."""
    chosen: tuple[str, ...]
    """Tasks that settings were chosen on, with seed 0."""
    reported: tuple[str, ...]
    """Tasks that nothing was chosen on; reported with seeds 1, 2, ..."""

    def opened(self) -> EmbeddedWorld:
        """The world with what is otherwise here."""
        world = load_world(self.world)
        return replace(world, make={**world.make, **self.make}, max_turns=self.max_turns or world.max_turns)

    def panel_make(self) -> dict[str, Any]:
        """Arguments of gym.make that belong to its panels."""
        world = self.opened()
        return {"split": world.split, **world.make, "max_turns": world.max_turns, **self.evaluated}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the runs of a scenario begin with."""

    name: str
    imitation: Imitation | None = None
    """Comes before; without it the runs begin with the world's student."""
    words: tuple[str, ...] = ()
    """Further options of that run."""
    text: bool = False
    """Whether the model also learns to model text while it imitates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One claim of a paper, put where it should show."""

    name: str
    claim: str
    """What its paper promises, in a sentence."""
    place: Place
    start: Start
    method: Recipe
    control: Recipe
    others: tuple[Recipe, ...] = ()
    """Further rows, compared with the control as well."""
    words: tuple[str, ...] = ()
    """Options of `turngym train` that all arms have; their own come after them."""
    steps: int
    episodes: int = 64
    """Episodes per step."""
    measure: Measure = "success"

    @property
    def arms(self) -> tuple[Recipe, ...]:
        """The control first: the others are compared with it."""
        return (self.control, self.method, *self.others)

    def recipe(self, arm: Recipe) -> Recipe:
        """With the words that all arms have."""
        return replace(arm, words=(*self.words, *arm.words))


# --- The scenarios


def household(first: int) -> tuple[str, ...]:
    """A hundred evaluation games."""
    return tuple(f"generated/small/eval/{number}" for number in range(first, first + 100))


def questions(one_hop: int, two_hops: Sequence[int], three_hops: int) -> tuple[str, ...]:
    """Five questions of each of the 20 evaluation worlds, in the shares of `search-quickstart`."""
    kinds = [("popqa-like", one_hop), *(("2wiki-like", place) for place in two_hops), ("musique-like", three_hops)]
    return tuple(f"{kind}/tiny-eval{world}-{place}" for kind, place in kinds for world in range(20))


LOOPS = Place(
    name="loops",
    world="alfworld-loops",
    max_turns=50,
    evaluated={"part": "eval"},
    chosen=household(0),
    reported=household(100),
)
"""Households of 50 turns and a student that falls into loops: the reward comes late or never."""
QUESTIONS = Place(
    name="questions",
    world="search",
    evaluated={"split": "eval"},
    chosen=questions(0, (0, 1, 2), 0),
    reported=questions(1, (3, 4, 5), 1),
)
"""Multi-hop questions over small fictional worlds."""
NEXT_GOALS = """
505 506 508 530 533 538 541 543 554 556 559 561 562 563 571 577 579 582 590 596 606 613 615 631 641 647 663 664 669
680 681 682 683 685 691 700 704 719 721 722 733 735 739 740 743 746 747 748 754 757 758 765 766 778 779 783 794 803
806 807 812 814 823 835 837 840 845 848 859 860 868 880 881 884 897 898 901 906 909 913 916 919 929 931 933 937 939
941 942 947 961 962 967 970 974 982 989 990 1001 1003
"""
"""The hundred evaluation goals of the shop that come after those of `webshop-quickstart`."""
HOUSEHOLD = Place(
    name="household", world="alfworld", evaluated={"part": "eval"}, chosen=household(0), reported=household(100)
)
SHOP = Place(
    name="shop",
    world="webshop",
    evaluated={"split": "eval"},
    chosen=load_panel("webshop-quickstart").task_ids,
    reported=tuple(f"embedded-small/{number}" for number in NEXT_GOALS.split()),
)
STUDENT = Start(name="student")
WARM = Start(name="warm", imitation=setup_of("webshop").warm)
"""The shop's student after some imitation: nearly all that the shipped one samples is failure."""
STUCK = Start(
    name="stuck",
    imitation=Imitation(steps=30, lr="1e-3", schedule="linear"),
    words=("--players", "expert:.03,repeat:.97", "--loop-after", "1.3", "--sft.train-on", "both"),
)
"""A student that has seen players who search for the same thing until they run out of turns, and does so too: it knows
more than it shows, and hardly ever succeeds."""
LOOPY = Start(
    name="loopy",
    imitation=Imitation(steps=12, lr="3e-4", schedule="linear"),
    words=("--players", "expert:.1,noisy:.1,repeat:.4,cycle:.4", "--loop-after", "1.6", "--sft.train-on", "both"),
)
"""A student that falls into loops more often still: it says in an episode of fifty turns hardly anything new."""
HINTS = Start(name="hints", imitation=setup_of("search").hints)
"""A model that has learned to read hints; without that no hint can teach."""
READER = Start(
    name="reader",
    imitation=Imitation(steps=120, lr="2e-3", schedule="linear"),
    words=("--lm-loss.documents", "16"),
    text=True,
)
"""A model that has seen text: without that there is nothing to forget."""
# long failures would outweigh short successes if every token counted the same
GRPO = Recipe(algorithm="grpo", words=("--grpo.weight", "trajectory"))
JUDGE = ("--judge", "expert")
BOLD = (*REWARD, "--optimizer.lr", "5e-4")
"""Where nearly nothing succeeds there is little that large steps could undo."""
# at equal terms with grpo: no KL to the initial policy, and every attempt counts the same
GIGPO_WORDS = ("--gigpo.weight", "trajectory", "--gigpo.kl-coef", "0")
GIGPO = Scenario(
    name="gigpo",
    claim="Attempts at one task pass through the same situations; comparing what followed there gives each turn credit "
    "of its own, which the reward of the whole attempt does not.",
    place=HOUSEHOLD,
    start=STUDENT,
    method=Recipe(algorithm="gigpo", words=GIGPO_WORDS),
    control=GRPO,
    others=(Recipe(name="gigpo-state", algorithm="gigpo", words=(*GIGPO_WORDS, "--gigpo.anchor", "state")),),
    words=REWARD,
    steps=12,
)
SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        GIGPO,
        replace(GIGPO, name="gigpo-shop", place=SHOP, start=WARM),
        Scenario(
            name="luffy",
            claim="Where hardly any own attempt succeeds, groups hold no contrast and on-policy learning stands still; "
            "demonstrations in the groups get it going.",
            place=QUESTIONS,
            start=STUCK,
            method=Recipe(algorithm="luffy", expert=True, words=("--luffy.weight", "trajectory")),
            control=GRPO,
            words=BOLD,
            steps=20,
            episodes=32,
        ),
        Scenario(
            name="prm-rl",
            claim="Over long horizons a judge's verdict on each turn teaches where one reward at the end does not.",
            place=LOOPS,
            start=LOOPY,
            method=Recipe(algorithm="prm-rl", expert=True, words=(*JUDGE, "--judge-strict")),
            control=GRPO,
            words=(*REWARD, "--optimizer.ppo-epochs", "1"),
            steps=20,
            episodes=16,
        ),
        Scenario(
            name="hints",
            claim="The text that follows a turn says how it should have been; distilled as a hint it teaches more than "
            "the same judge's verdict as a reward, without any teacher model.",
            place=QUESTIONS,
            start=HINTS,
            method=hinted("opd-hints"),
            control=Recipe(algorithm="prm-rl", expert=True, words=REWARD),
            others=(hinted("prm-opd"),),
            words=JUDGE,
            steps=16,
            episodes=128,
        ),
        Scenario(
            name="grpo-kd",
            claim="A teacher's log-likelihood is a dense reward: it tells attempts apart where none succeeds.",
            place=QUESTIONS,
            start=STUCK,
            method=Recipe(algorithm="grpo-kd", teacher=True),
            control=GRPO,
            words=BOLD,
            steps=20,
            episodes=32,
        ),
        Scenario(
            name="text",
            claim="Language modeling on text beside the reward (L_PT, weight 1) keeps a student from forgetting it.",
            place=QUESTIONS,
            start=READER,
            method=Recipe(algorithm="grpo-minillm", teacher=True, text=True),
            control=Recipe(algorithm="grpo-kd", teacher=True),
            words=REWARD,
            steps=16,
            episodes=128,
            measure="text",
        ),
        Scenario(
            name="ppo-kd",
            claim="A critic gives each token its own advantage, as far as its values explain the returns.",
            place=QUESTIONS,
            start=STUDENT,
            method=Recipe(algorithm="ppo-kd", teacher=True, words=FREE_CRITIC),
            control=Recipe(name="ppo-kd, slow critic", algorithm="ppo-kd", teacher=True),
            words=REWARD,
            steps=16,
            episodes=128,
            measure="critic",
        ),
    )
}
"""By name, in the order in which they are run."""


def chosen_scenarios(names: Sequence[str]) -> list[Scenario]:
    """Those called `names`, or all. Raises TurngymError for an unknown name."""
    for name in names:
        if name not in SCENARIOS:
            raise TurngymError(
                f"--scenarios {name!r}: there are {', '.join(SCENARIOS)}.{did_you_mean(name, [*SCENARIOS])}"
            )
    return [scenario for name, scenario in SCENARIOS.items() if not names or name in names]


# --- Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """Which scenarios are trained, and on what they are measured."""

    out: Path = Path("runs/scenarios")
    """Folder of the runs, panels, texts, report.md, scenarios.png and scenarios.json."""
    scenarios: tuple[str, ...] = ()
    """Which of them (default: all): gigpo, gigpo-shop, luffy, prm-rl, hints, grpo-kd, text, ppo-kd."""
    seeds: int = 3
    """Runs per arm: seeds 1, 2, ... Settings were chosen on seed 0."""
    chosen: bool = False
    """Play what settings were chosen on instead: seed 0 and the other panel."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 2
    """Episodes per task and evaluation: Avg@n."""
    short: bool = False
    """One seed, two steps of few episodes and few tasks: to see that everything works, not what comes of it."""
    run: bool = True
    """Train what is missing; --no-run reports what is there."""
    parallel: int = 1
    """Runs at a time, one thread each."""

    def __post_init__(self) -> None:
        for name in ("seeds", "tasks", "samples", "parallel"):
            checked_int(f"--{name}", getattr(self, name), 1)

    @property
    def seeds_played(self) -> range:
        """Seed 0 has chosen the settings, so it is never reported."""
        if self.chosen:
            return range(1)
        return range(1, 2 if self.short else 1 + self.seeds)

    @property
    def evaluated(self) -> tuple[int, int]:
        """Tasks of an evaluation, and episodes per task."""
        return (2, 1) if self.short else (self.tasks, self.samples)

    def size(self, scenario: Scenario) -> Size:
        """How much a run of `scenario` trains; it is evaluated before and after."""
        steps, episodes = (2, 8) if self.short else (scenario.steps, scenario.episodes)
        tasks, samples = self.evaluated
        return Size(steps=steps, episodes=episodes, every=steps, tasks=tasks, samples=samples)


# --- Panels of a place

Use = Literal["chosen", "reported"]


def panel_path(folder: Path, place: Place, use: Use) -> Path:
    """Where the manifest of a panel is."""
    return folder / f"{place.name}-{use}-v1.json"


def write_panels(folder: Path, place: Place) -> None:
    """Write both panels of `place` to `folder`, unless they are there.

    Raises PanelError if they share a task, by id or by content, or if one is there with other content.
    """
    if panel_path(folder, place, "chosen").exists() and panel_path(folder, place, "reported").exists():
        return
    make, env_id = place.panel_make(), place.opened().env_id
    chosen = panel_of_env(f"{place.name}-chosen", env_id, make_kwargs=make, task_ids=place.chosen)
    reported = panel_of_env(f"{place.name}-reported", env_id, make_kwargs=make, task_ids=place.reported)
    assert_disjoint(chosen.tasks, reported.tasks)
    for panel in (chosen, reported):
        load_panel(str(write_panel(panel, folder)))


# --- Text of the fictional search worlds

ARTICLES = 8
"""Per document: some 120 tokens of the tiny models."""
TRAIN, HELD_OUT = 2000, 100
"""Documents. No fact of a held-out one is in a training world; the names are coined from the same parts."""


def text_path(folder: Path, part: Part) -> Path:
    return folder / f"passages-{part}.txt"


def write_passages(folder: Path) -> None:
    """Write both files to `folder`, unless they are there."""
    counts: dict[Part, int] = {"train": TRAIN, "eval": HELD_OUT}
    for part, count in counts.items():
        path = text_path(folder, part)
        if not path.exists():
            with atomic_write(path) as file:
                file.write("\n\n".join(islice(article_documents(part), count)) + "\n")


def article_documents(part: Part) -> Iterator[str]:
    """Articles in world order, `ARTICLES` to a document, each its title and its text."""
    worlds = (TINY.worlds or (1, 1))[part == "eval"]
    for number in range(worlds):
        articles = [f"{one.title}\n{one.text}" for one in generate_world(one_world(TINY, part, number)).passages]
        # a world's last articles are left out where they do not fill a document
        for place in range(0, len(articles) - ARTICLES + 1, ARTICLES):
            yield "\n".join(articles[place : place + ARTICLES])
