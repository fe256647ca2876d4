"""Low-rank adapters (peft) in place of training all weights: added, saved apart, and merged into an ordinary model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turngym.agents.local_engine.lora_weights import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    LowRank,
    is_transposed,
    shared_weights,
)
from turngym.agents.saved_model import write_tensors
from turngym.core.errors import ModelError
from turngym.core.numbers import Count, torch_seed
from turngym.core.spec import Spec

ADAPTER_NAME = "default"
"""peft's own name for the only adapter of a model."""


class LoraConfig(Spec):
    """Low-rank adapters: the student's own weights stay as they are, rank x (in + out) numbers per layer learn."""

    rank: Count
    """Rank of the adapters. LoRA wants about ten times the learning rate."""
    alpha: Count = 32
    """Adapters count for alpha / rank. What they compute is multiplied by it."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get an adapter. Linear layers or embeddings (q_proj v_proj ...); none named: all linear
    layers but the head."""


def add_adapters(model: Any, config: LoraConfig, *, base: str = "", seed: int = 0) -> None:
    """Put adapters into `model` in place and freeze the rest; the model computes what it did until they are trained.

    Whoever holds `model` (a rollout engine) runs the adapted weights. Adapters are float32 whatever the model's
    precision is. Raises ModelError without peft, and for targets that the model lacks or that could not be merged
    exactly.

    Args:
        base: name of the model in the saved adapter; empty: it names none.
        seed: fixes the half of each adapter that begins random; the other half begins with zeros.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(f"--lora.rank {config.rank} needs pip install 'turngym[lora]' ({error})") from error
    uncalled = _uncalled_layers(model)
    layers = {name: layer for name, layer in model.named_modules() if name not in uncalled}
    for target in config.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            linear = (name.rpartition(".")[2] for name, layer in layers.items() if is_transposed(layer) is not None)
            raise ModelError(
                f"--lora.targets {target}: text calls no such layer of {type(model).__name__}, so that nothing would "
                f"be learned; valid: {', '.join(dict.fromkeys(linear))}"
            )
    option, valid = f"--lora.targets {' '.join(config.targets)}", ""
    if not config.targets:
        option, valid = f"--lora.rank {config.rank}", "; valid: the layers that learn (--lora.targets q_proj v_proj)"
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets) or "all-linear",  # peft's word for all linear layers but the output head
        exclude_modules=uncalled or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed))
            # not get_peft_model, which wraps the model and puts a prefix before the name of every weight
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ModelError(f"{option}: {str(error).splitlines()[0]}{valid}") from error
    for name, layer in _adapted_layers(model):
        if is_transposed(layer.base_layer) is None:
            raise ModelError(
                f"{option}: {name} is a {type(layer.base_layer).__name__}; adapters are for linear layers and "
                f"embeddings, and not for experts and their routers{valid}"
            )
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        # under autocast peft would copy each input to float32 for a product that is taken in bfloat16 all the same
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            # updates of adapters are as small as those of weights; bfloat16 would lose them
            parameter.data = parameter.data.float()


def _uncalled_layers(model: Any) -> list[str]:
    """Names of the layers that could have an adapter and that a row of text does not call: those of a half that reads
    images, and those of which the model reads the weight itself (Jamba's dt_proj). An adapter would not count there.
    Where one of several alike is called all are: an expert that this row was not routed to is for another row."""
    layers = {name: layer for name, layer in model.named_modules() if is_transposed(layer) is not None}
    alike = {layer: re.sub(r"\.\d+(?=\.|$)", "", name) for name, layer in layers.items()}
    called = set[str]()
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(alike[layer])) for layer in layers.values()]
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [name for name, layer in layers.items() if alike[layer] not in called]


def adapted(model: Any) -> bool:
    """Whether `add_adapters` was here."""
    return ADAPTER_NAME in getattr(model, "peft_config", {})


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Inside, the model computes what it did before it had adapters, to the bit: theirs counts zero times."""
    layers = [layer for _, layer in _adapted_layers(model)]
    scales = [layer.scaling[ADAPTER_NAME] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER_NAME] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER_NAME] = scale


def merged_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the ordinary model that computes the same (`LowRank.merge`); `weights` are the model's own.

    A model without adapters gives `weights` back.
    """
    if not adapted(model):
        return dict(weights)
    learned = {}
    for name, layer in _adapted_layers(model):
        embeds = f"{name}.lora_embedding_A.{ADAPTER_NAME}" in weights
        a, b = (
            f"lora_embedding_{half}.{ADAPTER_NAME}" if embeds else f"lora_{half}.{ADAPTER_NAME}.weight" for half in "AB"
        )
        learned[f"{name}.base_layer.weight"] = LowRank(
            a=weights[f"{name}.{a}"],
            b=weights[f"{name}.{b}"],
            scale=layer.scaling[ADAPTER_NAME],
            transposed=bool(is_transposed(layer.base_layer)),
        )
    # peft moves the weight of a layer that it wraps from LAYER.weight to LAYER.base_layer.weight
    return {
        name.replace(".base_layer.", "."): learned[name].merge(value) if name in learned else value
        for name, value in weights.items()
        if ".lora_" not in name
    }


def require_one_model(model: Any) -> None:
    """Raises ModelError where the merged weights do not fit the plain model: one of two tied layers has an adapter.

    Servers and copies hold one weight for both. A folder says that they are apart.
    """
    shared = shared_weights(model)
    for name, layer in _adapted_layers(model):
        if id(layer.base_layer.weight) in shared:
            raise ModelError(
                f"--lora.targets: {name} shares its weight with another layer, and the two are apart once it has an "
                "adapter: servers, copies and references that follow the student cannot hold that; leave it out, or "
                "play in this process"
            )


def _adapted_layers(model: Any) -> list[tuple[str, Any]]:
    # attention layers have a `scaling`, too, which is a number
    return [
        (name, layer) for name, layer in model.named_modules() if ADAPTER_NAME in getattr(layer, "lora_dropout", ())
    ]


def save_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters to `folder` as peft does, for `load_model` or `PeftModel.from_pretrained(base, folder)`."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    adapter_weights = get_peft_model_state_dict(model, state_dict=dict(weights), save_embedding_layers=False)
    model.peft_config[ADAPTER_NAME].save_pretrained(str(folder))
    # the prefix that peft's wrapper would have added; contiguous, for safetensors refuses strided views
    tensors = {f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in adapter_weights.items()}
    write_tensors(tensors, folder / ADAPTER_WEIGHTS, like=ADAPTER)
