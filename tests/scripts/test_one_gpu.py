"""The page on one GPU, word for word, with a tiny model in the place of Qwen: recipes and commands in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from turngym.agents import load_world
from turngym.agents.presets import find_preset

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
    text = text.replace("--split train", "--split generated --max-turns 3 --threads 1 --no-tensorboard")
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
    assert sorted(RECIPES) == ["student.toml", "teacher.toml"]
    for text in RECIPES.values():
        recipe = tomllib.loads(text)
        assert recipe["preset"] == preset.name
        assert not beside & set(recipe)
    for line in commands():
        if line.startswith(("turngym eval --panel", "turngym train sft")):
            assert f"--preset {preset.name}" in line
        assert not [word for word in line.split() if word[2:].replace("-", "_") in beside]


@pytest.mark.long
def test_the_page_runs_from_its_recipes_to_the_packed_row(tmp_path: Path) -> None:
    student = str(load_world("alfworld").checkpoint("student"))
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(smaller(text, student), encoding="utf-8")
    for line in commands():
        words = shlex.split(smaller(line, student))
        if words[1] == "eval" and "--panel" in words:
            words += ["--limit", "2", "--max-turns", "3", "--max-new-tokens", "16", "--threads", "1"]
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "turnopd.result.xz").stat().st_size > 500
