"""Adapters: nothing at first, trained alone, played by the engine, resumed to the same numbers, merged and apart."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from distributed_cases import command
from late import late
from safetensors.torch import load_file, save_file

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.models import file_hashes, load_model
from turngym.agents.saved_model import save_model
from turngym.core.errors import ModelError, SettingsError
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.scripts.main import main
from turngym.scripts.model import average
from turngym.scripts.train import resolved
from turngym.trainers.batch import pack
from turngym.trainers.checkpoint import CheckpointError, latest_model, list_checkpoints
from turngym.trainers.critic import ValueCritic
from turngym.trainers.lora import LoraConfig, _uncalled_layers, adapted, add_adapters, merged_weights, save_adapter
from turngym.trainers.metrics import read_metrics
from turngym.trainers.optimizer_step import make_optimizer
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run import run_training
from turngym.trainers.run_config import CriticConfig, OptimizerConfig, Renewed
from turngym.trainers.scorer import LocalScorer, ModelWeights, reference_refresh
from turngym.trainers.train_config import train_config

torch.set_num_threads(1)
IDS = torch.arange(12)[None]


def student(seed: int = 1, base: str = "", **changes: Any) -> Any:
    model = toy.tiny(seed)
    add_adapters(model, LoraConfig(**{"rank": 4, "alpha": 8, **changes}), base=base, seed=7)
    return model


def trainer(out: Path, model: Any, steps: int = 4) -> Any:
    return toy.trainer(out, steps=steps, model=model, source=toy.Sampled(model), evaluate=None)


def shaken(model: Any) -> Any:
    """The adapters away from their start, where B is zero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_adapters_change_nothing_until_trained_and_leave_the_head_alone() -> None:
    model, plain = student(), toy.tiny(1)
    assert adapted(model)
    assert not adapted(plain)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(names) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(make_optimizer(model, OptimizerConfig()).param_groups[0]["params"]) == 28
    few = {name for name, parameter in student(targets=("q_proj",)).named_parameters() if parameter.requires_grad}
    assert {name.split(".")[4] for name in few} == {"q_proj"}
    one, two = (student().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_seed_has_any_number_of_digits() -> None:
    first, again, other = (toy.tiny(seed).get_input_embeddings().weight for seed in (10**30, 10**30, 10**30 + 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    add_adapters(toy.tiny(1), LoraConfig(rank=4, alpha=8), seed=10**30)


def test_the_reference_of_adapters_is_the_model_before_them_and_costs_none() -> None:
    model, row, places = shaken(student()), np.arange(9, dtype=np.int32), np.arange(1, 9)
    plain, adapted_, bare = (
        LocalScorer(model=one, bare=off).topk([row], [places], 5)[0]
        for one, off in ((toy.tiny(1), False), (model, False), (model, True))
    )
    assert np.array_equal(bare.logp, plain.logp)
    assert not np.allclose(adapted_.logp, plain.logp, atol=1e-3)
    # the adapters are there again
    assert np.array_equal(LocalScorer(model=model).topk([row], [places], 5)[0].logp, adapted_.logp)


def test_merged_weights_by_hand() -> None:
    model = shaken(student(rank=2, alpha=6))
    weights = model.state_dict()
    stem = "model.layers.1.mlp.up_proj"
    expected = weights[f"{stem}.base_layer.weight"] + 3.0 * (
        weights[f"{stem}.lora_B.default.weight"] @ weights[f"{stem}.lora_A.default.weight"]
    )
    plain = merged_weights(model, weights)
    assert torch.allclose(plain[f"{stem}.weight"], expected, atol=1e-7)
    assert plain.keys() == toy.tiny(1).state_dict().keys()
    unchanged = toy.tiny(1)
    assert merged_weights(unchanged, unchanged.state_dict()).keys() == unchanged.state_dict().keys()


def test_a_run_trains_adapters_alone_and_saves_them_alone(tmp_path: Path) -> None:
    from peft import PeftModel

    save_model(toy.tiny(1), tmp_path / "base")
    model, start = student(base=str(tmp_path / "base")), toy.tiny(1)
    trainer(tmp_path / "run", model).train()
    base = dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])
    gap = max(row["gap_max"] for row in read_metrics(tmp_path / "run"))
    assert gap < 1e-4  # rollouts used the adapters of their step
    now = model(IDS).logits
    assert (now - start(IDS).logits).abs().max() > 1e-2
    saved = latest_model(tmp_path / "run")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in saved.iterdir()}
    assert not (saved / "model.safetensors").exists()
    whole = load_model(saved)
    assert not adapted(whole)
    assert torch.allclose(whole(IDS).logits, now, atol=1e-4)
    theirs = PeftModel.from_pretrained(toy.tiny(1), str(saved))
    assert torch.allclose(theirs(IDS).logits, now, atol=1e-5)


def test_what_is_no_plain_adapter_or_has_no_base_is_refused(tmp_path: Path) -> None:
    save_model(toy.tiny(1), tmp_path / "base")
    model = shaken(student(base=str(tmp_path / "base")))
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(config.read_text())
    for change, said in (
        ({"base_model_name_or_path": "nowhere"}, "is a LoRA adapter of the model nowhere, which is not there"),
        ({"use_dora": True}, "magnitude of a layer are not as the settings say"),
        ({"lora_bias": True}, "bias of a layer are not as the settings say"),
        ({"r": 5}, "has rank 4, the settings say 5"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "is no name of layers"),
        ({"init_lora_weights": "pissa"}, r"is more than LoRA \(init_lora_weights 'pissa'\)"),
        ({"trainable_token_indices": [1]}, r"is more than LoRA \(trainable_token_indices\)"),
        ({"something_new": {"a": 1}}, r"is more than LoRA \(something_new\)"),
        ({"peft_type": "IA3"}, r"is more than LoRA \(IA3\)"),
        ({"r": None}, r"adapter_config\.json has no r"),
        ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf"),
    ):
        config.write_text(json.dumps(good | change))
        with pytest.raises(ModelError, match=said):
            load_model(tmp_path / "adapter")
    config.write_text("[]")
    with pytest.raises(ModelError, match=r"adapter_config\.json: Expected `object`"):
        load_model(tmp_path / "adapter")
    config.write_text(json.dumps(good))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    (tmp_path / "adapter" / "turngym.sums").unlink(missing_ok=True)
    weights = load_file(file)
    first, *others = weights
    for changed, said in (
        ({**weights, first: weights[first] * math.nan}, "holds numbers that are not finite"),
        ({name: weights[name] for name in others}, "there is one of the two matrices alone"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=said):
            load_model(tmp_path / "adapter")


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=4, n_positions=64, **ids)).eval()


def qwen2(tied: bool = True) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": None}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 48, "initializer_range": 0.3}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **ids, tie_word_embeddings=tied)).eval()


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 48, "head_dim": 4, "initializer_range": 0.3}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **ids)).eval()


def qwen35() -> Any:
    """One with a half that reads images; `load_model` reads its text part alone, whose layers have other names."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 48, "initializer_range": 0.3, "linear_num_key_heads": 2}
    text |= {"linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    text |= {"layer_types": ["linear_attention", "full_attention"], "bos_token_id": None, "eos_token_id": None}
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    images |= {"num_position_embeddings": 4, "patch_size": 4}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=images)).eval()


def untied() -> Any:
    return qwen2(False)


QUICK = ("linear", "both of a tied pair", "conv1d", "whole pair", "dora", "all biases", "ranks and alphas by name")
QUICK = (*QUICK, "text part of a model that reads images")
KINDS = {
    "linear": (qwen2, {"target_modules": ["q_proj", "down_proj"]}),
    "embedding of a tied pair": (qwen2, {"target_modules": ["q_proj", "embed_tokens"]}),
    "head of a tied pair": (qwen2, {"target_modules": ["q_proj", "lm_head"]}),
    "both of a tied pair": (qwen2, {"target_modules": ["embed_tokens", "lm_head"]}),
    "both, kept tied": (qwen2, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "embedding and head": (untied, {"target_modules": ["embed_tokens", "lm_head"]}),
    "scaled embedding": (gemma3, {"target_modules": ["embed_tokens", "v_proj"]}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d that was not announced": (gpt2, {"target_modules": ["c_fc"]}),
    "embeddings of ids and positions": (gpt2, {"target_modules": ["wte", "wpe"]}),
    "whole head": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "whole embedding": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole pair": (
        qwen2,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "whole norms": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]}),
    "whole block": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    "rslora": (qwen2, {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
    "dora": (qwen2, {"target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "dora of an embedding": (untied, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "dora of a conv1d": (gpt2, {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "dora with rslora": (qwen2, {"target_modules": ["q_proj"], "use_dora": True, "use_rslora": True}),
    "biases of the layers": (qwen2, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "all biases": (qwen2, {"target_modules": ["q_proj"], "bias": "all"}),
    "biases of the adapters": (qwen2, {"target_modules": ["q_proj"], "lora_bias": True}),
    "ranks and alphas by name": (
        qwen2,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 2, "layers.1.mlp.down_proj": 6},
            "alpha_pattern": {"v_proj": 32, "model.layers.0.self_attn.q_proj": 3},
        },
    ),
    "one layer": (qwen2, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "all linear layers": (qwen2, {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
    "text part of a model that reads images": (qwen35, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "by expression": (qwen2, {"target_modules": r".*\.1\..*(q|v)_proj", "exclude_modules": ["v_proj"]}),
}
"""Adapters as peft makes them: the base and the settings."""
APART = {"embedding of a tied pair", "head of a tied pair", "both of a tied pair", "both, kept tied", "whole head"}
APART |= {"scaled embedding", "whole embedding", "whole pair", "rslora", "embeddings of ids and positions"}
"""Those after which head and embedding have weights of their own."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", late(KINDS, *QUICK))
def test_every_adapter_is_merged_into_the_model_that_peft_reads(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig as Settings
    from peft import PeftModel, get_peft_model

    base, settings = KINDS[kind]
    save_model(base(), tmp_path / "base")
    made = get_peft_model(base(), Settings(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    shaken(made).save_pretrained(str(tmp_path / "adapter"))
    config = tmp_path / "adapter" / "adapter_config.json"
    named = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    config.write_text(json.dumps(named))
    expected = PeftModel.from_pretrained(base(), str(tmp_path / "adapter")).eval()(IDS).logits
    assert (expected - base()(IDS).logits).abs().max() > 0.01
    played = load_model(tmp_path / "adapter")
    assert torch.allclose(played(IDS).logits, expected, atol=2e-5)
    assert main(["model", "merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")]) == 0
    merged_model = load_model(tmp_path / "whole")
    assert torch.allclose(merged_model(IDS).logits, expected, atol=2e-5)
    tied = base().config.tie_word_embeddings
    assert merged_model.config.tie_word_embeddings is (tied and kind not in APART)
    engine = LocalEngine(played, max_length=64)
    settled = Sampling(temperature=1.0, max_new_tokens=6)
    asked = GenerateRequest(session="s", prompt_ids=np.arange(5, dtype=np.int32), sampling=settled, stream=(0, 0, 0))
    (answer,) = engine.generate([asked])
    row = np.concatenate([asked.prompt_ids, answer.ids])
    again = PeftModel.from_pretrained(base(), str(tmp_path / "adapter")).eval()
    logp = again(torch.from_numpy(row.astype(np.int64))[None]).logits[0, 4:-1].log_softmax(-1)
    drawn = logp[torch.arange(len(answer.ids)), torch.from_numpy(answer.ids.astype(np.int64))]
    assert np.allclose(answer.logprobs, drawn.detach().numpy(), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [53, 40])
def test_an_adapter_brings_its_vocabulary(size: int, tied: bool, tmp_path: Path) -> None:
    """Tokens were added before it was trained, or padding taken off: peft writes embedding and head whole."""
    from peft import LoraConfig as Settings
    from peft import PeftModel, get_peft_model

    save_model(qwen2(tied), tmp_path / "base")
    resized = qwen2(tied)
    resized.resize_token_embeddings(size)
    made = get_peft_model(resized, Settings(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    shaken(made).save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    played = load_model(tmp_path / "adapter")
    assert (played.get_output_embeddings().weight.shape[0], played.config.vocab_size) == (size, size)
    base = qwen2(tied)
    base.resize_token_embeddings(size)
    ids = IDS.clamp(max=size - 1)
    expected = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(ids).logits
    assert torch.allclose(played(ids).logits, expected, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_an_adapter_finds_the_text_part_of_its_base_by_every_name_that_it_had(prefix: str, tmp_path: Path) -> None:
    save_model(toy.tiny(1), tmp_path / "base")
    model = shaken(student(base=str(tmp_path / "base")))
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    named = {name.replace(".model.model.", f".model.{prefix}"): value for name, value in load_file(file).items()}
    save_file(named, file)
    assert torch.allclose(load_model(tmp_path / "adapter")(IDS).logits, model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "targets"),
    [(untied, ("q_proj", "embed_tokens", "lm_head")), (gpt2, ("c_attn", "c_proj")), (qwen2, ("q_proj",))],
)
def test_trained_layers_of_every_type_are_merged_into_the_plain_model(base: Any, targets: tuple[str, ...]) -> None:
    model, plain = base(), base()
    add_adapters(model, LoraConfig(rank=4, alpha=8, targets=targets))
    shaken(model)
    plain.load_state_dict(merged_weights(model, model.state_dict()))
    assert torch.allclose(plain(IDS).logits, model(IDS).logits, atol=2e-5)
    sent = dict(ModelWeights(model).named_weights())
    assert sent.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(sent[name], weight) for name, weight in plain.named_parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_layer_of_a_tied_pair_is_trained_and_played_but_not_sent(target: str, tmp_path: Path) -> None:
    save_model(qwen2(), tmp_path / "base")
    model = qwen2()
    add_adapters(model, LoraConfig(rank=4, alpha=8, targets=("q_proj", target)), base=str(tmp_path / "base"))
    shaken(model)
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    assert torch.allclose(load_model(tmp_path / "adapter")(IDS).logits, model(IDS).logits, atol=2e-5)
    with pytest.raises(ModelError, match=rf"--lora\.targets: .*{target} shares its weight"):
        ModelWeights(model)
    with pytest.raises(ModelError, match="shares its weight"):
        reference_refresh(Renewed(reference_every=1), LocalScorer(model=qwen2()), model, SINGLE)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_cannot_be_merged_is_refused_before_training() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Lfm2Config(vocab_size=48, num_key_value_heads=2, layer_types=["conv", "full_attention"], **sizes)
    with pytest.raises(ModelError, match=r"layers\.0\.conv\.conv is a Conv1d"):
        add_adapters(Lfm2ForCausalLM(config), LoraConfig(rank=16, targets=("conv.conv",)))


@pytest.mark.filterwarnings("ignore")
def test_a_layer_whose_weight_alone_is_read_gets_no_adapter() -> None:
    from transformers import JambaConfig, JambaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = JambaConfig(
        vocab_size=48,
        num_key_value_heads=2,
        num_experts=1,
        attn_layer_offset=1,
        attn_layer_period=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        **sizes,
    )
    model = JambaForCausalLM(config)
    with pytest.raises(ModelError, match=r"--lora\.targets dt_proj: .*x_proj"):
        add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "dt_proj")))
    add_adapters(model, LoraConfig(rank=2))
    model(IDS).logits.square().mean().backward()
    learning = {name: one.grad is not None for name, one in model.named_parameters() if one.requires_grad}
    assert any("x_proj" in name for name in learning)
    assert all(learning.values())


def test_merged_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(toy.tiny(1), tmp_path / "elsewhere")
    model = shaken(student(base="gone"))
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    (tmp_path / "adapter" / "turngym.json").write_text("{}")
    words = ["model", "merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")]
    assert main(words) == 2
    assert "--base FOLDER" in capsys.readouterr().err
    assert main([*words, "--base", str(tmp_path / "elsewhere")]) == 0
    assert {"config.json", "turngym.json", "turngym.sums"} <= {path.name for path in (tmp_path / "whole").iterdir()}
    assert torch.allclose(load_model(tmp_path / "whole")(IDS).logits, model(IDS).logits, atol=1e-4)
    assert main(words) == 2  # never over what is there


def test_an_adapter_of_2023_is_a_pickle_of_tensors(tmp_path: Path) -> None:
    save_model(toy.tiny(1), tmp_path / "base")
    model = shaken(student(base=str(tmp_path / "base")))
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    expected = load_model(tmp_path / "adapter")(IDS).logits
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert torch.equal(load_model(tmp_path / "adapter")(IDS).logits, expected)
    torch.save(Path("code"), file.with_suffix(".bin"))
    with pytest.raises(ModelError, match="damaged: Weights only load failed"):
        load_model(tmp_path / "adapter")


def test_adapters_are_averaged_as_the_models_that_they_make(tmp_path: Path) -> None:
    save_model(toy.tiny(1), tmp_path / "base")
    found = []
    for step in (1, 2):
        model = shaken(student(seed=1, base=str(tmp_path / "base")))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(step)
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "model"
        save_adapter(model, model.state_dict(), folder)
        found.append(dict(load_model(folder).named_parameters()))
    made = dict(load_model(average(tmp_path / "run", last=2)).named_parameters())
    for name, weight in made.items():
        # not the product of the mean factors
        assert torch.allclose(weight, (found[0][name] + found[1][name]) / 2, atol=1e-6)


def test_the_identity_of_an_adapter_is_that_of_its_base_too(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(toy.tiny(seed), tmp_path / f"base{seed}")
    found = []
    for seed in (1, 2):
        model = student(base=str(tmp_path / f"base{seed}"))
        save_adapter(model, model.state_dict(), tmp_path / f"adapter{seed}")
        found.append(file_hashes(tmp_path / f"adapter{seed}"))
    one, two = found
    assert one["adapter_model.safetensors"] == two["adapter_model.safetensors"]
    assert one["base/model.safetensors"] != two["base/model.safetensors"]


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    whole = student()
    trainer(tmp_path / "whole", whole, steps=5).train()
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for checkpoint in list_checkpoints(tmp_path / "killed")[1:]:
        shutil.rmtree(checkpoint)
    resumed = student()
    trainer(tmp_path / "killed", resumed, steps=5).train(resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "killed")]
    assert losses[0] == losses[1]


def test_the_command_line_trains_and_resumes_adapters_of_the_same_student_only(tmp_path: Path) -> None:
    words = [*command("sft", tmp_path / "run", steps=1, episodes=2), "--lora.rank", "2", "--lora.targets", "q_proj"]
    assert run_training(resolved(words).spec, SINGLE).step == 1
    assert run_training(resolved([*words, "--resume"]).spec, SINGLE).step == 1
    with pytest.raises(CheckpointError, match=r"lora\.rank: checkpoint 2, now 4"):
        run_training(resolved([*words, "--resume", "--lora.rank", "4"]).spec, SINGLE)
    with pytest.raises(CheckpointError, match="lora"):
        run_training(resolved([*words[: words.index("--lora.rank")], "--resume"]).spec, SINGLE)


def test_the_rollout_engine_speaks_with_the_adapters() -> None:
    model = student()
    engine = LocalEngine(model, max_length=64)
    request = GenerateRequest(
        session="s",
        prompt_ids=np.arange(5, dtype=np.int32),
        sampling=Sampling(temperature=1.0, max_new_tokens=6),
        stream=(0, 0, 0),
    )
    for _ in range(2):
        (found,) = engine.generate([request])
        row = np.concatenate([request.prompt_ids, found.ids])
        (logp,) = LocalScorer(model=model).logprobs([row], [np.arange(5, len(row))])
        assert np.allclose(found.logprobs, logp, atol=1e-4)
        assert engine._model.native  # by the decoder without modules, which reads the merged weights
        shaken(model)
    (again,) = engine.generate([request])
    assert not np.allclose(again.logprobs[:1], found.logprobs[:1], atol=1e-3)


def test_a_critic_of_an_adapted_student_learns_adapters_and_a_head() -> None:
    batch = pack(toy.demonstrations(4), origins=("demonstration",))
    critic = ValueCritic(shaken(student()), CriticConfig(lr=1e-2, clip=None))
    before = {name: value.clone() for name, value in critic.module.state_dict().items()}
    target, zero = np.ones(batch.tokens, np.float32), np.zeros(batch.tokens, np.float32)
    losses = [critic.update(batch, target, zero) for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0]
    moved = {name for name, value in critic.module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(".lora_" in name or name.startswith("head.") for name in moved)


def test_bfloat16_students_have_float32_adapters(tmp_path: Path) -> None:
    model = toy.tiny(1).bfloat16()
    add_adapters(model, LoraConfig(rank=2, alpha=4))
    kinds = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    shaken(model)
    save_model(model, tmp_path / "m", merged_weights(model, model.state_dict()))
    again = load_model(tmp_path / "m", dtype="bfloat16")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert torch.allclose(again(IDS).logits.float(), model(IDS).logits.float(), atol=0.05)


def test_autocast_copies_no_input_of_an_adapter_to_float32() -> None:
    model = toy.tiny(1)
    add_adapters(model, LoraConfig(rank=2))
    seen = []
    for name, module in model.named_modules():
        if name.endswith("down_proj.lora_A.default"):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.tensor([[1, 2, 3]]))
    assert seen
    assert set(seen) == {torch.bfloat16}


def test_what_cannot_be_adapted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"rank is -1"):
        train_config("opd", {"student": "s", "out": "o", "lora": {"rank": -1}}, "test")
    with pytest.raises(ModelError, match=r"--lora\.targets no_such_layer: .*q_proj"):
        student(targets=("no_such_layer",))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'turngym\[lora\]'"):
        student()


def test_an_expert_that_a_row_is_not_routed_to_may_have_an_adapter() -> None:
    class Routed(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
            self.vision = torch.nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            found: torch.Tensor = self.experts[0](input_ids.float())
            return found

    assert _uncalled_layers(Routed()) == ["vision"]
