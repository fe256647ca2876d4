"""What a training setup needs: memory per GPU and seconds per step, by formula.

Formulas hold for Qwen3-shaped and Qwen3.5-shaped models with SDPA attention, AdamW with float32 weights and moments
sharded over all GPUs (FSDP2), and rollouts by the local engine on the same GPUs. Parameters and the engine's cache are
exact; saved activations are exact for transformers 5 where all layers attend (a test counts them; layers with linear
attention are priced as those); times rest on two assumed shares of the chip's peak, which `turngym bench loss` and
`turngym bench rollout` measure on yours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from turngym.envs.core import TurngymError
from turngym.trainers.models.shapes import BYTES, ModelShape

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
        )
    }
)


def chip_named(name: str) -> Chip:
    """One of `CHIPS`. Raises TurngymError, with the names, for another."""
    if name not in CHIPS:
        raise TurngymError(f"chip {name!r} is unknown; valid: {', '.join(CHIPS)}")
    return CHIPS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one training step does."""

    episodes: int = 64
    """Per step, all GPUs together."""
    turns: int = 30
    """Of an episode."""
    observation: int = 150
    """Tokens that an environment adds per turn, template included."""
    response: int = 100
    """Tokens that the policy samples per turn."""
    micro_tokens: int = 8192
    """Tokens per forward and backward pass on one GPU (an episode longer than this comes alone)."""
    head_chunk: int = 1024
    """Rows of logits that exist at a time."""
    checkpointing: bool = True
    """Recompute activations."""
    precision: Precision = "autocast"
    """Of the update: bfloat16 autocast over float32 weights, or float32 throughout."""
    slots: int = 64
    """Episodes that a process plays side by side at most."""
    rollout_dtype: Dtype = "float32"
    """Of the weights and the cache that play; bfloat16 weights are a copy beside those that are trained."""
    teacher_dtype: Dtype = "float32"
    """Of the teacher's weights."""
    shard_teacher: bool = False
    """Divide the teacher over the GPUs; each holds all of it while it scores."""
    eval_episodes: int = 536
    """Of one evaluation (tasks times samples); each process plays its share."""
    compute_share: float = 0.4
    """Of the chip's peak that forward and backward passes reach."""
    decode_share: float = 0.5
    """Of the memory's bandwidth that decoding reaches."""
    reserve: float = 0.1
    """Of the chip's memory left to the allocator, the libraries and the communication buffers."""

    def __post_init__(self) -> None:
        for name in ("episodes", "turns", "observation", "response", "micro_tokens", "head_chunk", "slots"):
            if getattr(self, name) < 1:
                raise TurngymError(f"{name} is {getattr(self, name)}; valid: at least 1")
        if self.eval_episodes < 0:
            raise TurngymError(f"eval_episodes is {self.eval_episodes}; valid: at least 0")
        for name in ("compute_share", "decode_share"):
            if not 0 < getattr(self, name) <= 1:
                raise TurngymError(f"{name} is {getattr(self, name)}; valid: above 0, at most 1")
        if not 0 <= self.reserve < 1:
            raise TurngymError(f"reserve is {self.reserve}; valid: at least 0, below 1")

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return self.turns * (self.observation + self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes per GPU and seconds per step."""

    states: float
    """Weights, gradients and moments of the student's shard, the teacher or its shard, and the copy of the student that
    plays where it plays in another precision: there all the time."""
    update: float
    """On top while updating: gathered layers, activations, logits; or AdamW's one copy of its second moments, which
    torch makes for all parameters at once."""
    scoring: float
    """On top while the teacher scores: what a sharded one gathers."""
    rollout: float
    """On top while playing: the student's gathered weights and the engine's cache."""
    at_once: int
    """Episodes that one GPU can keep in memory while playing; 0 if none fits."""
    rollout_s: float
    teacher_s: float
    update_s: float
    eval_s: float
    """Of one evaluation; not part of a step."""
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


def saved_bytes(shape: ModelShape, precision: Precision = "autocast") -> int:
    """Bytes that one decoder layer saves for its backward pass, per token, without recomputation.

    autocast: 26 D + 12 Q + 6 KV + 8 M; float32: 24 D + 20 Q + 8 KV + 16 M, with D the width, Q and KV the widths of
    queries and keys, M that of the MLP. To both come the scales of the norms and the sums of attention, which is one
    fused kernel that saves no scores: 8 + 8 heads + 4 key heads.
    """
    d, q, kv, m = shape.width, shape.query_width, shape.kv_width, shape.mlp
    scales = 8 + 8 * shape.heads + 4 * shape.kv_heads
    if precision == "autocast":
        return 26 * d + 12 * q + 6 * kv + 8 * m + scales
    return 24 * d + 20 * q + 8 * kv + 16 * m + scales


def activation_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool, precision: Precision) -> float:
    """Of a forward pass over `tokens` until its backward pass.

    With recomputation every layer keeps its float32 input, and one layer at a time keeps everything.
    """
    layer = saved_bytes(shape, precision)
    kept = shape.layers * 4 * shape.width + layer if checkpointing else shape.layers * layer
    return float(tokens * kept)


def logits_bytes(shape: ModelShape, rows: int) -> float:
    """Of the head, forward and backward: two float32 copies of a chunk's logits.

    Its gradient is the one that the student's states count: chunks and micro-batches add to that.
    """
    return 8.0 * rows * shape.vocab


def embedding_bytes(shape: ModelShape) -> float:
    """Of the end of a backward pass: torch makes the embedding's gradient anew, and adds it to the one that it has."""
    return 4.0 * shape.vocab * shape.width


def gathered_bytes(shape: ModelShape) -> float:
    """Of what FSDP2 gathers while a layer runs: two layers in bfloat16 and one's float32 gradient; both embeddings."""
    return 8.0 * shape.layer_parameters + 6.0 * shape.embedding_parameters


def estimate(student: ModelShape, teacher: ModelShape | None, chip: Chip, gpus: int, work: Workload) -> Estimate:
    """Memory and time of one training step on `gpus` equal chips; no teacher for algorithms that need none.

    Raises:
        TurngymError: `gpus` below 1.
    """
    if gpus < 1:
        raise TurngymError(f"gpus is {gpus}; valid: at least 1")
    # 16 bytes: float32 weight, gradient and AdamW's two moments
    states = 16.0 * student.parameters / gpus
    if work.rollout_dtype != "float32":
        states += BYTES[work.rollout_dtype] * student.parameters
    held, gathered = (0.0, 0.0) if teacher is None else _teacher_bytes(teacher, gpus, work)
    states += held
    # while they play all processes hold all weights; of a single one they are its own
    weights = 4.0 * student.parameters * (1 - 1 / gpus)
    room = chip.memory * (1 - work.reserve)
    share, evaluated = math.ceil(work.episodes / gpus), math.ceil(work.eval_episodes / gpus)
    cache = float(student.episode_bytes(work.length, work.rollout_dtype))
    fitting = int(max(0.0, room - states - weights) // cache)
    at_once = min(share, work.slots, fitting)
    return Estimate(
        states=states,
        update=_update_bytes(student, gpus, work),
        scoring=gathered,
        rollout=weights + at_once * cache,
        at_once=at_once,
        rollout_s=_rollout_seconds(student, chip, work, share, at_once),
        teacher_s=0.0
        if teacher is None
        else _forward_flops(teacher, work) / gpus / _operations(chip, work, work.teacher_dtype),
        # in forward passes: one forward, two for the backward pass, one more where activations are recomputed
        update_s=(4 if work.checkpointing else 3)
        * _forward_flops(student, work)
        / gpus
        / _operations(chip, work, "float32" if work.precision == "float32" else "bfloat16"),
        eval_s=_rollout_seconds(student, chip, work, evaluated, min(evaluated, work.slots, fitting)),
        room=room,
    )


def _teacher_bytes(teacher: ModelShape, gpus: int, work: Workload) -> tuple[float, float]:
    """Of one GPU all the time, and on top while it scores."""
    whole = float(BYTES[work.teacher_dtype] * teacher.parameters)
    return (whole / gpus, whole * (1 - 1 / gpus)) if work.shard_teacher else (whole, 0.0)


def _update_bytes(student: ModelShape, gpus: int, work: Workload) -> float:
    tokens = max(work.micro_tokens, work.length)
    forward = activation_bytes(student, tokens, checkpointing=work.checkpointing, precision=work.precision)
    # on one GPU nothing is sharded, so nothing is gathered but the bfloat16 copies that autocast keeps
    alone = 0.0 if work.precision == "float32" else 2.0 * student.parameters
    gathered = alone if gpus == 1 else gathered_bytes(student)
    pass_ = forward + logits_bytes(student, min(work.head_chunk, tokens))
    # one after the other: activations and logits are gone when the embedding's turn comes, gathered layers at the step
    return max(max(pass_, embedding_bytes(student)) + gathered, 4.0 * student.parameters / gpus)


def _operations(chip: Chip, work: Workload, dtype: str) -> float:
    """Per second that one chip reaches."""
    return (chip.flops if dtype == "bfloat16" else chip.flops32) * work.compute_share


def _forward_flops(shape: ModelShape, work: Workload) -> float:
    tokens = float(work.episodes * work.length)
    # under a causal mask a token sees half of its episode on average
    return shape.forward_flops(tokens, work.length / 2, work.episodes * work.turns * work.response)


def _rollout_seconds(shape: ModelShape, chip: Chip, work: Workload, share: int, at_once: int) -> float:
    """Waves of `at_once` episodes: observations at the compute rate, then token by token at the memory's."""
    if share == 0:
        return 0.0
    if at_once == 0:
        return math.inf
    rate, dtype = _operations(chip, work, work.rollout_dtype), work.rollout_dtype
    # every decoded token reads all weights once, and caches that are half full on average
    read = float(BYTES[dtype] * shape.parameters + at_once * shape.episode_bytes(work.length // 2, dtype))
    compute = at_once * shape.forward_flops(1.0, work.length / 2, 1.0)
    token_s = max(read / (chip.bandwidth * work.decode_share), compute / rate)
    seen = float(at_once * work.turns * work.observation)
    prefill_s = shape.forward_flops(seen, work.length / 2, 0.0) / rate
    return math.ceil(share / at_once) * (work.turns * work.response * token_s + prefill_s)
