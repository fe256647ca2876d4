"""Which runs of which papers there are recipes for: students, environments, methods, and whose each setting is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.envs.core.errors import TurngymError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One training of a recipe."""

    name: str
    """Of its folder."""
    algorithm: str
    words: tuple[str, ...] = ()
    """The paper's settings, said even where they are our defaults: defaults may change, a paper does not."""
    embedded: tuple[str, ...] = ()
    """Further options with the tiny models, in place of what they cannot do."""
    teacher: bool = False
    """Whether a teacher takes part, which GRPO makes first."""
    judge: tuple[str, ...] = ()
    """Options of the judge, who answers on servers of its own; with the tiny models the expert judges."""
    text: bool = False
    """Whether text is modeled beside (L_PT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRun:
    """One student in one environment, on at most 32 GPUs."""

    name: str
    paper: str
    world: str
    """The embedded world that stands in for it."""
    env: str
    env_kwargs: Mapping[str, str]
    panel: str
    max_turns: int
    student: str
    """On the Hugging Face hub."""
    teacher: str
    """What the teacher is made from, by GRPO on the environment's reward; or who judges."""
    methods: tuple[Method, ...]
    notes: tuple[str, ...]
    """What is from the paper and what is ours."""

    @property
    def has_teacher(self) -> bool:
        return any(method.teacher for method in self.methods)

    @property
    def has_judge(self) -> bool:
        return any(method.judge for method in self.methods)

    @property
    def has_text(self) -> bool:
        return any(method.text for method in self.methods)


Place = tuple[str, str, Mapping[str, str], str, int]
HOUSE: Place = ("alfworld", "turngym/ALFWorld-v0", {"split": "train"}, "alfworld-valid-unseen", 80)
SHOP: Place = ("webshop", "turngym/WebShop-v0", {"profile": "full-synthetic", "split": "train"}, "webshop-1k-eval", 50)
SEARCH: Place = ("search", "turngym/Search-v0", {"source": "mixture", "split": "train"}, "search-mixture", 30)
TURNOPD = tuple(Method(name=name, algorithm=name, teacher=True) for name in ("opd", "tcod", "turnopd"))
TURNOPD_NOTES = (
    "# From the paper: models, thinking, the tool channel, turn limits, Table 7's settings (our defaults), 32 GPUs.",
    "# Ours, for it does not say or was not at hand: how GPUs are divided, 150 steps of GRPO, bfloat16, data folders.",
)
MODELS = (
    "# Ours: models (those of TurnOPD's recipes), environments, turn limits, 100 steps of 64 episodes, learning rate,",
    "# how GPUs are divided, bfloat16;",
)


def _curriculum(eta: int, most: int) -> tuple[Method, ...]:
    """Vanilla OPD, and both directions of TCOD with a schedule k = min(1 + floor(n / eta), most)."""
    schedule = ("--tcod.schedule.eta", str(eta), "--tcod.schedule.k-start", "1", "--tcod.schedule.k-max", str(most))
    # the embedded tasks are over sooner, and so are the runs
    tiny = ("--tcod.schedule.eta", "1", "--tcod.schedule.k-max", "8")
    return (
        Method(name="opd", algorithm="opd", teacher=True),
        *(
            Method(
                name=f"tcod-{direction}",
                algorithm="tcod",
                words=("--tcod.direction", direction, *schedule),
                embedded=tiny,
                teacher=True,
            )
            for direction in ("f2b", "b2f")
        ),
    )


TCOD_NOTES = (
    "# From the paper and its code: both directions, the schedule (eta 6 and at most 30 turns in ALFWorld, 4 and 15 in",
    "# WebShop), trajectory weights.",
    *MODELS,
    "# a reverse KL over 50 ids and a tail bin (theirs: the log-ratio at sampled ids), the environment's expert as the",
    "# demonstrator, a teacher made by GRPO.",
)
LUFFY = (
    Method(name="grpo", algorithm="grpo", words=("--grpo.n", "8")),
    Method(
        name="luffy",
        algorithm="luffy",
        words=(
            *("--luffy.n", "8", "--luffy.prefix.count", "1", "--luffy.shape", "p_div_p_a", "--luffy.a", "0.1"),
            *("--luffy.entropy-coef", "0.001", "--luffy.kl-coef", "0"),
        ),
    ),
)
LUFFY_NOTES = (
    "# From the paper and its code: groups of 8 with one whole demonstration, f(pi) = pi / (pi + 0.1), entropy 0.001,",
    "# no KL; GRPO beside.",
    *MODELS,
    "# the expert's turns as demonstrations (theirs: a stronger model's solutions in mathematics), the filter, the",
    "# baseline from the policy's own episodes (--luffy.advantage grpo: all), a clip of 0.2 (--luffy.clip None: no).",
)
_SURROGATE = ("clip", "0.2", "0.28"), ("kl-coef", "0.02"), ("entropy-coef", "0")
JUDGE = ("--judge-votes", "3", "--judge-temperature", "0.6")


def _live(name: str) -> Method:
    words = tuple(word for option, *values in _SURROGATE for word in (f"--{name}.{option}", *values))
    return Method(name=name, algorithm=name, words=words, embedded=("--judge", "expert"), judge=JUDGE)


OPENCLAW = (_live("prm-rl"), _live("opd-hints"))
OPENCLAW_NOTES = (
    "# From the paper: 3 votes at temperature 0.6, clip 0.2 / 0.28, KL 0.02, entropy 0, the next message as the next",
    "# state, hints read by the policy as it was before training.",
    *MODELS,
    "# an environment in place of users (scripts/launch has both for users, through turngym serve proxy), who judges.",
)
KD_CRITIC = ("--ppo-kd.critic.lr", "1e-3", "--ppo-kd.critic.clip", "None")
KD = (
    Method(name="grpo-kd", algorithm="grpo-kd", teacher=True),
    Method(name="grpo-minillm", algorithm="grpo-minillm", teacher=True, text=True),
    Method(name="ppo-kd", algorithm="ppo-kd", embedded=KD_CRITIC, teacher=True),
    Method(name="ppo-minillm", algorithm="ppo-minillm", embedded=KD_CRITIC, teacher=True, text=True),
)
KD_NOTES = (
    "# From the paper: Algorithms 1 to 4, the teacher's log-likelihood as the reward of GRPO and PPO, without and with",
    "# L_PT; MiniLLM's reward in Algorithm 4.",
    *MODELS,
    "# groups of 8, the mean per token (--grpo-kd.reward sum is literal and favors saying little), k3 as the KL,",
    "# coefficients, texts, a teacher made by GRPO.",
)


def _runs() -> list[PaperRun]:
    """All of them; a name says paper (none: TurnOPD) and environment."""
    found = []

    def add(name: str, paper: str, place: Place, pair: str, *what: tuple[Any, ...]) -> None:
        world, env, kwargs, panel, turns = place
        student, teacher = (f"Qwen/{model}" for model in pair.split(" "))
        methods, notes = what
        found.append(
            PaperRun(
                name=name,
                paper=paper,
                world=world,
                env=env,
                env_kwargs=kwargs,
                panel=panel,
                max_turns=turns,
                student=student,
                teacher=teacher,
                methods=methods,
                notes=notes,
            )
        )

    small, large, other = "Qwen3-1.7B Qwen3-8B", "Qwen3-4B Qwen3-8B", "Qwen3.5-2B Qwen3.5-9B"
    own = (
        *(("alfworld-1.7b", HOUSE, small), ("alfworld-4b", HOUSE, large)),
        *(("webshop-1.7b", SHOP, small), ("webshop-4b", SHOP, large), ("search-2b", SEARCH, other)),
    )
    for name, place, pair in own:
        add(name, "TurnOPD", place, pair, TURNOPD, TURNOPD_NOTES)
    for place, eta, most in ((HOUSE, 6, 30), (SHOP, 4, 15)):
        add(f"tcod-{place[0]}", "TCOD", (*place[:4], most), small, _curriculum(eta, most), TCOD_NOTES)
    for place, pair in ((HOUSE, small), (SHOP, small), (SEARCH, other)):
        world = place[0]
        add(f"luffy-{world}", "LUFFY", place, pair, LUFFY, LUFFY_NOTES)
        add(f"openclaw-{world}", "OpenClaw-RL", place, pair, OPENCLAW, OPENCLAW_NOTES)
        add(f"kd-{world}", "GRPO and PPO with distillation rewards", place, pair, KD, KD_NOTES)
    return found


RECIPES: Mapping[str, PaperRun] = {run.name: run for run in _runs()}


def find_recipe(name: str) -> PaperRun:
    """The recipe called `name`; raises TurngymError if there is none."""
    if name not in RECIPES:
        raise TurngymError(f"recipe {name!r}: there are {', '.join(RECIPES)}.{did_you_mean(name, [*RECIPES])}")
    return RECIPES[name]
