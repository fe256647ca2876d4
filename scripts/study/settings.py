"""What `turngym study turnopd` compares: its methods as words of `turngym train`, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from turngym.agents.worlds import WORLDS
from turngym.envs.core.errors import TurngymError, checked_int, did_you_mean

Group = Literal["main", "reward", "ablation", "sweep", "fixed", "family"]
GROUPS: tuple[Group, ...] = ("main", "reward", "ablation", "family", "fixed", "sweep")
"""In the order in which they are run."""
BASE = "opd"
"""The method with which all others are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the study."""

    name: str
    group: Group
    words: tuple[str, ...]
    """Arguments of `turngym train`: the algorithm and its options, which take the place of the world's."""
    about: str


def _turnopd(name: str, group: Group, about: str, *options: str) -> Method:
    return Method(name=name, group=group, words=("--algorithm", "turnopd", *options), about=about)


def _sweep(p: float, everyone: bool) -> Method:
    words = ["--turnopd.depth.p", f"{p:g}"] + (["--turnopd.depth.no-use-success"] if everyone else [])
    whose = "all episodes" if everyone else "successful episodes"
    return _turnopd(f"p{p:g}-{'all' if everyone else 'success'}", "sweep", f"H_cov covers {p:g} of the {whose}", *words)


def methods(max_turns: int) -> dict[str, Method]:
    """All rows by name, for a world of `max_turns` turns; the fixed depths are shares of these."""
    opd = Method(name=BASE, group="main", words=("--algorithm", "opd"), about="vanilla OPD at full depth")
    tcod = Method(name="tcod", group="main", words=("--algorithm", "tcod"), about="TCOD, front to back")
    rows = [opd, tcod, _turnopd("turnopd", "main", "TurnOPD as in Table 7"), *_rewarded()]
    rows += [
        _turnopd("depth-only", "ablation", "adaptive depth, trajectory weights", "--turnopd.weight", "trajectory"),
        _turnopd("blend-only", "ablation", "full depth, blended weights", "--turnopd.no-adaptive-depth"),
        _turnopd("hard-turn", "ablation", "turn weights from the first step", "--turnopd.weight", "turn"),
        _turnopd("partial", "ablation", "probes of a quarter of the batch", "--turnopd.depth.probe-share", "0.25"),
    ]
    # 0.8 of the successful episodes is TurnOPD itself
    rows += [_sweep(p, False) for p in (0.4, 0.6)] + [_sweep(p, True) for p in (0.4, 0.6, 0.8)]
    rows += _family()
    rows += [_fixed(depth) for depth in fixed_depths(max_turns)]
    return {row.name: row for row in rows}


def _rewarded() -> list[Method]:
    """Methods without a teacher, at the learning rate and with the updates that `study learn` gives them."""
    shared = ("--optimizer.lr", "2e-4", "--optimizer.ppo-epochs", "2", "--optimizer.minibatches", "2")
    about = {
        "grpo": "the outcome's reward, compared within groups",
        "gigpo": "as grpo, and turns where the same was seen",
    }
    weights = {name: (f"--{name}.weight", "trajectory", f"--{name}.kl-coef", "0") for name in about}
    return [
        Method(name=name, group="reward", words=("--algorithm", name, *weights[name], *shared), about=text)
        for name, text in about.items()
    ]


def _family() -> list[Method]:
    """Later methods of multi-turn distillation, each with its own defaults."""
    about = {
        "loopstop": "episodes end where they loop, as long as loops teach less than other turns",
        "guided-opd": "teacher and student share the turns, the teacher's share goes down to nothing",
        "atod": "distillation annealed into reinforcement, turns weighted by disagreement and uncertainty",
        "sage-opd": "turns chosen by a judge, tokens weighted by the teacher's confidence",
        "grpo-opd": "the reward's advantage plus the teacher's log-ratio",
    }
    return [Method(name=name, group="family", words=("--algorithm", name), about=text) for name, text in about.items()]


def _fixed(depth: int) -> Method:
    cut = ("--turnopd.depth.h-min", str(depth), "--turnopd.depth.h-max", str(depth))
    about = f"trajectory weights, always {depth} turns"
    return _turnopd(f"fixed-{depth}", "fixed", about, *cut, "--turnopd.weight", "trajectory")


def fixed_depths(max_turns: int) -> list[int]:
    """The depths of the sweep: an eighth, a quarter, half and three quarters of full depth."""
    return sorted({max(1, round(max_turns * share)) for share in (0.125, 0.25, 0.5, 0.75)})


def chosen_methods(names: Sequence[str], max_turns: int, base: bool = True) -> list[Method]:
    """The rows with these names or of these groups; `fixed-N` is a row for any depth N. `base` adds OPD.

    Raises TurngymError for a name that is none of these.
    """
    known = methods(max_turns)
    for name in names:
        depth = name.removeprefix("fixed-")
        if name not in known and depth != name and depth.isdigit() and int(depth) > 0:
            known[name] = _fixed(int(depth))
    groups = {row.group for row in known.values()}
    wanted = {BASE} if base else set()
    for name in names:
        if name in groups:
            wanted |= {row.name for row in known.values() if row.group == name}
        elif name in known:
            wanted.add(name)
        else:
            valid = [*sorted(groups), *known]
            raise TurngymError(f"--methods {name!r}: valid: {', '.join(valid)}.{did_you_mean(name, valid)}")
    return [row for row in known.values() if row.name in wanted]


# Options of `turngym study turnopd`, and how much each cell trains by them.


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Which cells are run, how much, and where."""

    out: Path = Path("runs/study")
    """Folder of the cells and, under tables/, of the report; several processes and machines may share it."""
    worlds: tuple[str, ...] = tuple(WORLDS)
    """Embedded worlds."""
    methods: tuple[str, ...] = ("main", "ablation", "sweep", "fixed", "family")
    """Rows, by name (opd, tcod, turnopd, depth-only, ...) or by group: main, reward (grpo, gigpo),
    ablation, sweep, fixed, family."""
    base: bool = True
    """Add OPD, with which all others are compared; --no-base where its cells are in another --data file."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every method is run with each of them."""
    steps: int = 100
    """Training steps K_total of every cell."""
    episodes: int | None = None
    """Episodes per training step, if not the world's."""
    max_turns: int | None = None
    """Full depth, if not the worlds'."""
    student: Path | None = None
    """Folder of another student than the world's; needs one world."""
    teacher: Path | None = None
    """Folder of another teacher than the world's; needs one world."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 4
    """Episodes per task and evaluation: Avg@n."""
    evaluations: int = 10
    """Evaluations after the one before step 1, evenly spaced; the last is after the last step."""
    parallel: int = 2
    """Cells at a time in this process, one thread each."""
    short: bool = False
    """A study of minutes: one seed, the main methods and partial probes, few steps, tasks and samples. It only
    shows that everything works."""
    run: bool = True
    """Run cells; --no-run only writes the tables of those that are done."""
    average: bool = False
    """Also evaluate the averaged weights of every cell's last four checkpoints, one after each evaluation."""
    pack: bool = False
    """Pack the last evaluation of every cell into OUT/results, and make the page of them in OUT/results-table."""
    p: bool = False
    """Also a table of p-values, alone and among all methods (Holm)."""
    data: tuple[Path, ...] = ()
    """study.json (or study.json.gz) of one or several earlier studies: make tables of all their cells, run nothing."""

    def __post_init__(self) -> None:
        for name in ("steps", "episodes", "max_turns", "tasks", "samples", "evaluations", "parallel"):
            if (value := getattr(self, name)) is not None:
                checked_int(f"--{name.replace('_', '-')}", value, 1)
        if self.steps % self.evaluations:
            raise TurngymError(
                f"--steps {self.steps} cannot be cut into {self.evaluations} equal parts (--evaluations)"
            )
        if self.average and self.evaluations < 4:
            raise TurngymError(f"--average needs four checkpoints, and --evaluations {self.evaluations} makes fewer")
        if not self.worlds or not self.seeds:
            raise TurngymError("a study needs at least one of --worlds and one of --seeds")
        if (self.student or self.teacher) and len(self.worlds) != 1:
            raise TurngymError("--student and --teacher belong to one world: give --worlds one name")


SHORT = StudyOptions(
    short=True, methods=("main", "partial"), seeds=(0,), steps=12, episodes=24, tasks=24, samples=1, evaluations=4
)
"""What --short means. Options that are given beside it take precedence."""


def shortened(options: StudyOptions) -> StudyOptions:
    """With --short, returns `options` with the values of `SHORT` in place of those left at their defaults."""
    default = StudyOptions()
    changed = {
        name: getattr(SHORT, name)
        for name in ("methods", "seeds", "steps", "episodes", "tasks", "samples", "evaluations")
        if getattr(options, name) == getattr(default, name)
    }
    return replace(options, **changed) if options.short else options


def replaced(words: Sequence[str], changed: dict[str, str]) -> list[str]:
    """`words` with other values for some options; those that it lacks are added."""
    found, rest = list(words), dict(changed)
    for place, word in enumerate(words[:-1]):
        if word in rest:
            found[place + 1] = rest.pop(word)
    return found + [word for pair in rest.items() for word in pair]
