"""Makes a small LoRA adapter of a trained model and its base: the shipped adapters of docs/research/real_model.md.

    python tests/tools/compress_adapter.py BASE MODEL OUT [RANK]

The difference of every linear layer's weight is cut to its RANK (8) largest singular values and stored in float16, with
the base as the adapter names it. MODEL may itself be an adapter, or one on top of another. Prints the share of the
difference (squared Frobenius norm) that is kept.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from turngym.agents.local_engine.lora_weights import ADAPTER, ADAPTER_WEIGHTS
from turngym.agents.models import load_model
from turngym.agents.rendering.chat_settings import CHAT_FILE

BASE_NAME = "models/smollm2"
"""Where `bootstrap.py smollm2` puts the base, seen from the checkout."""


def compress(base: Path, model: Path, out: Path, rank: int) -> float:
    """Writes the adapter to `out`; returns the share that is kept."""
    torch.manual_seed(0)  # the decomposition draws
    before, after = load_model(base), load_model(model)
    weights: dict[str, torch.Tensor] = {}
    kept = total = 0.0
    for name, layer in before.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        delta = (after.get_submodule(name).weight - layer.weight).detach()
        # what adapters of rank 16 added, one on another, has few singular values; the whole decomposition takes seconds
        left, values, right = torch.svd_lowrank(delta, q=48, niter=3)
        root = values[:rank].sqrt()
        # the scale alpha / rank is 1
        weights[f"base_model.model.{name}.lora_A.weight"] = (right[:, :rank] * root).T.half().contiguous()
        weights[f"base_model.model.{name}.lora_B.weight"] = (left[:, :rank] * root).half().contiguous()
        kept += float(values[:rank].square().sum())
        total += float(delta.square().sum())
    out.mkdir(parents=True)
    save_file(weights, out / ADAPTER_WEIGHTS)
    targets = sorted({name.split(".")[-3] for name in weights})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": BASE_NAME}
    config |= {"r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none", "inference_mode": True}
    (out / ADAPTER).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    # how the model is spoken to; tokenizer and template are the base's
    shutil.copy(model / CHAT_FILE, out / CHAT_FILE)
    return kept / total


if __name__ == "__main__":
    share = compress(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int([*sys.argv[4:], "8"][0]))
    print(f"{100 * share:.1f} % of the difference is kept")
