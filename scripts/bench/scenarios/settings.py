"""The scenarios. Their settings were chosen on seed 0 and the `chosen` panels, in the few tries that docs/scenarios.md
tells of; what is not said here is as in `turngym bench learn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.scripts.bench.learn.recipes import FREE_CRITIC, REWARD, Imitation, Recipe, setup_of
from turngym.scripts.bench.scenarios.scenario import Arm, Place, Scenario, Start


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
STUDENT = Start(name="student")
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
GRPO = Arm(name="grpo", recipe=Recipe(algorithm="grpo", words=("--grpo.weight", "trajectory")))
JUDGE = ("--judge", "expert")
BOLD = (*REWARD, "--optimizer.lr", "5e-4")
"""Where nearly nothing succeeds there is little that large steps could undo."""
SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="luffy",
            claim="Where hardly any own attempt succeeds, groups hold no contrast and on-policy learning stands still; "
            "demonstrations in the groups get it going.",
            place=QUESTIONS,
            start=STUCK,
            method=Arm(
                name="luffy", recipe=Recipe(algorithm="luffy", expert=True, words=("--luffy.weight", "trajectory"))
            ),
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
            method=Arm(name="prm-rl", recipe=Recipe(algorithm="prm-rl", expert=True, words=(*JUDGE, "--judge-strict"))),
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
            method=Arm(
                name="opd-hints",
                recipe=Recipe(
                    algorithm="opd-hints",
                    expert=True,
                    words=(
                        *("--judge-repeats", "2", "--opd-hints.form", "topk", "--distill.top-k", "1"),
                        *("--opd-hints.reject-below", "0.05", "--optimizer.lr", "1e-3", "--optimizer.minibatches", "4"),
                    ),
                ),
            ),
            control=Arm(name="prm-rl", recipe=Recipe(algorithm="prm-rl", expert=True, words=REWARD)),
            others=(
                Arm(
                    name="prm-opd",
                    recipe=Recipe(
                        algorithm="prm-opd",
                        expert=True,
                        words=(
                            *("--judge-repeats", "2", "--prm-opd.form", "topk", "--distill.top-k", "1"),
                            *("--prm-opd.reject-below", "0.05", "--optimizer.lr", "1e-3"),
                            *("--optimizer.minibatches", "4"),
                        ),
                    ),
                ),
            ),
            words=JUDGE,
            steps=16,
            episodes=128,
        ),
        Scenario(
            name="grpo-kd",
            claim="A teacher's log-likelihood is a dense reward: it tells attempts apart where none succeeds.",
            place=QUESTIONS,
            start=STUCK,
            method=Arm(name="grpo-kd", recipe=Recipe(algorithm="grpo-kd", teacher=True)),
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
            method=Arm(name="grpo-minillm", recipe=Recipe(algorithm="grpo-minillm", teacher=True, text=True)),
            control=Arm(name="grpo-kd", recipe=Recipe(algorithm="grpo-kd", teacher=True)),
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
            method=Arm(name="ppo-kd", recipe=Recipe(algorithm="ppo-kd", teacher=True, words=FREE_CRITIC)),
            control=Arm(name="ppo-kd, slow critic", recipe=Recipe(algorithm="ppo-kd", teacher=True)),
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
