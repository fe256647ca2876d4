"""Flips one random bit of a file and reads the file: the reader must refuse it, report it, or be unaffected.

The first part writes and reads a small file of every kind that this package knows. The second flips bits and judges.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tally import Tally

from turngym.core.errors import RetrievalError, TurngymError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader returned."""

    items: Mapping[str, bytes]
    """A digest of each thing that was read, by name."""
    problems: int = 0
    """How many problems the reader reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of file that this package writes and reads."""

    name: str
    write: Callable[[Path], None]
    """Writes into an empty folder."""
    read: Callable[[Path], Reading]
    """Reads the whole folder back."""


# --- Files of every kind: how each is written and read back


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def write_trace(folder: Path) -> None:
    from turngym.agents import play_episodes

    kwargs = {"config": "small"}
    path = folder / "t.jsonl"
    play_episodes("turngym/ALFWorld-v0", "expert", tasks=12, env_kwargs=kwargs, out=path, progress=False)


def read_trace(folder: Path) -> Reading:
    from turngym.core.trace import episode_to_json
    from turngym.core.trace import read_trace as read

    episodes, problems = read(folder / "t.jsonl")
    return Reading(items={e.task.task_id: _digest(episode_to_json(e)) for e in episodes}, problems=len(problems))


def write_records(folder: Path) -> None:
    from turngym.agents.proxy.turn_records import TurnRecorder

    rng, recorder = np.random.default_rng(0), TurnRecorder(folder)
    for number in range(60):
        ids, logprobs = rng.integers(50_000, size=12).tolist(), rng.random(12, np.float32).astype(str).tolist()
        said = {"messages": [{"role": "user", "content": f"question {number}"}], "text": f"answer {number}"}
        recorder.write({"kind": "turn", "session": f"{number:032x}-{number}", **said, "ids": ids, "logprobs": logprobs})
    recorder.close()


def read_records(folder: Path) -> Reading:
    from turngym.agents.proxy.turn_records import iter_records
    from turngym.core.trace import TraceProblem

    items, problems = {}, 0
    for number, record in enumerate(iter_records(folder)):
        if isinstance(record, TraceProblem):
            problems += 1
        else:
            items[f"{record.get('session', number)}"] = _digest(json.dumps(record, sort_keys=True))
    return Reading(items=items, problems=problems)


def write_index(folder: Path) -> None:
    from turngym.retrieval.index import BuildPlan, build_index

    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    rows = (f"t{row} " + " ".join(rng.choice(words, 40)) for row in range(300))
    corpus = folder.with_suffix(".jsonl")
    corpus.write_text("".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(rows)))
    build_index(BuildPlan(corpus=corpus, out=folder / "index", kind="bm25"))


def read_index(folder: Path) -> Reading:
    from turngym.retrieval.corpus import PassageStore
    from turngym.retrieval.open_retriever import open_retriever

    store = PassageStore(folder / "index" / "passages")
    items = {str(row): _digest(p.id, p.title, p.text) for row, p in enumerate(store)}
    hits = open_retriever(str(folder / "index")).search(["w1 w2", "w3 t7", "w250 w9"], k=20)
    items |= {f"q{n}": _digest([(hit.passage.id, hit.score) for hit in found]) for n, found in enumerate(hits)}
    return Reading(items=items)


def write_shop(folder: Path) -> None:
    from turngym.envs.webshop.open_catalog import build_folder, load_catalog
    from turngym.envs.webshop.products import find_profile

    products = load_catalog(find_profile("embedded"), None)
    build_folder(folder / "shop", lambda _: products, "synthetic")


def read_shop(folder: Path) -> Reading:
    from turngym.envs.webshop.open_catalog import MappedCatalog
    from turngym.envs.webshop.products import find_profile
    from turngym.envs.webshop.shop import Shop

    shop = Shop(MappedCatalog(folder / "shop"), find_profile("embedded"))
    try:
        items = {str(row): _digest(product) for row, product in enumerate(shop.products)}
        items |= {f"p{row}": _digest(shop.price(product.asin)) for row, product in enumerate(shop.products)}
        items |= {f"g{row}": _digest(goal) for row, goal in enumerate(shop.goals)}
        items |= {f"s{word}": _digest(shop.search(word)) for word in ("mug", "blue shirt", "lamp")}
        return Reading(items=items)
    finally:
        shop.close()


def write_model(folder: Path) -> None:
    from turngym.agents import load_world
    from turngym.core.files import write_sums

    shutil.copytree(load_world("alfworld").checkpoint("student"), folder / "model")
    write_sums(folder / "model")


def read_model(folder: Path) -> Reading:
    from turngym.agents.models import load_policy
    from turngym.agents.rendering.chat_settings import ChatSettings

    model, tokenizer = load_policy(folder / "model", "cpu")
    items = {name: _digest(value.numpy().tobytes()) for name, value in model.state_dict().items()}
    words = tokenizer("go to the desk <think> x </think>")["input_ids"]
    others = (model.config.to_dict(), words, tokenizer.chat_template, ChatSettings.load(folder / "model"))
    return Reading(items={**items, "others": _digest(others)})


def write_checkpoint(folder: Path) -> None:
    from turngym.trainers.checkpoint import save_checkpoint

    model, optimizer = _learner(3)
    save_checkpoint(folder, model=model, optimizer=optimizer, state={"step": 3, "depth": {"cap": 4}, "seconds": 1.5})


def read_checkpoint(folder: Path) -> Reading:
    from turngym.trainers.checkpoint import latest_checkpoint, load_checkpoint, read_state

    checkpoint = latest_checkpoint(folder)
    model, optimizer = _learner(4)
    load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    items = {name: _digest(value.numpy().tobytes()) for name, value in model.state_dict().items()}
    moments = [value.numpy().tobytes() for state in optimizer.state.values() for value in state.values()]
    return Reading(items={**items, "moments": _digest(moments), "state": _digest(read_state(checkpoint))})


def _learner(seed: int) -> tuple[Any, Any]:
    """Returns a small model and its optimizer after one update, so that the optimizer has moments to store."""
    import torch

    from turngym.trainers.models import tiny_qwen3

    model: Any = tiny_qwen3(64, width=16, layers=1, heads=2, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    return model, optimizer


TARGETS = (
    Target(name="trace", write=write_trace, read=read_trace),
    Target(name="proxy records", write=write_records, read=read_records),
    Target(name="index", write=write_index, read=read_index),
    Target(name="mapped shop", write=write_shop, read=read_shop),
    Target(name="model folder", write=write_model, read=read_model),
    Target(name="checkpoint", write=write_checkpoint, read=read_checkpoint),
)


# --- Flipping bits

BAD = ("taken quietly", "traceback")


def flip_all(folder: Path, flips: int, seed: int) -> Iterator[Tally]:
    """Flips `flips` bits, one at a time, in each kind of file. Places are drawn from all bytes of its files."""
    for number, target in enumerate(TARGETS):
        place = folder / f"{number}"
        place.mkdir(parents=True)
        target.write(place)
        yield flip_target(target, place, flips, np.random.default_rng([seed, number]))


def flip_target(target: Target, place: Path, flips: int, rng: np.random.Generator) -> Tally:
    """Flips bits in the files of one target; each file is restored before the next flip."""
    tally = Tally(what=f"bit flip: {target.name}", bad=BAD)
    before = _read(target, place)
    assert isinstance(before, Reading), f"{target.name} cannot be read as it was written: {before}"
    paths = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    ends = np.cumsum([path.stat().st_size for path in paths])
    for _ in range(flips):
        # draw a place among all bytes of the folder, then find its file and the offset within it
        where = int(rng.integers(ends[-1]))
        number = int(np.searchsorted(ends, where, side="right"))
        offset = where - (int(ends[number - 1]) if number else 0)
        path, bit = paths[number], int(rng.integers(8))
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[offset] ^= 1 << bit
        _write_new_inode(path, bytes(changed))
        after = _read(target, place)
        tally.count(judge(before, after), f"{path.relative_to(place)}, byte {offset}, bit {bit}: {after!r:.200}")
        _write_new_inode(path, whole)
    return tally


def judge(before: Reading, after: Reading | Exception) -> str:
    """Names the outcome of reading a damaged file.

    `taken quietly` is the failure to look for: other contents were read, or something is missing, and the reader
    reported nothing.
    """
    if isinstance(after, TurngymError | RetrievalError):
        return "refused"
    if isinstance(after, Exception):
        return "traceback"
    if any(before.items.get(name) != content for name, content in after.items.items()):
        return "taken quietly"
    if len(after.items) == len(before.items):
        return "harmless"
    return "named" if after.problems else "taken quietly"


def _read(target: Target, place: Path) -> Reading | Exception:
    # some readers report damage as a warning: it counts as a problem like those they return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = target.read(place)
        except Exception as error:
            return error
    ours = sum(issubclass(one.category, UserWarning) and "damaged" in str(one.message) for one in said)
    return replace(found, problems=found.problems + ours)


def _write_new_inode(path: Path, content: bytes) -> None:
    """Replaces the file under a new inode, because the old one may still be memory-mapped."""
    scratch = path.with_name(f".{path.name}.flip")
    scratch.write_bytes(content)
    scratch.replace(path)
