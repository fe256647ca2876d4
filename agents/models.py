"""Models on disk, LoRA adapters included: found, loaded on a device with their tokenizer, told apart by hash."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from turngym.agents.local_engine.lora_weights import ADAPTER, adapter_config, merge_adapter, more_settings, say_untied
from turngym.core.errors import ModelError, SettingsError, did_you_mean
from turngym.core.files import check_sums, missing_weights
from turngym.core.hub import WEIGHTS, HubError, cached_folder, is_hub_name, load_problem, model_folder
from turngym.core.model_folder_check import model_files
from turngym.core.nested import at
from turngym.core.plugins import need
from turngym.core.provenance import CONFIG_FILE
from turngym.core.redaction import brief
from turngym.core.settings import read_toml
from turngym.core.user_files import json_object, library_path, user_path
from turngym.retrieval.open_tokenizer import open_tokenizer
from turngym.retrieval.precision import cast_parameters

DTYPES = ("float32", "bfloat16", "float16")
TORCH_VARIABLES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
"""Environment variables that torch reads once in a process, when it first computes a product of that kind.

The first two: bfloat16 products that oneDNN and torch keep prepared on a CPU, 1,024 by default. Each shape is a product
of its own, and every batch has new lengths: with SmolLM2-135M's matrices a step of training added 80 to 100 MB that no
tensor held. A pass through a model, whose layers are alike, needs fewer than 128.

The third: on Hopper and Blackwell GPUs torch with cuDNN above 9.15 prefers cuDNN's attention, which makes and keeps a
plan for every new length. While tokens are sampled, every token has a new length (docs/research/benchmarks.md, "On a
GPU"). https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""
PROCESSOR_TEMPLATE = "chat_template.json"
MOST_ADAPTERS = 8
"""Most adapters on top of each other; more is a circle, or a file that wants to be one."""


def hub_folder(named: str | Path, *, weights: bool = True) -> Path:
    """Returns the folder of a model: a path, or `ORG/NAME[@REVISION]` of the hub, which is fetched if not in the cache.

    Raises ModelError if `model_folder` refuses it.
    """
    try:
        return model_folder(named, weights=weights)
    except HubError as error:
        raise ModelError(str(error)) from None


def set_torch_variables() -> None:
    """Set those `TORCH_VARIABLES` that the user has not set."""
    for name, value in TORCH_VARIABLES.items():
        os.environ.setdefault(name, value)


def load_policy(folder: str | Path, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """A causal model in evaluation mode and its tokenizer, from a folder. Raises ModelError as `load_model` does."""
    return load_model(folder, device=device, dtype=dtype), load_tokenizer(folder)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder; of an adapter without one, that of its base. Raises ModelError, MissingExtra."""
    path = hub_folder(folder, weights=False)
    if not (path / "tokenizer_config.json").is_file() and (base := base_model(path)):
        return load_tokenizer(base)
    need("transformers", "a tokenizer", "train")
    if not path.is_dir():
        raise ModelError(f"there is no folder {folder} with a tokenizer")
    try:
        # an adapter has its tokenizer, and no configuration of its model
        tokenizer = open_tokenizer(path, model_config(path) if base_model(path) else None)
        # the first call reads the maximum length, which may hold anything
        tokenizer("")
        # some models that also read images keep the template in a file of their processor
        if tokenizer.chat_template is None and (path / PROCESSOR_TEMPLATE).is_file():
            tokenizer.chat_template = json_object(path / PROCESSOR_TEMPLATE, ModelError)["chat_template"]
        return tokenizer
    except Exception as error:  # readers of damaged files raise anything
        raise ModelError(f"cannot load the tokenizer in {folder}: {load_problem(error)}") from error


def load_model(folder: str | Path, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """Any Hugging Face causal model in a folder, or a LoRA adapter merged into its base, in evaluation mode.

    Evaluation mode switches dropout off, so that the sampled and the trained distribution are the same one.

    Raises:
        ModelError: torch or memory is missing, this machine has no such device, or the folder holds no model or not all
            weights.
        ChangedFileError: a file is not as turngym wrote it.
    """
    path = find_model(folder)
    set_torch_variables()
    try:
        import torch
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(f"models need torch and transformers: pip install 'turngym[train]' ({error})") from error
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; valid: {', '.join(DTYPES)}")
    check_sums(path)
    target = find_device(device)
    if base := base_model(path):
        # merged in float32, and rounded once
        model = load_model(base)
        merge_adapter(model, path)
        return cast_parameters(model, getattr(torch, dtype)).to(target).eval()
    # bars for every file would tear the one line of progress that a person watches
    logging.disable_progress_bar()
    config = model_config(path)
    load: Any = auto_class(config).from_pretrained
    quantized = _dequantized(config)
    try:
        require_memory(path, _numbers(path, config), dtype)
        library_folder = library_path(path)
        wanted = {"config": config, "dtype": getattr(torch, dtype), "output_loading_info": True}
        # shapes that differ are told by name, below
        wanted |= {"trust_remote_code": False, "ignore_mismatched_sizes": True}
        try:
            model, loading = load(library_folder, attn_implementation="sdpa", **wanted)
        except ValueError as error:
            # Gemma 2 caps its attention's logits, which torch's own attention cannot
            if "scaled_dot_product_attention" not in str(error):
                raise
            print(f"{folder}: attention without torch's fast kernels, which this family has not", file=sys.stderr)
            model, loading = load(library_folder, attn_implementation="eager", **wanted)
    except ModelError:
        raise
    except Exception as error:  # as above; safetensors has an error of its own
        raise ModelError(f"cannot load the model in {folder}: {load_problem(error)}") from error
    if missing := missing_weights(loading):
        raise ModelError(f"cannot load the model in {folder}: {missing}")
    if quantized:
        _forget_quantization(model)
    elif (kind := getattr(config, "quantization_config", None)) and getattr(model, "hf_quantizer", None) is None:
        raise ModelError(f"{folder} is quantized in a way that transformers does not read: {brief(kind, 80)}")
    # files may hold a head of its own although their configuration ties it, and transformers keeps both
    say_untied(model)
    return model.to(target).eval()


def model_config(folder: Path) -> Any:
    """The configuration of the model of transformers in `folder`; of an adapter, its base's.

    Raises ModelError for one that cannot be read, and for a family whose code lies in the folder.
    """
    transformers = need("transformers", "a model's configuration", "train")
    while base := base_model(folder):
        folder = base
    try:
        config = transformers.AutoConfig.from_pretrained(library_path(folder), trust_remote_code=False)
        # the caller of a forward pass decides what it returns, not the program that wrote the folder
        for part in (config, config.get_text_config()):
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    except Exception as error:  # readers of damaged files raise anything
        raise ModelError(f"cannot load the model in {folder}: {load_problem(error)}") from error
    return config


def auto_class(config: Any) -> Any:
    """The class of transformers that makes the model of a configuration."""
    import transformers

    # of models that also read images some are causal models for transformers (Gemma 3), others not (Qwen3-VL)
    causal, images = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    reads_images = type(config) in images and type(config) not in causal
    return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM


DEQUANTIZED = ("fp8", "mxfp4")
"""Kinds of quantized weights that are read as the numbers that they stand for (`quant_method` in config.json)."""


def _dequantized(config: Any) -> bool:
    """Returns whether the weights are of a kind in `DEQUANTIZED`. If so, makes `config` ask for plain numbers.

    Other kinds are played as they are, where transformers can; they are neither trained nor saved (`require_plain`).
    """
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in DEQUANTIZED:
        return False
    config.quantization_config = {**quantization, "dequantize": True}
    return True


def require_plain(model: Any, folder: str | Path) -> None:
    """Raises ModelError for a model from `folder` whose weights are quantized in memory: training or saving would make
    another model of it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise ModelError(
            f"{folder} is quantized ({quantizer.quantization_config.quant_method}) and can only be played; valid to "
            f"train and to save: weights in full precision, {' and '.join(DEQUANTIZED)}, which are read as such"
        )


def _forget_quantization(model: Any) -> None:
    """Make `model`, whose weights are plain numbers now, one that is saved as such.

    transformers remembers how it read the weights, and would write them back quantized, or under names that nobody
    reads. Without these notes it writes them as those of a model that was never quantized.
    """
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "_weight_conversions"):
        model.__dict__.pop(name, None)


def find_model(folder: str | Path) -> Path:
    """Returns the model folder with `~` expanded. Raises ModelError with a remedy if it holds no model."""
    path = hub_folder(folder)
    if (path / "config.json").is_file() or (path / ADAPTER).is_file():
        return path
    if path.suffix == ".gguf" and path.is_file():
        raise ModelError(
            f"{folder} is a GGUF file. `turngym model import {folder} --out FOLDER` makes a model folder of it (Llama, "
            "Qwen2 and Qwen3 families); or serve it with llama.cpp (`llama-server -m FILE`) and play it as "
            "--agent openai:NAME --base-url http://127.0.0.1:8080/v1"
        )
    if path.is_dir():
        inside = sorted(path.glob("model")) + sorted(path.glob("checkpoints/step_*/model"))
        near = (
            f"; the model is in {inside[-1]}"
            if inside
            else ": config.json, model.safetensors and a tokenizer are needed"
        )
        raise ModelError(f"{folder} holds no model{near}")
    if path.exists():
        raise ModelError(f"{folder} is a file; a model is a folder with config.json, model.safetensors and a tokenizer")
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    beside = [
        entry.name
        for entry in entries
        if entry.suffix == ".gguf" or (entry.is_dir() and not entry.name.startswith("."))
    ]
    near = did_you_mean(path.name, beside, 1, cutoff=0.6)
    hint = " A model is a folder with config.json, model.safetensors and a tokenizer."
    raise ModelError(f"there is no folder {folder}.{near or hint}")


def base_model(folder: Path) -> Path | None:
    """The model that the LoRA adapter in `folder` was trained on; None if there is no adapter in it.

    Raises ModelError if that model is missing, or if a chain of adapters does not end in a model.
    """
    base = _base_of(folder)
    below, seen = base, [folder.resolve()]
    while below is not None and (below / ADAPTER).is_file():
        if below.resolve() in seen or len(seen) > MOST_ADAPTERS:
            raise ModelError(
                f"{folder} is a LoRA adapter of {base}, and no model lies below: each of {len(seen)} adapters names "
                f"another; base_model_name_or_path in {below / ADAPTER} must lead to a model"
            )
        seen.append(below.resolve())
        below = _base_of(below)
    return base


def lineage(folder: Path) -> list[Path]:
    """Returns the folders that a model is made of: those of its base if it is an adapter, then `folder`. Raises
    ModelError as `base_model` does."""
    base = base_model(folder)
    return [*(() if base is None else lineage(base)), folder]


def _base_of(folder: Path) -> Path | None:
    if not (folder / ADAPTER).is_file():
        return None
    config = adapter_config(folder)
    named = str(config.get("base_model_name_or_path"))
    revision = config.get("revision")
    base = cached_folder(f"{named}@{revision}" if revision else named) or user_path(named)
    # an adapter may have been trained on top of another
    if not (base / "config.json").is_file() and not (base / ADAPTER).is_file():
        where = "not whole in the hub's cache" if is_hub_name(named) else "not there"
        raise ModelError(
            f"{folder} is a LoRA adapter of the model {named}, which is {where}: `turngym model merge {folder} "
            "--base FOLDER --out FOLDER` puts it into its base wherever that is"
        )
    return base


def require_memory(path: Path, numbers: int, dtype: str) -> None:
    """Raises ModelError where a model of so many `numbers` does not fit into the memory that is free: without this the
    system would end the process without a word."""
    needed, free = numbers * (4 if dtype == "float32" else 2), free_bytes()
    if needed > free:
        hint = "; --dtype bfloat16 takes half" if dtype == "float32" else ""
        raise ModelError(
            f"{path} needs {needed / 1e9:.1f} GB of memory in {dtype}, and {free / 1e9:.1f} GB are free{hint}"
        )


def free_bytes() -> float:
    """Memory that is free, buffers of files included; infinite where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():  # only Linux has it
        return float("inf")
    rows = meminfo.read_text(encoding="utf-8").splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("MemAvailable"))


SCALED = re.compile(r"F[48]_.*|F[46]|I8")
"""Types of numbers in safetensors that mean nothing without their scales; bytes (U8) may be a mask."""


def _numbers(folder: Path, config: Any) -> int:
    """Counts the numbers in the safetensors of a model folder, by their headers.

    Raises ModelError for `SCALED` types if `config` does not say how to read them: transformers would load them
    unscaled. It does not know TensorRT's hf_quant_config.json, for example.
    """
    from safetensors import safe_open

    count = 0
    # some come with the same weights a second time, under a name of their own
    for file in (entry for entry in library_path(folder).iterdir() if WEIGHTS.fullmatch(entry.name)):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                part = weights.get_slice(name)
                if SCALED.fullmatch(part.get_dtype()) and not getattr(config, "quantization_config", None):
                    raise ModelError(
                        f"{folder} is quantized ({name} is {part.get_dtype()}), and its config.json has no "
                        "quantization_config that says how to read it; valid: weights in full precision"
                    )
                # MXFP4 keeps two numbers in a byte
                count += math.prod(part.get_shape()) * (2 if name.endswith("_blocks") else 1)
    return count


def find_device(device: str) -> str:
    """`device`, with `auto` resolved. Raises ModelError for one that this machine does not have."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"--device {device!r} is no device; valid: auto, cpu, cuda, cuda:1, ...") from None
    if wanted.type == "cuda" and torch.cuda.device_count() <= (wanted.index or 0):
        count = torch.cuda.device_count()
        has = f"{count} CUDA GPUs" if count else "no CUDA GPU"
        raise ModelError(f"--device {device}: this torch sees {has}; use --device cpu or auto")
    return device


def file_hashes(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weight, configuration and tokenizer file of a model folder, by file name; of an adapter's base
    too, as base/NAME."""
    kinds = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model")
    path = user_path(folder)
    # raises an error that says what is there instead
    path = path if path.is_dir() else find_model(folder)
    hashes = {}
    for file in model_files(path):
        # the adapter's configuration names the folder of the base, which changes nothing that the model computes
        if file.suffix in kinds and file.name != ADAPTER:
            with file.open("rb") as opened:
                hashes[file.relative_to(path).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
    if base := base_model(path):
        config = adapter_config(path)
        hashes[ADAPTER] = " ".join([f"{config.get('r')} {config.get('lora_alpha')}", *more_settings(config)])
        hashes |= {f"base/{name}": digest for name, digest in file_hashes(base).items()}
    return hashes


def trained_on(folder: str | Path) -> tuple[str, ...]:
    """Returns the environments that a checkpoint was trained on, from its run's config.toml; empty if unknown."""
    path = Path(folder).resolve()
    # RUN/checkpoints/step_000100/model
    config = next((file for parent in path.parents[:3] if (file := parent / CONFIG_FILE).is_file()), None)
    if config is None or not path.is_relative_to(config.parent / "checkpoints"):
        return ()
    try:
        settings = read_toml(config)
    except SettingsError:
        return ()
    also = at(settings, "play.also")
    # each of `also` is an environment and its settings, with commas between them
    further = [str(text).partition(",")[0] for text in also] if isinstance(also, list) else []
    named = [at(settings, "play.env.id"), *further]
    return tuple(env.rpartition(":")[2] for env in named if isinstance(env, str))
