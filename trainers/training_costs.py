"""What a training setup needs: memory per GPU and seconds per step, by formula.

Formulas hold for Qwen3-shaped and Qwen3.5-shaped models with SDPA attention, AdamW with float32 weights and moments
sharded over all GPUs (FSDP2), and rollouts by the local engine on the same GPUs. Parameters and the engine's cache are
exact; saved activations are exact for transformers 5 where all layers attend (a test counts them; layers with linear
attention are priced as those); times rest on two assumed shares of the chip's peak, which `turngym bench gpu` and
`turngym bench rollout` measure on yours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from turngym.agents.rendering.memory import require_memory
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.numbers import BelowOne, Count, Million, NotNegative, Number, Portion
from turngym.core.spec import Spec, changed
from turngym.core.task import MAX_TURNS
from turngym.trainers.model_shapes import BYTES, ModelShape
from turngym.trainers.run_config import PASS_TOKENS, PASS_TOKENS_CPU

Precision = Literal["float32", "autocast"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator, by its maker's figures."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """bfloat16 operations per second, dense."""
    flops32: float
    """float32 operations per second: not those of TF32, which torch leaves off."""
    bandwidth: float
    """Bytes per second of its memory."""


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(name="A100-40", memory=40e9, flops=312e12, flops32=19.5e12, bandwidth=1.555e12),
            Chip(name="A100-80", memory=80e9, flops=312e12, flops32=19.5e12, bandwidth=2.039e12),
            Chip(name="H100", memory=80e9, flops=989e12, flops32=67e12, bandwidth=3.35e12),
            Chip(name="H200", memory=141e9, flops=989e12, flops32=67e12, bandwidth=4.8e12),
            Chip(name="H20", memory=96e9, flops=148e12, flops32=44e12, bandwidth=4.0e12),
            # consumer cards: tensor cores reach half of their bfloat16 rate where sums are float32, as torch has them
            Chip(name="3090", memory=24e9, flops=71e12, flops32=35.6e12, bandwidth=0.936e12),
            Chip(name="4090", memory=24e9, flops=165e12, flops32=82.6e12, bandwidth=1.008e12),
            Chip(name="5090", memory=32e9, flops=209.5e12, flops32=104.8e12, bandwidth=1.792e12),
        )
    }
)


CPU_FLOPS, CPU_BANDWIDTH = 50e9, 20e9
"""What is assumed of a core (float32 operations a second, with AVX2 at 3 GHz) and of main memory (bytes a second)."""


def chip_named(name: str) -> Chip:
    """One of `CHIPS`, or `CPU`: this machine's cores and main memory. Raises TurngymError for another name."""
    if name.upper() == "CPU":
        cores, pages = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # a CPU without bfloat16 units computes it no faster
        rate = cores * CPU_FLOPS
        return Chip(name=f"CPU ({cores} cores)", memory=float(pages), flops=rate, flops32=rate, bandwidth=CPU_BANDWIDTH)
    if name not in CHIPS:
        raise TurngymError(f"chip {name!r} is unknown; valid: {', '.join(CHIPS)}, CPU.{did_you_mean(name, CHIPS)}")
    return CHIPS[name]


class StepWorkload(Spec):
    """What one training step does."""

    episodes: Million = 64
    """Episodes per step, all GPUs together."""
    turns: Count = 30
    """Turns of an episode."""
    memory: str = "all"
    """What a turn's prompt holds, as --memory of training. `all`: an episode is one row; `window:N`, `verl-agent:N`,
    `react`: every turn is a row of its own, which reads again what it shows of the past."""
    observation: Count = 150
    """Tokens that an environment adds per turn, template included."""
    response: Count = 100
    """Tokens that the policy samples per turn."""
    micro_tokens: Count | None = None
    """Tokens per forward and backward pass on one GPU (an episode longer than this comes alone). By default 8192, and
    2048 on a CPU."""
    head_chunk: Count = 1024
    """Rows of logits that exist at a time."""
    checkpointing: bool = True
    """Recompute activations, but for what attention gives."""
    updates: Million = 1
    """Updates per pass over the step's episodes (minibatches)."""
    epochs: Million = 1
    """Passes over the step's episodes."""
    dtype: Dtype = "float32"
    """Precision of the student's weights, gradients and moments."""
    precision: Precision = "autocast"
    """Precision of the update: bfloat16 autocast over the weights, or theirs throughout."""
    lora_rank: Number = 0
    """Rank of adapters on every linear layer but the head; 0 trains all weights."""
    reference: Literal["none", "base", "own"] = "none"
    """The frozen initial policy, which scores, too: `own`, a second model in --teacher-dtype, or `base`, the student
    without its adapters."""
    critic: Literal["none", "model", "head"] = "none"
    """What predicts returns. `model`: a second student that is trained, too; `head`: a small network on its states."""
    ahead: bool = False
    """Keep a copy of the student that plays while the student learns (--staleness)."""
    plays: bool = True
    """Whether the student plays what it learns from; it does not imitate an expert or recorded episodes."""
    slots: Million = 64
    """Episodes that a process plays side by side at most."""
    rollout_dtype: Dtype | None = None
    """Precision of the weights and the cache that play, by default that of --dtype; where the two differ, the weights
    are a copy beside those that are trained."""
    engine: Literal["local", "sglang", "vllm"] = "local"
    """What plays: the trainer's process, or a server of the run's own beside it, on one GPU. It has its own weights, in
    --rollout-dtype, and gives its memory back during updates."""
    engine_memory: Portion = 0.4
    """Share of the chip's memory that such a server takes while it plays."""
    teacher_dtype: Dtype = "float32"
    """Precision of the teacher's weights."""
    shard_teacher: bool = False
    """Divide the teacher over the GPUs; each holds all of it while it scores."""
    eval_episodes: Number = 536
    """Episodes of one evaluation (tasks times samples); each process plays its share."""
    compute_share: Portion = 0.4
    """Share of the chip's peak that forward and backward passes reach."""
    decode_share: Portion = 0.5
    """Share of the memory's bandwidth that decoding reaches."""
    start_us: NotNegative = 15.0
    """Microseconds for Python and torch to start one operation of the local engine; 0 if a server plays."""
    reserve: BelowOne = 0.1
    """Share of the chip's memory left to the allocator, the libraries and the communication buffers."""

    def __post_init__(self) -> None:
        if self.reference == "base" and not self.lora_rank:
            raise TurngymError("reference is base without lora_rank; valid: own, the student has no adapters")
        past_turns(self.memory)

    @property
    def pass_tokens(self) -> int:
        """Tokens per pass, on a GPU where nothing is said."""
        return PASS_TOKENS if self.micro_tokens is None else self.micro_tokens

    @property
    def played_dtype(self) -> Dtype:
        """Precision of the weights and the cache that play."""
        return self.rollout_dtype or self.dtype

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row that an episode is trained as: of all turns together, or of each with what its prompt
        shows."""
        turn, remembered = self.observation + self.response, past_turns(self.memory)
        if remembered is None:
            return (self.turns * turn,)
        if self.memory == "react":
            # a transcript repeats thoughts, too
            return tuple((past + 1) * turn for past in range(self.turns))
        # a window shows observations with the actions that were read, not responses
        return tuple((min(past, remembered) + 1) * self.observation + self.response for past in range(self.turns))

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.row_lengths)

    @property
    def tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def context(self) -> float:
        """Tokens that a token attends to on average: under a causal mask half of its row."""
        return sum(length**2 for length in self.row_lengths) / (2 * self.tokens)

    @property
    def fresh(self) -> int:
        """Tokens of an episode that its prompts bring while it is played: with rows of single turns all of them."""
        return self.tokens - self.turns * self.response

    @property
    def cached(self) -> float:
        """Tokens in an episode's cache while it decodes, on average."""
        return self.length / 2 if self.memory == "all" else self.tokens / self.turns - self.response / 2

    @property
    def halves(self) -> bool:
        """Whether the update computes in bfloat16."""
        return self.precision == "autocast" or self.dtype == "bfloat16"


def past_turns(memory: str) -> int | None:
    """The number of past turns in a prompt if every turn is a row of its own; None if an episode is one row.

    Raises TurngymError for a memory that does not exist.
    """
    require_memory(memory)
    if memory == "all":
        return None
    return MAX_TURNS if memory == "react" else int(memory.partition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """Bytes per GPU and seconds per step."""

    states: float
    """Weights, gradients and moments of the student's shard and the critic's, teacher and initial policy or their
    shards, and what plays beside them (a copy of the student in another precision or an older one, its weights with the
    adapters merged): there all the time."""
    update: float
    """Bytes on top while updating: gathered layers, activations, logits; or AdamW's one copy of its second moments,
    which torch makes for all parameters at once."""
    scoring: float
    """Bytes on top while the teacher scores: what a sharded one gathers."""
    rollout: float
    """Bytes on top while playing: the student's gathered weights and the engine's cache."""
    at_once: int
    """Episodes that one GPU can keep in memory while playing; 0 if none fits."""
    rollout_s: float
    teacher_s: float
    update_s: float
    eval_s: float
    """Seconds of one evaluation; not part of a step."""
    room: float
    """Bytes that one GPU offers, the reserve taken off."""

    @property
    def peak(self) -> float:
        """Most bytes on one GPU."""
        return self.states + max(self.update, self.scoring, self.rollout)

    @property
    def fits(self) -> bool:
        return self.at_once > 0 and self.peak <= self.room

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.teacher_s + self.update_s


def saved_bytes(shape: ModelShape, precision: Precision = "autocast", lora_rank: int = 0) -> int:
    """Bytes that one decoder layer saves for its backward pass, per token, without recomputation.

    | | all weights | adapters of rank r |
    | --- | --- | --- |
    | autocast | 26 D + 12 Q + 6 KV + 8 M | 18 D + 8 Q + 8 KV + 8 M + 14 r |
    | float32 | 24 D + 20 Q + 8 KV + 16 M | 16 D + 12 Q + 12 KV + 16 M + 28 r |

    with D the width, Q and KV the widths of queries and keys, M that of the MLP. To all come the scales of the norms
    and the sums of attention, which is one fused kernel that saves no scores: 8 + 8 heads + 4 key heads. A frozen norm
    does not keep what it multiplies; an adapter keeps the input of its layer, as the layer's own weight would.
    """
    d, q, kv, m, r = shape.width, shape.query_width, shape.kv_width, shape.mlp, lora_rank
    scales = 8 + 8 * shape.heads + 4 * shape.kv_heads
    if precision == "autocast":
        return (18 * d + 8 * q + 8 * kv + 14 * r if r else 26 * d + 12 * q + 6 * kv) + 8 * m + scales
    return (16 * d + 12 * q + 12 * kv + 28 * r if r else 24 * d + 20 * q + 8 * kv) + 16 * m + scales


def activation_bytes(
    shape: ModelShape, tokens: int, *, checkpointing: bool, precision: Precision, lora_rank: int = 0
) -> float:
    """Bytes of a forward pass over `tokens` until its backward pass.

    With recomputation every layer keeps its float32 input, and what its attention gives and the sums behind it; one
    layer at a time keeps everything.
    """
    layer = saved_bytes(shape, precision, lora_rank)
    attended = (2 if precision == "autocast" else 4) * shape.query_width + 4 * shape.heads
    per_token = shape.layers * layer
    if checkpointing:
        per_token = shape.layers * (4 * shape.width + attended) + layer - attended
    return float(tokens * per_token)


def logits_bytes(shape: ModelShape, rows: int) -> float:
    """Bytes of the head, forward and backward: two float32 copies of a chunk's logits.

    Its gradient is the one that the student's states count: chunks and micro-batches add to that.
    """
    return 8.0 * rows * shape.vocab


def gathered_bytes(shape: ModelShape, *, frozen: bool = False) -> float:
    """Bytes of what FSDP2 gathers while a layer runs: two layers in bfloat16 and one's float32 gradient; both
    embeddings.

    Frozen weights have no gradient.
    """
    gradient = 0 if frozen else 4
    return (4.0 + gradient) * shape.stored_layer + (2.0 + gradient) * shape.embedding_parameters


def estimate(
    student: ModelShape, teacher: ModelShape | None, chip: Chip, gpus: int, work: StepWorkload
) -> CostEstimate:
    """Memory and time of one training step on `gpus` equal chips; no teacher for algorithms that need none.

    Raises:
        TurngymError: a server of the run's own with several GPUs.
    """
    served = work.engine != "local"
    if served and gpus > 1:
        raise TurngymError(f"gpus is {gpus} with engine {work.engine}: a run's own server stands beside one process")
    if served:
        # servers record a token's operations once and start them together (CUDA graphs)
        work = changed(work, start_us=0.0)
    if work.micro_tokens is None and chip.name.startswith("CPU"):
        work = changed(work, micro_tokens=PASS_TOKENS_CPU)
    adapters, size = student.adapter_parameters(work.lora_rank), float(BYTES[work.dtype])
    # four numbers a parameter: weight, gradient and AdamW's two moments; frozen weights are one, adapters float32
    states = (size * student.parameters + 16.0 * adapters if adapters else 4 * size * student.parameters) / gpus
    if work.critic == "model":
        # its gradients come when the student's are gone
        states += (size * student.parameters + 12.0 * adapters if adapters else 3 * size * student.parameters) / gpus
    if work.ahead:
        states += size * student.parameters
    if served:
        pass  # what plays is in the server's share, below
    elif work.played_dtype != work.dtype:
        states += BYTES[work.played_dtype] * student.parameters
    elif adapters:
        # the engine merges the weights that play, beside those that they are made of
        states += size * (student.parameters - student.embedding_parameters)
    frozen = ([] if teacher is None else [teacher]) + ([student] if work.reference == "own" else [])
    states += sum(_frozen_bytes(model, gpus, work)[0] for model in frozen)
    # while they play all processes hold all weights; of a single one they are its own
    weights = size * student.parameters * (1 - 1 / gpus)
    room = chip.memory * (1 - work.reserve)
    share, evaluated = math.ceil(work.episodes / gpus), math.ceil(work.eval_episodes / gpus)
    cache = float(student.episode_bytes(work.length, work.played_dtype))
    fitting = int(max(0.0, room - states - weights) // cache)
    if served:
        weights = float(BYTES[work.played_dtype] * student.parameters)
        claimed = work.engine_memory * chip.memory
        # a share that does not fit beside the trainer's states leaves nothing
        fitting = int(max(0.0, claimed - weights) // cache) if states + claimed <= room else 0
    at_once = min(share, work.slots, fitting)
    scoring = ([] if teacher is None else [teacher]) + ([] if work.reference == "none" else [student])
    scored = sum(_forward_flops(model, work) for model in scoring)
    learned = _update_flops(student, work) + _critic_flops(student, work)
    update_dtype = "bfloat16" if work.halves else "float32"
    return CostEstimate(
        states=states,
        update=_update_bytes(student, gpus, work),
        scoring=max((_frozen_bytes(model, gpus, work)[1] for model in frozen), default=0.0),
        rollout=claimed if served else weights + at_once * cache if work.plays or evaluated else 0.0,
        at_once=at_once,
        rollout_s=_rollout_seconds(student, chip, work, share, at_once) if work.plays else 0.0,
        teacher_s=scored / gpus / _operations(chip, work, work.teacher_dtype),
        update_s=learned / gpus / _operations(chip, work, update_dtype),
        eval_s=_rollout_seconds(student, chip, work, evaluated, min(evaluated, work.slots, fitting)),
        room=room,
    )


def _frozen_bytes(model: ModelShape, gpus: int, work: StepWorkload) -> tuple[float, float]:
    """Bytes of a teacher or of the initial policy on one GPU, all the time, and on top while it scores."""
    total = float(BYTES[work.teacher_dtype] * model.parameters)
    return (total / gpus, total * (1 - 1 / gpus)) if work.shard_teacher else (total, 0.0)


def _update_bytes(student: ModelShape, gpus: int, work: StepWorkload) -> float:
    tokens, adapters = max(work.pass_tokens, work.length), student.adapter_parameters(work.lora_rank)
    size, precision = float(BYTES[work.dtype]), "autocast" if work.halves else "float32"
    forward = activation_bytes(
        student,
        tokens,
        checkpointing=work.checkpointing,
        precision=precision,  # type: ignore[arg-type]
        lora_rank=work.lora_rank,
    )
    # on one GPU nothing is sharded, so nothing is gathered but the bfloat16 copies that autocast makes of weights
    copied = student.parameters
    if adapters and work.checkpointing:
        # it keeps none of frozen weights, so one layer's and the head's are there at a time
        copied = student.stored_layer + student.embedding_parameters
    casts = 2.0 * copied if work.precision == "autocast" and work.dtype == "float32" else 0.0
    gathered = casts if gpus == 1 else gathered_bytes(student, frozen=bool(adapters))
    one_pass = forward + logits_bytes(student, min(work.head_chunk, tokens))
    # torch makes the embedding's gradient anew at the end, and adds it to the one that it has
    embedding = 0.0 if adapters else size * student.vocab * student.width
    # one after the other: activations and logits are gone when the embedding's turn comes, gathered layers at the step
    return max(max(one_pass, embedding) + gathered, (4.0 * adapters or size * student.parameters) / gpus)


def _operations(chip: Chip, work: StepWorkload, dtype: str) -> float:
    """Operations per second that one chip reaches."""
    return (chip.flops if dtype == "bfloat16" else chip.flops32) * work.compute_share


def _forward_flops(shape: ModelShape, work: StepWorkload) -> float:
    tokens = float(work.episodes * work.tokens)
    return shape.forward_flops(tokens, work.context, work.episodes * work.turns * work.response)


def _update_flops(shape: ModelShape, work: StepWorkload) -> float:
    """One forward pass, two for the backward pass, one more without attention where activations are recomputed.

    Frozen weights need no gradient of their own, which is one of the backward pass's two, but attention, which has no
    weights, needs both; adapters are trained as weights are.
    """
    forward, tokens = _forward_flops(shape, work), float(work.episodes * work.tokens)
    attention = tokens * (shape.forward_flops(1.0, work.context, 0.0) - shape.forward_flops(1.0, 0.0, 0.0))
    again = forward - attention if work.checkpointing else 0.0
    if not work.lora_rank:
        return work.epochs * (3 * forward + again)
    adapters = 2.0 * tokens * shape.adapter_parameters(work.lora_rank)
    return work.epochs * (2 * forward + again + attention + (4 if work.checkpointing else 3) * adapters)


def _critic_flops(shape: ModelShape, work: StepWorkload) -> float:
    """One forward pass for the values, then an update as the student's without a head, or a forward pass where only a
    small network learns."""
    if work.critic == "none":
        return 0.0
    tokens = float(work.episodes * work.tokens)
    forward = shape.forward_flops(tokens, work.context, 0.0)
    if work.critic == "head":
        return (1 + work.epochs) * forward
    head = shape.forward_flops(0.0, 0.0, work.episodes * work.turns * work.response)
    passes = 3 if work.lora_rank == 0 else 2
    return forward + _update_flops(shape, work) - work.epochs * (passes + work.checkpointing) * head


OPERATIONS = 23
"""Operations that compute something in a layer of `agents.local_engine.decoder`, for a token of all rows; 18 in models
below 1 GB, whose products are fused."""


def _rollout_seconds(shape: ModelShape, chip: Chip, work: StepWorkload, share: int, at_once: int) -> float:
    """Waves of `at_once` episodes: observations at the compute rate, then token by token at the memory's."""
    if share == 0:
        return 0.0
    if at_once == 0:
        return math.inf
    rate, dtype = _operations(chip, work, work.played_dtype), work.played_dtype
    # every decoded token reads all weights once, and caches that are half full on average
    read = float(BYTES[dtype] * shape.parameters + at_once * shape.episode_bytes(int(work.cached), dtype))
    compute = at_once * shape.forward_flops(1.0, work.cached, 1.0)
    # the operations of a layer are started one after the other, however few rows they have
    started = OPERATIONS * shape.layers * work.start_us * 1e-6
    token_s = max(read / (chip.bandwidth * work.decode_share), compute / rate, started)
    prefill_s = shape.forward_flops(float(at_once * work.fresh), work.context, 0.0) / rate
    return math.ceil(share / at_once) * (work.turns * work.response * token_s + prefill_s)


# Bytes that move in a training step of several processes: weights, gradients, the teacher's top K, episodes.

EPISODE_TOKEN = 12
"""Bytes of an episode's token as processes exchange it: its id (4), if sampled its log-probability (4), its text."""
TOP_K_ENTRY = 8
"""An id and a log-probability, 4 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one GPU receives in a step; 0 with a single GPU."""

    to_play: float
    """The student's float32 weights, gathered once before it plays; with `--staleness` for the snapshot of the copy."""
    update: float
    """Weights for every forward and backward pass, and gradients back."""
    teacher: float
    """A divided teacher's weights, gathered once before it scores."""
    top_k: float
    """The teacher's K most likely ids of every sampled token, from all processes to all."""
    episodes: float
    """Bytes of the whole batch, from all processes to all."""
    to_server: float
    """Bytes to each engine server that plays: the weights, in the precision in which it holds them."""

    @property
    def all(self) -> float:
        """Bytes between the training processes."""
        return self.to_play + self.update + self.teacher + self.top_k + self.episodes


def traffic(
    student: ModelShape, teacher: ModelShape | None, gpus: int, work: StepWorkload, *, top_k: int = 50
) -> Traffic:
    """Bytes that one of `gpus` training processes, and each engine server, receives in a step of `work`.

    With N processes each holds 1/N of the P parameters and receives the rest: 4 P (1 - 1/N) bytes a gathering. A
    micro-batch gathers twice (forward, backward) and reduces its gradient once, which moves as much again (with LoRA
    the adapters' share alone).
    """
    missing = 1 - 1 / gpus
    weights = float(BYTES[work.dtype]) * student.parameters * missing
    # of one update; a longer row than --micro-tokens has a pass of its own
    read = math.ceil(work.episodes / gpus) * work.tokens / work.updates
    passes = work.epochs * work.updates * math.ceil(read / max(work.pass_tokens, work.length))
    sampled, adapters = work.episodes * work.turns * work.response, student.adapter_parameters(work.lora_rank)
    frozen_bytes, frozen = 0.0, ([] if teacher is None else [teacher]) + ([student] if work.reference == "own" else [])
    if work.shard_teacher:
        frozen_bytes = float(BYTES[work.teacher_dtype]) * sum(model.parameters for model in frozen) * missing
    return Traffic(
        to_play=weights,
        update=passes * (2 * weights + (4.0 * adapters * missing if adapters else weights)),
        teacher=frozen_bytes,
        top_k=0.0 if teacher is None else TOP_K_ENTRY * top_k * sampled * missing,
        episodes=EPISODE_TOKEN * work.episodes * work.tokens * missing,
        to_server=float(BYTES[work.played_dtype] * student.parameters),
    )
