"""Low-rank adapters (peft) in place of training all weights: added, saved apart, and merged into an ordinary model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turngym.agents.models import ADAPTER_WEIGHTS
from turngym.envs.core.errors import ModelError
from turngym.envs.core.files import weights_hash
from turngym.trainers.config import ConfigError

NAME = "default"
"""peft's own name for the only adapter of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the student's own weights stay as they are, rank x (in + out) numbers per layer learn."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights. LoRA wants about ten times the learning rate."""
    alpha: int = 32
    """What the adapters compute is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one (q_proj v_proj ...); none named: all but the head."""

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha < 1:
            raise ConfigError(f"lora rank is {self.rank} and alpha {self.alpha}; valid: rank from 0, alpha from 1")


def adapter_identity(lora: LoraConfig, student: Path) -> dict[str, Any]:
    """Returns what a resumed run must share of its adapters; empty without adapters."""
    if not lora.rank:
        return {}
    # adapters are only right on the weights that they were trained on, so the student counts too
    return {"lora": {**asdict(lora), "targets": list(lora.targets)}, "student": weights_hash(student)}


def add_adapters(model: Any, config: LoraConfig, *, base: str = "", seed: int = 0) -> None:
    """Put adapters into `model` in place and freeze the rest; the model computes what it did until they are trained.

    Whoever holds `model` (a rollout engine) runs the adapted weights. `base` names the model in the saved adapter;
    `seed` fixes the random half of the adapters, float32 whatever the model's precision is. Raises ModelError without
    peft, and for targets that the model lacks.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(f"--lora.rank {config.rank} needs pip install 'turngym[lora]' ({error})") from error
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets) or "all-linear",  # peft's word for all linear layers but the output head
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # not get_peft_model, which wraps the model and puts a prefix before the name of every weight
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ModelError(f"--lora.targets {' '.join(config.targets)}: {str(error).splitlines()[0]}") from error
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        # under autocast peft would copy each input to float32 for a product that is taken in bfloat16 all the same
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            # updates of adapters are as small as those of weights; bfloat16 would lose them
            parameter.data = parameter.data.float()


def adapted(model: Any) -> bool:
    """Whether `add_adapters` was here."""
    return NAME in getattr(model, "peft_config", {})


def merged(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the ordinary model that computes the same: W + alpha / rank B A; `weights` are the model's own.

    A model without adapters gives `weights` back. The sum is taken in float32 and rounded once.
    """
    if not adapted(model):
        return dict(weights)
    config = model.peft_config[NAME]
    plain: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        # peft moves the weight of a layer that it wraps from LAYER.weight to LAYER.base_layer.weight
        layer, marked, rest = name.partition(".base_layer.")
        up = weights.get(f"{layer}.lora_B.{NAME}.weight") if marked and rest == "weight" else None
        if up is not None:
            down = weights[f"{layer}.lora_A.{NAME}.weight"]
            value = (value.float() + config.lora_alpha / config.r * (up.float() @ down.float())).to(value.dtype)
        plain[f"{layer}.{rest}" if marked else name] = value
    return plain


def save_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters to `folder` as peft does, for `load_model` or `PeftModel.from_pretrained(base, folder)`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = get_peft_model_state_dict(model, state_dict=dict(weights), save_embedding_layers=False)
    # the prefix that peft's wrapper would have added; contiguous, for safetensors refuses strided views
    save_file({f"base_model.model.{name}": value.contiguous() for name, value in own.items()}, folder / ADAPTER_WEIGHTS)
    model.peft_config[NAME].save_pretrained(str(folder))
