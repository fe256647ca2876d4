"""What a LoRA adapter makes of the weights of its base: one formula for a model that is played, merged, exported, sent.

    linear layer   W [out, in]         W + scale B A                        A [r, in], B [out, r]
    embedding      W [ids, width]      W + scale (B A)^T                    A [r, ids], B [width, r]
    Conv1D         W [in, out]         W + scale (B A)^T                    A [r, in], B [out, r]
    DoRA           V = W + scale B A   m V / |V|, row by row of outputs     m [out]

`LowRank.merge` is that formula. `merge_adapter` applies it to a model and an adapter's folder, the local engine to the
layers of a model in training, `turngym.trainers.lora.merged_weights` to gathered weights.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.core.errors import ModelError
from turngym.core.user_files import json_object, library_path

# torch is imported where weights are touched: hashes and names of adapters are read without it
if TYPE_CHECKING:
    from torch import Tensor

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a LoRA adapter, as peft writes them."""
OLDER_WEIGHTS = "adapter_model.bin"
"""The weights as peft wrote them until the end of 2023: a pickle, of which tensors alone are read."""
PEFT_PREFIX = "base_model.model."
"""What peft's wrapper puts before the name of every weight."""
SCALES = ("use_rslora", "alpha_pattern")
"""Settings beside rank and alpha on which the merged weights depend; all else is in the names of the tensors."""
PATTERN = re.compile(r"[\w.]{1,200}")
"""Names in `alpha_pattern`. peft reads any regular expression there, which a stranger's file could make endless."""
LAYER = re.compile(
    r"(?P<layer>.+?)\.(?:"
    r"(?P<a>lora_A\.weight|lora_embedding_A)|(?P<b>lora_B\.weight|lora_embedding_B)|(?P<bias>lora_B\.bias)"
    r"|(?P<magnitude>lora_magnitude_vector(?:\.weight)?)|(?P<base>base_layer\.)?(?P<own>weight|bias))"
)
"""The tensors of an adapter's file, without `PEFT_PREFIX`."""
READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "alpha_pattern", "use_rslora"),
        # what these made is seen from the names and shapes of the tensors
        *("target_modules", "exclude_modules", "rank_pattern", "layers_to_transform", "layers_pattern", "use_dora"),
        *("modules_to_save", "bias", "lora_bias", "fan_in_fan_out", "ensure_weight_tying", "inference_mode"),
        # where it came from, how it was trained and how it began
        *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "lora_dropout"),
        *("init_lora_weights", "eva_config", "runtime_config", "megatron_core", "qalora_group_size"),
    )
)
"""Settings of an adapter that change no weight in another way than `LowRank.merge` knows."""
INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin an adapter that leave the base as it is. The others move a part of it into the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What was learned for one layer."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    scale: float
    transposed: bool = False
    """Whether the layer's weight is [in, out], as in embeddings and Conv1D."""
    magnitude: Tensor | None = None
    """DoRA's length of each row [out]."""

    def merge(self, weight: Tensor, dtype: Any = None) -> Tensor:
        """The weight of the plain layer that computes the same. Summed in float32, then rounded once to `dtype`, by
        default that of `weight`."""
        import torch

        base = weight.detach().float()
        base = base.T if self.transposed else base
        delta = self.b.detach().float() @ self.a.detach().float()
        # torch would stretch one that is too small
        if delta.shape != base.shape or (self.magnitude is not None and self.magnitude.shape != base.shape[:1]):
            raise ValueError(f"an adapter of {tuple(delta.shape)} on a weight of {tuple(base.shape)}")
        merged = torch.add(base, delta.to(base.device), alpha=self.scale)
        if self.magnitude is not None:
            merged = merged * (self.magnitude.detach().float().to(base.device) / merged.norm(dim=1))[:, None]
        return (merged.T.contiguous() if self.transposed else merged).to(dtype or weight.dtype)


def is_transposed(layer: Any) -> bool | None:
    """Whether the weight of `layer` is [in, out]; None for a layer that no adapter can be merged into."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if type(layer) is nn.Linear:
        return False
    # Gemma's embeddings multiply what they look up, and peft does so with what an adapter adds
    scaled = isinstance(layer, nn.Embedding) and hasattr(layer, "embed_scale")
    return True if type(layer) in (nn.Embedding, Conv1D) or scaled else None


def shared_weights(model: Any) -> frozenset[int]:
    """The ids of parameters that stand under several names, as those of a head that is tied to the embedding."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return frozenset(number for number, count in uses.items() if count > 1)


def merge_adapter(model: Any, folder: Path) -> None:
    """Make `model` in place the ordinary model that it is with the adapter in `folder`.

    A head or embedding that gets a weight of its own is no longer tied; the model's configuration says so then.

    Raises ModelError for an adapter that cannot be merged exactly, or does not fit the model.
    """
    import torch
    from safetensors.torch import load_file

    config = adapter_config(folder)
    _check_settings(config, folder)
    try:
        older = library_path(folder) / OLDER_WEIGHTS
        if older.is_file() and not (folder / ADAPTER_WEIGHTS).is_file():
            tensors = torch.load(older, map_location="cpu", weights_only=True)
        else:
            tensors = load_file(library_path(folder) / ADAPTER_WEIGHTS)
        parts = _by_layer(tensors)
        names = {_text_name(name): name for name, _ in model.named_modules()}
        _fit_vocabulary(model, {names.get(_text_name(name), name): tensors for name, tensors in parts.items()})
        shared = shared_weights(model)
        with torch.no_grad():
            for name, tensors in parts.items():
                layer = model.get_submodule(names.get(_text_name(name), name))
                _merge_layer(layer, tensors, config, name, shared)
    except Exception as error:  # readers of damaged files raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the adapter in {folder} does not fit its base or is damaged: {first}") from error
    if not any("a" in tensors for tensors in parts.values()):
        raise ModelError(f"the adapter in {folder} holds no LoRA weights")
    say_untied(model)


def _fit_vocabulary(model: Any, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give `model` the vocabulary of an adapter that was trained with more tokens, or fewer: its file has embedding and
    head whole then."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [parts.get(name, {}).get("own.weight") for name, layer in model.named_modules() if layer in ends]
    sizes = {None if weight is None else weight.shape[0] for weight in weights}
    if None not in sizes and len(sizes) == 1 and sizes != {ends[0].weight.shape[0]}:
        model.resize_token_embeddings(*sizes, mean_resizing=False)


def _text_name(name: str) -> str:
    """A layer's name without what says where the text part of a model is: `model.layers` by itself, in one that also
    reads images `model.language_model.layers`, and once `language_model.model.layers`."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter's settings, as peft wrote them. Raises ModelError for a file that is not an adapter's."""
    return json_object(folder / ADAPTER, ModelError)


def more_settings(config: Mapping[str, Any]) -> list[str]:
    """What the settings say of the merged weights beyond rank and alpha; [] for a plain adapter."""
    return [f"{name} {json.dumps(config[name], sort_keys=True)}" for name in SCALES if config.get(name)]


def _check_settings(config: Mapping[str, Any], folder: Path) -> None:
    beyond = [name for name, value in config.items() if name not in READ and value]
    if config.get("init_lora_weights") not in INITS:
        beyond.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if config.get("peft_type") != "LORA" or beyond:
        problem = config.get("peft_type") if config.get("peft_type") != "LORA" else ", ".join(beyond)
        raise ModelError(
            f"the adapter in {folder} is more than LoRA ({problem}); merge it with peft's merge_and_unload()"
        )
    if missing := [name for name in ("r", "lora_alpha") if config.get(name) is None]:
        raise ModelError(f"{folder / ADAPTER} has no {missing[0]}, without which no adapter can be merged")


def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of an adapter by layer: `a`, `b`, `bias`, `magnitude`, and what stands for the layer's own."""
    layers: dict[str, dict[str, Tensor]] = {}
    weights = {name.removeprefix(PEFT_PREFIX): value for name, value in weights.items()}
    wrapped = {name.partition(".lora_")[0] for name in weights if ".lora_" in name}
    for name, value in weights.items():
        match = LAYER.fullmatch(name)
        # the layer inside an adapter is called base_layer, and no other is
        if match is None or (match["own"] and bool(match["base"]) != (match["layer"] in wrapped)):
            raise ValueError(f"{name} is no tensor of LoRA")
        if not value.float().isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
        kind = f"own.{match['own']}" if match["own"] else next(k for k in ("a", "b", "bias", "magnitude") if match[k])
        layers.setdefault(match["layer"], {})[kind] = value
    if half := next((layer for layer, parts in layers.items() if ("a" in parts) != ("b" in parts)), None):
        raise ValueError(f"of {half} there is one of the two matrices alone")
    return layers


def _scale(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> float:
    rank, alpha = tensors["a"].shape[0], config["lora_alpha"]
    if not config.get("rank_pattern") and rank != config["r"]:
        raise ValueError(f"{name} has rank {rank}, the settings say {config['r']}")
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if PATTERN.fullmatch(pattern) is None:
            raise ValueError(f"alpha_pattern {pattern!r} is no name of layers")
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = value
            break
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha of {name} is {alpha!r}; valid: a finite number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _merge_layer(
    layer: Any, tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str, shared: frozenset[int]
) -> None:
    """Give `layer`, called `name`, the weights that the adapter makes of its own; `tensors` are the adapter's."""
    from torch import nn

    new = {kind: tensors[f"own.{kind}"] for kind in ("weight", "bias") if f"own.{kind}" in tensors}
    if "a" in tensors:
        scale, transposed = _scale(config, name, tensors), is_transposed(layer)
        if transposed is None or ("magnitude" in tensors and hasattr(layer, "embed_scale")):
            raise ValueError(f"this adapter cannot be merged into a {type(layer).__name__}")
        features = {"magnitude": config.get("use_dora"), "bias": config.get("lora_bias")}
        if odd := [part for part, wanted in features.items() if bool(wanted) != (part in tensors)]:
            raise ValueError(f"{' and '.join(odd)} of a layer are not as the settings say")
        learned = LowRank(
            a=tensors["a"], b=tensors["b"], scale=scale, transposed=transposed, magnitude=tensors.get("magnitude")
        )
        new["weight"] = learned.merge(new.get("weight", layer.weight))
        if "bias" in tensors:
            new["bias"] = new.get("bias", layer.bias) + scale * tensors["bias"]
    for kind, value in new.items():
        parameter = getattr(layer, kind)
        if parameter is None or parameter.shape != value.shape:
            has = None if parameter is None else tuple(parameter.shape)
            raise ValueError(f"{name}.{kind} is {tuple(value.shape)}, the base's {has}")
        if id(parameter) in shared:
            # the other layer keeps what was both of theirs
            setattr(
                layer,
                kind,
                nn.Parameter(value.to(parameter.device, parameter.dtype), requires_grad=parameter.requires_grad),
            )
        else:
            parameter.copy_(value)


def say_untied(model: Any) -> None:
    """Make the configuration say that head and embedding are apart, if they are: files and loaders follow it."""
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    for config in {id(part): part for part in (model.config, model.config.get_text_config())}.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
