"""A real language model, SmolLM2-135M-Instruct: its ids are llama.cpp's, it speaks, and its end token is trained on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.agents import evaluate, load_world
from turngym.agents.models import load_policy
from turngym.agents.worlds import REAL_WORLDS
from turngym.scripts.main import main
from turngym.trainers.metrics import read_metrics

FOLDER = Path(os.environ.get("TURNGYM_SMOLLM2", Path(__file__).parents[2] / "models" / "smollm2"))
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs models/smollm2: python3 scripts/bootstrap.py smollm2 makes it"
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load_policy(FOLDER, "cpu")


IDS: dict[str, list[int]] = {
    "You arrive at cabinet 12.\n\n1979 was cold.": [
        *(2683, 11296, 418, 19565, 216, 33, 34, 30, 1116, 33, 41, 39, 41, 436, 4011, 30)
    ],
    "Price: $1,249.50  (2 sizes)": [27148, 42, 1885, 33, 28, 34, 36, 41, 30, 37, 32, 216, 365, 34, 7804, 25],
    "a\n\n  7 8\t9": [81, 39892, 39, 216, 40, 197, 41],
    "  two spaces, 10%": [216, 827, 5600, 28, 216, 33, 32, 21],
    "<|im_start|>user\nlook<|im_end|>\n": [1, 4093, 198, 14757, 2, 198],
    "go to café 3, 東京 2020 😀": [
        *(2345, 288, 37366, 216, 35, 28, 17097, 247, 126, 16736, 122, 216, 34, 32, 34, 32, 40303, 218)
    ],
    "don't we'll I'd": [12420, 982, 392, 3060, 339, 6737],
    "x=1\r\n22\u00a033": [104, 45, 33, 2738, 34, 34, 15442, 35, 35],
}
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


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the model at models/smollm2, where the shipped adapters look for it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2").symlink_to(FOLDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("name", REAL_WORLDS)
def test_the_shipped_teachers_play(name: str) -> None:
    world = load_world(name)
    result = evaluate(world.panel, f"model:{world.checkpoint('teacher')}", samples=1, limit=3, temperature=0.0)
    assert result.scores.verdicts["malformed"] == 0  # without its adapter the model writes nothing else
    assert result.scores.overall.avg.mean > 0


def test_its_quickstart_from_start_to_end(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart", "--env", "alfworld-smollm2", "--methods", "opd", "--steps", "1", "--limit", "1"]
    assert main([*words, "--samples", "1"]) == 0
    (row,) = (row for row in read_metrics(clone / "runs/quickstart-alfworld-smollm2/opd") if row["kind"] == "train")
    assert re.search(rf"^opd: .* in {row['time/train_s']:.0f} s of training", capsys.readouterr().out, re.MULTILINE)
    assert row["turns_mean"] <= 10
    # adapters have no tokenizer of their own, which the page needs
    assert (clone / "runs/quickstart-alfworld-smollm2/episodes.html").stat().st_size > 10_000
