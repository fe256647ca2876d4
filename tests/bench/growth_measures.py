"""Everything whose growth is measured: traces, runs, episodes, the local engine, shops, indexes, panels."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from growth import Measure, Work

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.task import Task, Verdict
from turngym.envs.core.trace import episode_to_json

# --- Traces: what reads the episodes of an evaluation

SAMPLES, TURNS, IDS = 4, 4, 8
"""Of each task, of each episode, of each response."""
KINDS = ("place", "look", "clean", "heat", "cool", "two")
AGENT, TEMPERATURE = "made-up", 0.85
TRACE = "trace.jsonl"


def tasks(size: int) -> list[Task]:
    """The tasks that `size` made-up episodes play."""
    return [
        Task(env_id="bench/Text-v0", task_id=f"bench/{n}", sha256=f"{n:064x}", split="eval", category=KINDS[n % 6])
        for n in range(max(size // SAMPLES, 1))
    ]


def episode(task: Task, number: int, sample: int) -> Episode:
    """A short episode with ids and log-probabilities; what happens in it depends on `number`."""
    rng, prompt = np.random.default_rng((number, sample)), 24
    step = prompt + IDS
    turns = tuple(
        Turn(
            index=t,
            observation=f"You arrive at shelf {number % 97}. On the shelf {number % 97}, you see a cup {t}.",
            admissible=("look", f"go to shelf {t}", f"take cup {t} from shelf {number % 97}", "inventory"),
            response=f"<action>take cup {t} from shelf {number % 97}</action>",
            action=f"take cup {t} from shelf {number % 97}",
            verdict=Verdict.OK,
            reward=0.0,
            prompt_span=(t * step, t * step + prompt),
            response_span=(t * step + prompt, (t + 1) * step),
            logprobs=rng.normal(-1, 0.5, IDS).astype(np.float32),
        )
        for t in range(TURNS)
    )
    won = number % 3 == 0
    return Episode(
        task=task,
        seed=0,
        sample=sample,
        group=number,
        segments=(rng.integers(0, 600, TURNS * step).astype(np.int32),),
        turns=turns,
        status=Status.COMPLETED if won else Status.TRUNCATED_TURNS,
        success=won,
        episode_return=float(won),
        score=float(won),
        system="Interact with a household to solve a task.",
        final_observation="You won." if won else "",
        timings={"env": 0.001, "elapsed": 0.01 * number},
        meta={"agent": AGENT, "temperature": TEMPERATURE, "goal_rate": float(won)},
    )


def make_trace(folder: Path, size: int) -> None:
    """`size` episodes (whole tasks) as an evaluation writes them."""
    with (folder / TRACE).open("w", encoding="ascii") as file:
        for number, task in enumerate(tasks(size)):
            for sample in range(SAMPLES):
                file.write(episode_to_json(episode(task, number, sample)) + "\n")


def _quietly(verb: Callable[[Sequence[str]], int], *words: str) -> Work:
    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert verb(words) == 0, words

    return work


def _warm(folder: Path) -> Path:
    """A few episodes, with which what is imported late is imported before it is measured."""
    warm = folder / "warm"
    warm.mkdir(exist_ok=True)
    make_trace(warm, SAMPLES)
    return warm


def open_report(folder: Path, size: int) -> Work:
    from turngym.scripts import report

    _quietly(report.main, str(_warm(folder) / TRACE))()
    return _quietly(report.main, str(folder / TRACE))


def open_trace(folder: Path, size: int, *words: str) -> Work:
    """`turngym trace` with `words`, into a new file."""
    from turngym.scripts import trace

    out = folder / "out"

    def work(folder: Path) -> None:
        written = ("--out", str(out)) if words[0] != "verify" else ()
        _quietly(trace.main, words[0], str(folder / TRACE), *written, *words[1:])()
        out.unlink(missing_ok=True)

    out.unlink(missing_ok=True)
    work(_warm(folder))
    return lambda: work(folder)


def open_view(folder: Path, size: int) -> Work:
    """The index, a page of the list sorted otherwise, and one episode."""
    from turngym.scripts.trace_pages import create_app, index_trace

    def work(folder: Path) -> None:
        client = create_app({"run": index_trace(folder / TRACE)}).test_client()
        for address in ("rows?sort=turns&count=100", "episode?at=0"):
            assert client.get(f"/api/{address}").status_code == 200

    work(_warm(folder))
    return lambda: work(folder)


class _Nobody:
    """Who would play what is missing."""

    name = AGENT

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("nothing is missing")


def open_resume(folder: Path, size: int) -> Work:
    """An evaluation whose episodes are all there, and its results file."""
    from turngym.agents.evaluation.play_panel import evaluate_tasks

    def work(folder: Path, size: int) -> None:
        agent: Any = _Nobody()
        result = evaluate_tasks(
            tasks(size), agent, agent, samples=SAMPLES, temperature=TEMPERATURE, trace=folder / TRACE
        )
        assert result.resumed == len(result.outcomes) == SAMPLES * max(size // SAMPLES, 1)
        result.write(folder / "results.json")
        (folder / "results.json").unlink()

    work(_warm(folder), SAMPLES)
    return lambda: work(folder, size)


def open_rescore(folder: Path, size: int) -> Work:
    from turngym.agents.evaluation.compare import rescore

    return lambda: rescore(folder / TRACE)


EPISODES: dict[str, Any] = {
    "per": "episodes",
    "sizes": (1000, 10_000),
    "full": (1000, 10_000, 100_000),
    "make": make_trace,
    "shared": "trace",
}

ROW = "how each one ended"
"""200 to 300 bytes, ids of tasks included; an episode has 3,100 in its file."""

TRACE_MEASURES = (
    Measure(name="report", open=open_report, needs="torch", holds=ROW, **EPISODES),
    Measure(name="trace html", open=lambda folder, size: open_trace(folder, size, "html"), **EPISODES),
    Measure(name="trace view", open=open_view, needs="flask", holds=ROW, **EPISODES),
    Measure(
        name="trace parquet", open=lambda folder, size: open_trace(folder, size, "parquet"), needs="pyarrow", **EPISODES
    ),
    Measure(
        name="trace parquet of trajectories",
        open=lambda folder, size: open_trace(folder, size, "parquet", "--rows", "trajectories"),
        needs="pyarrow",
        **EPISODES,
    ),
    Measure(name="trace verify", open=lambda folder, size: open_trace(folder, size, "verify"), **EPISODES),
    Measure(name="eval resumed", open=open_resume, holds=ROW, **EPISODES),
    Measure(name="eval rescored", open=open_rescore, holds=ROW, **EPISODES),
)


# --- Runs: what reads the metrics of a training run

RUN_TURNS = 30
KEPT = "kept.jsonl"
"""The metric_rows, for a measure that rewrites metrics.jsonl."""


def metric_rows(size: int) -> Iterator[dict[str, Any]]:
    """A row for each of `size` steps, of a run whose episodes have up to `RUN_TURNS` turns."""
    names = ("kl", "kl_raw", "teacher_entropy", "entropy", "weight", "kl_raw_success", "kl_raw_failure")
    for step in range(1, size + 1):
        shift = step % 17 / 100
        by_turn = {f"turn/{name}": [round(0.5 + shift / (t + 1), 6) for t in range(RUN_TURNS)] for name in names}
        by_turn["turn/survivors"] = [64.0 - t for t in range(RUN_TURNS)]
        by_turn["turn/tokens"] = [640.0 - 10 * t for t in range(RUN_TURNS)]
        by_turn["turn/ended_success"] = [1.0] * RUN_TURNS
        by_turn["turn/ended_cut"] = [0.0] * RUN_TURNS
        times = {f"time/{name}_s": 1.0 + shift for name in ("rollout", "teacher", "update")}
        plain = {"loss": shift, "gap_mean": 1e-6, "gap_max": 1e-5, "turns_mean": 15.0, "episodes": 64, "tokens": 15_000}
        depth = {"depth/cap": RUN_TURNS, "depth/probe": 0, "depth/hbar": 15.0, "depth/h_eff": 0, "depth/h_cov": 0}
        times |= {"time/step_s": 3.5, "time/train_s": 3.5 * step}
        yield {"step": step, "kind": "train", **times, **plain, **depth, **by_turn}


def make_run(folder: Path, size: int) -> None:
    with (folder / "metrics.jsonl").open("w", encoding="ascii") as file:
        for row in metric_rows(size):
            file.write(json.dumps(row) + "\n")
    shutil.copy(folder / "metrics.jsonl", folder / KEPT)


def open_run_report(folder: Path, size: int) -> Work:
    from turngym.scripts import report

    def work(run: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert report.main([str(run)]) == 0

    warm = folder / "warm"
    warm.mkdir(exist_ok=True)
    make_run(warm, 8)
    work(warm)
    return lambda: work(folder)


def open_table(folder: Path, size: int) -> Work:
    """Two columns of a run."""
    from turngym.trainers.metrics import table

    def work() -> None:
        assert len(table(folder, "train", ("step", "loss"))) == size

    return work


def open_truncate(folder: Path, size: int) -> Work:
    """What a resumed run does to what was written after its checkpoint."""
    from turngym.trainers.metrics import MetricsLog

    shutil.copy(folder / KEPT, folder / "metrics.jsonl")
    return lambda: MetricsLog(folder).truncate(size - 1, size)


STEPS: dict[str, Any] = {
    "per": "steps",
    "sizes": (300, 1000, 3000),
    "full": (1000, 10_000, 100_000),
    "make": make_run,
    "needs": "torch",
}

RUN_MEASURES = (
    Measure(name="report of a run", open=open_run_report, shared="run", **STEPS),
    Measure(name="metrics columns", open=open_table, shared="run", holds="the two columns", **STEPS),
    Measure(name="metrics cut on resume", open=open_truncate, shared="run-cut", **STEPS),
)


# --- Playing: turns of an episode, environments of a vector

ACTION = "look"
"""Always possible, and never the end of a task."""
VECTOR_STEPS = 200
"""Of every environment of a vector."""


class Looker:
    """An agent that looks around, turn after turn."""

    name = "looker"

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def respond(self, waiting: Sequence[Any]) -> list[Any]:
        return [self.writer.write(conversation, ACTION) for conversation in waiting]

    def release(self, conversation: Any) -> None:
        """It holds nothing."""


def open_turns(folder: Path, size: int, *, rendered: bool) -> Work:
    """One episode of `size` turns; `rendered` with token ids, its history growing to that."""
    from turngym.agents.playing.agent import ResponseWriter
    from turngym.agents.playing.environments import env_maker
    from turngym.agents.playing.rollout import Job, Rollout

    writer, channel = _rendered() if rendered else (ResponseWriter(), None)
    make_env = env_maker("turngym/ALFWorld-v0", max_turns=size, channel=channel)
    env: Any = make_env()
    (task, *_) = env.unwrapped.task_ids()
    env.close()
    driver = Rollout(make_env, Looker(writer))
    driver.run([Job(task_id=task, sample=0, group=0)])  # the game is read

    def work() -> None:
        (episode,) = driver.run([Job(task_id=task, sample=1, group=0)])
        assert episode.depth == size, episode.status

    return work


def _rendered() -> tuple[Any, str]:
    from turngym.agents.models import load_policy
    from turngym.agents.playing.agent import ResponseWriter
    from turngym.agents.playing.environments import probe
    from turngym.agents.rendering.chat_settings import ChatSettings, renderer_of
    from turngym.agents.worlds.built_in import HOUSEHOLD
    from turngym.agents.worlds.worlds import CHECKPOINTS

    folder = CHECKPOINTS / "alfworld" / "student"
    settings = ChatSettings.load(folder)
    model, tokenizer = load_policy(str(folder), "cpu", "float32")
    tool = probe(HOUSEHOLD.env_id, {"split": HOUSEHOLD.split, **HOUSEHOLD.make}).tool
    return ResponseWriter(renderer_of(model, tokenizer, settings, tool)), settings.channel


def open_vector(folder: Path, size: int, *, lists: bool) -> Work:
    """`VECTOR_STEPS` steps of `size` environments, as Gymnasium's vector or in plain lists."""
    import gymnasium as gym

    import turngym.envs  # noqa: F401 - registers the ids

    envs: Any = gym.make_vec("turngym/ALFWorld-v0", size)
    envs.reset(seed=0)
    step, actions = envs.unwrapped.step_lists if lists else envs.step, [ACTION] * size
    step(actions)

    def work() -> None:
        for _ in range(VECTOR_STEPS):
            step(actions)

    return work


TURN_SIZES: dict[str, Any] = {"per": "turns", "sizes": (100, 400, 1600), "full": (100, 1000, 10_000)}
ENVS: dict[str, Any] = {
    "per": "environments",
    "sizes": (1, 8, 64, 256),
    "full": (1, 8, 64, 256),
    "holds": "a game each",
}

PLAY_MEASURES = (
    Measure(
        name="turns of an episode",
        open=lambda folder, size: open_turns(folder, size, rendered=False),
        holds="what was said",
        **TURN_SIZES,
    ),
    Measure(
        name="turns with token ids",
        open=lambda folder, size: open_turns(folder, size, rendered=True),
        holds="what was said",
        needs="transformers",
        **TURN_SIZES,
    ),
    Measure(name="make_vec step", open=lambda folder, size: open_vector(folder, size, lists=False), **ENVS),
    Measure(name="make_vec step_lists", open=lambda folder, size: open_vector(folder, size, lists=True), **ENVS),
)


# --- The local engine: length of a history, number of slots

DRAWN = 32
"""Ids of a measured response."""
SAID = 25
"""Ids of the observation before it."""
HISTORY = 200
"""Ids of each history, where slots are counted."""


def _engine(slots: int, history: int) -> tuple[Any, list[Any]]:
    """An engine that has read a history of `history` ids in each of `slots` sessions, and the next requests."""
    import torch

    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.scripts.bench_rollout import TINY, build_model

    torch.set_num_threads(1)
    longest = history + SAID + DRAWN + 8
    engine = LocalEngine(build_model(TINY, longest, 0), max_batch=slots, max_length=longest)
    prompts = np.random.default_rng(0).integers(0, TINY.vocab, (slots, history + SAID)).astype(np.int32)
    engine.generate([_request(row, prompt[:history], 0, 1) for row, prompt in enumerate(prompts)])
    return engine, [_request(row, prompt, 1, DRAWN) for row, prompt in enumerate(prompts)]


def _request(row: int, prompt: Any, turn: int, drawn: int) -> Any:
    from turngym.envs.core.protocols import GenerateRequest, Sampling

    sampling = Sampling(temperature=0.0, max_new_tokens=drawn)
    return GenerateRequest(session=str(row), prompt_ids=prompt, sampling=sampling, stream=(row, turn))


def open_first(folder: Path, size: int) -> Work:
    """A whole history read at once."""
    engine, (request,) = _engine(1, size)

    def work() -> None:
        engine.release(request.session)
        engine.generate([_request(0, request.prompt_ids[:size], 0, 1)])

    return work


def open_next(folder: Path, size: int) -> Work:
    """A turn after a history that was read before: an observation and a response."""
    engine, requests = _engine(1, size)
    return lambda: engine.generate(requests)


def open_slots(folder: Path, size: int) -> Work:
    """A turn of `size` conversations."""
    engine, requests = _engine(size, HISTORY)
    return lambda: engine.generate(requests)


HISTORY_SIZES: dict[str, Any] = {
    "per": "ids",
    "sizes": (1000, 4000, 16_000),
    "full": (1000, 8000, 64_000),
    "holds": "keys and values",
    "needs": "transformers",
}

ENGINE_MEASURES = (
    Measure(name="engine next turn", open=open_next, **HISTORY_SIZES),
    Measure(name="engine history at once", open=open_first, power=2.0, **HISTORY_SIZES),
    Measure(
        name="engine slots",
        open=open_slots,
        **{**HISTORY_SIZES, "per": "slots", "sizes": (1, 8, 64), "full": (1, 8, 64, 256)},
    ),
)


# --- Corpora: shops, retrieval indexes, panels

QUERIES = 200


def open_shop_build(folder: Path, size: int) -> Work:
    """Makes up `size` products of a generated shop and writes their catalog and index."""
    from turngym.envs.webshop.catalog import LoadReport, read_products
    from turngym.envs.webshop.generate import FULL, records
    from turngym.envs.webshop.open_catalog import build_folder

    def work() -> None:
        report = LoadReport()
        # one cluster more than needed: clusters that are not asked for are never made
        config = replace(FULL, name="big", clusters=max(size // 1000, 1) + 1)
        # only the entry of the product that is being read: all of them need not fit into memory
        entry: dict[str, Any] = {}

        def items() -> Iterator[Any]:
            for item, attributes in islice(records(config), size):
                entry.clear()
                entry[item["asin"]] = attributes
                yield item

        products = read_products(items(), entry, None, report=report)
        build_folder(_fresh(folder), lambda staging: products, "synthetic", report, lambda *_: None)

    return work


def make_shop(folder: Path, size: int) -> None:
    open_shop_build(folder, size)()


def open_shop_search(folder: Path, size: int) -> Work:
    """Asks `QUERIES` different queries, the exact best 50 of each."""
    from turngym.envs.webshop.open_catalog import MappedCatalog
    from turngym.envs.webshop.products import find_profile
    from turngym.envs.webshop.shop import Shop

    shop = Shop(MappedCatalog(folder / "index"), find_profile("embedded"), memo=0)
    # of each of some goals: its title, its instruction, its kind and features, some words of the instruction
    rng, queries = np.random.default_rng(0), list[str]()
    for row in rng.integers(len(shop.goals), size=QUERIES // 4 + 1).tolist():
        goal = shop.goals[row]
        words = goal.instruction_text.split()
        some = rng.choice(words, size=min(int(rng.integers(2, 7)), len(words)), replace=False)
        queries += [goal.title, goal.instruction_text, " ".join([goal.query, *goal.attributes]), " ".join(some)]
    return _asking(shop.search, [text.lower() for text in queries[: QUERIES + 1]])


def _asking(find: Any, queries: list[str]) -> Work:
    find(queries.pop())

    def work() -> None:
        for text in queries:
            find(text)

    return work


def make_store(folder: Path, size: int) -> None:
    """`size` made-up passages."""
    from turngym.retrieval.corpus import PassageStore
    from turngym.scripts.bench_retrieval import zipf_passages

    PassageStore.build(zipf_passages(size), folder / "passages").close()


def open_words_build(folder: Path, size: int) -> Work:
    """The BM25 index of passages that were written before."""
    from turngym.retrieval.bm25 import LuceneIndex, indexed_documents
    from turngym.retrieval.corpus import PassageStore

    store = PassageStore(folder / "passages")
    return lambda: LuceneIndex.build(indexed_documents(store), _fresh(folder)).close()


def make_words(folder: Path, size: int) -> None:
    make_store(folder, size)
    open_words_build(folder, size)()


def open_words_search(folder: Path, size: int) -> Work:
    """`QUERIES` questions, the best three passages of each."""
    from turngym.retrieval.bm25 import BM25Retriever
    from turngym.retrieval.corpus import PassageStore
    from turngym.scripts.bench_retrieval import zipf_queries

    bm25 = BM25Retriever.open(folder / "index", PassageStore(folder / "passages"))
    return _asking(lambda text: bm25.search([text], 3), zipf_queries(QUERIES + 1))


def make_manifest(folder: Path, size: int) -> None:
    from turngym.envs.panels import make_panel, write_panel

    write_panel(make_panel("bench", 1, "bench/Text-v0", {}, tasks(SAMPLES * size)), folder)


def open_panel(folder: Path, size: int) -> Work:
    """A panel read, and its hash compared."""
    from turngym.envs.panels import load_panel

    def work() -> None:
        assert len(load_panel("bench", folder).tasks) == size

    return work


def _fresh(folder: Path) -> Path:
    index = folder / "index"
    shutil.rmtree(index, ignore_errors=True)
    return index


SHOP: dict[str, Any] = {"per": "products", "sizes": (1000, 4000, 16_000), "full": (1000, 50_000, 1_180_000)}
PASSAGES: dict[str, Any] = {"per": "passages", "sizes": (3000, 10_000, 30_000), "full": (10_000, 100_000, 1_000_000)}
MAPPED = "pages of the mapped index"

CORPUS_MEASURES = (
    Measure(name="shop build", open=open_shop_build, holds="words and products of the index", **SHOP),
    Measure(name="shop search", open=open_shop_search, make=make_shop, shared="shop", holds=MAPPED, **SHOP),
    Measure(name="BM25 build", open=open_words_build, make=make_store, holds="words of the index", **PASSAGES),
    Measure(name="BM25 search", open=open_words_search, make=make_words, shared="words", holds=MAPPED, **PASSAGES),
    Measure(
        name="panel read",
        open=open_panel,
        make=make_manifest,
        per="tasks",
        sizes=(1000, 10_000),
        full=(1000, 10_000, 100_000),
        holds="its tasks",
    ),
)

MEASURES = (*TRACE_MEASURES, *RUN_MEASURES, *PLAY_MEASURES, *ENGINE_MEASURES, *CORPUS_MEASURES)
