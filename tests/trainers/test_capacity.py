"""The formulas behind `turngym plan`: counted on real models, worked out by hand, and refusing what makes no sense."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
)

from turngym.agents.local_engine import decoder
from turngym.agents.local_engine.engine import LocalEngine
from turngym.core.errors import ModelError, TurngymError
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.core.spec import changed
from turngym.scripts import plan
from turngym.trainers.lora import LoraConfig, add_adapters
from turngym.trainers.model_shapes import (
    SHAPES,
    LinearShape,
    ModelShape,
    config_of,
    random_model,
    shape_named,
    shape_of,
)
from turngym.trainers.models import RECOMPUTATION
from turngym.trainers.training_costs import (
    CHIPS,
    OPERATIONS,
    Precision,
    StepWorkload,
    activation_bytes,
    estimate,
    gathered_bytes,
    saved_bytes,
    traffic,
)

SMALL = ModelShape(layers=2, width=64, heads=4, kv_heads=2, head_dim=24, mlp=160, vocab=50, tied=True)
HYBRID = replace(
    SMALL, layers=4, linear=LinearShape(layers=2, key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4)
)
SMOLLM2 = ModelShape(layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49_152, tied=True)
STATES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 50, "state_size": 8}
OTHER = replace(SMALL, width=96, heads=6, kv_heads=3, head_dim=16, mlp=112)


@pytest.mark.parametrize("shape", [SHAPES["tiny"], SMALL, OTHER, HYBRID, replace(SMALL, tied=False)])
def test_parameters_are_those_of_the_model(shape: ModelShape) -> None:
    model = random_model(shape, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert shape_of(config_of(shape)) == shape


def test_the_shape_of_a_model_that_also_reads_images_is_its_language_models() -> None:
    text = Gemma3TextConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=50)
    assert shape_of(Gemma3Config(text_config=text.to_dict())) == shape_of(text)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": 50, "intermediate_size": 96}
    # no causal model for transformers, and whether the matrices are one stands beside its text part
    for tied in (True, False):
        looks = Qwen3VLConfig(text_config=sizes, vision_config={"depth": 1}, tie_word_embeddings=tied)
        assert shape_of(looks) == shape_of(Qwen3Config(**sizes, tie_word_embeddings=tied))


def test_sizes_that_differ_from_layer_to_layer_are_named() -> None:
    """transformers raises an error of its own there, which was a traceback of `turngym plan`."""
    with pytest.raises(ModelError, match=r"Gemma4TextConfig .*head_dim"):
        shape_of(Gemma4TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]))


@pytest.mark.parametrize("config", [MambaConfig(**STATES), Mamba2Config(**STATES, num_heads=8, head_dim=16)])
def test_a_model_without_attention_keeps_states_alone(config: Any) -> None:
    shape = shape_of(config)
    with torch.device("meta"):
        stored = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    assert (shape.parameters, shape.kv_bytes()) == (stored, 0)
    assert shape.episode_bytes(9, "bfloat16") == shape.episode_bytes(9000, "bfloat16") > 0
    # each of its weights is read for each token
    assert shape.forward_flops(1.0, 9000.0, 0.0) == pytest.approx(
        2 * (shape.parameters - shape.embedding_parameters), rel=0.2
    )


def test_experts_are_stored_whole_and_computed_in_part() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 50}
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    with torch.device("meta"):
        stored = sum(parameter.numel() for parameter in Qwen3MoeForCausalLM(config).parameters())
    shape = shape_of(config)
    assert (shape.parameters, shape.mlp) == (stored, 2 * 24)
    # two of eight experts of three matrices, and a router
    assert shape.beside == 2 * (6 * 3 * 64 * 24 + 64 * 8)
    assert shape.stored_layer == shape.layer_parameters + shape.beside // 2
    assert shape.forward_flops(1.0, 0.0, 0.0) == replace(shape, beside=0).forward_flops(1.0, 0.0, 0.0)
    assert gathered_bytes(shape) > gathered_bytes(replace(shape, beside=0))


def test_known_sizes() -> None:
    """Qwen3's published sizes: 1.7B has 1.72e9 parameters, 8B 8.19e9; 28 layers x 2 x 8 x 128 x 2 bytes of cache."""
    assert SHAPES["1.7B"].parameters == 1_720_574_976
    assert SHAPES["8B"].parameters == 8_190_735_360
    assert SHAPES["1.7B"].kv_bytes() == 114_688
    assert SHAPES["1.7B"].kv_bytes("float32") == 2 * 114_688
    assert (SHAPES["2B"].parameters, SHAPES["9B"].parameters) == (1_881_825_088, 8_953_803_264)
    with pytest.raises(ModelError, match="model shape '7B' is unknown; valid: tiny"):
        shape_named("7B")


def student(shape: ModelShape, lora_rank: int) -> Any:
    """A model to train, with adapters if it is to have some."""
    model = random_model(shape, dtype=torch.float32)
    if lora_rank:
        add_adapters(model, LoraConfig(rank=lora_rank))
    return model


@pytest.mark.parametrize("shape", [SMALL, OTHER, HYBRID, replace(SMALL, tied=False)])
def test_adapters_are_counted_exactly(shape: ModelShape) -> None:
    learn = (parameter.numel() for parameter in student(shape, 8).parameters() if parameter.requires_grad)
    assert sum(learn) == shape.adapter_parameters(8)
    assert shape.adapter_parameters(0) == 0


def saved_by_the_model(
    shape: ModelShape, tokens: int, *, checkpointing: bool, precision: Precision, lora_rank: int = 0
) -> int:
    """Bytes of activations that torch holds between forward and backward, weights and their copies not counted."""
    model = student(shape, lora_rank)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tokens in tensor.shape:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    if checkpointing:
        model.activation_checkpointing_enable(RECOMPUTATION)
        model.train()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        states = model.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).last_hidden_state
    assert states.requires_grad
    if checkpointing:
        # what is kept of a layer that is recomputed no hook sees
        known = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        _ = [keep(thing) for thing in known if thing.shape[1:3] == (shape.heads, tokens)]
        # which lets go of it
        states.sum().backward()
    return sum(held.values())


@pytest.mark.parametrize("lora_rank", [0, 5])
@pytest.mark.parametrize("precision", ["autocast", "float32"])
@pytest.mark.parametrize("shape", [SMALL, OTHER])
def test_saved_activations_are_counted_exactly(shape: ModelShape, precision: Precision, lora_rank: int) -> None:
    """Two more layers save what the formula says, to the byte."""
    deep, tokens = replace(shape, layers=4), 101
    two = saved_by_the_model(shape, tokens, checkpointing=False, precision=precision, lora_rank=lora_rank)
    four = saved_by_the_model(deep, tokens, checkpointing=False, precision=precision, lora_rank=lora_rank)
    assert (four - two) / 2 == tokens * saved_bytes(shape, precision, lora_rank)


def products(shape: ModelShape, tokens: int, lora_rank: int) -> int:
    """Operations of the matrix products of one forward and backward pass, attention's own not counted."""
    model = student(shape, lora_rank)
    with FlopCounterMode(display=False) as counted:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits.sum().backward()
    return sum(count for kind, count in counted.get_flop_counts()["Global"].items() if "attention" not in str(kind))


@pytest.mark.parametrize("lora_rank", [0, 5])
def test_operations_of_an_update_are_counted(lora_rank: int) -> None:
    """Two more layers cost what the update's formula says for them, less what attention itself costs."""
    work = StepWorkload(
        episodes=1, turns=1, observation=100, response=1, checkpointing=False, precision="float32", lora_rank=lora_rank
    )
    chip = replace(CHIPS["H100"], flops32=1.0)
    by_formula, by_torch = [], []
    for layers in (2, 4):
        shape = replace(SMALL, layers=layers)
        seconds = estimate(shape, None, chip, 1, changed(work, compute_share=1.0)).update_s
        attention = 3 * 101 * layers * 4 * shape.query_width * 101 / 2
        norms = (2 if lora_rank else 3) * 101 * layers * 2 * (2 * shape.width + 2 * shape.head_dim)
        by_formula.append(seconds - attention - norms)
        by_torch.append(products(shape, 101, lora_rank))
    assert by_torch[1] - by_torch[0] == pytest.approx(by_formula[1] - by_formula[0], rel=1e-6)


@pytest.mark.parametrize(("precision", "size"), [("autocast", 2), ("float32", 4)])
def test_recomputation_keeps_each_layers_input_and_attention(precision: Precision, size: int) -> None:
    tokens = 101
    two = saved_by_the_model(SMALL, tokens, checkpointing=True, precision=precision)
    four = saved_by_the_model(replace(SMALL, layers=4), tokens, checkpointing=True, precision=precision)
    attended = size * SMALL.query_width + 4 * SMALL.heads
    assert (four - two) / 2 == tokens * (4 * SMALL.width + attended)
    found = activation_bytes(SMALL, tokens, checkpointing=True, precision=precision)
    assert found == tokens * (2 * (4 * 64 + attended) + saved_bytes(SMALL, precision) - attended)


class Kinds(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_recomputation_does_again_what_is_no_attention() -> None:
    counts = []
    for checkpointing in (False, True):
        model = student(SMALL, 0)
        if checkpointing:
            model.activation_checkpointing_enable(RECOMPUTATION)
            model.train()
        with Kinds() as kinds:
            model.model(torch.zeros(1, 101, dtype=torch.long), use_cache=False).last_hidden_state.sum().backward()
        counts.append(kinds.counts)
    once, again = counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert again[attention] == once[attention] == SMALL.layers
    # a layer has seven products, forward and (twice as many) backward
    assert (once["mm"], again["mm"]) == (3 * 7 * SMALL.layers, (4 * 7 - 1) * SMALL.layers)  # the last feeds no gradient


def test_memory_by_hand() -> None:
    """16 bytes per parameter of the student, divided by the GPUs; the teacher as it is said; float32 caches."""
    student, teacher = 1_720_574_976, 8_190_735_360
    found = estimate(SHAPES["1.7B"], SHAPES["8B"], CHIPS["H100"], 8, StepWorkload())
    assert found.states == pytest.approx(2 * student + 4 * teacher)
    assert found.at_once == 8  # 64 episodes on 8 GPUs; 1.7 GB each
    assert found.rollout == pytest.approx(4 * student * 7 / 8 + 8 * 7500 * 229_376)
    assert (found.scoring, found.fits) == (0.0, True)
    half = StepWorkload(rollout_dtype="bfloat16", teacher_dtype="bfloat16", shard_teacher=True)
    found = estimate(SHAPES["1.7B"], SHAPES["8B"], CHIPS["H100"], 8, half)
    assert found.states == pytest.approx(2 * student + 2 * student + 2 * teacher / 8)
    assert found.scoring == pytest.approx(2 * teacher * 7 / 8)
    assert found.rollout == pytest.approx(4 * student * 7 / 8 + 8 * 7500 * 114_688)
    assert found.peak == pytest.approx(found.states + found.scoring)  # more than the rollout takes


def test_an_update_needs_the_largest_of_its_parts_by_hand() -> None:
    """The pass with two copies of a chunk's logits, the embedding's second gradient, or a copy of AdamW's moments."""
    shape, work = SHAPES["1.7B"], StepWorkload(head_chunk=1000)
    kept = activation_bytes(shape, 8192, checkpointing=True, precision="autocast")
    update = estimate(shape, None, CHIPS["H100"], 8, work).update
    assert update == pytest.approx(kept + 8 * 1000 * 151_936 + gathered_bytes(shape))
    few = changed(work, turns=1, micro_tokens=250, head_chunk=1)
    assert estimate(shape, None, CHIPS["H100"], 8, few).update == pytest.approx(
        4 * 151_936 * 2048 + gathered_bytes(shape)
    )
    plain = changed(few, precision="float32")
    assert estimate(shape, None, CHIPS["H100"], 1, plain).update == pytest.approx(4 * 1_720_574_976)


@pytest.mark.parametrize(("chip", "tokens"), [("CPU", 2048), ("H100", 8192)])
def test_tokens_per_pass_suit_the_chip(chip: str, tokens: int) -> None:
    open_, named = (
        estimate(
            SMOLLM2, None, plan.chip_named(chip), 1, StepWorkload(turns=4, checkpointing=False, micro_tokens=given)
        )
        for given in (None, tokens)
    )
    assert open_ == named


def test_adapters_by_hand() -> None:
    """Rank 16 on 1.7B: 17.4 million numbers learn, no gradient of a frozen weight is held, gathered or sent."""
    shape, frozen, adapters = SHAPES["1.7B"], 1_720_574_976, 17_432_576
    work = StepWorkload(lora_rank=16, rollout_dtype="bfloat16", head_chunk=1000)
    found = estimate(shape, None, CHIPS["H100"], 8, work)
    assert found.states == pytest.approx((4 * frozen + 16 * adapters) / 8 + 2 * frozen)
    merged = estimate(shape, None, CHIPS["H100"], 8, changed(work, rollout_dtype="float32"))
    assert merged.states == pytest.approx((4 * frozen + 16 * adapters) / 8 + 4 * (frozen - 151_936 * 2048))
    kept = activation_bytes(shape, 8192, checkpointing=True, precision="autocast", lora_rank=16)
    logits = 8 * 1000 * 151_936
    assert found.update == pytest.approx(kept + logits + 4 * shape.layer_parameters + 2 * 151_936 * 2048)
    one = estimate(shape, None, CHIPS["H100"], 1, work)
    assert one.update == pytest.approx(kept + logits + 2 * (shape.layer_parameters + 151_936 * 2048))
    passes, missing = math.ceil(8 * 7500 / 8192), 7 / 8
    moved = traffic(shape, None, 8, work)
    assert moved.update == pytest.approx(passes * missing * (2 * 4 * frozen + 4 * adapters))
    assert moved.to_server == 2 * frozen  # merged


def test_evaluations_are_divided_as_the_episodes_of_a_step_are() -> None:
    """536 episodes over 8 GPUs are 67 each: two waves of at most 64."""
    for gpus in (1, 8):
        work = StepWorkload(eval_episodes=64 * gpus)
        found = estimate(SHAPES["0.6B"], None, CHIPS["H200"], gpus, work)
        assert (
            found.eval_s
            == estimate(SHAPES["0.6B"], None, CHIPS["H200"], gpus, StepWorkload(episodes=64 * gpus)).rollout_s
        )
    eight = estimate(SHAPES["0.6B"], None, CHIPS["H200"], 8, StepWorkload())
    one = estimate(SHAPES["0.6B"], None, CHIPS["H200"], 1, StepWorkload())
    assert one.eval_s / eight.eval_s == pytest.approx(9 / 2, rel=0.1)
    assert estimate(SHAPES["0.6B"], None, CHIPS["H200"], 1, StepWorkload(eval_episodes=0)).eval_s == 0.0


def test_precision_sets_the_rate() -> None:
    chip = CHIPS["H20"]
    assert (chip.memory, chip.flops, chip.bandwidth) == (96e9, 148e12, 4.0e12)
    slow, fast = (
        estimate(SHAPES["2B"], SHAPES["9B"], chip, 4, StepWorkload(teacher_dtype=kind))  # type: ignore[arg-type]
        for kind in ("float32", "bfloat16")
    )
    assert slow.teacher_s == pytest.approx(fast.teacher_s * 148 / 44)


SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
OTHERS = {
    "convolutions keep no keys": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
    "latents in place of keys": DeepseekV3Config(**SIZES | {"num_key_value_heads": 4}, **LATENT),
    "state spaces between": JambaConfig(**SIZES, attn_layer_offset=1, attn_layer_period=2, num_experts=2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [config_of(SMALL), config_of(HYBRID), *OTHERS.values()], ids=lambda one: one.model_type
)
def test_the_engines_cache_is_counted_exactly(config: Any, dtype: str) -> None:
    """Three sessions in a cache of 64 positions: what the engine holds is what `plan` counts, to the byte."""
    shape, model = shape_of(config), AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    engine = LocalEngine(model, dtype=dtype, max_length=64, max_batch=3, cache="ragged")
    asked = [
        GenerateRequest(
            session=str(i),
            prompt_ids=np.arange(9 + i, dtype=np.int32),
            sampling=Sampling(temperature=0.0, max_new_tokens=4),
            stream=(i,),
        )
        for i in range(3)
    ]
    engine.generate(asked)
    padding = 64 * shape.kv_bytes(dtype)  # one more row takes the keys of padding ids
    assert engine._cache.nbytes() == 3 * shape.episode_bytes(64, dtype) + padding


@pytest.mark.parametrize(
    ("memory", "rows"),
    [
        ("all", (1000,)),
        ("window:2", (250, 400, 550, 550)),
        ("verl-agent:1", (250, 400, 400, 400)),
        ("window:0", (250, 250, 250, 250)),
        ("react", (250, 500, 750, 1000)),
    ],
)
def test_rows_are_those_of_the_memory_by_hand(memory: str, rows: tuple[int, ...]) -> None:
    """Four turns of 150 tokens seen and 100 said: a window shows two more observations, a transcript all."""
    work = StepWorkload(turns=4, observation=150, response=100, memory=memory)
    assert (work.row_lengths, work.length, work.tokens) == (rows, max(rows), sum(rows))
    assert work.context == sum(row * row / 2 for row in rows) / sum(rows)
    assert work.fresh == sum(rows) - 400
    one = changed(work, episodes=1)
    found = estimate(SMALL, None, CHIPS["H100"], 1, changed(one, compute_share=1.0, checkpointing=False))
    flops = sum(3 * SMALL.forward_flops(row, row / 2, 100 * 4 / len(rows)) for row in rows)
    assert found.update_s == pytest.approx(flops / CHIPS["H100"].flops)
    assert found.rollout == SMALL.episode_bytes(max(rows), "float32")


def test_models_and_updates_by_hand() -> None:
    """What a second model, the critic, a copy that plays ahead, another precision and further passes add."""
    shape, chip, plain = SHAPES["0.6B"], CHIPS["H200"], StepWorkload(rollout_dtype="float32")
    size, usual = shape.parameters, estimate(shape, None, chip, 1, plain)

    def more(**given: Any) -> tuple[float, float, float]:
        found = estimate(shape, None, chip, 1, changed(plain, **given))
        return found.states - usual.states, found.teacher_s, found.update_s / usual.update_s

    own = more(reference="own")
    assert own[0] == 4 * size
    assert own[1] == pytest.approx(estimate(shape, shape, chip, 1, plain).teacher_s)
    assert more(reference="own", teacher_dtype="bfloat16")[0] == 2 * size
    assert more(critic="model")[0] == 12 * size
    assert 1.9 < more(critic="model")[2] < 2.4
    assert more(critic="head")[0] == 0
    assert more(ahead=True)[0] == 4 * size
    assert more(dtype="bfloat16", rollout_dtype=None)[0] == (8 - 16) * size
    assert more(dtype="bfloat16")[0] == (8 - 16 + 4) * size  # a float32 copy plays
    assert more(epochs=3)[2] == pytest.approx(3)
    assert more(updates=5) == (0.0, 0.0, 1.0)
    adapted = estimate(shape, None, chip, 1, changed(plain, lora_rank=8))
    base = estimate(shape, None, chip, 1, changed(plain, lora_rank=8, reference="base"))
    assert (base.states, base.teacher_s) == (adapted.states, own[1])
    assert estimate(shape, None, chip, 1, changed(plain, plays=False, eval_episodes=0)).rollout_s == 0
    with pytest.raises(TurngymError, match="reference is base without lora_rank"):
        StepWorkload(reference="base")
    with pytest.raises(TurngymError, match="memory 'window' is unknown"):
        StepWorkload(memory="window")
    two, ten = (traffic(shape, None, 2, changed(plain, updates=n)).update for n in (1, 400))
    assert ten > 1.5 * two  # an update of less than a pass of tokens is a pass all the same


@pytest.mark.parametrize(
    ("shape", "checkpointing", "measured"), [(SMOLLM2, 0, 11.72), (SHAPES["Qwen2.5-1.5B"], 1, 31.03)]
)
def test_the_update_takes_what_an_h200_measured(shape: ModelShape, checkpointing: int, measured: float) -> None:
    """SmolLM2-135M and the shape of Qwen2.5-1.5B, 24 episodes of 10 turns with 140 + 60 tokens, autocast
    (docs/research/benchmarks.md#on-a-gpu); to a twentieth."""
    work = StepWorkload(episodes=24, turns=10, observation=140, response=60, checkpointing=bool(checkpointing))
    found = estimate(shape, None, CHIPS["H200"], 1, work)
    assert (found.states + found.update) / 1e9 == pytest.approx(measured, rel=0.05)


def test_time_by_hand() -> None:
    """One GPU, one episode of one turn of 10 + 10 tokens, at full rates: decoding reads the weights 10 times."""
    shape, chip = SHAPES["0.6B"], CHIPS["H100"]
    work = StepWorkload(
        episodes=1,
        turns=1,
        observation=10,
        response=10,
        rollout_dtype="bfloat16",
        compute_share=1.0,
        decode_share=1.0,
        start_us=0.0,
        checkpointing=False,
    )
    found = estimate(shape, None, chip, 1, work)
    per_token = (2 * shape.parameters + shape.kv_bytes() * 10) / chip.bandwidth
    layers = 28 * (2 * shape.layer_parameters + 4 * 16 * 128 * 10)
    assert found.rollout_s == pytest.approx(10 * per_token + 10 * layers / chip.flops)
    assert found.update_s == pytest.approx(3 * (20 * layers + 10 * 2 * 151_936 * 1024) / chip.flops)
    assert found.teacher_s == 0.0
    # 644 operations a token take longer to start than one row's weights to read
    waiting = estimate(shape, None, chip, 1, changed(work, start_us=20.0))
    assert waiting.rollout_s == pytest.approx(10 * 28 * 23 * 20e-6 + 10 * layers / chip.flops)
    assert waiting.update_s == found.update_s


class Started(TorchDispatchMode):
    """Counts operations, without those that only look at a tensor in another way."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shares = func._schema.returns[0].alias_info
        self.count += shares is None or shares.is_write
        return func(*args, **(kwargs or {}))


def _started(layers: int) -> int:
    """Operations that the engine starts for the last of four tokens of three rows."""
    engine, found = LocalEngine(random_model(replace(SMALL, layers=layers), dtype=torch.bfloat16)), []
    forward = engine._model.forward

    def counted(*step: Any) -> Any:
        with Started() as mode:
            logits = forward(*step)
        found.append(mode.count)
        return logits

    engine._model.forward = counted
    sampling = Sampling(temperature=0.0, max_new_tokens=4)
    prompts = [np.arange(9 + row, dtype=np.int32) for row in range(3)]
    engine.generate(
        [
            GenerateRequest(session=str(row), prompt_ids=ids, sampling=sampling, stream=(row,))
            for row, ids in enumerate(prompts)
        ]
    )
    return found[-1]


@pytest.mark.parametrize(("largest", "counted"), [(0, OPERATIONS), (1 << 30, 18)])
def test_operations_of_a_layer_are_counted(monkeypatch: pytest.MonkeyPatch, largest: int, counted: int) -> None:
    """Two models that differ in nothing but their layers; products of models up to `largest` bytes are fused."""
    monkeypatch.setattr(decoder, "FUSE_BYTES", largest)
    assert (_started(6) - _started(2)) / 4 == counted


def test_more_gpus_need_less_of_each() -> None:
    work = StepWorkload(teacher_dtype="bfloat16", shard_teacher=True)
    rows = [estimate(SHAPES["4B"], SHAPES["8B"], CHIPS["A100-80"], gpus, work) for gpus in (2, 4, 8, 16)]
    for fewer, more in itertools.pairwise(rows):
        assert more.states == fewer.states / 2
        assert more.step_s < fewer.step_s


def test_what_does_not_fit_is_said() -> None:
    found = estimate(SHAPES["8B"], SHAPES["32B"], CHIPS["A100-40"], 1, StepWorkload())
    assert (found.fits, found.at_once, found.rollout_s) == (False, 0, math.inf)
    assert plan.main(["--student", "8B", "--teacher", "32B", "--chip", "A100-40", "--gpus", "1"]) == 1


def test_unknown_chips_are_refused() -> None:
    with pytest.raises(TurngymError, match="chip 'TPU' is unknown; valid: A100-40"):
        plan.plan_table(plan.PlanOptions(chip="TPU"))


def test_the_plan_says_what_a_step_takes_where_playing_and_learning_overlap() -> None:
    work = StepWorkload(episodes=256, rollout_dtype="bfloat16", teacher_dtype="bfloat16", shard_teacher=True)
    (said,) = [line for line in plan.notes(plan.PlanOptions(gpus=(8, 32, 256), work=work)) if "--staleness 1" in line]
    # of 32.2, 10.1 and 9.0 s (rollout, teacher, update) the first, which is longer than the two others together; where
    # the engine of the trainer plays, starting its operations takes at least 29.0 s
    assert said.endswith("8: 32.2 instead of 51.2, 32: 12.7 instead of 34.1, 256: 7.0 instead of 29.6.")
    slow_teacher = [line for line in plan.notes(plan.PlanOptions(gpus=(1,))) if "--staleness 1" in line]
    assert slow_teacher[0].endswith("1: 315.4 instead of 674.9.")  # 297.3 + 19.1 against 278.0
    assert not [line for line in plan.notes(plan.PlanOptions(student="32B", gpus=(1,))) if "--staleness 1" in line]


def test_a_runs_own_server_takes_its_share_and_keeps_its_own_weights() -> None:
    student, chip = SHAPES["1.7B"], CHIPS["H100"]
    own = estimate(student, None, chip, 1, StepWorkload(engine="vllm", rollout_dtype="bfloat16", engine_memory=0.4))
    local = estimate(student, None, chip, 1, StepWorkload(rollout_dtype="bfloat16"))
    assert own.rollout == 0.4 * chip.memory
    # the bfloat16 copy is the server's, not the trainer's
    assert own.states == local.states - 2.0 * student.parameters
    cache = student.episode_bytes(StepWorkload().length, "bfloat16")
    assert own.at_once == (0.4 * chip.memory - 2.0 * student.parameters) // cache
    assert own.rollout_s < local.rollout_s * local.at_once / own.at_once * 1.5
    more = estimate(student, None, chip, 1, StepWorkload(engine="vllm", rollout_dtype="bfloat16", engine_memory=0.9))
    assert not more.fits
    with pytest.raises(TurngymError, match="gpus is 2 with engine sglang"):
        estimate(student, None, chip, 2, StepWorkload(engine="sglang"))
