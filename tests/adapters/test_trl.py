"""TRL itself, on the CPU with tiny models: two GRPO steps through each of its two interfaces."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers_of import bytes_alone

from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.errors import TurngymError
from turngym.trainers.adapters import trl as adapter
from turngym.trainers.adapters import trl as trl_tools
from turngym.trainers.adapters.token_session import Trajectory

HOUSE = {"split": "generated", "config": "small", "on_invalid": "noop"}


def config(folder: Path, **settings: Any) -> Any:
    trl = pytest.importorskip("trl", reason="needs the extra turngym[trl]")
    defaults = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "learning_rate": 1e-3}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "use_cpu": True}
    return trl.GRPOConfig(output_dir=str(folder), **{**defaults, **quiet, **settings})


def grpo(**arguments: Any) -> Any:
    trl = pytest.importorskip("trl", reason="needs the extra turngym[trl]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.GRPOTrainer(**arguments)


def change(before: Sequence[Any], model: Any) -> float:
    return max(float((a - b.detach()).abs().max()) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.long
def test_two_grpo_steps_on_alfworld_through_rollout_func(student: SimpleNamespace, tmp_path: Path) -> None:
    """Real games, real sampling, real updates. The ids that TRL trains on are those that were sampled."""
    datasets = pytest.importorskip("datasets", reason="needs the extra turngym[trl]")
    from turngym.agents.local_engine.engine import LocalEngine

    sessions = SessionPool.of("turngym/ALFWorld-v0", student.tokenizer, student.settings, max_turns=6, **HOUSE)
    model = student.load()
    engine = LocalEngine(model, tokenizer=student.tokenizer, max_length=1024)
    roll, seen = adapter.rollout_func(sessions, lambda trainer: engine), []

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(roll(prompts, trainer))
        return seen[-1]

    trainer = grpo(
        model=model,
        processing_class=student.tokenizer,
        reward_funcs=[adapter.episode_reward],
        args=config(tmp_path),
        train_dataset=datasets.Dataset.from_list(adapter.rows([sessions.task_ids()[0], sessions.task_ids()[6]])),
        rollout_func=watched,
    )
    handed = []
    inner = trainer._generate_and_score_completions

    def scored(inputs: list[Any]) -> dict[str, Any]:
        handed.append(inner(inputs))
        return handed[-1]

    trainer._generate_and_score_completions = scored
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    assert trainer.state.global_step == len(seen) == 2
    for sampled, given in zip(seen, handed, strict=True):
        mask, columns = given["completion_mask"].bool(), given["completion_ids"]
        assert [row[keep].tolist() for row, keep in zip(columns, mask, strict=True)] == sampled["completion_ids"]
        assert [row[keep].tolist() for row, keep in zip(given["tool_mask"], mask, strict=True)] == sampled["env_mask"]
        assert len({tuple(ids) for ids in sampled["completion_ids"]}) > 2  # attempts at one task differ
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx(np.mean([float(r) for r in seen[0]["turngym_reward"]]))
    assert 0.0 < logged["reward"] < 1.0  # the second attempt wins, the first does not
    assert logged["frac_reward_zero_std"] == 0.0
    assert change(before, model) > 0.0


def test_settings_that_would_falsify_the_result_are_refused(sessions: SessionPool) -> None:
    roll = adapter.rollout_func(sessions, lambda trainer: trainer)
    hot = SimpleNamespace(args=SimpleNamespace(temperature=0.7, mask_truncated_completions=False))
    with pytest.raises(TurngymError, match=r"temperature 1, but GRPOConfig says 0\.7"):
        roll(["x"], hot)
    masked = SimpleNamespace(args=SimpleNamespace(temperature=1.0, mask_truncated_completions=True))
    with pytest.raises(TurngymError, match="mask_truncated_completions"):
        roll(["x"], masked)


def qwen_tokenizer() -> Any:
    """One token per byte with Qwen3's special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    templates = pytest.importorskip("trl.chat_template_utils", reason="needs the extra turngym[trl]")
    tokenizer = bytes_alone(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = templates.qwen3_chat_template
    return fast


def tiny_qwen(vocabulary: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 8192}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **shape, **heads))


@pytest.mark.long
def test_environment_factory_trains_on_the_ids_that_a_session_gives(tmp_path: Path) -> None:
    """Two GRPO steps. A random model calls no function, so what it "samples" is prescribed; TRL does the rest."""
    datasets = pytest.importorskip("datasets", reason="needs the extra turngym[trl]")
    tokenizer = qwen_tokenizer()
    settings = ChatSettings(channel="tool", observation_role="tool", max_context=8000)
    sessions = SessionPool.of("turngym/ALFWorld-v0", tokenizer, settings, **HOUSE)
    task = sessions.task_ids()[1]
    ours, said = played(sessions, tokenizer, task)
    last = tokenizer("Done.", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    trainer = grpo(
        model=tiny_qwen(len(tokenizer)),
        processing_class=tokenizer,
        environment_factory=trl_tools.environment_factory(sessions),
        args=config(tmp_path, max_completion_length=8000, per_device_train_batch_size=2, temperature=1.0),
        train_dataset=datasets.Dataset.from_list(trl_tools.tool_rows(sessions, [task])),
    )
    out: list[Any] = []
    generate = trainer._generate

    def watched(prompts: list[Any]) -> Any:
        out.append(generate(prompts))
        return out[-1]

    trainer._generate = watched

    def sampled(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """The first attempt plays the episode, the second gives up at once."""
        return [said.get(len(ids), last) if row == 0 else last for row, ids in enumerate(prompt_ids)], None

    trainer._generate_single_turn = sampled
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert len(out) == 2
    prompt_ids, completion_ids, tool_mask, *_ = out[0]
    length = len(ours.response_ids)
    assert prompt_ids == [ours.prompt_ids.tolist()] * 2
    assert completion_ids[0][:length] == ours.response_ids.tolist()
    assert tool_mask[0][:length] == ours.response_mask.astype(int).tolist()
    assert completion_ids[0][-len(last) :] == last  # TRL lets the model speak once more when the episode is over
    assert completion_ids[1] == last
    assert ours.reward == 1.0
    assert trainer.state.log_history[0]["reward"] == 0.5
    assert change(before, trainer.model) > 0.0


def played(sessions: SessionPool, tokenizer: Any, task: str) -> tuple[Trajectory, dict[int, list[int]]]:
    """An expert's episode with one refused action, and what is said after a prompt of each length."""
    from turngym.core.protocols import Generation
    from turngym.envs.channels import make_channel
    from turngym.envs.guard import guard_of

    session, channel, said = sessions.open(task), make_channel("tool", sessions.tool), {}
    actions = iter(["fly to the moon"])
    while (request := session.request) is not None:
        action = next(actions, None) or guard_of(session._env).expert_action()
        assert action is not None
        ids = tokenizer(channel.format(action), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        said[len(request.prompt_ids)] = ids
        session.step(Generation(ids=np.array(ids, np.int32), logprobs=np.zeros(len(ids), np.float32), finish="stop"))
    session.close()
    return Trajectory.of(session.episode()), said
