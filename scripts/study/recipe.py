"""The papers' own runs: print their exact commands, or run the same path here with tiny models.

Examples:
    turngym study recipe alfworld-1.7b --print
    turngym study recipe bench-alfworld-1.7b --print
    turngym study recipe luffy-search --embedded --out runs/recipe
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from turngym.agents.evaluation.statistics import Interval
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.envs.core.tables import print_table
from turngym.retrieval.cores import environment_with_threads
from turngym.scripts.jobs import shown
from turngym.scripts.options import distill_argv
from turngym.scripts.study.learn import write_text
from turngym.scripts.study.settings import replaced

# The recipes: students, environments and methods of the papers, and which settings are theirs or ours.


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One training of a recipe."""

    name: str
    """Names its folder too."""
    algorithm: str
    words: tuple[str, ...] = ()
    """The paper's settings, written out even where they are our defaults: defaults may change, a paper does not."""
    embedded: tuple[str, ...] = ()
    """Further options for the tiny models, which cannot do everything."""
    teacher: bool = False
    """Whether a teacher takes part, which GRPO makes first."""
    judge: tuple[str, ...] = ()
    """Options of the judge, which has servers of its own. For the tiny models the expert judges."""
    text: bool = False
    """Whether text is modeled beside (L_PT)."""


@dataclass(frozen=True, slots=True)
class Place:
    """An environment, and the tasks that are evaluated on."""

    world: str
    """The embedded world that stands in for it."""
    env: str
    env_kwargs: Mapping[str, str]
    panel: str
    max_turns: int


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One student in one environment, on at most 32 GPUs."""

    name: str
    paper: str
    place: Place
    student: str
    """Its name on the Hugging Face hub."""
    teacher: str
    """The model that GRPO makes the teacher from; or the judge."""
    methods: tuple[Method, ...]
    notes: tuple[str, ...]
    """What is from the paper and what is ours."""
    seeds: tuple[int, ...] = ()
    """Training seeds; where they are given, everything runs on one machine with 8 GPUs, one run after the other."""

    @property
    def has_teacher(self) -> bool:
        return any(method.teacher for method in self.methods)

    @property
    def has_judge(self) -> bool:
        return any(method.judge for method in self.methods)

    @property
    def has_text(self) -> bool:
        return any(method.text for method in self.methods)


HOUSE = Place("alfworld", "turngym/ALFWorld-v0", {"split": "train"}, "alfworld-valid-unseen", 80)
SHOP = Place("webshop", "turngym/WebShop-v0", {"profile": "full-synthetic", "split": "train"}, "webshop-1k-eval", 50)
SEARCH = Place("search", "turngym/Search-v0", {"source": "mixture", "split": "train"}, "search-mixture", 30)
SMALL, LARGE = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"), ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B")
OTHER = ("Qwen/Qwen3.5-2B", "Qwen/Qwen3.5-9B")
"""Pairs of student and teacher."""
BENCH = (
    *(Method(name=name, algorithm=name, teacher=True) for name in ("opd", "tcod", "turnopd")),
    Method(name="gigpo", algorithm="gigpo"),
    Method(name="grpo-student", algorithm="grpo"),  # the folder `grpo` is the teacher's
)
BENCH_NOTES = (
    "# From the papers: the algorithms' settings (our defaults), models, thinking, the tool channel.",
    "# Ours: 100 steps of 64 episodes for every method, 50 turns, five seeds, 150 steps of GRPO for the teacher;",
    "# what is compared is the mean of each run's last four evaluations.",
)
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
JUDGE_OPTIONS = ("--judge-votes", "3", "--judge-temperature", "0.6")


def _live(name: str) -> Method:
    words = tuple(word for option, *values in _SURROGATE for word in (f"--{name}.{option}", *values))
    return Method(name=name, algorithm=name, words=words, embedded=("--judge", "expert"), judge=JUDGE_OPTIONS)


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


RECIPES: Mapping[str, PaperRun] = {
    run.name: run
    for run in (
        PaperRun("alfworld-1.7b", "TurnOPD", HOUSE, *SMALL, TURNOPD, TURNOPD_NOTES),
        PaperRun("alfworld-4b", "TurnOPD", HOUSE, *LARGE, TURNOPD, TURNOPD_NOTES),
        PaperRun("webshop-1.7b", "TurnOPD", SHOP, *SMALL, TURNOPD, TURNOPD_NOTES),
        PaperRun("webshop-4b", "TurnOPD", SHOP, *LARGE, TURNOPD, TURNOPD_NOTES),
        PaperRun("search-2b", "TurnOPD", SEARCH, *OTHER, TURNOPD, TURNOPD_NOTES),
        PaperRun(
            "bench-alfworld-1.7b",
            "reproduction bench",
            replace(HOUSE, max_turns=50),
            *SMALL,
            BENCH,
            BENCH_NOTES,
            seeds=(0, 1, 2, 3, 4),
        ),
        PaperRun("tcod-alfworld", "TCOD", replace(HOUSE, max_turns=30), *SMALL, _curriculum(6, 30), TCOD_NOTES),
        PaperRun("tcod-webshop", "TCOD", replace(SHOP, max_turns=15), *SMALL, _curriculum(4, 15), TCOD_NOTES),
        *(
            PaperRun(f"{short}-{place.world}", paper, place, *pair, methods, notes)
            for place, pair in ((HOUSE, SMALL), (SHOP, SMALL), (SEARCH, OTHER))
            for short, paper, methods, notes in (
                ("luffy", "LUFFY", LUFFY, LUFFY_NOTES),
                ("openclaw", "OpenClaw-RL", OPENCLAW, OPENCLAW_NOTES),
                ("kd", "GRPO and PPO with distillation rewards", KD, KD_NOTES),
            )
        ),
    )
}
"""By name; a name says paper (none: TurnOPD) and environment."""


# The result of an embedded recipe: each method's evaluation.


def accuracy(path: Path) -> str:
    """The mean success in a results.json with its interval."""
    average = json.loads(path.read_text(encoding="utf-8"))["scores"]["overall"]["avg"]
    return str(Interval(**average))


# A recipe as command lines: servers, torchrun, evaluation; and the same path with tiny models.

POLICY, TEACHER, JUDGE, TRAIN = "POLICY_HOST", "TEACHER_HOST", "JUDGE_HOST", "TRAIN_HOST"
PLAY, SCORE, JUDGES, TEXT = "$PLAY", "$SCORE", "$JUDGES", "$TEXT"
"""Addresses of the servers, and the files of L_PT, as the script's head sets them."""
PORT = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command, and on which machines it runs."""

    where: str
    words: tuple[str, ...]
    why: str
    loop: bool = False
    """Whether it runs once for each GPU N of the machine, all at the same time."""
    seeds: tuple[int, ...] = ()
    """Whether it runs once for each SEED, one after the other."""

    @property
    def line(self) -> str:
        # `$NAME` is the shell's to fill in, and must not be quoted away
        said = " ".join(word if "$" in word else shlex.quote(word) for word in self.words)
        if self.seeds:
            return f"for SEED in {' '.join(map(str, self.seeds))}; do {said}; done"
        return f"for N in 0 1 2 3 4 5 6 7; do CUDA_VISIBLE_DEVICES=$N {said} & done" if self.loop else said


def paper_steps(run: PaperRun, out: str) -> list[Step]:
    """Everything from the hub's models to the evaluations, in order."""
    if run.seeds:
        return node_steps(run, out)
    student, teacher = f"{out}/models/student", f"{out}/models/teacher"
    steps = [_download(run.student, student, "the student's weights"), *_helpers(run, out)]
    for method in run.methods:
        made = f"{out}/{method.name}/checkpoints/step_000100/model"
        words = [*_common(run), *method.words, "--student", student, "--out", f"{out}/{method.name}"]
        words += ["--policy-server", PLAY, "--weight-sync", "disk", "--panel", run.place.panel]
        words += ["--teacher", teacher, "--teacher-server", SCORE] if method.teacher else []
        words += ["--judge", JUDGES, *method.judge] if method.judge else []
        words += ["--lm-loss.files", TEXT] if method.text else []
        steps += [
            _serve(POLICY, student, f"8 servers that play for {method.name}; end them after it"),
            Step(
                where="2 machines x 8", words=_torchrun(2, method.algorithm, words), why=f"100 steps of {method.name}"
            ),
            _serve(POLICY, made, f"8 servers of what {method.name} made"),
            Step(where="anywhere", words=_evaluate(run, out, method), why="Avg@4, divided among 16 processes"),
        ]
    return steps


def node_steps(run: PaperRun, out: str) -> list[Step]:
    """Everything on one machine with 8 GPUs, whose processes train, play, score and evaluate; no server is needed."""
    student, base, teacher = (f"{out}/models/{name}" for name in ("student", "base", "teacher"))
    lean = ["--rollout-dtype", "bfloat16", "--shard-teacher"]
    plan = ["--gpus", "8", "--teacher-dtype", "bfloat16", *lean]
    sizes = [model.rpartition("-")[2] for model in (run.student, run.teacher)]
    # a larger model beside its keys and values: fewer episodes side by side
    grpo = [*_common(run), *lean, "--student", base, "--out", f"{out}/grpo", "--steps", "150", "--slots", "4"]
    steps = [
        Step(where="anywhere", words=("turngym", "plan", "--student", sizes[0], "--teacher", sizes[1], *plan),
             why="memory and seconds of a step, by formula; --chip names yours"),
        _download(run.student, student, "the student's weights"),
        _download(run.teacher, base, "the teacher's weights"),
        Step(where="1 machine x 8", words=_one_machine("grpo", grpo), why="GRPO makes the teacher"),
        Step(where="anywhere", words=("cp", "-r", f"{out}/grpo/checkpoints/step_000150/model", teacher),
             why="its last checkpoint teaches"),
    ]  # fmt: skip
    for method in run.methods:
        folder, packed = f"{out}/{method.name}-seed$SEED", f"{out}/results/{method.name}-seed$SEED.result.xz"
        words = [*_common(run), *lean, *method.words, "--student", student, "--out", folder, "--seed", "$SEED"]
        words += ["--panel", run.place.panel, "--eval-every", "25"]
        words += ["--teacher", teacher] if method.teacher else []
        pack = ("turngym", "result", "pack", f"{folder}/eval/step_000100.jsonl", "--out", packed)
        steps += [
            Step(where="1 machine x 8", words=_one_machine(method.algorithm, words), seeds=run.seeds,
                 why=f"100 steps of {method.name}, Avg@4 after every 25"),
            Step(where="anywhere", words=pack, why="the last evaluation, every episode played once more",
                 seeds=run.seeds),
        ]  # fmt: skip
    folders = [f"{method.name}-{seed}={out}/{method.name}-seed{seed}" for method in run.methods for seed in run.seeds]
    table = ("turngym", "result", "table", f"{out}/results", "--out", f"{out}/table")
    report = ("turngym", "report", *folders, "--out", f"{out}/report")
    return [
        *steps,
        Step(where="anywhere", words=table, why="the page with every episode"),
        Step(where="anywhere", words=report, why="means of the last evaluations, spread between seeds, differences"),
    ]


def _one_machine(algorithm: str, words: list[str]) -> tuple[str, ...]:
    return ("torchrun", "--standalone", "--nproc-per-node", "8", "-m", "turngym", "train", algorithm, *words)


def _helpers(run: PaperRun, out: str) -> list[Step]:
    """The steps that start the teacher or the judge. GRPO trains the teacher first."""
    base, teacher = f"{out}/models/base", f"{out}/models/teacher"
    if run.has_judge:
        judge = f"{out}/models/judge"
        # a judge has one address
        address = ("--host", "0.0.0.0", "--port", str(PORT))
        words = ("turngym", "serve", "policy", judge, *address, "--tensor-parallel", "4")
        served = Step(where=JUDGE, words=words, why="one server, on 4 GPUs, that judges")
        return [_download(run.teacher, judge, "the judge's weights"), served]
    if not run.has_teacher:
        return []
    grpo = [*_common(run), "--student", base, "--out", f"{out}/grpo", "--steps", "150"]
    grpo += ["--policy-server", PLAY, "--weight-sync", "disk"]
    return [
        _download(run.teacher, base, "the teacher's weights"),
        _serve(POLICY, base, "8 servers that play for the teacher's own training; end them after it"),
        Step(where="3 machines x 8", words=_torchrun(3, "grpo", grpo), why="GRPO makes the teacher"),
        Step(
            where="anywhere",
            words=("cp", "-r", f"{out}/grpo/checkpoints/step_000150/model", teacher),
            why="its last checkpoint teaches",
        ),
        _serve(TEACHER, teacher, "8 servers that score for the teacher", "--no-seeds"),
    ]


def _download(model: str, folder: str, why: str) -> Step:
    return Step(where="anywhere", words=("hf", "download", model, "--local-dir", folder), why=why)


def _serve(host: str, model: str, why: str, *more: str) -> Step:
    words = ("turngym", "serve", "policy", model, "--host", "0.0.0.0", "--port", f"$(({PORT}+N))", *more)
    return Step(where=host, words=words, why=why, loop=True)


def addresses(name: str, host: str) -> str:
    """The line that sets `name` to the addresses of a machine's eight servers."""
    return f"{name}=" + ",".join(f"http://${host}:{PORT + n}" for n in range(8))


def _torchrun(machines: int, algorithm: str, words: list[str]) -> tuple[str, ...]:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"${TRAIN}:29500")
    group = ("torchrun", "--nnodes", str(machines), "--nproc-per-node", "8", *rendezvous)
    return (*group, "-m", "turngym", "train", "--algorithm", algorithm, *words)


def _common(run: PaperRun) -> list[str]:
    """Options of all trainings. The settings of TurnOPD's Table 7 are our defaults and not repeated."""
    words = ["--env", run.place.env, "--split", run.place.env_kwargs["split"], "--max-turns", str(run.place.max_turns)]
    more = {name: value for name, value in run.place.env_kwargs.items() if name != "split"}
    words += ["--env-kwargs", json.dumps(more)] if more else []
    words += ["--channel", "tool", "--thinking", "on", "--autocast", "bfloat16", "--gradient-checkpointing"]
    return [*words, "--teacher-dtype", "bfloat16"]


def _evaluate(run: PaperRun, out: str, method: Method) -> tuple[str, ...]:
    model = f"{out}/{method.name}/checkpoints/step_000100/model"
    words = ["turngym", "eval", "--panel", run.place.panel, "--agent", f"model:{model}", "--samples", "4"]
    words += ["--temperature", "0.85", "--max-turns", str(run.place.max_turns), "--channel", "tool", "--thinking", "on"]
    return (*words, "--policy-server", PLAY, "--workers", "16", "--out", f"{out}/{method.name}/final")


def render(run: PaperRun, steps: list[Step]) -> str:
    """A shell script for people: above each command stand its purpose and where it runs."""
    role = "judged by" if run.has_judge else "learns from" if run.has_teacher else ""
    who = f"{run.student} {role} {run.teacher}" if role else run.student
    place = "one machine with 8 GPUs of 80 GB" if run.seeds else "at most 4 machines with 8 GPUs each"
    head = [f"# {run.name} ({run.paper}): {who}, on {place}.", *run.notes]
    untried = "# None of these commands has been run at this size; --embedded runs the same path with tiny models."
    if run.seeds:
        head += [*costs(run), untried, "# Set ALFWORLD_DATA to the folder of alfworld-download, everywhere."]
    else:
        hosts = [POLICY, *([TEACHER] if run.has_teacher else []), *([JUDGE] if run.has_judge else []), TRAIN]
        head += [f"# Set {', '.join(hosts)} to host names, TURNGYM_SERVER_KEY everywhere, and --out on a shared disk."]
        head += [untried, "", addresses(PLAY[1:], POLICY)]
        head += [addresses(SCORE[1:], TEACHER)] if run.has_teacher else []
        judge = (f"{JUDGES[1:]}=http://${JUDGE}:{PORT}/v1", "export TURNGYM_JUDGE_KEY=$TURNGYM_SERVER_KEY")
        head += judge if run.has_judge else []
        head += [f"{TEXT[1:]}=pretraining.txt  # what L_PT reads"] if run.has_text else []
    return "\n".join([*head, *(line for step in steps for line in ("", f"# {step.where}: {step.why}", step.line))])


def costs(run: PaperRun) -> list[str]:
    """What `node_steps` takes on 8 H100s by the formulas of `turngym plan`, as comments."""
    from turngym.trainers.plan import Workload, chip_named, estimate, shape_named

    work = Workload(rollout_dtype="bfloat16", teacher_dtype="bfloat16", shard_teacher=True)
    student, base = (shape_named(model.rpartition("-")[2]) for model in (run.student, run.teacher))
    chip = chip_named("H100")
    making = 150 * estimate(base, None, chip, 8, replace(work, slots=4)).step_s
    each = [estimate(student, base if method.teacher else None, chip, 8, work) for method in run.methods]
    learning = len(run.seeds) * sum(100 * one.step_s for one in each)
    # before the first step, and after 25, 50, 75 and 100
    playing = len(run.seeds) * sum(5 * one.eval_s for one in each)
    total, peak = making + learning + playing, max(one.peak for one in each)
    return [
        f"# By formula, on H100s, episodes of 30 turns: {total / 3600:.0f} hours (teacher {making / 3600:.1f}, "
        f"training {learning / 3600:.1f}, evaluations {playing / 3600:.1f}); a GPU holds {peak / 1e9:.0f} GB while "
        "students learn."
    ]


LR = "2e-4"
"""Learning rate of every embedded run. The world's own rate for distillation, without a warm-up, destroys a tiny model
in four steps."""


def embedded_steps(run: PaperRun, world: EmbeddedWorld, options: RecipeOptions) -> list[Step]:
    """The same path in `world`, on this machine: GRPO, every method under torchrun, evaluation."""
    out, last = str(options.out), f"checkpoints/step_{options.steps:06d}/model"
    changed = {"--episodes": str(options.episodes), "--optimizer.lr": LR, "--optimizer.lr-warmup": "0"}
    common = [*replaced(distill_argv(world), changed), "--steps", str(options.steps), "--eval-every", "0"]
    common.append("--no-tensorboard")
    planned = []
    if run.has_teacher:
        words = [*common, "--student", shown(world.checkpoint("teacher")), "--out", f"{out}/grpo"]
        planned.append(_local("grpo", words, "GRPO makes the teacher"))
    for method in run.methods:
        folder = f"{out}/{method.name}"
        words = [*common, *method.words, *method.embedded, "--student", shown(world.checkpoint("student"))]
        words += ["--out", folder, *(["--teacher", f"{out}/grpo/{last}"] if method.teacher else [])]
        words += ["--lm-loss.files", str(text_file(options)), "--lm-loss.coef", "0.01"] if method.text else []
        planned.append(_local(method.algorithm, words, f"{options.steps} steps of {method.name}"))
        told = ("turngym", "eval", "--panel", world.panel, "--agent", f"model:{folder}/{last}", "--samples", "4")
        planned.append(
            Step(
                where="here",
                words=(*told, "--limit", "8", "--threads", "1", "--workers", "2", "--out", f"{folder}/final"),
                why="Avg@4, divided among 2 processes",
            )
        )
    return planned


def text_file(options: RecipeOptions) -> Path:
    """File that L_PT reads: what the world's expert sees and does."""
    return options.out / "text.txt"


def _local(algorithm: str, words: list[str], why: str) -> Step:
    group = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "turngym", "train")
    return Step(where="here", words=(*group, "--algorithm", algorithm, *words), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Which run, and what is done with it."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """alfworld-1.7b, webshop-4b, search-2b, tcod-alfworld, luffy-search, ...; without one they are listed."""
    print: bool = False
    """Print the commands of the paper's run."""
    embedded: bool = False
    """Run the same path with the tiny models of the embedded world: GRPO for the teacher, then every method in two
    processes and its evaluation."""
    out: Path = Path("runs/recipe")
    """Folder of models and runs."""
    steps: int = 4
    """embedded: training steps of every run."""
    episodes: int = 16
    """embedded: episodes per step; whole groups of 8."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym study recipe`."""
    about = (__doc__ or "").split("\n")[0]
    options = tyro.cli(RecipeOptions, args=list(argv), prog="turngym study recipe", description=about)
    if options.name is None:
        print("\n".join(described(run) for run in RECIPES.values()))
        return 0
    if options.name not in RECIPES:
        hint = did_you_mean(options.name, [*RECIPES])
        raise TurngymError(f"recipe {options.name!r}: there are {', '.join(RECIPES)}.{hint}")
    run = RECIPES[options.name]
    if options.print == options.embedded:
        raise TurngymError("say --print for the commands of the paper's run, or --embedded to run the path here")
    if options.print:
        print(render(run, paper_steps(run, str(options.out))))
        return 0
    world = load_world(run.place.world)
    if run.has_text:
        write_text(world, text_file(options))
    for step in embedded_steps(run, world, options):
        print(f"# {step.why}\n{step.line}", flush=True)
        execute(step)
    rows = [[method.name, accuracy(options.out / method.name / "final" / "results.json")] for method in run.methods]
    print_table((["", "Avg@4 [95 %]"], rows), f"{run.name}: {options.steps} steps of {options.episodes} episodes")
    return 0


def described(run: PaperRun) -> str:
    """A line of the list."""
    methods = ", ".join(method.name for method in run.methods)
    helper = f" {'judged by' if run.has_judge else 'from'} {run.teacher}" if run.has_judge or run.has_teacher else ""
    return f"{run.name}: {run.student}{helper}, {run.place.env}; {run.paper}: {methods}"


def execute(step: Step) -> None:
    """Run a step with this Python's turngym and torchrun. Raises TurngymError where it fails."""
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "turngym": [sys.executable, "-m", "turngym.scripts"],
    }
    words = [*programs[step.words[0]], *step.words[1:]]
    done = subprocess.run(words, env=environment_with_threads(1), check=False)
    if done.returncode:
        raise TurngymError(f"{step.why} failed (exit status {done.returncode}): {step.line}")
