"""Models on disk as agents use them: loaded with their tokenizer, rendered as they were trained, told apart by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from turngym.agents.rendering.chat_settings import ChatSettings, open_renderer
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.core.errors import AgentError
from turngym.envs.core.files import check_sums, missing_weights
from turngym.envs.core.settings import FILE, SettingsError, read_toml
from turngym.envs.core.task import ToolSpec


def load_policy(folder: str | Path, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """A causal model in evaluation mode and its tokenizer, from a folder.

    Raises AgentError where torch is missing, or the folder holds no model or not all of its weights.
    """
    path = require_model(folder)
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise AgentError(f"models need torch and transformers: pip install 'turngym[train]' ({error})") from error
    check_sums(path)
    target = _device(device, torch)
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        load: Any = AutoModelForCausalLM.from_pretrained
        model, loading = load(path, dtype=getattr(torch, dtype), output_loading_info=True)
    except Exception as error:  # readers of damaged files raise anything, safetensors an error of its own
        # transformers explains at length; the first line names the cause
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AgentError(f"cannot load the model in {folder}: {first}") from error
    if said := missing_weights(loading):
        raise AgentError(f"cannot load the model in {folder}: {said}; they would be random")
    return model.to(target).eval(), tokenizer


def require_model(folder: str | Path) -> Path:
    """The folder, with the home directory filled in. Raises AgentError where it holds no model."""
    path = Path(folder).expanduser()
    if path.suffix == ".gguf":
        raise AgentError(
            f"{folder} is a GGUF file: turngym model import {folder} --out FOLDER makes a model folder of it"
        )
    if not (path / "config.json").exists():
        raise AgentError(f"{folder} holds no model: config.json, model.safetensors and a tokenizer are needed there")
    return path


def _device(device: str, torch: Any) -> str:
    """`device`, with `auto` resolved. Raises AgentError for one that this machine does not have."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise AgentError(f"--device {device!r} is no device; valid: auto, cpu, cuda, cuda:1, ...") from None
    if asked.type == "cuda" and torch.cuda.device_count() <= (asked.index or 0):
        found = torch.cuda.device_count()
        has = f"{found} CUDA GPUs" if found else "no CUDA GPU"
        raise AgentError(f"--device {device}: this torch sees {has}; use --device cpu or auto")
    return device


def renderer_of(model: Any, tokenizer: Any, settings: ChatSettings, tool: ToolSpec) -> ChatRenderer:
    """The `ChatRenderer` that a model was trained with; its generation config may name further end tokens."""
    # transformers allows one id, a list of ids, or none
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or ()
    return open_renderer(tokenizer, settings, tool, stop_ids=(more,) if isinstance(more, int) else tuple(more))


def file_hashes(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weight, configuration and tokenizer file of a model folder, by file name."""
    kinds = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model")
    found = {}
    for path in sorted(Path(folder).expanduser().iterdir()):
        if path.suffix in kinds:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def trained_on(folder: str | Path) -> str | None:
    """The environment of the run that a model is a checkpoint of, by the run's config.toml; None if not known."""
    path = Path(folder).resolve()
    # RUN/checkpoints/step_000100/model
    config = next((found for parent in path.parents[:3] if (found := parent / FILE).is_file()), None)
    if config is None or not path.is_relative_to(config.parent / "checkpoints"):
        return None
    try:
        env = read_toml(config).get("env")
    except SettingsError:
        return None
    return env.rpartition(":")[2] if isinstance(env, str) else None
