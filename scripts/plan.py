"""What a training setup needs: memory per GPU and seconds per step, before a machine is rented.

Examples:
    turngym plan --student 1.7B --teacher 8B --chip H100
    turngym plan --student models/smollm2 --teacher none --chip 4090 --gpus 1
    turngym plan --student 8B --teacher 14B --lora-rank 16 --rollout-dtype bfloat16 --teacher-dtype bfloat16
    turngym plan --config runs/turnopd/config.toml --chip 3090
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.models import base_model, model_config
from turngym.agents.named_agent import chat_settings
from turngym.agents.play_spec import episodes_of
from turngym.agents.rendering.chat_settings import CHAT_FILE, ChatSettings
from turngym.agents.servers.server_options import StartedServer, rollout_dtype
from turngym.core.nested import at, flat
from turngym.core.numbers import Count, Million, Number
from turngym.core.resolve import Layer, Resolved
from turngym.core.setting import kind_of
from turngym.core.settings import read_toml
from turngym.core.spec import Spec, Unread, changed, needing, plain
from turngym.core.tables import Table, print_table, table_of
from turngym.scripts.options import CONFIG, pop_option, read_options
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import BUILT_IN
from turngym.trainers.model_shapes import ModelShape, shape_named, shape_of
from turngym.trainers.run import build_algorithm, evaluation_of
from turngym.trainers.several_envs import further_env
from turngym.trainers.teacher import is_the_base
from turngym.trainers.train_config import DEFAULT, TrainConfig, resolve_training
from turngym.trainers.training_costs import CostEstimate, StepWorkload, chip_named, estimate, traffic


class PlanOptions(Spec):
    """Which models on which machines."""

    student: str = "1.7B"
    """tiny, 0.6B, 1.7B, 4B, 8B, 14B, 32B (Qwen3), 2B, 9B (Qwen3.5, hybrid), or a folder with a model or an adapter."""
    teacher: str | None = "8B"
    """Shape or folder of the teacher, as for --student; `none` for algorithms without a teacher."""
    gpus: tuple[Count, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of GPUs, one row each."""
    steps: Million | None = None
    """Steps of the run; with it a line says what all of it takes."""
    eval_every: Number = 10
    """Steps between evaluations, one before the first and one after the last included; 0 for none."""
    chip: str = "H100"
    """A100-40, A100-80, H100, H200, H20, a consumer card (3090, 4090, 5090), or CPU: this machine."""
    work: StepWorkload = StepWorkload()

    def unread(self) -> Unread:
        if self.steps is None:
            yield from needing("--steps", "eval_every")
        if self.teacher is None and self.work.reference != "own":
            yield from needing("a --teacher, or --reference own", "work.teacher_dtype", "work.shard_teacher")
        if self.work.engine == "local":
            yield from needing("--engine sglang or vllm", "work.engine_memory")


def plan_table(options: PlanOptions) -> Table:
    """One line per number of GPUs. Raises TurngymError for names that are unknown."""
    memory = {part: part for part in ("states", "update", "teacher", "rollout", "peak")} | {"teacher": "scoring"}
    seconds = ("rollout", "teacher", "update", "step", "eval")
    return table_of(
        {
            "GPUs": str(gpus),
            **{f"{part} GB": f"{getattr(planned, key) / 1e9:.1f}" for part, key in memory.items()},
            "fits": "yes" if planned.fits else "no",
            "at once": str(planned.at_once),
            **{f"{part} s": f"{getattr(planned, f'{part}_s'):.1f}" if planned.fits else "-" for part in seconds},
        }
        for gpus, planned in _estimates(options).items()
    )


def _models(options: PlanOptions) -> tuple[ModelShape, ModelShape | None]:
    return _shape(options.student), None if options.teacher is None else _shape(options.teacher)


def _estimates(options: PlanOptions) -> dict[int, CostEstimate]:
    """The cost of a step, by number of GPUs."""
    models, chip = _models(options), chip_named(options.chip)
    return {gpus: estimate(*models, chip, gpus, options.work) for gpus in options.gpus}


def traffic_table(options: PlanOptions) -> Table:
    """What each GPU receives in a step, one line per number of GPUs."""
    names = {"to_play": "to play", "update": "update", "teacher": "teacher", "top_k": "top K", "episodes": "episodes"}
    names |= {"all": "together", "to_server": "to a server"}
    by_gpus = {gpus: traffic(*_models(options), gpus, options.work) for gpus in options.gpus}
    return table_of(
        {"GPUs": str(gpus), **{f"{name} GB": f"{getattr(moved, key) / 1e9:.2f}" for key, name in names.items()}}
        for gpus, moved in by_gpus.items()
    )


def notes(options: PlanOptions) -> list[str]:
    """Says in sentences which assumptions the figures rest on."""
    chip, work = chip_named(options.chip), options.work
    tokens, rows = work.episodes * work.tokens, len(work.row_lengths)
    spread = "sharded, too" if work.shard_teacher else "whole on every GPU"
    others = "" if options.teacher is None else f"; the {work.teacher_dtype} teacher, {spread}"
    others += f"; the initial policy, in {work.teacher_dtype}, {spread}" if work.reference == "own" else ""
    others += "; the critic's own three" if work.critic == "model" else ""
    copied = work.played_dtype != work.dtype
    served = work.engine != "local"
    others += "; the student that plays ahead, whole" if work.ahead else ""
    others += "; the copy of the student that plays, whole" if copied and not served else ""
    others += "; the merged weights that play, whole" if work.lora_rank and not copied and not served else ""
    trained = "gradients and AdamW's moments"
    held = f"{work.dtype} weights, {trained} of the student"
    if work.lora_rank:
        held = f"{work.dtype} weights of the student, adapters of rank {work.lora_rank} with {trained}"
    engine = (
        f"rollout: the {work.engine} server of --engine, {work.engine_memory:.0%} of the chip's memory for its own "
        f"{work.played_dtype} weights and cache; it sleeps while the teacher scores and the student learns."
    )
    return [
        f"{work.episodes} episodes of {rows} {'row' if rows == 1 else 'rows'} and {work.tokens:,} tokens per step "
        f"(memory {work.memory}: the longest row has {work.length:,}; {tokens:,} in all, "
        f"{work.turns * work.response / work.tokens:.0%} sampled); {chip.name}: {chip.memory / 1e9:.0f} GB, "
        f"{chip.flops / 1e12:.3g} TFLOP/s in bfloat16, {chip.flops32 / 1e12:.3g} in float32, "
        f"{chip.bandwidth / 1e12:.2f} TB/s.",
        f"states: {held}, sharded over all GPUs{others}. update, teacher and rollout come on top, one after the other; "
        "peak is the largest sum.",
        f"at once: episodes that one GPU plays side by side; the {work.played_dtype} cache of one takes "
        f"{_shape(options.student).episode_bytes(work.length, work.played_dtype) / 1e9:.2f} GB.",
        *([engine] if served else []),
        f"eval s: {work.eval_episodes} episodes, divided among the processes as those of a step are.",
        f"Times assume {work.compute_share:.0%} of the chip's operations, {work.decode_share:.0%} of its bandwidth, "
        f"{work.start_us:g} microseconds to start an operation, and no waiting for the environments or the network: "
        "measure yours with `turngym bench gpu` and `turngym bench rollout`, and say --compute-share, --decode-share "
        "and --start-us.",
        *_whole(options),
        *_ahead(options),
        "to play: the student's weights before it plays. update: weights for each pass, gradients back. top K: 50 ids "
        "a sampled token. to a server: what each engine that plays gets instead of its own rollout.",
    ]


def _whole(options: PlanOptions) -> list[str]:
    """Hours of the whole run, and what to change where it does not fit."""
    estimates, lines = _estimates(options), []
    if options.steps is not None:
        evaluations = 1 + -(-options.steps // options.eval_every) if options.eval_every else 0
        hours = [
            f"{gpus}: {(options.steps * planned.step_s + evaluations * planned.eval_s) / 3600:.1f}"
            for gpus, planned in estimates.items()
            if planned.fits
        ]
        work_text = f"{options.steps} steps and {evaluations} evaluations"
        lines.append(f"the run: {work_text} take, in hours by GPUs, {', '.join(hours) or 'nothing, as nothing fits'}.")
    if not all(planned.fits for planned in estimates.values()):
        work, frozen = options.work, options.teacher is not None or options.work.reference == "own"
        changes = {
            "--lora-rank 16": not work.lora_rank,
            "--checkpointing": not work.checkpointing,
            "--rollout-dtype bfloat16": work.played_dtype == "float32" and not work.lora_rank,
            "--teacher-dtype bfloat16": frozen and work.teacher_dtype == "float32",
            "--shard-teacher": frozen and not work.shard_teacher and max(options.gpus) > 1,
            "a smaller --micro-tokens": True,
            "a smaller model or a larger chip": True,
        }
        lines.append(f"where it does not fit: {', '.join(name for name, helps in changes.items() if helps)}.")
    return lines


def _ahead(options: PlanOptions) -> list[str]:
    """Seconds of a step in which servers play while the trainer learns."""
    # servers record a token's operations once and start them together (CUDA graphs)
    served = _estimates(changed(options, work=changed(options.work, start_us=0.0)))
    seconds = []
    for gpus, in_turn in _estimates(options).items():
        ahead = max(served[gpus].rollout_s, served[gpus].teacher_s + served[gpus].update_s)
        seconds += [f"{gpus}: {ahead:.1f} instead of {in_turn.step_s:.1f}"] if in_turn.fits else []
    if not seconds:
        return []
    return [
        "step s: in turn, nothing overlaps. With --staleness 1 and engines of their own (--policy-server) on as many "
        f"GPUs again, a step takes the longer of playing and learning, in seconds: {', '.join(seconds)}."
    ]


def main(argv: Sequence[str]) -> int:
    """Run `turngym plan`; the exit status is 1 if nothing fits."""
    words, file = pop_option(argv, CONFIG)
    run_table = None if file is None else read_toml(file, provenance=True)
    run = {} if run_table is None else plain(of_run(run_table, str(file)))
    options = read_options(PlanOptions, words, prog="turngym plan", about=__doc__, below=run)
    if (options.chip.upper() == "CPU" or options.work.engine != "local") and "--gpus" not in words:
        options = changed(options, gpus=(1,))
    table = plan_table(options)
    print_table(table, f"{options.student} taught by {options.teacher or 'nobody'} on {chip_named(options.chip).name}")
    print_table(traffic_table(options), "what each GPU receives in a step")
    print("\n".join([*notes(options), *([] if run_table is None else notes_of_run(run_table, str(file)))]))
    return 0 if any(row[6] == "yes" for row in table[1]) else 1


def of_run(table: Mapping[str, Any], where: str = "options") -> PlanOptions:
    """The plan's options for a training run whose settings are read as `turngym train` does. Lengths of observations
    and responses keep their defaults if the settings do not say them."""
    resolved = _run_config(table, where)
    config, given = resolved.spec, flat(resolved.asked or {})
    algorithm, run, play, evaluation = build_algorithm(config), config.run, config.play, config.evaluation
    chat = chat_settings(config.chat, ChatSettings.load(config.models.student), play.env.id)
    work: dict[str, Any] = {
        "episodes": run.episodes,
        "turns": config.loop.full_depth,
        "memory": chat.memory,
        "micro_tokens": run.micro_tokens,
        "head_chunk": run.head_chunk,
        "checkpointing": run.gradient_checkpointing,
        # a minibatch has an episode at least
        "updates": min(config.optimizer.minibatches, run.episodes),
        "epochs": config.optimizer.ppo_epochs,
        "dtype": config.models.dtype,
        "precision": "float32" if run.autocast == "off" else "autocast",
        "lora_rank": 0 if config.lora is None else config.lora.rank,
        "reference": _reference(config, algorithm),
        "critic": "none" if algorithm.critic is None else algorithm.critic.kind,
        "ahead": config.stale is not None,
        "plays": algorithm.imitates is None and not play.traces,
        "slots": play.slots,
        "rollout_dtype": rollout_dtype(config.engine),
        "teacher_dtype": config.part("frozen").teacher_dtype,
        "shard_teacher": config.part("frozen").shard_teacher,
    }
    # a limit is no length, but the longest that a response may be
    if "chat.max_new_tokens" in given or play.preset or (config.models.student / CHAT_FILE).is_file():
        work["response"] = chat.max_new_tokens
    if isinstance(config.engine, StartedServer):
        work |= {"engine": kind_of(type(config.engine)), "engine_memory": config.engine.engine_memory}
    if evaluation is None or not run.eval_every:
        work["eval_episodes"] = 0
    else:
        every = (config, *(further_env(text).played(config) for text in play.also))
        work["eval_episodes"] = sum(episodes_of(spec.play) for spec in map(evaluation_of, every) if spec is not None)
    held = algorithm.needs_teacher and config.served_teacher is None and config.teacher is not None
    return PlanOptions(
        student=str(config.models.student),
        teacher=str(config.teacher) if held else None,
        work=StepWorkload(**work),
        eval_every=run.eval_every,
        steps=run.steps if "run.steps" in given else None,
    )


def notes_of_run(table: Mapping[str, Any], where: str = "options") -> list[str]:
    """Sentences about a run that no column shows: its learning rate and updates, and what is not counted."""
    resolved = _run_config(table, where)
    config = resolved.spec
    algorithm, adapters = build_algorithm(config), config.lora is not None
    updates = min(config.optimizer.minibatches, config.run.episodes) * config.optimizer.ppo_epochs
    is_given = at(resolved.asked, "optimizer.lr") is not None
    source = "as given" if is_given else f"the usual one of {config.algorithm}{' with adapters' if adapters else ''}"
    uncounted = ", ".join(
        name
        for name, present in (
            ("teachers of --also", any(further_env(text).teacher for text in config.play.also)),
            ("fewer adapters than on every linear layer (--lora.targets)", config.lora and config.lora.targets),
            (f"up to {algorithm.refill} further rounds of episodes a step (refill)", algorithm.refill),
            ("a teacher that plays, too", algorithm.teacher_mix or algorithm.guide),
            ("a judge that is a model", "model" in (kind_of(type(config.part("judge"))) or "")),
        )
        if present
    )
    return [
        f"learning rate: {config.optimizer.lr:g}, {source} (--optimizer.lr). Updates: {updates} a step "
        "(--optimizer.minibatches, --optimizer.ppo-epochs).",
        *([f"not counted: {uncounted}."] if uncounted else []),
    ]


def _run_config(table: Mapping[str, Any], where: str) -> Resolved[TrainConfig]:
    # a file that names no algorithm is meant for the one whose settings it has
    algorithm = next((name for name in BUILT_IN if name.replace("-", "_") in table), DEFAULT)
    needed = Layer(name="plan", table={"student": "1.7B", "out": "."}, asked=True)
    layers = [needed, Layer(name=where, table=table, asked=True)]
    return resolve_training(str(table.get("algorithm", algorithm)), layers)


def _reference(config: TrainConfig, algorithm: Algorithm) -> str:
    if not algorithm.needs_reference:
        return "none"
    return "base" if is_the_base(config, config.models.dtype) else "own"


def _shape(name: str) -> ModelShape:
    folder = Path(name)
    while base := base_model(folder):
        folder = base
    if not (folder / "config.json").is_file():
        return shape_named(name)
    return shape_of(model_config(folder))
