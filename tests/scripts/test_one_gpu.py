"""The page on one GPU, word for word, with a tiny model in the place of Qwen: recipes and commands in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from turngym.agents import load_world
from turngym.agents.presets import find_preset
from turngym.scripts.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "one_gpu.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r'```toml title="(\w+\.toml)"\n(.*?)```', PAGE, re.DOTALL))
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
FEWER = {"60": "2", "150": "2", "100": "2", "128": "8", "64": "4", "50": "2", "32": "4"}
"""Numbers of steps and episodes here, for those of the page."""


def commands() -> list[str]:
    """The page's commands that are run here."""
    found = re.findall(r"<!-- run by: tests/scripts/test_one_gpu.py -->\n```bash\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in found for line in block.splitlines()]


def smaller(text: str, student: str) -> str:
    """The same for a tiny model on a CPU: fewer steps, generated houses, this process's engine."""
    text = text.replace(QWEN, student).replace("alfworld-valid-seen", "alfworld-quickstart")
    text = re.sub(r'split = "train"', 'split = "generated"\nmax_turns = 3\neval_limit = 2\nthreads = 1', text)
    text = text.replace("--split train", "--split generated --max-turns 3 --threads 1 --tracker none")
    text = re.sub(r'engine = "vllm"\n', "max_new_tokens = 16\n", text)
    text = re.sub(r'(autocast|rollout_dtype|teacher_dtype) = "bfloat16"\n', "", text).replace(
        " --autocast bfloat16", ""
    )
    pattern = r"(steps = |episodes = |eval_every = |--steps |--episodes |--checkpoint-every )(\d+)"
    text = re.sub(pattern, lambda found: found[1] + FEWER[found[2]], text)
    return re.sub(r"step_0*(\d+)", lambda found: f"step_{int(FEWER[found[1]]):06d}", text)


def test_recipes_and_commands_name_the_preset_and_give_nothing_beside_it() -> None:
    preset = find_preset("verl-agent", "turngym/ALFWorld-v0")
    assert preset is not None
    beside = {"max_turns", "channel", "memory", "system", "thinking", "max_new_tokens", "env_kwargs", "prompts"}
    beside |= {"eval_temperature", "eval_samples", "observation_role"}
    assert sorted(RECIPES) == ["rl.toml"]
    for text in RECIPES.values():
        recipe = tomllib.loads(text)
        assert recipe["preset"] == preset.name
        assert not beside & set(recipe)
    for line in commands():
        if line.startswith(("turngym eval --panel", "turngym train sft")):
            assert f"--preset {preset.name}" in line
        assert not [word for word in line.split() if word[2:].replace("-", "_") in beside]


TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call:' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Like those of Qwen2.5: a system message of its own, tools in it, an end after every message."""


def tiny_qwen(folder: Path) -> str:
    """A random model of Qwen2.5's kind: query heads that share keys, tied embeddings, the family's real template where
    the folder $TPL has it."""
    import torch

    student = load_world("alfworld").checkpoint("student")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ends = json.loads((student / "generation_config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=ends["eos_token_id"],
        pad_token_id=ends["pad_token_id"],
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(student / name, folder / name)
    real = Path(os.environ.get("TPL", "")) / "cz_qwen2.5-instruct.jinja"
    text = real.read_text(encoding="utf-8") if real.is_file() else TEMPLATE.strip()
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.long
def test_the_page_runs_from_its_recipes_to_the_packed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = tiny_qwen(tmp_path / "qwen")
    monkeypatch.chdir(tmp_path)
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(smaller(text, student), encoding="utf-8")
    for line in commands():
        words = shlex.split(smaller(line, student))[1:]
        if words[0] == "eval" and "--panel" in words:
            words += ["--limit", "2", "--max-turns", "3", "--max-new-tokens", "16", "--threads", "1"]
        assert main(words) == 0, line
    assert (tmp_path / "turnopd.result.xz").stat().st_size > 500
