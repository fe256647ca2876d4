"""Local engine against `generate` on the whole history each turn, then whole rollouts by size, engine and processes.

First the engine alone. Both play the same made-up episodes with the same random model under greedy decoding: every turn
adds an observation, every response has its own length. The peer is transformers' `generate` with its own cache, left
padding and a per-row stopping criterion, called on the histories that the engine produced, so each response is
comparable. It is run on a sample of evenly spread turns (peer-turns); its tokens per second are those of the sampled
turns. Seconds are CPU seconds of this process, so that other work on the machine does not decide.

Then whole rollouts of the embedded household, by wall clock: tokens per second by number of environments, length of
history, engine and number of processes, and the environments' share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from turngym.scripts.bench.rollout.play import PlayBench
from turngym.scripts.bench.rollout.play import report as report_play
from turngym.scripts.bench.rollout.play import run as run_play

if TYPE_CHECKING:
    from turngym.envs.protocols import GenerateRequest

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One random Qwen3-shaped model."""

    layers: int
    """Decoder layers; 0 leaves this model out."""
    width: int
    """Hidden size; heads are 32 wide up to width 128, else 64, two query heads per key head."""
    peer_turns: int
    """Turns on which `generate` is run, evenly spread; at most the number of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Sizes of the episodes and of the two models."""

    tiny: Shape = Shape(layers=2, width=128, peer_turns=10)
    """The model of the embedded quickstart."""
    larger: Shape = Shape(layers=8, width=512, peer_turns=2)
    """One whose matrix products outweigh the overhead of each call."""
    turns: int = 30
    """Turns of every episode."""
    batch: int = 32
    """Episodes played side by side."""
    vocab: int = 600
    """Size of the vocabulary."""
    system: int = 150
    """Ids before the first observation."""
    observation: tuple[int, int] = (20, 30)
    """Shortest and longest observation, ids."""
    response: tuple[int, int] = (8, 20)
    """Shortest and longest response, ids."""
    threads: int = 1
    """Threads of torch."""
    seed: int = 0
    """Of the weights and the observations."""
    play: Annotated[PlayBench, tyro.conf.arg(name="play")] = field(default_factory=PlayBench)


@dataclass(slots=True)
class Tally:
    """What one model's run added up to."""

    engine_tokens: int = 0
    engine_seconds: float = 0.0
    peer_tokens: int = 0
    peer_seconds: float = 0.0
    responses: int = 0
    equal: int = 0
    gap: float = 0.0
    """Largest difference of the two best logits where a response first differs: rounding decides when it is tiny."""

    def ratio(self) -> float:
        return (self.engine_tokens / self.engine_seconds) / (self.peer_tokens / self.peer_seconds)


def build_model(shape: Shape, config: RolloutBench) -> Any:
    """The random model, in evaluation mode."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(config.seed)
    head = 32 if shape.width <= 128 else 64
    heads = max(shape.width // head, 2)
    positions = config.system + config.turns * (config.observation[1] + config.response[1])
    model_config = Qwen3Config(
        vocab_size=config.vocab,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(model_config).eval()


def peer(model: Any, requests: Sequence[GenerateRequest]) -> list[Ids]:
    """Responses of transformers' `generate` to the whole histories, left-padded into one batch."""
    import torch
    from transformers import StoppingCriteriaList

    width = max(len(request.prompt_ids) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    lengths = torch.tensor([request.sampling.max_new_tokens for request in requests])

    def enough(so_far: Any, scores: Any, **kwargs: Any) -> Any:
        return so_far.shape[1] - width >= lengths

    with torch.inference_mode():
        longest = int(lengths.max())
        criteria = StoppingCriteriaList([enough])  # type: ignore[list-item]
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=criteria,
        )
    return [row[width : width + int(length)].numpy().astype(np.int32) for row, length in zip(out, lengths, strict=True)]


def play(shape: Shape, config: RolloutBench) -> Tally:
    """All turns with the engine, the peer on some of them."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.envs.protocols import GenerateRequest, Sampling

    model, rng, tally = build_model(shape, config), np.random.default_rng(config.seed), Tally()
    engine = LocalEngine(model, max_batch=config.batch)
    histories = [_random_ids(rng, config.system, config.vocab) for _ in range(config.batch)]
    count = min(shape.peer_turns, config.turns)
    sampled = {int((k + 0.5) * config.turns / count) for k in range(count)}
    for turn in range(config.turns):
        requests = []
        for row, history in enumerate(histories):
            observation = _random_ids(rng, int(rng.integers(*config.observation, endpoint=True)), config.vocab)
            sampling = Sampling(temperature=0.0, max_new_tokens=int(rng.integers(*config.response, endpoint=True)))
            prompt = np.concatenate((history, observation))
            requests.append(GenerateRequest(session=str(row), prompt_ids=prompt, sampling=sampling, stream=(row, turn)))
        begin = time.process_time()
        generations = engine.generate(requests)
        tally.engine_seconds += time.process_time() - begin
        tokens = sum(len(generation.ids) for generation in generations)
        tally.engine_tokens += tokens
        histories = [np.concatenate((r.prompt_ids, g.ids)) for r, g in zip(requests, generations, strict=True)]
        if turn in sampled:
            begin = time.process_time()
            expected = peer(model, requests)
            tally.peer_seconds += time.process_time() - begin
            tally.peer_tokens += tokens
            for request, generation, ids in zip(requests, generations, expected, strict=True):
                _compare(model, request.prompt_ids, generation.ids, ids, tally)
            print(f"  turn {turn + 1}/{config.turns}: {tally.ratio():.1f}x so far", flush=True)
    return tally


def _random_ids(rng: np.random.Generator, count: int, vocab: int) -> Ids:
    return rng.integers(0, vocab, count).astype(np.int32)


def _compare(model: Any, prompt: Ids, ours: Ids, theirs: Ids, tally: Tally) -> None:
    import torch

    tally.responses += 1
    different = np.flatnonzero(ours != theirs)
    if not len(different):
        tally.equal += 1
        return
    upto = np.concatenate((prompt, ours[: different[0]]))
    with torch.inference_mode():
        best = model(torch.from_numpy(upto.astype(np.int64))[None]).logits[0, -1].topk(2).values
    tally.gap = max(tally.gap, float(best[0] - best[1]))


def report(name: str, shape: Shape, tally: Tally) -> None:
    """One model's lines."""
    equal = f"{tally.equal}/{tally.responses} responses have the same ids"
    if tally.equal < tally.responses:
        equal += f" (the others part where the two best logits are at most {tally.gap:.1e} apart)"
    ratio = tally.ratio()
    print(f"{name} ({shape.layers} layers, width {shape.width}):")
    print(f"  engine   {tally.engine_tokens / tally.engine_seconds:9.0f} tokens/CPU s ({tally.engine_seconds:.1f} s)")
    print(f"  generate {tally.peer_tokens / tally.peer_seconds:9.0f} tokens/CPU s ({tally.peer_seconds:.1f} s)")
    print(f"  ratio    {ratio:9.1f}x (target 5x: {'met' if ratio >= 5 else 'missed'})")
    print(f"  greedy   {equal}", flush=True)


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(RolloutBench, args=list(argv), prog="turngym bench rollout", description=__doc__)
    import torch

    torch.set_num_threads(config.threads)
    shapes = {"tiny": config.tiny, "larger": config.larger}
    print(
        f"{config.turns} turns, batch {config.batch}, {config.threads} thread{'s' if config.threads > 1 else ''}",
        flush=True,
    )
    for name, shape in shapes.items():
        if shape.layers:
            report(name, shape, play(shape, config))
    if config.play.episodes:
        print(f"rollouts of {config.play.episodes} episodes, wall clock:", flush=True)
        report_play(run_play(config.play, config.threads))
    return 0
