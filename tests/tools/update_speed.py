"""How fast one update of a real model is: one thread, LoRA of rank 16, eight demonstrations of generated houses.

python tests/tools/update_speed.py models/smollm2 --autocast bfloat16

Prints operations a CPU second and their share of the processor's own matrix product (2,048 x 576 x 1,536), seconds by
phase, and the same rows and labels through transformers' `model(ids, attention_mask, labels)` in padded lines.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from turngym.scripts import train
from turngym.trainers import optimizer_step
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.models import length_batches, pad

RUN = """--steps 1 --seed 1 --eval-every 0 --episodes 8 --max-turns 24 --sft.noise 0 0.3 --sft.mistakes 0.5
--lora.rank 16 --threads 1 --env turngym/ALFWorld-v0 --split generated
--env-kwargs '{"config": "small", "on_invalid": "noop"}'"""
"""The training whose update is measured."""

PHASES = {"attention": ("attention",), "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn")}
"""Of the backward pass and the forward pass together, by parts of the operators' names; the rest is one more."""


def seconds(run: Callable[[], Any], times: int = 3) -> float:
    """CPU seconds of one call, after a first that is not counted."""
    run()
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


def attention(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **more: Any) -> int:
    """Operations of torch's CPU attention, which torch's counter leaves out; given the shapes."""
    rows, heads, length, width = query
    return 4 * int(rows * heads * length * key[2] * width) // (2 if causal else 1)


def attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, dropout: float, causal: bool, **more: Any
) -> int:
    """Five products in the place of two."""
    return attention(query, key, value, dropout, causal) * 5 // 2


def operations(run: Callable[[], Any]) -> int:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with FlopCounterMode(display=False, custom_mapping={kernel: attention, backward: attention_backward}) as counted:
        run()
    return counted.get_total_flops()


def padded(model: Any, batch: RolloutBatch, most: int, autocast: bool) -> None:
    """Forward and backward as transformers' examples train, in passes of as many tokens."""
    rows = [batch.input_ids_M[start:stop] for start, stop in pairwise(batch.row_offsets)]
    for members in length_batches([len(row) for row in rows], most):
        ids = torch.from_numpy(pad([rows[row] for row in members]))
        labels, real = torch.full_like(ids, -100), torch.zeros_like(ids)
        for line, row in enumerate(members):
            real[line, : len(rows[row])] = 1
            own = batch.row_N == row
            labels[line, batch.position_M[batch.predictor_N[own]] + 1] = torch.from_numpy(batch.label_N[own]).long()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=ids, attention_mask=real, labels=labels, use_cache=False).loss
        loss.backward()


def report(name: str, run: Callable[[], Any], products: float) -> float:
    took, count = seconds(run), operations(run)
    rate = count / took / 1e9
    print(f"{name}: {took:.1f} CPU s, {count / 1e12:.2f} TFLOP, {rate:.0f} GFLOP/s, {rate / products:.0%} of products")
    return took


def phases(run: Callable[[], Any]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    spent = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    whole, named = sum(spent.values()), 0.0
    for phase, parts in PHASES.items():
        part = sum(time for key, time in spent.items() if any(word in key for word in parts))
        named += part
        print(f"  {phase}: {part / whole:.0%}")
    print(f"  everything else: {1 - named / whole:.0%}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--autocast", default="off", choices=("off", "bfloat16"))
    parser.add_argument("--micro-tokens", type=int, default=2048)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dtype = torch.float32 if options.autocast == "off" else torch.bfloat16
    one, other = torch.randn(2048, 576).to(dtype), torch.randn(576, 1536).to(dtype)
    products = 2 * 2048 * 576 * 1536 / seconds(lambda: one @ other, 100) / 1e9
    print(f"matrix product, {dtype}: {products:.0f} GFLOP/s")
    accumulate = optimizer_step.accumulate

    def measured(model: Any, batch: RolloutBatch, **how: Any) -> Any:
        print(f"{len(batch.input_ids_M)} tokens in {batch.rows} rows, {batch.tokens} of them supervised")
        ours = report("turngym", lambda: accumulate(model, batch, **how), products)
        phases(lambda: accumulate(model, batch, **how))
        theirs = report(
            "transformers", lambda: padded(model, batch, options.micro_tokens, options.autocast != "off"), products
        )
        print(f"transformers / turngym: {theirs / ours:.2f}")
        return accumulate(model, batch, **how)

    with tempfile.TemporaryDirectory() as out, mock.patch.object(optimizer_step, "accumulate", measured):
        words = shlex.split(f"sft --out {out}/run {RUN} --autocast {options.autocast}")
        words += ["--micro-tokens", str(options.micro_tokens), "--student", options.model]
        return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
