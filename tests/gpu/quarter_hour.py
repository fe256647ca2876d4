"""A quarter of an hour of a GPU: what to measure there, in order of worth, in one command.

    python tests/gpu/wheels.py wheels                     # here: what the other machine lacks, under 60 MB
    pip install --no-index --find-links wheels turngym    # there
    python tests/gpu/quarter_hour.py --out gpu.json

It takes at most `--minutes`, prints what it does every second, and writes its JSON after every row, so that a cut
loses nothing that was measured. A stage that fails is noted with its error, and the next one begins. `--tiny` rehearses
all of it on a CPU, as `tests/gpu/test_quarter_hour.py` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.models import set_torch_variables

set_torch_variables()  # before torch is imported: it reads some of them then

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from turngym.agents.local_engine.engine import LocalEngine  # noqa: E402
from turngym.agents.worlds import load_world  # noqa: E402
from turngym.core.protocols import GenerateRequest, Sampling  # noqa: E402
from turngym.core.spec import changed  # noqa: E402
from turngym.scripts.bench_episodes import MadeUpTurn, made_up_turns, random_ids  # noqa: E402
from turngym.scripts.bench_gpu import GpuBench, clock, matmul_rate, play, training_step  # noqa: E402
from turngym.scripts.bench_rollout import KeptCache  # noqa: E402
from turngym.trainers.metrics import read_metrics  # noqa: E402
from turngym.trainers.model_shapes import ModelShape, random_model, shape_named  # noqa: E402
from turngym.trainers.training_costs import StepWorkload, chip_named, estimate  # noqa: E402

Row = dict[str, Any]

SMOLLM2 = ModelShape(layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49_152, tied=True)
QWEN_1_5B = ModelShape(layers=28, width=1536, heads=12, kv_heads=2, head_dim=128, mlp=8960, vocab=151_936, tied=True)
QWEN_7B = ModelShape(layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, mlp=18_944, vocab=152_064, tied=False)
TINY = shape_named("tiny")

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ATTENTION = {"flash first": [FLASH, *OTHERS, CUDNN], "cudnn first": [CUDNN, FLASH, *OTHERS]}
"""Orders in which torch chooses its attention. cuDNN's makes a plan for each new length, and every token is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: on a GPU, or in the rehearsal on a CPU."""

    device: str = "cuda"
    models: dict[str, ModelShape] = field(default_factory=lambda: {"SmolLM2": SMOLLM2, "1.5B": QWEN_1_5B})
    teacher: ModelShape = QWEN_7B
    rows: tuple[int, ...] = (24, 64)
    lengths: tuple[int, ...] = (500, 1000, 2000, 4000)
    tokens: int = 32
    """Decoded for one timing."""
    episodes: int = 24
    turns: int = 10
    observation: int = 140
    response: int = 60
    steps: int = 2
    """Of each algorithm with the shipped pair."""
    chip: str = "H100"

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"


REHEARSAL = Sizes(
    device="cpu",
    models={"tiny": TINY},
    teacher=TINY,
    rows=(2,),
    lengths=(16, 32),
    tokens=6,
    episodes=2,
    turns=2,
    observation=6,
    response=4,
    steps=1,
    chip="CPU",
)


# --- Formulas, each counted by hand in the test


def decode_bytes(shape: ModelShape, rows: int, length: int, dtype: str) -> int:
    """Bytes that one decoded token of all rows has to read: the layers and the head once, each row's keys and values.

    A tied head is the embedding, which is read once; of an embedding of its own only `rows` lines are read.
    """
    size = 2 if dtype == "bfloat16" else 4
    head = shape.vocab * shape.width
    return size * (shape.layers * shape.layer_parameters + head) + rows * length * shape.kv_bytes(dtype)


def update_flops(shape: ModelShape, lengths: Sequence[int], predicted: int) -> float:
    """Operations of forward and backward over rows of these lengths; the head sees `predicted` tokens.

    A token attends to (L + 1) / 2 others on average, itself included; a backward pass costs twice the forward pass.
    """
    total = sum(lengths)
    context = sum(length * (length + 1) / 2 for length in lengths) / total
    return 3 * shape.forward_flops(total, context, predicted)


# --- What is said and written meanwhile


class Record:
    """The figures so far, on disk after every row; says every second what is under way.

    Args:
        path: the JSON file.
        seconds: the time for all stages.
    """

    def __init__(self, path: Path, seconds: float, about: Row) -> None:
        self.path, self.end, self.start = path, time.monotonic() + seconds, time.monotonic()
        self.found: Row = {**about, "stages": {}}
        self.doing = "starting"
        self._over = threading.Event()
        self._voice = threading.Thread(target=self._say, daemon=True)
        self._voice.start()
        self.write()

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.end - time.monotonic()

    def add(self, stage: str, row: Row) -> None:
        self.found["stages"].setdefault(stage, []).append(row)
        self.write()
        print(f"  {stage}: {json.dumps(row)}", flush=True)

    def write(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self.start, 1)
        whole = self.path.with_name(self.path.name + ".part")
        whole.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        os.replace(whole, self.path)

    def close(self) -> None:
        self._over.set()
        self._voice.join()
        self.write()

    def _say(self) -> None:
        while not self._over.wait(1.0):
            print(f"{time.monotonic() - self.start:6.0f} s  {self.doing}", flush=True)


@contextmanager
def model_of(shape: ModelShape, sizes: Sizes, dtype: str | None = None) -> Iterator[Any]:
    """A model of random weights on the device, whose memory is given back."""
    model: Any = random_model(shape, dtype=getattr(torch, dtype or sizes.dtype), device=sizes.device)
    try:
        yield model
    finally:
        model.to("meta")
        if sizes.device != "cpu":
            torch.cuda.empty_cache()


def seconds_of(work: Callable[[], Any], sizes: Sizes) -> float:
    start = clock(sizes.device != "cpu")
    work()
    return clock(sizes.device != "cpu") - start


# --- 1. One decoded token


def decode(sizes: Sizes, record: Record) -> None:
    """Milliseconds of one token of all rows, what of the memory's bandwidth that is, and how many launches it takes.

    Plainly and in CUDA graphs.
    """
    bandwidth = chip_named(sizes.chip).bandwidth
    for name, shape in sizes.models.items():
        with model_of(shape, sizes) as model:
            for rows in sizes.rows:
                for length in sizes.lengths:
                    for order, backends in ATTENTION.items():
                        record.doing = f"decode {name}, {rows} rows of {length} ids, {order}"
                        with sdpa_kernel(backends, set_priority=True):
                            for took, row in one_token(model, shape.vocab, rows, length, sizes):
                                read = decode_bytes(shape, rows, length, sizes.dtype) / took / bandwidth
                                row |= {"model": name, "rows": rows, "length": length, "attention": order}
                                record.add("decode", row | {"ms": 1e3 * took, "bandwidth": read})
                        if record.left < 0:
                            return


def one_token(model: Any, vocab: int, rows: int, length: int, sizes: Sizes) -> Iterator[tuple[float, Row]]:
    """Seconds of one token of all rows, plainly and in graphs: the difference of a long and a short response.

    With each: its launches, the graphs made, the memory they took, and why the engine made none.
    """
    engine = LocalEngine(model, max_batch=rows, max_length=length + sizes.tokens + 8)
    prompt = random_ids(np.random.default_rng(0), length, vocab)

    def answer(tokens: int) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=tokens)
        requests = [
            GenerateRequest(session=str(row), prompt_ids=prompt, sampling=sampling, stream=(row, tokens))
            for row in range(rows)
        ]
        engine.generate(requests)

    short, long = max(sizes.tokens // 4, 1), sizes.tokens
    for off in ("measured without them first", None):
        engine.graphs.refused = off
        free = free_bytes(sizes)
        answer(long)  # keys and values of the prompt are in the cache, kernels are loaded, steps captured
        row: Row = {"graphs": len(engine.graphs), "graphs_mb": (free - free_bytes(sizes)) / 1e6}
        took = (seconds_of(partial(answer, long), sizes) - seconds_of(partial(answer, short), sizes)) / (long - short)
        launches = operations_started(partial(answer, long)) - operations_started(partial(answer, long - 1))
        yield max(took, 1e-9), row | {"launches": launches, "refused": engine.graphs.refused}


def free_bytes(sizes: Sizes) -> int:
    """Memory of the device that nobody has taken; 0 for a CPU."""
    if sizes.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def operations_started(work: Callable[[], Any]) -> int:
    """Kernels and graphs that `work` launches on a GPU, or torch's operations on a CPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if cuda := torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        work()
    counted = [row for row in seen.key_averages() if not cuda or "Launch" in row.key]
    return sum(row.count for row in counted)


# --- 2. A rollout against transformers


def rollout(sizes: Sizes, record: Record) -> None:
    """The same episodes, greedily: the engine, `generate` with its cache kept, and continuous batching."""
    for name, shape in sizes.models.items():
        with model_of(shape, sizes) as model:
            play_against(name, model, shape.vocab, sizes, record)


def play_against(name: str, model: Any, vocab: int, sizes: Sizes, record: Record) -> None:
    rng = np.random.default_rng(1)
    system = random_ids(rng, 300 if sizes.device != "cpu" else 8, vocab)
    engine, peer = LocalEngine(model, max_batch=sizes.episodes), KeptCache(model, sizes.episodes)
    players: dict[str, Callable[[MadeUpTurn, int], list[Any]]] = {
        "engine": lambda turn, number: [one.ids for one in engine.generate(turn.requests(number))],
        "generate": lambda turn, number: peer.answer(turn.new, turn.limits),
        "generate_batch": lambda turn, number: continuous(model, turn.prompts, sizes.response),
    }
    spent, same, played = dict.fromkeys(players, 0.0), dict.fromkeys(players, 0), 0
    spent["generate"] = seconds_of(partial(peer.begin, system), sizes)
    observation, response = (sizes.observation, sizes.observation), (sizes.response, sizes.response)
    for turn in made_up_turns(rng, sizes.turns, [system] * sizes.episodes, vocab, observation, response):
        record.doing = f"rollout {name}, turn {played + 1} of {sizes.turns}"
        for who, player in list(players.items()):
            start, drawn = clock(sizes.device != "cpu"), []
            try:
                drawn = player(turn, played)
            except Exception as error:  # a peer that cannot play here does not end the stage
                if who == "engine":
                    raise
                del players[who]
                record.add("rollout", {"model": name, "who": who, "error": f"{type(error).__name__}: {error}"[:200]})
            spent[who] += clock(sizes.device != "cpu") - start
            turn.answers.extend(drawn if who == "engine" else [])
            same[who] += sum(np.array_equal(one, other) for one, other in zip(turn.answers, drawn, strict=False))
        played += 1
        if record.left < 0:
            break
    responses = sizes.episodes * played
    for who in players:
        row = {"model": name, "who": who, "ids/s": responses * sizes.response / spent[who], "responses": responses}
        record.add("rollout", row | {"same": same[who], "times the engine's": spent[who] / spent["engine"]})


def continuous(model: Any, prompts: Sequence[Any], tokens: int) -> list[Any]:
    """Whole histories through transformers' continuous batching; its answers as ids."""
    from transformers import GenerationConfig

    how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    # by itself it takes nearly all of the memory for its cache: a GPU's is its own, a CPU's is others', too
    more: dict[str, Any] = {}
    if model.device.type == "cpu":
        from transformers import ContinuousBatchingConfig

        more["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    found = model.generate_batch(inputs=[prompt.tolist() for prompt in prompts], generation_config=how, **more)
    if len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} answers to {len(prompts)} prompts")
    ordered = sorted(found.items(), key=lambda item: int("".join(filter(str.isdigit, item[0])) or 0))
    return [np.array(one.generated_tokens, np.int32) for _, one in ordered]


# --- 3. and 4. An update, and a teacher's top-K


def update(sizes: Sizes, record: Record) -> None:
    """One update on the episodes of a rollout: operations a second, and memory beside the plan's."""
    peak = matmul_rate(sizes.device)
    for name, shape in sizes.models.items():
        bench = changed(bench_of(sizes), checkpointing=name != "SmolLM2")
        with model_of(shape, sizes, "float32") as student:
            record.doing = f"update {name}: playing its episodes"
            engine = LocalEngine(student, max_batch=sizes.episodes, dtype=sizes.dtype)
            episodes = play(engine, bench)
            del engine
            score, step = training_step(bench, student, student)
            record.doing = f"update {name}: targets"
            targets = score(episodes)
            step(episodes[:1], score(episodes[:1]))  # kernels are loaded, the optimizer has its state
            record.doing = f"update {name}"
            if sizes.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            took = seconds_of(partial(step, episodes, targets), sizes)
            lengths = [len(episode.segments[0]) for episode in episodes]
            flops = update_flops(shape, lengths, sizes.episodes * sizes.turns * sizes.response)
            row: Row = {"model": name, "tokens": sum(lengths), "seconds": took, "flops/s": flops / took}
            row |= {"of matmul": flops / took / peak}
            if sizes.device != "cpu":
                row |= {"GB": torch.cuda.max_memory_allocated() / 1e9}
                row |= {"planned GB": planned(sizes, shape, checkpointing=bench.checkpointing) / 1e9}
            record.add("update", row)


def teacher(sizes: Sizes, record: Record) -> None:
    """The 50 likeliest ids of a large teacher at every sampled token."""
    bench = bench_of(sizes)
    with model_of(TINY, sizes, "float32") as student, model_of(sizes.teacher, sizes) as large:
        engine = LocalEngine(student, max_batch=sizes.episodes)
        episodes = play(engine, bench)
        score, _ = training_step(bench, student, large)
        score(episodes[:1])
        record.doing = "teacher's top-K"
        took = seconds_of(partial(score, episodes), sizes)
        lengths = [len(episode.segments[0]) for episode in episodes]
        flops = update_flops(sizes.teacher, lengths, sizes.episodes * sizes.turns * sizes.response) / 3
        record.add("teacher", {"tokens": sum(lengths), "seconds": took, "flops/s": flops / took})


def bench_of(sizes: Sizes) -> GpuBench:
    """The sizes as `turngym bench gpu` takes them. Ids are those that every shape knows."""
    same = {"episodes": sizes.episodes, "turns": sizes.turns, "observation": sizes.observation}
    return GpuBench(
        device=sizes.device, student="tiny", teacher="tiny", response=sizes.response, system=8, k=50, **same
    )


def planned(sizes: Sizes, shape: ModelShape, *, checkpointing: bool) -> float:
    """Bytes that `turngym plan` says for the update, when nothing that plays is there."""
    work = StepWorkload(
        episodes=sizes.episodes,
        turns=sizes.turns,
        observation=sizes.observation,
        response=sizes.response,
        checkpointing=checkpointing,
        precision="float32" if sizes.device == "cpu" else "autocast",
    )
    found = estimate(shape, None, chip_named(sizes.chip), 1, work)
    return found.states + found.update


# --- 5. and 6. Whole steps of training


def steps(sizes: Sizes, record: Record) -> None:
    """Steps of the shipped pair on the device and on the CPU, with what they say of the same episodes."""
    from turngym.trainers import train

    world = load_world("alfworld")
    for algorithm in ("opd", "turnopd", "grpo"):
        told: dict[str, list[Row]] = {}
        for device in dict.fromkeys((sizes.device, "cpu")):
            record.doing = f"{algorithm}, {sizes.steps} steps on {device}"
            with tempfile.TemporaryDirectory() as out:
                models: Row = {"student": world.checkpoint("student")}
                if algorithm != "grpo":
                    models["teacher"] = world.checkpoint("teacher")
                train(
                    algorithm,
                    **models,
                    **world.settings(),
                    out=f"{out}/run",
                    steps=sizes.steps,
                    episodes=16,
                    device=device,
                    seed=0,
                )
                told[device] = [row for row in read_metrics(Path(out) / "run") if row["kind"] == "train"]
        first = {device: rows[0] for device, rows in told.items()}
        names = [name for name in ("loss", "grad_norm", "turns_mean", "gap_max") if name in first["cpu"]]
        row: Row = {"algorithm": algorithm, "seconds": told[sizes.device][-1]["time/step_s"]}
        row |= {f"{name} on {device}": rows[name] for device, rows in first.items() for name in names}
        record.add("steps", row)


def shop(sizes: Sizes, record: Record, model: Path) -> None:
    """SmolLM2 in the shop with the time that is left: GRPO, three seeds, as many steps as fit."""
    from turngym.trainers import train

    world = load_world("webshop")
    for seed in range(3):
        with tempfile.TemporaryDirectory() as out:
            done = 0
            while record.left > 30 * (3 - seed) and done < 12:
                record.doing = f"shop, seed {seed}, step {done + 1}"
                how: Row = {"resume": True} if done else {}
                took = seconds_of(
                    partial(
                        train,
                        "grpo",
                        student=model,
                        **world.settings(),
                        out=f"{out}/run",
                        steps=done + 1,
                        episodes=16,
                        device=sizes.device,
                        seed=seed,
                        **how,
                    ),
                    sizes,
                )
                done += 1
                rows = [row for row in read_metrics(Path(out) / "run") if row["kind"] == "train"]
                record.add("shop", {"seed": seed, "step": done, "seconds": took, "loss": rows[-1]["loss"]})


STAGES: dict[str, Callable[[Sizes, Record], None]] = {
    "decode": decode,
    "rollout": rollout,
    "update": update,
    "teacher": teacher,
    "steps": steps,
}
"""In order of worth."""


def run(sizes: Sizes, record: Record, names: Sequence[str], model: Path | None) -> bool:
    """Runs the stages, and the shop with `model`; returns whether all of them ran to their end."""
    stages = {name: STAGES[name] for name in names}
    if model is not None:
        stages["shop"] = partial(shop, model=model)
    whole = True
    for name, stage in stages.items():
        if record.left < 0:
            record.add("left out", {"stage": name, "why": "the time is over"})
            whole = False
            continue
        try:
            stage(sizes, record)
        except Exception as error:  # what one stage cannot do, the next one may
            record.add("failed", {"stage": name, "error": f"{type(error).__name__}: {error}"[:500]})
            whole = False
    return whole


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--model", type=Path, help="folder of SmolLM2, for the stage of the shop; without it, none")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU with tiny shapes")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes is {options.minutes}; valid: above 0")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sizes = REHEARSAL if options.tiny else Sizes()
    if sizes.device != "cpu" and not torch.cuda.is_available():
        print("there is no GPU here; --tiny rehearses on the CPU", file=sys.stderr)
        return 2
    about: Row = {"torch": torch.__version__, "python": platform.python_version(), "device": "cpu"}
    if sizes.device != "cpu":
        about["device"] = torch.cuda.get_device_name()
        sizes = replace(sizes, chip="H200" if "H200" in about["device"] else "H100")
    about["sizes"] = {key: value for key, value in asdict(sizes).items() if key not in ("models", "teacher")}
    record = Record(options.out, 60 * options.minutes, about)
    try:
        return 0 if run(sizes, record, options.stages, options.model) else 1
    finally:
        record.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
