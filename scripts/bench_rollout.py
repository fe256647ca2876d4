"""Measures the local engine against transformers' `generate`, then whole rollouts by number of processes.

First the engine alone. Both sides play the same made-up episodes with the same random model and greedy decoding: every
turn adds an observation, every response has its own length. The peer is `generate` with its cache carried from turn to
turn (left padding, a stopping criterion for each row). Times are CPU seconds of this process, so that other work on the
machine does not decide, and the sides take turns.

Then whole rollouts of the embedded household, by wall clock: tokens per second by number of processes, and the share of
time spent in environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from turngym.agents.evaluation.open_play import OpenPlay, open_play
from turngym.agents.evaluation.play_episodes import ROLLOUT_DEFAULTS
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.processes import LocalWorkers
from turngym.agents.playing.rollout import Job, PlayJobs, rollout
from turngym.agents.resolve_play import resolve_play
from turngym.agents.worlds.built_in import HOUSEHOLD
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.numbers import Count, Million, Number, Seed, Threads
from turngym.core.setting import fields_of
from turngym.core.spec import Spec, Unread, needing
from turngym.core.tables import Table, print_table, table_of
from turngym.scripts.bench_episodes import Ids, made_up_turns, random_ids
from turngym.scripts.options import read_options
from turngym.trainers.model_shapes import ModelShape, random_model

# --- The models, and the turns and batches that each plays

SMALL_SHAPE = ModelShape(layers=2, width=128, heads=4, kv_heads=2, head_dim=32, mlp=384, vocab=600, tied=True)
MODELS: dict[str, tuple[ModelShape, tuple[int, ...], tuple[int, ...]]] = {
    # about that of the embedded quickstart
    "tiny": (SMALL_SHAPE, (3, 10, 30), (1, 8, 32, 64)),
    # one whose matrix products outweigh the overhead of each call
    "larger": (
        replace(SMALL_SHAPE, layers=8, width=512, heads=8, kv_heads=4, head_dim=64, mlp=1536),
        (3, 10, 30),
        (1, 8, 32),
    ),
    # a model of 0.5B parameters, with its vocabulary
    "half-billion": (
        replace(SMALL_SHAPE, layers=24, width=896, heads=14, head_dim=64, mlp=4864, vocab=151_936),
        (3,),
        (1, 8),
    ),
}
"""Name -> shape, turns of an episode, episodes side by side; one row of the table for each pair."""


# --- The peer


def left_padded(rows: Sequence[Ids]) -> tuple[Any, Any]:
    """Ids and mask int64 [B, W]."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, width - len(values) :] = torch.from_numpy(values)
        mask[row, width - len(values) :] = 1
    return ids, mask


def generate(model: Any, ids: Any, mask: Any, limits: Sequence[int], cache: Any = None) -> Any:
    """Greedy continuation by transformers, int64 [B, W + longest]; the first `limits[i]` new ids of row i count.

    Args:
        ids: whole histories, int64 [B, W], padded on the left and between turns.
        mask: 1 for ids, 0 for padding, int64 [B, W].
        limits: new ids that are wanted of each row.
        cache: keys and values of the first columns, which are not computed again; None: all columns are.
    """
    from transformers import StoppingCriteriaList

    lengths, width = torch.tensor(limits, device=ids.device), ids.shape[1]

    def long_enough(so_far: Any, scores: Any, **kwargs: Any) -> Any:
        return so_far.shape[1] - width >= lengths

    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(limits),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([long_enough]),  # type: ignore[list-item]
            disable_compile=True,
            **({} if cache is None else {"past_key_values": cache}),
        )


def new_ids(out: Any, width: int, limits: Sequence[int]) -> list[Ids]:
    """Cuts the new ids of each row out of a batch."""
    return [row[width : width + limit].cpu().numpy().astype(np.int32) for row, limit in zip(out, limits, strict=True)]


class KeptCache:
    """`generate` on one batch of conversations, only what is new in a turn fed: its cache goes from call to call.

    Rows grow by different amounts, so there are holes between a short response and the next observation, which the
    attention mask hides. They are closed after every turn, by one copy of the cache: faster than to leave them, and
    than a cache of fixed size, which every step reads to its end.
    """

    def __init__(self, model: Any, rows: int) -> None:
        from transformers import DynamicCache

        self._model, self._rows = model, rows
        self._cache: Any = DynamicCache()
        self._ids = torch.zeros(rows, 0, dtype=torch.int64, device=model.device)
        self._mask = torch.zeros_like(self._ids)

    def begin(self, system: Ids) -> None:
        """Feeds the ids that every row begins with once and repeats their keys and values."""
        from transformers import DynamicCache

        ids, once = torch.from_numpy(system.astype(np.int64))[None].to(self._model.device), DynamicCache()
        with torch.inference_mode():
            self._model(ids, past_key_values=once, use_cache=True, logits_to_keep=1)
            layers: list[Any] = once.layers
            for number, layer in enumerate(layers):
                keys, values = (tensor.repeat(self._rows, 1, 1, 1) for tensor in (layer.keys, layer.values))
                self._cache.update(keys, values, number)
        self._ids = ids.expand(self._rows, -1)
        self._mask = torch.ones_like(self._ids)

    def answer(self, new: Sequence[Ids], limits: Sequence[int]) -> list[Ids]:
        """Answers each row after its `new` ids."""
        ids, mask = (part.to(self._model.device) for part in left_padded(new))
        ids, mask = torch.cat((self._ids, ids), 1), torch.cat((self._mask, mask), 1)
        width = ids.shape[1]
        out = generate(self._model, ids, mask, limits, self._cache)
        drawn = torch.arange(out.shape[1] - width)[None] < torch.tensor(limits)[:, None]
        self._ids, self._mask = out, torch.cat((mask, drawn.long().to(mask.device)), 1)
        self._pack()
        return new_ids(out, width, limits)

    def _pack(self) -> None:
        """Closes the holes, so that the ids of every row end at the last column."""
        # a stable sort puts the holes first and leaves the ids in their order
        order = self._mask.sort(dim=1, stable=True).indices
        fewest = int((self._mask == 0).sum(1).min())
        order = order[:, fewest:]
        self._ids, self._mask = self._ids.gather(1, order), self._mask.gather(1, order)
        # the last column was drawn but never fed, so the cache ends one column earlier
        rows = torch.arange(len(order), device=order.device)[:, None]
        for layer in self._cache.layers:
            held = layer.keys.shape[2]
            index = order[:, :-1].clamp(max=held - 1)
            layer.keys = layer.keys[rows, :, index].transpose(1, 2)
            layer.values = layer.values[rows, :, index].transpose(1, 2)


# --- One cell: the engine and its peers play the same episodes

Result = TypeVar("Result")


@dataclass(slots=True)
class Side:
    """Tokens and time of one side."""

    tokens: int = 0
    seconds: float = 0.0
    """CPU seconds of this process."""

    @property
    def speed(self) -> float:
        """Tokens per CPU second; 0 if it did not play."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def timed(self, work: Callable[[], Result], tokens: int) -> Result:
        """Runs and times `work`, which draws `tokens` ids."""
        begin = time.process_time()
        result = work()
        self.seconds += time.process_time() - begin
        self.tokens += tokens
        return result


@dataclass(slots=True)
class Tally:
    """The sums of one cell of the table."""

    turns: int
    batch: int
    engine: Side = field(default_factory=Side)
    kept: Side = field(default_factory=Side)
    """`generate` with its cache kept."""
    responses: int = 0
    equal: int = 0
    gap: float = 0.0
    """Largest difference of the two best logits where a response first differs; if it is tiny, rounding decided."""

    @property
    def ratio(self) -> float:
        """How many times as many tokens per CPU second the engine draws."""
        return self.engine.speed / self.kept.speed


def duel(model: Any, vocab: int, config: RolloutBench, turns: int, batch: int) -> Tally:
    """Lets engine and peer play `batch` episodes of `turns` turns side by side, with greedy decoding."""
    from turngym.agents.local_engine.engine import LocalEngine

    tally, engine, peer = Tally(turns, batch), LocalEngine(model, max_batch=batch), KeptCache(model, batch)
    together, rng = np.ones(batch, bool), np.random.default_rng(config.seed)
    system = random_ids(rng, config.system, vocab)
    tally.kept.timed(partial(peer.begin, system), 0)
    asked = made_up_turns(rng, turns, [system] * batch, vocab, config.observation, config.response)
    for number, turn in enumerate(asked):
        tokens = sum(turn.limits)
        generations = tally.engine.timed(partial(engine.generate, turn.requests(number)), tokens)
        ours = [generation.ids for generation in generations]
        turn.answers.extend(ours)
        theirs = tally.kept.timed(partial(peer.answer, turn.new, turn.limits), tokens)
        # the histories of rows that differ once differ from then on
        for row in np.flatnonzero(together).tolist():
            tally.responses += 1
            together[row] = np.array_equal(ours[row], theirs[row])
            tally.equal += together[row]
            if not together[row]:
                tally.gap = max(tally.gap, _gap(model, turn.prompts[row], ours[row], theirs[row]))
    return tally


def _gap(model: Any, prompt: Ids, ours: Ids, theirs: Ids) -> float:
    first = int(np.flatnonzero(ours != theirs)[0])
    upto = np.concatenate((prompt, ours[:first]))
    with torch.inference_mode():
        best = model(torch.from_numpy(upto.astype(np.int64))[None]).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


# --- Whole rollouts


class PlayBench(Spec):
    """Rollouts of the embedded household with the shipped student. Each row plays the same episodes."""

    model: Path = CHECKPOINTS / "alfworld" / "student"
    """Folder of the model that plays."""
    episodes: Number = 32
    """Episodes of a row; 0 leaves this part out."""
    slots: Million = 32
    """Environments played side by side."""
    depth: Million = 24
    """Turns after which episodes are cut."""
    workers: tuple[Million, ...] = (1, 2)
    """Processes of the rows with workers."""


def played_row(
    name: str, seconds: float, episodes: Sequence[Episode], base: float | None, workers: int = 1
) -> tuple[dict[str, str], float]:
    """A line of the table, and its turns per second. The first line has no `base`, turns per second of the first."""
    turns = [turn for episode in episodes for turn in episode.turns]
    tokens, speed = sum(turn.response_length for turn in turns), len(turns) / seconds
    history = np.mean([episode.turns[-1].prompt_span[1] for episode in episodes if episode.turns] or [0])
    envs = sum(episode.timings.get("env", 0.0) for episode in episodes) / (seconds * workers)
    row = {
        "played by": name,
        "history ids": f"{history:.0f}",
        "tokens/s": f"{tokens / seconds:.0f}",
        "turns/s": f"{speed:.0f}",
        "environment": f"{100 * envs:.0f} %",
        "ratio": f"{speed / (base or speed):.2f}x",
    }
    return row, speed


def run_play(bench: PlayBench, threads: int) -> Table:
    """Measures this process, which is the reference, and each number of workers."""
    env = _opened(bench).make_env()
    ids = list(env.unwrapped.task_ids()[: bench.episodes])
    env.close()
    jobs = [Job(task_id=ids[n % len(ids)], sample=n // len(ids), group=n) for n in range(bench.episodes)]
    rows, expected, base = [], list[Episode](), None
    for count in (0, *bench.workers):
        with ExitStack() as stack:
            play: PlayJobs = rollout
            # an engine that has kept nothing
            ready = _opened(bench)
            make_env, player, system = ready.make_env, ready.opened.agent, ready.opened.system
            if count:
                workers = play = ParallelRollout(LocalWorkers(count, threads=threads))
                stack.callback(workers.close)
                # the processes start, and get the model, before the time is taken
                play(jobs[:count], make_env, player, slots=bench.slots, max_turns=1, system=system)
            start = time.perf_counter()
            played = play(jobs, make_env, player, slots=bench.slots, max_turns=bench.depth, system=system)
            seconds = time.perf_counter() - start
        name = f"{count} processes" if count else "this process"
        row, speed = played_row(name, seconds, played, base, max(count, 1))
        base, expected = base or speed, expected or played
        rows.append(row)
        equal = sum(_ids(ours) == _ids(theirs) for ours, theirs in zip(expected, played, strict=True))
        same = f"{equal} of {len(expected)} episodes have the ids of this process's"
        print(f"  {name}: {seconds:.2f} s; {same}", flush=True)
    return table_of(rows)


def _ids(episode: Episode) -> list[list[int]]:
    return [ids.tolist() for ids in episode.segments]


def _opened(bench: PlayBench) -> OpenPlay:
    """The household and the model that plays it, as `turngym rollout` opens them."""
    settings: dict[str, Any] = {"env": HOUSEHOLD.env_id, "split": HOUSEHOLD.split, "env_kwargs": dict(HOUSEHOLD.make)}
    settings |= {"max_turns": HOUSEHOLD.max_turns, "agent": f"model:{bench.model}", "temperature": 1.0}
    resolved = resolve_play([("turngym bench rollout", {**settings, "slots": bench.slots})], usual=ROLLOUT_DEFAULTS)
    return open_play(resolved.spec)


# --- The command


class RolloutBench(Spec):
    """Sizes of the episodes and of the models."""

    models: tuple[str, ...] = tuple(MODELS)
    """Random models of the first part; none leaves it out."""
    system: Count = 150
    """Ids before the first observation, the same in every episode: fed once and then copied, by the peer too."""
    observation: tuple[Count, Count] = (20, 30)
    """Shortest and longest observation, ids."""
    response: tuple[Count, Count] = (8, 20)
    """Shortest and longest response, ids."""
    threads: Threads = 1
    """Threads of torch."""
    seed: Seed = 0
    """Seed of the weights and the observations."""
    play: PlayBench = PlayBench()

    def unread(self) -> Unread:
        if not self.models:
            yield from needing("--models", "system", "observation", "response", "seed")
        if not self.play.episodes:
            others = (field.name for field in fields_of(PlayBench) if field.name != "episodes")
            yield from needing("--episodes of 1 or more", *(f"play.{name}" for name in others))


HEADER = ["turns", "batch", "engine tok/s", "cache kept tok/s", "ratio", "same responses"]


def cells(tally: Tally) -> list[str]:
    """One row of the table."""
    equal = f"{tally.equal}/{tally.responses}"
    if tally.equal < tally.responses:
        # the gap shows whether rounding explains the difference
        equal += f" (gap {tally.gap:.0e})"
    speeds = (f"{tally.engine.speed:.0f}", f"{tally.kept.speed:.0f}", f"{tally.ratio:.2f}x")
    return [str(tally.turns), str(tally.batch), *speeds, equal]


def measure(name: str, config: RolloutBench) -> list[Tally]:
    shape, turns, batches = MODELS[name]
    model = random_model(shape, dtype=torch.float32, seed=config.seed)
    tallies = []
    for size in product(turns, batches):
        tallies.append(duel(model, shape.vocab, config, *size))
        print("  " + "  ".join(cells(tallies[-1])), flush=True)
    return tallies


def main(argv: Sequence[str]) -> int:
    config = read_options(RolloutBench, argv, prog="turngym bench rollout", about=__doc__)
    torch.set_num_threads(config.threads)
    for name in config.models:
        if name not in MODELS:
            raise TurngymError(f"--models {name!r}: there are {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
        size, threads = MODELS[name][0], f"{config.threads} thread{'s' if config.threads > 1 else ''}"
        print(f"{name} ({size.layers} layers, width {size.width}), tokens per CPU second, {threads}:", flush=True)
        print_table((HEADER, [cells(tally) for tally in measure(name, config)]))
    if config.play.episodes:
        print(f"rollouts of {config.play.episodes} episodes, wall clock:", flush=True)
        print_table(run_play(config.play, config.threads))
    return 0
