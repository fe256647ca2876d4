"""What the methods of told policies train on, worked out outside the trainer with transformers alone.

Which prompt is scored (the skill stands after the first observation), with whose weights (the live student, changed
after it was loaded, or the initial policy), at which temperature (1, while 0.7 samples), which tokens (those sampled).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import save_tiny, with_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngym.agents.rendering.skills import HINT_HEAD, read_skills
from turngym.core.episode import Episode, Turn
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.scripts import train
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.run import build_trainer
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)
TASKS = ("--episodes", "4", "--max-turns", "3", "--env-kwargs", '{"on_invalid": "noop"}', "--tracker", "none")
TASKS = (*TASKS, "--threads", "1", "--device", "cpu", "--eval-every", "0", "--steps", "1", "--temperature", "0.7")
SHOWN = TASKS[: TASKS.index("--temperature")]
"""The same of an algorithm that samples nothing."""
METHODS = ("sdar", "rlsd", "skill-sd", "opid", "agent-opsd")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), length=4096)


def logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """log p(response | prompt) at temperature 1, one forward pass for this turn alone."""
    with torch.no_grad():
        found = model(torch.tensor([prompt + response])).logits[0].float().log_softmax(-1)
    return [float(found[len(prompt) + place - 1, token]) for place, token in enumerate(response)]


def told_prompt(tokenizer: Any, episode: Episode, turn: Turn, text: str) -> list[int]:
    """The turn's prompt with `text` after the first observation, which is found in the text of the first prompt."""
    opening, first = episode.prompt_ids(episode.turns[0]).tolist(), episode.turns[0].observation
    shown = tokenizer.decode(opening, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert shown.count(first) == 1
    written = tokenizer(shown.replace(first, first + HINT_HEAD + text), add_special_tokens=False)["input_ids"]
    # what follows keeps its ids: sampled bytes may be no text that a tokenizer would read so again
    return [*written, *episode.prompt_ids(turn).tolist()[len(opening) :]]


def setting(name: str, **values: Any) -> list[str]:
    table = name.replace("-", "_")
    return [f"{table}.{key} = {value!r}" for key, value in values.items()]


@pytest.mark.parametrize("reader", ["live", "initial"])
@pytest.mark.parametrize("name", METHODS)
def test_targets_are_those_worked_out_elsewhere(model: Path, tmp_path: Path, name: str, reader: str) -> None:
    # opid puts what it tells behind the latest observation by default
    more = {"n": 2, "reader": reader, "reward": "score", "position": "opening"} | (
        {"fade": 4} if name == "rlsd" else {}
    )
    words = ["--algorithm", name, "--student", str(model), "--out", str(tmp_path / "run"), *TASKS]
    made = build_trainer(
        train.resolved([*words, "--judge", "skills:alfworld", *with_file(tmp_path, setting(name, **more))]).spec
    )
    episodes = made.source(RolloutRequest(step=1, episodes=4, max_turns=3, group=2, temperature=0.7))
    # what an untrained model scores is 0: half of each group is given something to compare
    for number, episode in enumerate(episodes):
        object.__setattr__(episode, "score", float(number % 2))
        object.__setattr__(episode, "success", bool(number % 2))
    # a step later the live student is no longer what was loaded
    initial = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        for value in made.model.parameters():
            value += 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value)))
    batch = pack(made.algorithm.select(episodes))  # type: ignore[misc]
    student = LocalScorer(model=made.model)
    found = made.algorithm.target_fn(batch, episodes, Scorers(student=student, reference=made.reference, step=1))

    # Outside: the same tokens in prompts made from text, turn by turn.
    tokenizer, skills = AutoTokenizer.from_pretrained(model), read_skills("alfworld")
    own: list[float] = []
    told: list[float] = []
    for episode in episodes:
        text = skills.text(episode.task.category, episode.turns[0].observation) or ""
        for turn in episode.turns:
            response = episode.response_ids(turn).tolist()
            reading = made.model if reader == "live" else initial
            own += logprobs(made.model, episode.prompt_ids(turn).tolist(), response)
            told += logprobs(reading, told_prompt(tokenizer, episode, turn, text), response)
    gap = np.array(told) - np.array(own)
    assert len(gap) == batch.tokens
    assert np.abs(gap).max() > 0.01
    assert found.label_logp_N is not None
    np.testing.assert_allclose(found.label_logp_N, told, atol=2e-4)
    advantage = np.where(batch.episode_N % 2, 1.0, -1.0) * 0.5 / (0.5**0.5 + 1e-6)
    np.testing.assert_allclose(found.advantage_N, changed(name, advantage, gap, batch), atol=2e-4)
    if name in ("sdar", "skill-sd"):
        np.testing.assert_allclose(found.extra["told_logp"], told, atol=2e-4)
        assert found.extra["told"].all()


def changed(name: str, advantage: Any, gap: Any, batch: RolloutBatch) -> Any:
    """The advantages of a method, written once more."""
    if name == "rlsd":
        return advantage * (1 - 0.375 + 0.375 * np.exp(np.sign(advantage) * gap).clip(0.8, 1.2))
    if name == "opid":
        return advantage + 0.001 * gap
    if name != "agent-opsd":
        return advantage
    found = advantage.copy()
    for episode in range(batch.episodes):
        mine = batch.episode_N == episode
        turns = [gap[mine & (batch.turn_N == turn)].sum() for turn in range(3)]
        belief = 1 / (1 + np.exp(-np.cumsum([0.0, *turns])))
        moves = np.diff(belief)
        z = (moves - moves.mean()) / (moves.std() + 1e-6)
        sign = np.sign(advantage[mine][0])
        found[mine] *= (0.5 + 0.5 * (1 + 0.2 * sign * z).clip(0.8, 1.2))[batch.turn_N[mine]]
    return found


def test_half_of_the_demonstrations_show_how_to_read_where_a_told_policy_reads(model: Path, tmp_path: Path) -> None:
    words = ["--algorithm", "sft", "--student", str(model), *SHOWN, "--expert", "reading", "--out"]
    made = build_trainer(train.resolved([*words, str(tmp_path / "run"), "--sft.told", "skills:alfworld"]).spec)
    plain = build_trainer(train.resolved([*words, str(tmp_path / "plain")]).spec)
    asked = RolloutRequest(step=1, episodes=12, max_turns=3)
    episodes, tokenizer = made.source(asked), AutoTokenizer.from_pretrained(model)
    told = [episode for episode in episodes if HINT_HEAD in episode.turns[0].observation]
    assert 3 <= len(told) <= 9
    assert len({episode.turns[0].observation.partition(HINT_HEAD)[2] for episode in told}) > 1
    for episode, same in zip(episodes, plain.source(asked), strict=True):
        first, _, text = episode.turns[0].observation.partition(HINT_HEAD)
        assert first == same.turns[0].observation
        assert (text in read_skills("alfworld").texts) == bool(text)
        if text:
            # the ids of a told policy's prompt are those that the demonstration had
            wanted = told_prompt(tokenizer, same, same.turns[0], text)
            assert episode.prompt_ids(episode.turns[0]).tolist() == wanted


def test_what_cannot_be_told_to_demonstrations_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("look <|end|> around")
    (tmp_path / "skills.toml").write_text("always = 'a.txt'\n")
    words = ["--algorithm", "sft", "--student", str(model), *SHOWN, "--out"]
    for number, (folder, said) in enumerate(
        (
            ("alfworld", "--sft.told is 'alfworld'; valid: skills:FOLDER"),
            (f"skills:{tmp_path}", "spells a control token of the student's tokenizer"),
            ("skills:nowhere", "valid: a folder with skills.toml, or alfworld"),
        )
    ):
        with pytest.raises(TurngymError, match=said) as error:
            build_trainer(train.resolved([*words, str(tmp_path / f"run{number}"), "--sft.told", folder]).spec)
        assert "\n" not in str(error.value)


def test_a_judge_whose_skill_spells_a_control_token_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("look <|end|> around")
    (tmp_path / "skills.toml").write_text("always = 'a.txt'\n")
    words = ["--algorithm", "sdar", "--student", str(model), *TASKS, "--sdar.n", "2", "--out", str(tmp_path / "run")]
    with pytest.raises(TurngymError, match=r".look <\|end\|> around. spells a control token") as error:
        build_trainer(train.resolved([*words, "--judge", f"skills:{tmp_path}"]).spec)
    assert "\n" not in str(error.value)


def test_a_judge_that_asks_an_expert_is_refused_where_there_is_none(model: Path, tmp_path: Path) -> None:
    words = [
        "--algorithm",
        "opd-hints",
        "--student",
        str(model),
        "--teacher",
        str(model),
        "--out",
        str(tmp_path / "run"),
    ]
    said = "--judge expert asks an expert, and tests/NoExpert-v0 has none; valid: another judge"
    with pytest.raises(TurngymError, match=f"^{said}$"):
        build_trainer(train.resolved([*words, "--env", "lamps_env:tests/NoExpert-v0", "--judge", "expert"]).spec)
    assert not (tmp_path / "run").exists()
