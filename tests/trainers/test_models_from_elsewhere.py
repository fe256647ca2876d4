"""Padded heads, halves that read images, and ids of another tokenizer: what models of others bring to a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import proxy_run
import pytest
import torch
import toy_run as toy
import transformers
from engine_requests import request, tiny
from sglang_model import ModelServer
from tiny_runs import break_off, command, save_tiny
from tokenizers import AddedToken
from tokenizers_of import bytes_alone

from turngym.agents.local_engine.engine import LocalEngine, pack_engine, unpack_engine
from turngym.agents.models import load_model, load_tokenizer
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.open_renderer import complete_settings, open_renderer
from turngym.agents.rendering.renderer import TextEpisodes
from turngym.agents.saved_model import save_model
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import ModelError, SettingsError, TurngymError
from turngym.core.spec import changed
from turngym.core.task import Task, Verdict
from turngym.core.tools import ToolSpec
from turngym.core.trace import read_episodes
from turngym.envs.alfworld.priors import SMALL, vocabulary
from turngym.envs.channels import make_channel
from turngym.scripts.main import main
from turngym.trainers.batch import pack
from turngym.trainers.checkpoint import load_shards, save_shards
from turngym.trainers.critic import ValueCritic
from turngym.trainers.live.run import build
from turngym.trainers.lora import LoraConfig, add_adapters
from turngym.trainers.metrics import read_metrics
from turngym.trainers.microbatch import packing_for
from turngym.trainers.models import check_head, freeze_unread, tiny_qwen3, trained
from turngym.trainers.recorded_source import check_tokenizer
from turngym.trainers.run_config import CriticConfig, OptimizerConfig, tables_of
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)


@pytest.mark.parametrize("cache", ["ragged", "recompute"])
def test_ids_that_nobody_scores_are_not_drawn(cache: Any) -> None:
    """A teacher whose head has fewer padded rows has none for them."""
    model = tiny("Qwen2")
    with torch.no_grad():
        model.lm_head.weight[50:] = 3 * model.lm_head.weight[:11]
    asked = [request(str(n), [1, 2, 3 + n], (n,), temperature=2.0, max_new_tokens=40) for n in range(3)]
    free = LocalEngine(model, cache=cache)
    drawn = np.concatenate([one.ids for one in free.generate(asked)])
    assert drawn.max() >= 50
    engine = unpack_engine(pack_engine(LocalEngine(model, cache=cache, vocab_size=50)))
    for one, prompt in zip(engine.generate(asked), asked, strict=True):
        assert one.ids.max() < 50
        ids = torch.tensor(np.concatenate((prompt.prompt_ids, one.ids))).long()
        with torch.no_grad():
            logp = (model(ids[None]).logits[0, :, :50] / 2.0).log_softmax(-1)
        places = torch.arange(len(prompt.prompt_ids), len(ids))
        np.testing.assert_allclose(one.logprobs, logp[places - 1, ids[places]].numpy(), atol=1e-4)


def test_what_a_pass_returns_is_not_the_folders_matter(tmp_path: Path) -> None:
    """Tuples were an AttributeError at the first token; states of all layers take memory for nothing."""
    save_model(tiny("Qwen2"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    asked = {"return_dict": False, "output_hidden_states": True}
    (tmp_path / "config.json").write_text(json.dumps(settings | asked))
    model = load_model(tmp_path)
    assert LocalEngine(model, cache="recompute").generate([request("a", [1, 2])])[0].ids.size == 8
    assert model(torch.arange(4)[None]).hidden_states is None


@pytest.mark.parametrize("servers", [False, True])
def test_a_student_with_more_padding_than_its_teacher_learns(tmp_path: Path, servers: bool) -> None:
    """IndexError, on a GPU an assert; servers ended the run at the first such id."""
    save_tiny(tmp_path / "student")
    save_tiny(tmp_path / "teacher", seed=1)
    rows = load_model(tmp_path / "teacher").config.vocab_size
    padded = tiny_qwen3(rows + 200, width=32, layers=1, heads=2, max_length=512)
    save_model(padded, tmp_path / "student")
    words = command(tmp_path, tmp_path / "run", "opd", "--steps", "1")
    with ExitStack() as opened:
        if servers:
            words += ["--policy-server", opened.enter_context(ModelServer(folder=tmp_path / "student")).url]
        assert main(["train", *words]) == 0
    assert np.isfinite(read_metrics(tmp_path / "run")[-1]["loss"])


def test_a_proxy_draws_and_holds_what_its_teacher_scores(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its engine was opened before the teacher and knew none of its limits."""
    save_tiny(tmp_path / "student")
    save_tiny(tmp_path / "teacher", seed=1, length=60)
    rows = load_model(tmp_path / "teacher").config.vocab_size
    save_model(tiny_qwen3(rows + 9, width=32, layers=1, heads=2, max_length=512), tmp_path / "student")
    models = {name: tmp_path / name for name in ("student", "teacher")}
    service, training = build(proxy_run.options(tmp_path / "run", "opd", **models))
    assert training is not None
    try:
        assert training._serving.engine.vocab_size == rows
        assert service.max_context == 60
        assert "60 ids" in capfd.readouterr().err
    finally:
        training.stop()
        service.close()


def test_zero_clips_nothing_for_the_critic_too() -> None:
    model, batch = toy.tiny(1), pack(toy.demonstrations(4), origins=("demonstration",))
    ones, zeros = np.ones(batch.tokens, np.float32), np.zeros(batch.tokens, np.float32)
    found = {}
    for norm in (0.0, 1e6):
        critic = ValueCritic(model, CriticConfig(kind="head", lr=1e-2, clip=None, max_grad_norm=norm))
        critic.update(batch, ones, zeros)
        found[norm] = critic.values(batch)
    assert found[0.0].mean() > 1e-3
    np.testing.assert_array_equal(found[0.0], found[1e6])
    for kind in (CriticConfig, OptimizerConfig):
        with pytest.raises(SettingsError, match="max_grad_norm"):
            tables_of(kind(max_grad_norm=-1.0))


def gemma(vocab: int = 61) -> Any:
    """A Gemma 3 with a half that reads images; the settings of its language model lie in `text_config`."""
    text = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64, "query_pre_attn_scalar": 8}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 512}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    ids = {"image_token_index": 3, "boi_token_index": 1, "eoi_token_index": 2, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **ids)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def qwen3_vl() -> Any:
    """One that transformers does not list among causal models, with positions of three axes."""
    text = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("made", [gemma, qwen3_vl])
def test_a_model_that_also_reads_images_is_a_student(made: Any, tmp_path: Path) -> None:
    """Whether or not transformers calls it a causal model: Qwen3-VL and Mistral 3 were refused."""
    save_model(made(), tmp_path)
    model = load_model(tmp_path)
    check_head(model)
    rows = [np.arange(3, 40, dtype=np.int32), np.arange(5, 20, dtype=np.int32)]
    scorer = LocalScorer(model=model, packing=packing_for("auto", model))
    found = scorer.logprobs(rows, [np.arange(1, len(row)) for row in rows])
    (drawn,) = LocalEngine(model, max_length=64).generate([request("s", rows[1], max_new_tokens=4)])
    for ids, logp in zip((*rows, np.append(rows[1], drawn.ids)), (*found, drawn.logprobs), strict=True):
        with torch.no_grad():
            own = made()(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
        expected = own[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:].astype(np.int64))].numpy()
        np.testing.assert_allclose(logp, expected[-len(logp) :], atol=1e-4)


def stepped(model: Any) -> Any:
    """An optimizer after one update on text."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("adapters", [False, True])
def test_the_half_that_reads_images_is_not_trained(adapters: bool, tmp_path: Path) -> None:
    """Names of layers mean its layers, too; without a gradient there are no moments to save."""
    model = gemma()
    if adapters:
        add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    else:
        freeze_unread(model)
    names = trained(model)
    assert names
    assert not any("vision" in name or "multi_modal" in name for name in names)
    optimizer = stepped(model)
    save_shards(tmp_path / "shards", {"model": (model, optimizer)})
    again = stepped(model)
    load_shards(tmp_path / "shards", {"model": (model, again)})
    for parameter in names.values():
        assert torch.equal(again.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_a_parameter_without_a_gradient_is_saved_without_moments(tmp_path: Path) -> None:
    """An expert that no token reached, the head of a critic's trunk."""
    model = gemma()  # nothing is frozen: the half that reads images is trainable and gets no gradient
    optimizer = stepped(model)
    without = [name for name, one in trained(model).items() if not optimizer.state.get(one)]
    assert any("vision" in name for name in without)
    save_shards(tmp_path / "shards", {"model": (model, optimizer)})
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
    load_shards(tmp_path / "shards", {"model": (model, fresh)})
    assert [name for name, one in trained(model).items() if not fresh.state.get(one)] == without
    assert {float(state["step"]) for state in fresh.state.values()} == {1.0}


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_of_a_model_with_text_settings_of_its_own(kind: Any) -> None:
    batch = pack(toy.demonstrations(2), origins=("demonstration",))
    critic = ValueCritic(gemma(), CriticConfig(kind=kind))
    assert critic.values(batch).shape == (batch.tokens,)


TOOL = ToolSpec(name="t", description="d", argument="a", argument_description="what", examples=("look",))


def renderer_of(tokenizer: Any, settings: ChatSettings) -> Any:
    return open_renderer(tokenizer, complete_settings(settings, tokenizer, TOOL), TOOL)


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """They were trained on, where they were in range."""
    words = [*vocabulary(SMALL), "<action>", "</action>", "Do the task."]
    save_tiny(tmp_path / "student", words=words)
    save_tiny(tmp_path / "other", words=[*words, "a", "aa", "aaa", "aaaa"])
    save_tiny(tmp_path / "teacher", words=words)
    out, trace = tmp_path / "run", tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    assert main(["train", *command(tmp_path, out, "opd", "--steps", "1", "--keep-rollouts", "1")]) == 0
    episodes = read_episodes(trace)
    own, other = (
        renderer_of(load_tokenizer(tmp_path / name), ChatSettings.load(tmp_path / name))
        for name in ("student", "other")
    )
    check_tokenizer(episodes, own, "t")
    with pytest.raises(TurngymError, match="another tokenizer"):
        check_tokenizer(episodes, other, "t")
    # text alone has no ids that could be another's
    text = [replace(turn, prompt_span=(0, 0), response_span=(0, 0), logprobs=None) for turn in episodes[0].turns]
    check_tokenizer([replace(episodes[0], segments=(), turns=tuple(text))], other, "t")


CONTROLS = ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")


def chat_tokenizer(controls: Sequence[str], letters: int = 1) -> Any:
    """The bytes as letters, backwards with -1, and then the control tokens in this order."""
    made = bytes_alone([AddedToken(text, special=True, normalized=False) for text in controls], letters)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- '<|assistant|>' if m.role == 'assistant' else '<|user|>' -}}"
        "{{- m.content + '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    return tokenizer


@pytest.mark.parametrize("said", ["<action>look</action>", ""])
@pytest.mark.parametrize(
    "other",
    [
        {"letters": -1},
        {"controls": ("<|user|>", "<|pad|>", "<|end|>", "<|assistant|>")},
        {"controls": ("<|user|>", "<|assistant|>", "<|pad|>", "<|end|>")},
        {"controls": ("<|end|>", "<|assistant|>", "<|user|>", "<|pad|>")},
    ],
    ids=["letters", "before an answer", "behind an answer", "end and user"],
)
def test_control_tokens_tell_tokenizers_apart(other: dict[str, Any], said: str) -> None:
    """The letters of a family stay, and its control tokens move; a model that says nothing has only them."""
    own = renderer_of(chat_tokenizer(CONTROLS), ChatSettings())
    turn = Turn(
        index=0,
        observation="You are in a kitchen.",
        admissible=None,
        response=said,
        action=None,
        verdict=Verdict.MALFORMED,
        reward=0.0,
    )
    task = Task(env_id="turngym/ALFWorld-v0", task_id="t", sha256="0" * 64, split="s", category="c")
    text = Episode(
        task=task,
        seed=0,
        sample=0,
        group=0,
        segments=(),
        turns=(turn, replace(turn, index=1)),
        status=Status.TRUNCATED_TURNS,
        success=False,
        episode_return=0.0,
    )
    episode = TextEpisodes(renderer=own, channel=make_channel("text", TOOL), tool=TOOL).write(text)
    check_tokenizer([episode], own, "t")
    with pytest.raises(TurngymError, match="another tokenizer"):
        check_tokenizer([episode], renderer_of(chat_tokenizer(**{"controls": CONTROLS, **other}), ChatSettings()), "t")


def test_experts_get_no_adapters_and_it_is_said() -> None:
    """Attention's layers learn where they are named."""
    with pytest.raises(ModelError, match="experts and their routers"):
        add_adapters(tiny("Mixtral", num_local_experts=4), LoraConfig(rank=2))
    model = tiny("Mixtral", num_local_experts=4)
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    assert {name.split(".")[4] for name in trained(model)} == {"q_proj", "v_proj"}


def test_a_resumed_run_may_take_less_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trainer(**more: Any) -> Any:
        model = toy.tiny(1)
        made = toy.trainer(tmp_path / "run", steps=2, model=model, source=toy.Sampled(model), evaluate=None)
        made.run = changed(made.run, checkpoint_every=1, **more)
        return made

    break_off(trainer(), 2)
    less = {"micro_tokens": 64, "head_chunk": 16}
    trainer(**less).train(resume=True)
    said = capsys.readouterr().err
    assert all(f"run.{name}" in said for name in less)
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2
