"""Files of every kind, small ones: how each is written, and how it is read back whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Found = dict[str, Any]
"""`items`: contents by name; `problems`: how many the reader reported."""


def _hash(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def write_trace(folder: Path) -> None:
    from turngym.agents.evaluation.play_episodes import play_episodes

    kwargs = {"config": "small"}
    path = folder / "t.jsonl"
    play_episodes("turngym/ALFWorld-v0", "expert", tasks=12, env_kwargs=kwargs, out=path, progress=False)


def read_trace(folder: Path) -> Found:
    from turngym.envs.core.trace import episode_to_json
    from turngym.envs.core.trace import read_trace as read

    episodes, problems = read(folder / "t.jsonl")
    return {"items": {e.task.task_id: _hash(episode_to_json(e)) for e in episodes}, "problems": len(problems)}


def write_records(folder: Path) -> None:
    from turngym.agents.proxy.turn_records import Recorder

    rng, recorder = np.random.default_rng(0), Recorder(folder)
    for number in range(60):
        ids, logprobs = rng.integers(50_000, size=12).tolist(), rng.random(12, np.float32).astype(str).tolist()
        said = {"messages": [{"role": "user", "content": f"question {number}"}], "text": f"answer {number}"}
        recorder.write({"kind": "turn", "session": f"{number:032x}-{number}", **said, "ids": ids, "logprobs": logprobs})
    recorder.close()


def read_records(folder: Path) -> Found:
    from turngym.agents.proxy.turn_records import RecordProblem, iter_records

    items, problems = {}, 0
    for number, record in enumerate(iter_records(folder)):
        if isinstance(record, RecordProblem):
            problems += 1
        else:
            items[f"{record.get('session', number)}"] = _hash(json.dumps(record, sort_keys=True))
    return {"items": items, "problems": problems}


def write_index(folder: Path) -> None:
    from turngym.retrieval.index import BuildPlan, build_index

    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    rows = (f"t{row} " + " ".join(rng.choice(words, 40)) for row in range(300))
    corpus = folder.with_suffix(".jsonl")
    corpus.write_text("".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(rows)))
    build_index(BuildPlan(corpus=corpus, out=folder / "index", kind="bm25"))


def read_index(folder: Path) -> Found:
    from turngym.retrieval.corpus import PassageStore
    from turngym.retrieval.open import open_retriever

    store = PassageStore(folder / "index" / "passages")
    items = {str(row): _hash(p.id, p.title, p.text) for row, p in enumerate(store)}
    hits = open_retriever(str(folder / "index")).search(["w1 w2", "w3 t7", "w250 w9"], k=20)
    items |= {f"q{n}": _hash([(hit.passage.id, hit.score) for hit in found]) for n, found in enumerate(hits)}
    return {"items": items}


def write_shop(folder: Path) -> None:
    _shop(folder).close()


def read_shop(folder: Path) -> Found:
    shop = _shop(folder)
    try:
        items = {str(row): _hash(product) for row, product in enumerate(shop.products)}
        items |= {f"p{row}": _hash(shop.price(product.asin)) for row, product in enumerate(shop.products)}
        items |= {f"g{row}": _hash(goal) for row, goal in enumerate(shop.goals)}
        items |= {f"s{word}": _hash(shop.search(word)) for word in ("mug", "blue shirt", "lamp")}
        return {"items": items}
    finally:
        shop.close()


def _shop(folder: Path) -> Any:
    from turngym.envs.webshop.shop import open_shop

    return open_shop("embedded", storage="mapped", cache=folder)


def write_model(folder: Path) -> None:
    from turngym.agents.worlds import load_world
    from turngym.envs.core.files import write_sums

    shutil.copytree(load_world("alfworld").checkpoint("student"), folder / "model")
    write_sums(folder / "model")


def read_model(folder: Path) -> Found:
    from turngym.agents.models import load_policy
    from turngym.agents.rendering.chat_settings import ChatSettings

    model, tokenizer = load_policy(folder / "model", "cpu")
    items = {name: _hash(value.numpy().tobytes()) for name, value in model.state_dict().items()}
    words = tokenizer("go to the desk <think> x </think>")["input_ids"]
    others = (model.config.to_dict(), words, tokenizer.chat_template, ChatSettings.load(folder / "model"))
    return {"items": {**items, "others": _hash(others)}}


def write_checkpoint(folder: Path) -> None:
    from turngym.trainers.checkpoint import save_checkpoint

    model, optimizer = _learner(3)
    save_checkpoint(folder, model=model, optimizer=optimizer, state={"step": 3, "depth": {"cap": 4}, "seconds": 1.5})


def read_checkpoint(folder: Path) -> Found:
    from turngym.trainers.checkpoint import latest_checkpoint, load_checkpoint, read_state

    checkpoint = latest_checkpoint(folder)
    model, optimizer = _learner(4)
    load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    items = {name: _hash(value.numpy().tobytes()) for name, value in model.state_dict().items()}
    moments = [value.numpy().tobytes() for state in optimizer.state.values() for value in state.values()]
    return {"items": {**items, "moments": _hash(moments), "state": _hash(read_state(checkpoint))}}


def _learner(seed: int) -> tuple[Any, Any]:
    """A small model after one update."""
    import torch

    from turngym.trainers.models import tiny_qwen3

    model: Any = tiny_qwen3(64, width=16, layers=1, heads=2, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    return model, optimizer


TARGETS: tuple[tuple[str, Callable[[Path], None], Callable[[Path], Found]], ...] = (
    ("trace", write_trace, read_trace),
    ("proxy records", write_records, read_records),
    ("index", write_index, read_index),
    ("mapped shop", write_shop, read_shop),
    ("model folder", write_model, read_model),
    ("checkpoint", write_checkpoint, read_checkpoint),
)
"""Name, what writes into an empty folder, what reads it."""
