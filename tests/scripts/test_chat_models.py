"""A downloaded chat model through the commands: its template decides the dialect; the choice is printed and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from families import family_tokenizer
from late import late

from turngym.core.trace import read_trace
from turngym.scripts import main


def save_model(folder: Path, family: str) -> Path:
    """A tiny model with random weights that speaks as `family` does, and no turngym.json beside it."""
    tokenizer = family_tokenizer(family)
    transformers.set_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


EVAL = ["--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--no-verify", "--max-turns", "2"]


FOUND = [
    ("qwen3_5", ["--channel", "tool"], "channel tool:qwen-coder, observations as tool messages"),
    ("gpt_oss", ["--channel", "tool"], "channel tool:harmony, observations as tool messages"),
    ("qwen3_5", [], "channel text, observations as tool messages"),
    ("qwen3_5", ["--observation-role", "user"], "channel text, observations as user messages"),
    ("gpt_oss", [], "channel text:harmony, observations as user messages"),
]


@pytest.mark.parametrize(("family", "words", "found"), late(FOUND, FOUND[0], FOUND[4]))
def test_eval_says_what_it_found(
    family: str, words: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / family, family)
    agent = ["--agent", f"model:{model}", "--max-new-tokens", "6", "--out", str(tmp_path / "eval")]
    agent += ["--env-kwargs", '{"on_invalid": "reject"}']
    assert main.main(["eval", *EVAL, *agent, *words]) == 0
    assert f"chat: {found}" in " ".join(capsys.readouterr().out.split())
    (episode,) = read_trace(tmp_path / "eval" / "trace.jsonl")[0]
    # what a random model says is no call: the refusal is in the words of the channel
    asked = "no call of the tool alfworld_step" if "tool" in words else "no <action>...</action>"
    assert asked in episode.turns[1].observation


def test_a_template_without_tools_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "phi3", "phi3")
    assert main.main(["eval", *EVAL, "--agent", f"model:{model}", "--channel", "tool"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "knows no tools: use the text channel (--channel text), or --channel tool:hermes" in error[0]


def test_a_student_learns_and_keeps_the_dialect_of_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Demonstrations are calls as the template writes them, and the choice lies beside the weights."""
    student = save_model(tmp_path / "student", "qwen3_5")
    run = tmp_path / "run"
    sizes = ["--steps", "1", "--episodes", "2", "--max-turns", "2", "--eval-every", "0"]
    words = ["train", "sft", "--student", str(student), "--out", str(run), "--channel", "tool", *sizes]
    assert main.main(words) == 0
    assert "chat: channel tool:qwen-coder, observations as tool messages" in capsys.readouterr().err
    saved = json.loads(next(run.rglob("turngym.json")).read_text())
    assert (saved["channel"], saved["observation_role"]) == ("tool:qwen-coder", "tool")
    # a rollout of the trained model needs no option any more
    trained = next(run.rglob("turngym.json")).parent
    words = ["rollout", "--agent", f"model:{trained}", "--tasks", "1", "--depth", "1", "--max-new-tokens", "4"]
    assert main.main(words) == 0
    assert "channel tool:qwen-coder" in " ".join(capsys.readouterr().out.split())
