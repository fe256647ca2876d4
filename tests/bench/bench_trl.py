"""Measures one training step against TRL's: a step of GRPO with each side's own sampler, an update of SFT and of OPD.

GRPO: both sides play the generated household with the same model, the tool channel and one group of eight attempts at
a task. TRL samples by itself (`environment_factory`), ours with the local engine; each does one update. The model's
layers have random weights that change nothing at first, and its head says one token after another: every response is
the same function call of fifteen ids, so both sides play the same turns. Not the same: ours stops where the call is
closed, TRL's model ends each message by a sixteenth id, and speaks once more after the last turn.

SFT and OPD: an update on the same rows, which were played once, with the same supervised ids. OPD's peer is GKD on
these rows (`lmbda=0`, `beta=1`: the reverse KL over all ids; ours is on the teacher's top 50 and a bin of the rest).

Each measurement runs in a process of its own, of two steps; the second counts. CPU time is that process's, memory its
most. Float32, one thread.

Examples:
    python tests/bench/bench_trl.py --layers 4 --width 256 --episodes 8       # minutes
    python tests/bench/bench_trl.py --episodes 32                             # SmolLM2-135M's shape: an hour of a core
    python tests/bench/bench_trl.py --what grpo --checkpointing off --micro-tokens 8192
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from turngym.core.numbers import Count, Million
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.scripts.options import read_options

HOUSE = {"split": "generated", "config": "small", "on_invalid": "noop"}
ENV = "turngym/ALFWorld-v0"
CALL = '<tool_call>\n{"name": "alfworld_step", "arguments": {"action": "look"}}\n</tool_call>'
PIECES = 15
"""Ids of the call."""
GROUP = 8
LR = 1e-6
STEPS = 2


class TrlBench(Spec):
    """What is measured, and the model's shape: SmolLM2-135M's by default, with a head of its own."""

    what: Literal["all", "grpo", "sft", "opd"] = "all"
    """What is measured."""
    layers: Million = 30
    """Layers of the model."""
    width: Count = 576
    """Width of the model; heads have 64."""
    vocabulary: Count = 49152
    """Ids of the model, of which the tokenizer uses some 2,000."""
    episodes: Million = 8
    """Episodes of a step."""
    turns: Million = 10
    """Turns of an episode."""
    micro_tokens: Count = 2048
    """Ours: padded tokens of a pass."""
    checkpointing: Literal["on", "off"] = "off"
    """Ours: whether activations are recomputed. TRL's does, which is its default."""
    rows: Million = 2
    """TRL's: rows of a pass."""
    json: Path | None = None
    """File for the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One measurement: the second step of a process."""

    played: float
    """CPU seconds of playing."""
    updated: float
    """CPU seconds of everything else in the step."""
    peak: float
    """Most bytes that the process held."""
    ids: int
    """Sampled ids, or the supervised ones."""

    @property
    def cpu(self) -> float:
        return self.played + self.updated


# --- The model that calls the tool


def make_tokenizer() -> Any:
    """Byte-level BPE on what the household says, with the call's pieces as tokens, and Qwen3's chat template."""
    import gymnasium as gym
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    import turngym.envs

    assert turngym.envs
    env, texts = gym.make(ENV, disable_env_checker=True, **HOUSE), [qwen3_chat_template]
    for seed in range(20):
        texts.append(env.reset(seed=seed)[0])
        texts += [env.step(action)[0] for action in ("look", "inventory", "help")]
    env.close()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = qwen3_chat_template
    return fast


def pieces() -> list[str]:
    """The call in as many parts as it has ids, all different."""
    cuts = [round(len(CALL) * number / PIECES) for number in range(PIECES + 1)]
    return [CALL[begin:end] for begin, end in pairwise(cuts)]


def make_model(bench: TrlBench, folder: Path) -> None:
    """A Llama whose layers add nothing at first, and whose head follows each id by the next of the call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from turngym.agents import ChatSettings, SessionPool

    tokenizer = make_tokenizer()
    settings = ChatSettings(channel="tool", observation_role="tool", max_context=8000, max_new_tokens=PIECES + 9)
    session = SessionPool.of(ENV, tokenizer, settings, **HOUSE).open()
    assert session.request is not None
    begin = int(session.request.prompt_ids[-1])
    session.close()
    heads = max(1, bench.width // 64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=bench.vocabulary,
            hidden_size=bench.width,
            intermediate_size=bench.width * 8 // 3,
            num_hidden_layers=bench.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 3),
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    chain = [begin, *tokenizer.convert_tokens_to_ids(pieces()), tokenizer.eos_token_id]
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.normal_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for now, then in pairwise(chain):
            model.lm_head.weight[then] = 0.5 * embeddings[now]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings.save(folder)


# --- GRPO, each side with its own sampler


def ours_grpo(bench: TrlBench, folder: Path) -> Figures:
    """Two steps of `turngym train grpo`."""
    from turngym.trainers import train
    from turngym.trainers.metrics import read_metrics

    train(
        "grpo",
        student=folder / "model",
        out=folder / "run",
        env=ENV,
        env_kwargs={"config": HOUSE["config"], "on_invalid": HOUSE["on_invalid"]},
        split=HOUSE["split"],
        steps=STEPS,
        episodes=bench.episodes,
        max_turns=bench.turns,
        grpo={"n": GROUP, "filter_groups": False},
        optimizer={"lr": LR, "minibatches": 1, "ppo_epochs": 1},
        micro_tokens=bench.micro_tokens,
        gradient_checkpointing=bench.checkpointing == "on",
        device="cpu",
        threads=1,
        eval_every=0,
        tracker=None,
        progress=False,
    )
    last = [row for row in read_metrics(folder / "run") if row["kind"] == "train"][-1]
    return Figures(
        played=last["time/rollout_cpu_s"], updated=last["time/update_cpu_s"], peak=peak(), ids=round(last["tokens"])
    )


def trl_grpo(bench: TrlBench, folder: Path) -> Figures:
    """Two steps of `GRPOTrainer`, which samples and calls the environment's tool by itself."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from turngym.agents import ChatSettings, SessionPool
    from turngym.trainers.adapters.trl import environment_factory, tool_rows

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sessions = SessionPool.of(ENV, tokenizer, ChatSettings.load(folder / "model"), max_turns=bench.turns, **HOUSE)
    tasks = sessions.task_ids()[: bench.episodes // GROUP * STEPS]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=tokenizer,
        environment_factory=environment_factory(sessions),
        args=GRPOConfig(
            **common(bench, folder),
            num_generations=GROUP,
            beta=0.0,
            max_completion_length=8000 - 2000,
            max_tool_calling_iterations=bench.turns,
            temperature=1.0,
        ),
        train_dataset=Dataset.from_list(tool_rows(sessions, tasks)),
    )
    generate, spent, sampled = trainer._generate, list[float](), list[int]()

    def timed(prompts: list[Any]) -> Any:
        begin = time.process_time()
        found = generate(prompts)
        spent.append(time.process_time() - begin)
        sampled.append(sum(sum(mask) for mask in found[2]))
        return found

    trainer._generate = timed
    cpu = run_trl(trainer)
    return Figures(played=spent[-1], updated=cpu - spent[-1], peak=peak(), ids=sampled[-1])


# --- Updates on the same rows


def ours_update(bench: TrlBench, folder: Path, kind: str) -> Figures:
    """The trainer's own update of SFT or OPD, the teacher's pass included."""
    import torch
    from transformers import AutoModelForCausalLM

    from turngym.core.trace import read_episodes
    from turngym.trainers.algorithm import Algorithm, Scorers
    from turngym.trainers.algorithm_spec import BuildContext
    from turngym.trainers.algorithms import opd, sft
    from turngym.trainers.batch import pack
    from turngym.trainers.optimizer_step import Forward, make_optimizer, update
    from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
    from turngym.trainers.scorer import LocalScorer

    torch.set_num_threads(1)
    run = RunConfig(max_turns=bench.turns, micro_tokens=bench.micro_tokens)
    context = BuildContext(run=run, distill=DistillConfig(top_k=50))
    algorithm: Algorithm = (
        sft.build(sft.SftConfig(train_on="policy"), context) if kind == "sft" else opd.build(opd.OpdConfig(), context)
    )
    episodes = read_episodes(folder / "rows.jsonl")
    student = AutoModelForCausalLM.from_pretrained(folder / "model")
    scorers = Scorers(student=None)  # type: ignore[arg-type]
    if kind == "opd":
        teacher = LocalScorer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model"),
            max_tokens=run.pass_tokens,
            chunk=run.head_chunk,
        )
        scorers = Scorers(student=teacher, teacher=teacher)
    optimizer = make_optimizer(student, OptimizerConfig())
    forward = Forward(
        micro_tokens=run.pass_tokens, head_chunk=run.head_chunk, gradient_checkpointing=bench.checkpointing == "on"
    )
    for _ in range(STEPS):
        begin = time.process_time()
        batch = pack(episodes)
        update(
            student,
            optimizer,
            batch,
            targets=algorithm.target_fn(batch, episodes, scorers),
            weight_N=algorithm.weight(batch, step=1, total_steps=1),
            token_loss=algorithm.token_loss,
            forward=forward,
            lr=LR,
        )
        spent = time.process_time() - begin
    return Figures(played=0.0, updated=spent, peak=peak(), ids=batch.tokens)


def trl_update(bench: TrlBench, folder: Path, kind: str) -> Figures:
    """TRL's update on the same ids: `SFTTrainer`, or `GKDTrainer` with a teacher."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from turngym.core.trace import read_episodes

    rows = []
    for episode in read_episodes(folder / "rows.jsonl"):
        ids = episode.segments[0].tolist()
        labels = [-100] * len(ids)
        for turn in episode.turns:
            labels[slice(*turn.response_span)] = ids[slice(*turn.response_span)]
        rows.append({"input_ids": ids, "labels": labels})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def collate(items: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        most = max(len(item["input_ids"]) for item in items)
        filled = {"input_ids": tokenizer.pad_token_id, "labels": -100, "attention_mask": 0}
        columns = [{**item, "attention_mask": [1] * len(item["input_ids"])} for item in items]
        return {
            name: torch.tensor([one[name] + [fill] * (most - len(one[name])) for one in columns])
            for name, fill in filled.items()
        }

    args = common(bench, folder) | {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    given = {
        "model": AutoModelForCausalLM.from_pretrained(folder / "model"),
        "processing_class": tokenizer,
        "data_collator": collate,
        "train_dataset": Dataset.from_list(rows),
    }
    if kind == "sft":
        trainer = SFTTrainer(args=SFTConfig(**args, max_length=None), **given)
    else:
        teacher = AutoModelForCausalLM.from_pretrained(folder / "model")
        settings = GKDConfig(**args, max_length=None, lmbda=0.0, beta=1.0)
        trainer = GKDTrainer(args=settings, teacher_model=teacher, **given)
    cpu = run_trl(trainer)
    return Figures(
        played=0.0, updated=cpu, peak=peak(), ids=sum(label != -100 for row in rows for label in row["labels"])
    )


def make_rows(bench: TrlBench, folder: Path) -> None:
    """Plays the episodes whose rows both sides train on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from turngym.agents import ChatSettings, SessionPool
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.core.trace import TraceWriter
    from turngym.trainers.adapters.token_session import play

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sessions = SessionPool.of(ENV, tokenizer, ChatSettings.load(folder / "model"), max_turns=bench.turns, **HOUSE)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(folder / "model"), tokenizer=tokenizer)
    opened = [sessions.open(sessions.task_ids()[number // GROUP], sample=number) for number in range(bench.episodes)]
    with TraceWriter(folder / "rows.jsonl") as writer:
        for episode in play(opened, engine):
            writer.write(episode)


# --- What TRL's trainers share


def common(bench: TrlBench, folder: Path) -> dict[str, Any]:
    """Settings of all three: one optimizer step from all episodes, in passes of `rows`."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": STEPS,
        "per_device_train_batch_size": bench.rows,
        "gradient_accumulation_steps": bench.episodes // bench.rows,
        "learning_rate": LR,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def run_trl(trainer: Any) -> float:
    """Trains; CPU seconds of the last step."""
    import torch
    from transformers import TrainerCallback

    times = list[float]()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(-time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] += time.process_time()

    torch.set_num_threads(1)
    trainer.add_callback(Clock())
    trainer.train()
    assert len(times) == STEPS
    return times[-1]


def peak() -> float:
    """Most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


# --- The command

SIDES: dict[tuple[str, str], Callable[[TrlBench, Path], Figures]] = {
    ("grpo", "turngym"): ours_grpo,
    ("grpo", "TRL"): trl_grpo,
    ("sft", "turngym"): lambda bench, folder: ours_update(bench, folder, "sft"),
    ("sft", "TRL"): lambda bench, folder: trl_update(bench, folder, "sft"),
    ("opd", "turngym"): lambda bench, folder: ours_update(bench, folder, "opd"),
    ("opd", "TRL"): lambda bench, folder: trl_update(bench, folder, "opd"),
}


def measured(argv: Sequence[str], what: str, side: str, folder: Path) -> Figures:
    """The figures of one process."""
    words = [sys.executable, __file__, "--child", what, side, str(folder), *argv]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def lines(found: dict[tuple[str, str], Figures]) -> Iterator[list[str]]:
    """The table's lines: both sides, and TRL's figures over ours."""
    for (what, side), one in found.items():
        ratio = ""
        if side == "TRL":
            ours = found[what, "turngym"]
            ratio = f"{one.cpu / ours.cpu:.2f}x, {one.peak / ours.peak:.2f}x"
        yield [
            what,
            side,
            *(f"{value:.1f}" for value in (one.played, one.updated, one.peak / 1e9)),
            str(one.ids),
            ratio,
        ]


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    if argv[:1] == ["--child"]:
        what, side, folder = argv[1:4]
        bench = read_options(TrlBench, argv[4:], prog="bench_trl.py", about=__doc__)
        print(json.dumps(asdict(SIDES[what, side](bench, Path(folder)))), flush=True)
        return 0
    bench = read_options(TrlBench, argv, prog="bench_trl.py", about=__doc__)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        make_model(bench, Path(place) / "model")
        make_rows(bench, Path(place))
        for what, side in SIDES:
            if bench.what in ("all", what):
                found[what, side] = measured(argv, what, side, Path(place))
    header = ["", "", "playing, CPU s", "the rest, CPU s", "peak GB", "ids", "TRL / turngym: CPU, memory"]
    print_table((header, list(lines(found))), f"one step of {bench.episodes} episodes of {bench.turns} turns")
    if bench.json is not None:
        figures = [{"what": what, "side": side, **asdict(one)} for (what, side), one in found.items()]
        bench.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
