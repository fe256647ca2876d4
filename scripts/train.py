"""Train a student: supervised fine-tuning, on-policy distillation, TurnOPD or TCOD.

Examples:
    turngym train --algorithm turnopd --student models/student --teacher models/teacher --out runs/turnopd
    turngym train --algorithm sft --student models/base --expert searching --noise 0 0.5 --out runs/sft
    turngym train --algorithm turnopd --student S --teacher T --out runs/turnopd --resume
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from turngym.envs.core import TurngymError

try:
    from turngym.trainers.algorithms.opd import OpdConfig
    from turngym.trainers.algorithms.sft import SftConfig
    from turngym.trainers.algorithms.tcod import TcodConfig
    from turngym.trainers.algorithms.turnopd import TurnOpdConfig
    from turngym.trainers.config import DistillConfig, OptimiserConfig, RunConfig
except ImportError as error:
    raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error

if TYPE_CHECKING:
    from turngym.scripts.train_wiring import PanelEvaluation, Player
    from turngym.trainers.loop import Trainer
    from turngym.trainers.pieces import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of `turngym train`; the defaults are the reference configuration (TurnOPD, Table 7)."""

    student: Path
    """Folder of the model to train, with its tokenizer (and `turngym.json`, if it has one)."""
    out: Path
    """Folder of the run: checkpoints, metrics.jsonl, tensorboard, evaluation traces."""
    algorithm: Literal["sft", "opd", "turnopd", "tcod"] = "turnopd"
    """What is trained, and how."""
    teacher: Path | None = None
    """Folder of the teacher; needed by every algorithm but sft."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, to the same numbers."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id of the environment."""
    split: str = "generated"
    """Split to train on."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    make: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"config": "small", "on_invalid": "noop"}'."""
    panel: str | None = None
    """Panel to evaluate on; its tasks are never trained on. Without one nothing is evaluated."""
    eval_samples: int = 4
    """Episodes per task of an evaluation (Avg@n)."""
    eval_temperature: float = 0.85
    """Sampling temperature of evaluations."""
    eval_limit: int | None = None
    """Evaluate on the first so many tasks of the panel only."""
    traces: tuple[Path, ...] = ()
    """sft: imitate these recorded episodes instead of playing an expert."""
    expert: Literal["expert", "searching"] = "expert"
    """sft and tcod b2f: who demonstrates; `searching` knows only what it has seen."""
    noise: tuple[float, float] = (0.0, 0.0)
    """sft: share of random actions in an episode, drawn from this range; they are never imitated."""
    blunders: float = 0.0
    """sft: share of those random actions that are plausible mistakes, possible or not, instead of admissible ones."""
    slots: int = 64
    """Episodes played, and requests generated, at a time."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights; bfloat16 loses updates as small as the reference learning rate's."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the teacher's weights."""
    threads: int = 0
    """Threads of torch on the CPU; 0 leaves its default. Tiny models are fastest with 1."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    turnopd: TurnOpdConfig = field(default_factory=TurnOpdConfig)
    tcod: TcodConfig = field(default_factory=TcodConfig)


def main(argv: Sequence[str]) -> int:
    """Run `turngym train` with `argv` (without the verb itself)."""
    options = parse(argv)
    result = build_trainer(options).train(resume=options.resume)
    print(f"{result.step} steps in {result.train_seconds:.0f} s of training; model in {result.model}")
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line; a setting outside its range is explained, and the exit status is 2."""
    return tyro.cli(Options, args=list(argv), prog="turngym train", description=(__doc__ or "").split("\n")[0])


def build_algorithm(options: Options) -> Algorithm:
    """The composition that `options.algorithm` names."""
    from turngym.trainers.algorithms import opd, sft, tcod, turnopd

    run, distill = options.run, options.distill
    builders: dict[str, Callable[[], Algorithm]] = {
        "sft": lambda: sft.build(options.sft, run),
        "opd": lambda: opd.build(options.opd, distill, run),
        "turnopd": lambda: turnopd.build(options.turnopd, distill, run),
        "tcod": lambda: tcod.build(options.tcod, distill, run),
    }
    return builders[options.algorithm]()


def build_trainer(options: Options) -> Trainer:
    """Load models and environment and put the run together; nothing is written yet."""
    import torch

    from turngym.agents.settings import ChatSettings
    from turngym.scripts.train_wiring import Player, weights_hash
    from turngym.trainers.loop import Trainer
    from turngym.trainers.progress import LiveProgress

    if options.threads:
        torch.set_num_threads(options.threads)
    algorithm = build_algorithm(options)
    if algorithm.needs_teacher and options.teacher is None:
        raise TurngymError(f"--algorithm {options.algorithm} distils from a teacher: name its folder with --teacher")
    settings = ChatSettings.load(options.student)
    model, tokenizer = _load(options.student, options.dtype, options.device)
    player = Player.of(model, tokenizer, settings, _peek(options, "tool"), batch=options.slots)
    evaluation = _evaluation(options, player)
    teacher, vocab_size = _teacher(options, model, tokenizer, algorithm.distill_temperature)

    def save_extra(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        settings.save(folder)

    identity = {"env": options.env, "split": options.split, "make": options.make, "chat": asdict(settings)}
    if options.teacher is not None and algorithm.needs_teacher:
        identity["teacher"] = weights_hash(options.teacher)
    return Trainer(
        model=model,
        algorithm=algorithm,
        collect=_collect(options, player, evaluation),
        out=options.out,
        run=options.run,
        optimiser=options.optimiser,
        teacher=teacher,
        evaluate=evaluation,
        on_update=player.engine.weights_changed,
        save_extra=save_extra,
        vocab_size=vocab_size,
        identity=identity,
        progress=LiveProgress(options.algorithm, options.run.steps),
    )


def _load(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from turngym.trainers.model import load_model

    logging.disable_progress_bar()

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = load_model(folder, dtype=dtype, device=target)
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TurngymError(f"no tokenizer in {folder}: {str(error).strip().splitlines()[0]}") from error


def _teacher(options: Options, student: Any, tokenizer: Any, temperature: float) -> tuple[Any, int | None]:
    """The teacher as a scorer, and the number of ids that it shares with the student."""
    if options.teacher is None or options.algorithm == "sft":
        return None, None
    from turngym.trainers.model import vocabulary_size
    from turngym.trainers.scorer import LocalScorer
    from turngym.trainers.vocab_check import common_vocabulary

    model, other = _load(options.teacher, options.teacher_dtype, options.device)
    size = common_vocabulary(tokenizer, other, vocabulary_size(student), vocabulary_size(model))
    tokens = options.run.micro_tokens
    return LocalScorer(model=model, vocab_size=size, temperature=temperature, max_tokens=tokens), size


def _make_env(options: Options, **more: Any) -> Callable[[], Any]:
    from turngym.scripts.wiring import env_maker, json_object

    kwargs = {"split": options.split, "max_turns": options.run.max_turns, **json_object("--make", options.make)}
    if options.data is not None:
        kwargs["data"] = options.data
    return env_maker(options.env, **kwargs, **more)


def _peek(options: Options, name: str) -> Any:
    env = _make_env(options)()
    try:
        return getattr(env.unwrapped, name)
    finally:
        env.close()


def _evaluation(options: Options, player: Player) -> PanelEvaluation | None:
    if options.panel is None:
        return None
    from turngym.envs.panels import load_panel
    from turngym.scripts.train_wiring import PanelEvaluation
    from turngym.scripts.wiring import env_maker, json_object

    panel = load_panel(options.panel)
    more = {key: value for key, value in json_object("--make", options.make).items() if key in ("on_invalid", "engine")}
    kwargs = {"max_turns": options.run.max_turns, **more, **panel.make_kwargs, "channel": player.settings.channel}
    if options.data is not None:
        kwargs["data"] = options.data
    return PanelEvaluation(
        panel=panel,
        player=player,
        make_env=env_maker(panel.env_id, **kwargs),
        folder=options.out / "eval",
        samples=options.eval_samples,
        temperature=options.eval_temperature,
        seed=options.run.seed,
        slots=options.slots,
        limit=options.eval_limit,
    )


def _collect(options: Options, player: Player, evaluation: PanelEvaluation | None) -> Any:
    from turngym.envs.panels import assert_disjoint
    from turngym.scripts.train_wiring import ExpertCollect, LiveCollect
    from turngym.trainers.dataset import DatasetCollect

    held_out = () if evaluation is None else evaluation.panel.tasks
    if options.traces and options.algorithm == "sft":
        from turngym.envs.trace import read_trace

        episodes = [episode for path in options.traces for episode in read_trace(path)[0]]
        assert_disjoint([episode.task for episode in episodes], held_out)
        return DatasetCollect(episodes=episodes, seed=options.run.seed)
    shared = {
        "make_env": _make_env(options, channel=player.settings.channel),
        "task_ids": _peek(options, "task_ids")(),
        "seed": options.run.seed,
        "slots": options.slots,
        "held_out": held_out,
        "expert": options.expert,
    }
    if options.algorithm == "sft":
        return ExpertCollect(
            renderer=player.renderer, settings=player.settings, noise=options.noise, blunders=options.blunders, **shared
        )
    return LiveCollect(player=player, **shared)
