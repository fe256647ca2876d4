"""Measures the local engine against transformers' `generate`, then whole rollouts by size and engine.

First the engine alone. All sides play the same made-up episodes with the same random model and greedy decoding: every
turn adds an observation, every response has its own length. The peers are `generate` with its cache carried from turn
to turn (left padding, a stopping criterion for each row) and, on a few turns, `generate` on the whole history. Times
are CPU seconds of this process, so that other work on the machine does not decide, and the sides take turns.

Then whole rollouts of the embedded household, by wall clock: tokens per second by number of environments, length of
history, engine and number of processes, and the share of time spent in environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import tyro
from numpy.typing import NDArray

from turngym.agents.playing.rollout import Job, PlayJobs, rollout
from turngym.agents.worlds.built_in import HOUSEHOLD
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.envs.core.episode import Episode
from turngym.envs.core.protocols import GenerateRequest, Sampling
from turngym.envs.core.tables import print_table

# --- Random models


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One random Qwen3-shaped model, and the cells of the table that it plays."""

    layers: int
    """Decoder layers; 0 leaves this model out."""
    width: int
    """Hidden size."""
    heads: int
    """Query heads."""
    key_heads: int
    """Key heads."""
    head: int
    """Width of a head."""
    inner: int
    """Width of the feed-forward layer."""
    vocab: int = 600
    """Size of the vocabulary."""
    turns: tuple[int, ...] = (3, 10, 30)
    """Turns of an episode, one table row each."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Episodes played side by side, one table row each."""
    history_turns: int = 2
    """Turns of each cell on which the peer without a kept cache is run too, evenly spread; 0 leaves it out."""


TINY = Shape(layers=2, width=128, heads=4, key_heads=2, head=32, inner=384)
LARGER = Shape(layers=8, width=512, heads=8, key_heads=4, head=64, inner=1536, batches=(1, 8, 32), history_turns=0)
HALF_BILLION = Shape(
    layers=24,
    width=896,
    heads=14,
    key_heads=2,
    head=64,
    inner=4864,
    vocab=151936,
    turns=(3,),
    batches=(1, 8),
    history_turns=0,
)


def build_model(shape: Shape, positions: int, seed: int) -> Any:
    """The random model, for at most `positions` ids, in evaluation mode."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


# --- The peers

Ids = NDArray[np.int32]


def left_padded(rows: Sequence[Ids]) -> tuple[Any, Any]:
    """Ids and mask int64 [B, W]."""
    import torch

    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, width - len(values) :] = torch.from_numpy(values)
        mask[row, width - len(values) :] = 1
    return ids, mask


def generate(model: Any, ids: Any, mask: Any, limits: Sequence[int], cache: Any = None) -> Any:
    """Greedy continuation by transformers, int64 [B, W + longest]; the first `limits[i]` new ids of row i count."""
    import torch
    from transformers import StoppingCriteriaList

    lengths, width = torch.tensor(limits), ids.shape[1]

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
    return [row[width : width + limit].numpy().astype(np.int32) for row, limit in zip(out, limits, strict=True)]


def whole_history(model: Any, prompts: Sequence[Ids], limits: Sequence[int]) -> list[Ids]:
    """Answers whole histories in one left-padded batch; every id is fed again."""
    ids, mask = left_padded(prompts)
    return new_ids(generate(model, ids, mask, limits), ids.shape[1], limits)


class KeptCache:
    """`generate` on one batch of conversations, only what is new in a turn fed: its cache goes from call to call.

    Rows grow by different amounts, so there are holes between a short response and the next observation, which the
    attention mask hides. They are closed after every turn, by one copy of the cache: faster than to leave them, and
    than a cache of fixed size, which every step reads to its end.
    """

    def __init__(self, model: Any, rows: int) -> None:
        import torch
        from transformers import DynamicCache

        self._model, self._rows = model, rows
        self._cache: Any = DynamicCache()
        self._ids = torch.zeros(rows, 0, dtype=torch.int64)
        self._mask = torch.zeros_like(self._ids)

    def begin(self, system: Ids) -> None:
        """Feeds the ids that every row begins with once and repeats their keys and values."""
        import torch
        from transformers import DynamicCache

        ids, once = torch.from_numpy(system.astype(np.int64))[None], DynamicCache()
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
        import torch

        ids, mask = left_padded(new)
        ids, mask = torch.cat((self._ids, ids), 1), torch.cat((self._mask, mask), 1)
        width = ids.shape[1]
        out = generate(self._model, ids, mask, limits, self._cache)
        drawn = torch.arange(out.shape[1] - width)[None] < torch.tensor(limits)[:, None]
        self._ids, self._mask = out, torch.cat((mask, drawn.long()), 1)
        self._pack()
        return new_ids(out, width, limits)

    def _pack(self) -> None:
        """Closes the holes, so that the ids of every row end at the last column."""
        import torch

        # a stable sort puts the holes first and leaves the ids in their order
        order = self._mask.sort(dim=1, stable=True).indices
        fewest = int((self._mask == 0).sum(1).min())
        order = order[:, fewest:]
        self._ids, self._mask = self._ids.gather(1, order), self._mask.gather(1, order)
        # the last column was drawn but never fed, so the cache ends one column earlier
        rows = torch.arange(len(order))[:, None]
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
    history: Side = field(default_factory=Side)
    responses: int = 0
    equal: int = 0
    gap: float = 0.0
    """Largest difference of the two best logits where a response first differs; if it is tiny, rounding decided."""

    def ratio(self, peer: Side) -> float:
        """How many times as many tokens per CPU second the engine draws."""
        return self.engine.speed / peer.speed


def positions(lengths: RolloutBench, turns: int) -> int:
    """Largest number of ids of an episode."""
    return lengths.system + turns * (lengths.observation[1] + lengths.response[1])


@dataclass(frozen=True, slots=True)
class Turn:
    """What every side is asked in one turn."""

    prompts: list[Ids]
    """Whole histories with the new observation, by the engine's answers."""
    new: list[Ids]
    """What is new since the last answer."""
    limits: list[int]
    """Ids of every response."""
    answers: list[Ids] = field(default_factory=list)
    """The engine's."""

    @property
    def tokens(self) -> int:
        """Number of ids that are drawn."""
        return sum(self.limits)

    def requests(self, number: int) -> list[GenerateRequest]:
        """The same as requests to an engine."""
        return [
            GenerateRequest(
                session=str(row),
                prompt_ids=prompt,
                sampling=Sampling(temperature=0.0, max_new_tokens=limit),
                stream=(row, number),
            )
            for row, (prompt, limit) in enumerate(zip(self.prompts, self.limits, strict=True))
        ]


def duel(model: Any, shape: Shape, lengths: RolloutBench, turns: int, batch: int) -> Tally:
    """Plays all turns with the engine and the peer that keeps its cache, and some with the peer that does not."""
    from turngym.agents.local_engine.engine import LocalEngine

    tally, engine, peer = Tally(turns, batch), LocalEngine(model, max_batch=batch), KeptCache(model, batch)
    sampled, together, everywhere = _spread(shape.history_turns, turns), np.ones(batch, bool), np.ones(batch, bool)
    rng = np.random.default_rng(lengths.seed)
    system = _random_ids(rng, lengths.system, shape.vocab)
    tally.kept.timed(partial(peer.begin, system), 0)
    for number, turn in enumerate(_turns(rng, lengths, shape.vocab, turns, [system] * batch)):
        drawn = [one.ids for one in tally.engine.timed(partial(engine.generate, turn.requests(number)), turn.tokens)]
        turn.answers.extend(drawn)
        theirs = tally.kept.timed(partial(peer.answer, turn.new, turn.limits), turn.tokens)
        together &= ~_compare(model, turn.prompts, drawn, theirs, together, tally)
        if number in sampled:
            again = tally.history.timed(partial(whole_history, model, turn.prompts, turn.limits), turn.tokens)
            _compare(model, turn.prompts, drawn, again, everywhere, tally)
    return tally


def _turns(
    rng: np.random.Generator, lengths: RolloutBench, vocab: int, turns: int, histories: list[Ids]
) -> Iterator[Turn]:
    """Yields the turns. The caller fills in `answers` before it asks for the next turn."""
    for _ in range(turns):
        limits = [int(rng.integers(*lengths.response, endpoint=True)) for _ in histories]
        new = [_random_ids(rng, int(rng.integers(*lengths.observation, endpoint=True)), vocab) for _ in histories]
        turn = Turn([np.concatenate(pair) for pair in zip(histories, new, strict=True)], new, limits)
        yield turn
        histories = [np.concatenate(pair) for pair in zip(turn.prompts, turn.answers, strict=True)]


def _spread(count: int, turns: int) -> set[int]:
    """Chooses `count` turns, evenly spread."""
    return {int((k + 0.5) * turns / min(count, turns)) for k in range(min(count, turns))}


def _random_ids(rng: np.random.Generator, count: int, vocab: int) -> Ids:
    return rng.integers(0, vocab, count).astype(np.int32)


def _compare(
    model: Any, prompts: Sequence[Ids], ours: Sequence[Ids], theirs: Sequence[Ids], among: Any, tally: Tally
) -> Any:
    """Returns which rows of `among` have other ids.

    The caller leaves these rows out from then on, because their histories differ.
    """
    other = np.zeros(len(prompts), bool)
    for row in np.flatnonzero(among).tolist():
        tally.responses += 1
        other[row] = not np.array_equal(ours[row], theirs[row])
        tally.equal += not other[row]
        if other[row]:
            tally.gap = max(tally.gap, _gap(model, prompts[row], ours[row], theirs[row]))
    return other


def _gap(model: Any, prompt: Ids, ours: Ids, theirs: Ids) -> float:
    import torch

    first = int(np.flatnonzero(ours != theirs)[0])
    upto = np.concatenate((prompt, ours[:first]))
    with torch.inference_mode():
        best = model(torch.from_numpy(upto.astype(np.int64))[None]).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


# --- Whole rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayBench:
    """Rollouts of the embedded household with the shipped student. Each row plays the same episodes."""

    model: Path = CHECKPOINTS / "alfworld" / "student"
    """Folder of the model that plays."""
    episodes: int = 32
    """Episodes of a row; 0 leaves this part out."""
    slots: tuple[int, ...] = (1, 8, 32)
    """Environments played side by side."""
    depths: tuple[int, ...] = (6, 24)
    """Turns after which episodes are cut: short and long histories."""
    workers: tuple[int, ...] = (1, 2)
    """Processes of the rows with workers."""
    recompute: bool = True
    """Also without keys and values kept across turns, each turn feeding its whole history."""
    policy_server: str = ""
    """Address of an SGLang server with the same model, for a row of its own."""
    repeats: int = 2
    """Each row is played so many times and its fastest time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedWay:
    """One way to play; the times are of its fastest repetition."""

    name: str
    slots: int
    depth: int
    workers: int
    seconds: float
    """Wall clock."""
    tokens: int
    """Sampled by the model."""
    turns: int
    history: float
    """Ids that the last turn of an episode had before it, mean over episodes."""
    env_seconds: float
    """Seconds inside environments, summed over workers."""

    @property
    def env_share(self) -> float:
        """Share of the wall clock of all workers that was spent in environments, in [0, 1]."""
        return self.env_seconds / (self.seconds * max(self.workers, 1))

    def cells(self, base: PlayedWay) -> list[str]:
        speed = self.tokens / self.seconds if self.tokens else None
        return [
            self.name,
            str(self.slots),
            str(self.depth),
            f"{self.history:.0f}" if self.tokens else "-",
            "-" if speed is None else f"{speed:.0f}",
            f"{self.turns / self.seconds:.0f}",
            f"{100 * self.env_share:.0f} %",
            f"{base.seconds / self.seconds * self.turns / base.turns:.2f}x",
        ]


PLAY_HEADER = [
    *("engine", "environments", "turns <=", "history ids", "tokens/s", "turns/s", "environment"),
    "turns/s ratio",
]


@dataclass(slots=True)
class Stage:
    """Plays the rows, all with the same jobs."""

    bench: PlayBench
    make_env: Any
    jobs: Sequence[Job]
    system: str | None
    rows: list[PlayedWay] = field(default_factory=list)

    def measure(
        self, name: str, agent: Any, slots: int, depth: int, *, play: PlayJobs = rollout, workers: int = 0
    ) -> list[Episode]:
        """Plays the jobs, adds a row and returns the episodes."""
        best, episodes = float("inf"), []
        for _ in range(self.bench.repeats):
            start = time.perf_counter()
            played = play(self.jobs, self.make_env, agent, slots=slots, max_turns=depth, system=self.system)
            seconds = time.perf_counter() - start
            if seconds < best:
                best, episodes = seconds, played
        turns = [turn for episode in episodes for turn in episode.turns]
        lasts = [episode.turns[-1].prompt_span[1] for episode in episodes if episode.turns]
        row = PlayedWay(
            name=name,
            slots=slots,
            depth=depth,
            workers=workers,
            seconds=best,
            tokens=sum(turn.response_length for turn in turns),
            turns=len(turns),
            history=sum(lasts) / max(len(lasts), 1),
            env_seconds=sum(episode.timings.get("env", 0.0) for episode in episodes),
        )
        self.rows.append(row)
        print(f"  {name}, {slots} environments, {depth} turns: {best:.2f} s", flush=True)
        return episodes


def run_play(bench: PlayBench, threads: int) -> list[PlayedWay]:
    """Measures every row; the first is the reference: all environments, all turns, keys and values kept."""
    from turngym.agents.executor.parallel import ParallelRollout
    from turngym.agents.executor.processes import LocalWorkers
    from turngym.agents.playing.scripted import ExpertAgent

    make_env, agents, system = _players(bench)
    env = make_env()
    ids = list(env.unwrapped.task_ids()[: bench.episodes])
    env.close()
    jobs = [Job(task_id=ids[n % len(ids)], sample=n // len(ids), group=n) for n in range(bench.episodes)]
    stage = Stage(bench, make_env, jobs, system)
    slots, depth = max(bench.slots), max(bench.depths)
    expected = stage.measure("kept keys and values", agents["kept"](), slots, depth)
    for fewer in sorted(set(bench.slots) - {slots}, reverse=True):
        stage.measure("kept keys and values", agents["kept"](), fewer, depth)
    for shorter in sorted(set(bench.depths) - {depth}, reverse=True):
        stage.measure("kept keys and values", agents["kept"](), slots, shorter)
    for name in ("recompute", "server"):
        if name in agents:
            stage.measure(name, agents[name](), slots, depth)
    stage.measure("expert (no model)", ExpertAgent(), slots, depth)
    for count in bench.workers:
        with ExitStack() as stack:
            play = ParallelRollout(LocalWorkers(count, threads=threads))
            stack.callback(play.close)
            agent = agents["kept"]()
            # the processes start, and get the model, before the time is taken
            play(jobs[:count], make_env, agent, slots=slots, max_turns=1, system=system)
            found = stage.measure(f"{count} processes", agent, slots, depth, play=play, workers=count)
            _check_same(found, expected)
    return stage.rows


def _players(bench: PlayBench) -> tuple[Any, dict[str, Callable[[], Any]], str | None]:
    """Returns a maker of environments, makers of agents by engine, and the system prompt."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.model_agent import ModelAgent
    from turngym.agents.models import load_policy
    from turngym.agents.playing.environments import env_maker, probe
    from turngym.agents.rendering.chat_settings import ChatSettings, renderer_of
    from turngym.envs.channels import make_channel
    from turngym.envs.core.protocols import Policy, Sampling

    settings = ChatSettings.load(bench.model)
    kwargs = {"split": HOUSEHOLD.split, "max_turns": HOUSEHOLD.max_turns, **HOUSEHOLD.make}
    tool = probe(HOUSEHOLD.env_id, kwargs).tool
    model, tokenizer = load_policy(str(bench.model), "auto", "float32")
    renderer = renderer_of(model, tokenizer, settings, tool)

    def agent(policy: Policy) -> ModelAgent:
        sampling = Sampling(max_new_tokens=settings.max_new_tokens)
        channel = make_channel(settings.channel, tool)
        return ModelAgent(policy, renderer, channel, sampling, max_context=settings.max_context)

    def local(cache: Any) -> Callable[[], ModelAgent]:
        options = {"tokenizer": tokenizer, "max_length": settings.max_context, "max_batch": max(bench.slots)}
        return lambda: agent(LocalEngine(model, cache=cache, **options))

    agents: dict[str, Callable[[], Any]] = {"kept": local("ragged")}
    if bench.recompute:
        agents["recompute"] = local("recompute")
    if bench.policy_server:
        from turngym.agents.sglang.client import PolicyServer
        from turngym.agents.sglang.open_servers import eval_policy

        servers = PolicyServer(policy_server=bench.policy_server)
        agents["server"] = lambda: agent(eval_policy(servers, bench.model, tokenizer, settings.max_context))
    return env_maker(HOUSEHOLD.env_id, **kwargs, channel=settings.channel), agents, settings.system


def _check_same(found: Sequence[Episode], expected: Sequence[Episode]) -> None:
    same = sum(
        [ids.tolist() for ids in a.segments] == [ids.tolist() for ids in b.segments]
        for a, b in zip(found, expected, strict=True)
    )
    print(f"  {same} of {len(expected)} episodes have the ids of this process's", flush=True)


# --- The command


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Sizes of the episodes and of the models."""

    tiny: Shape = TINY
    """The model of the embedded quickstart, about."""
    larger: Shape = LARGER
    """One whose matrix products outweigh the overhead of each call."""
    half_billion: Shape = HALF_BILLION
    """The shape of a model of 0.5B parameters, with its vocabulary."""
    system: int = 150
    """Ids before the first observation, the same in every episode: fed once and then copied, by the peer too."""
    observation: tuple[int, int] = (20, 30)
    """Shortest and longest observation, ids."""
    response: tuple[int, int] = (8, 20)
    """Shortest and longest response, ids."""
    threads: int = 1
    """Threads of torch."""
    seed: int = 0
    """Seed of the weights and the observations."""
    play: Annotated[PlayBench, tyro.conf.arg(name="play")] = field(default_factory=PlayBench)


HEADER = [
    *("turns", "batch", "engine tok/s", "cache kept tok/s", "ratio"),
    *("whole history tok/s", "ratio", "same responses"),
]


def cells(tally: Tally) -> list[str]:
    """One row of the table."""
    history = (
        (f"{tally.history.speed:.0f}", f"{tally.ratio(tally.history):.1f}x") if tally.history.tokens else ("-", "-")
    )
    equal = f"{tally.equal}/{tally.responses}"
    if tally.equal < tally.responses:
        # the gap shows whether rounding explains the difference
        equal += f" (gap {tally.gap:.0e})"
    return [
        str(tally.turns),
        str(tally.batch),
        f"{tally.engine.speed:.0f}",
        f"{tally.kept.speed:.0f}",
        f"{tally.ratio(tally.kept):.2f}x",
        *history,
        equal,
    ]


def measure(shape: Shape, config: RolloutBench) -> list[Tally]:
    """Measures all cells of one model."""
    model = build_model(shape, positions(config, max(shape.turns)), config.seed)
    tallies = []
    for turns in shape.turns:
        for batch in shape.batches:
            tallies.append(duel(model, shape, config, turns, batch))
            print("  " + "  ".join(cells(tallies[-1])), flush=True)
    return tallies


def main(argv: Sequence[str]) -> int:
    """Runs `turngym bench rollout`."""
    config = tyro.cli(RolloutBench, args=list(argv), prog="turngym bench rollout", description=__doc__)
    import torch

    torch.set_num_threads(config.threads)
    shapes = {"tiny": config.tiny, "larger": config.larger, "half a billion": config.half_billion}
    for name, shape in shapes.items():
        if shape.layers:
            threads = f"{config.threads} thread{'s' if config.threads > 1 else ''}"
            print(f"{name} ({shape.layers} layers, width {shape.width}), tokens per CPU second, {threads}:", flush=True)
            print_table((HEADER, [cells(tally) for tally in measure(shape, config)]))
    if config.play.episodes:
        print(f"rollouts of {config.play.episodes} episodes, wall clock:", flush=True)
        rows = run_play(config.play, config.threads)
        print_table((PLAY_HEADER, [row.cells(rows[0]) for row in rows]))
    return 0
