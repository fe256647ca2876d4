"""A real language model, SmolLM2-135M-Instruct: its ids are llama.cpp's, it speaks, and its end token is trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.agents.models import load_policy

FOLDER = Path(os.environ.get("TURNGYM_SMOLLM2", Path(__file__).parents[2] / "models" / "smollm2"))
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs models/smollm2: python3 scripts/bootstrap.py smollm2 makes it"
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load_policy(FOLDER, "cpu")


IDS: dict[str, list[int]] = {}
"""What llama.cpp makes of texts that a wrong splitting of digits, spaces or control tokens would change."""


@pytest.mark.parametrize("text", IDS)
def test_ids_are_those_of_llama_cpp(text: str, smollm2: tuple[Any, Any]) -> None:
    assert smollm2[1](text).input_ids == IDS[text]


def test_it_knows_the_capital_of_france(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(said[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
