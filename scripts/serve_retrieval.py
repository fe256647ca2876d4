"""Serve an index over HTTP: Search-R1's /retrieve with batching, /health and /stats.

Examples:
    turngym serve retrieval --index indexes/wiki
    turngym serve retrieval --index indexes/wiki --port 8001 --topk 5 --window-ms 5
    turngym serve retrieval --index indexes/wiki --rerank hf:models/cross-encoder --device cuda
    curl --json '{"query": "who wrote Hamlet", "return_scores": true}' http://127.0.0.1:8000/retrieve

Any Search-R1 client works against it, and `turngym` takes its address wherever it takes an index. SIGTERM or Ctrl-C
stops listening, answers what was accepted, and ends; a second one ends at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import structs

from turngym.agents.serving import RETRIEVAL_THREADS, DrainingServer, Listen, retrieval_front
from turngym.core.numbers import Million, Processes, Threads
from turngym.core.spec import Spec, Unread, changed, needing
from turngym.retrieval.http_format import RetrievalServerSettings
from turngym.scripts.options import read_options


class Rerank(Spec):
    """Who orders the best hits again, and how many."""

    model: str
    """`hf:FOLDER`, or `coverage`."""
    rerank_depth: Million = 20
    """How many hits are ordered again, where a request does not ask for more."""


class ServeRetrieval(Spec):
    """What to serve, and where."""

    index: str
    """Folder that `turngym index build` made, or a corpus to index in memory: `bm25:corpus.jsonl`."""
    encoder: str | None = None
    """Encoder of the index, where it is a module of another package (`package.module:name`) or lies elsewhere now
    (`hf:FOLDER`): an index is not asked which code to import, nor what to download."""
    rerank: Rerank | None = None
    """Order the best hits again. `hf:FOLDER` of a cross-encoder (a Hugging Face sequence classifier), or `coverage`,
    which needs no model."""
    device: str = "cpu"
    """Device of the index's encoder and of the reranker: `cpu`, `cuda`, ..."""
    listen: Listen = Listen()
    threads: Threads = RETRIEVAL_THREADS
    """Requests in work at the same time: at least the number of clients, or they cannot share batches."""
    processes: Processes = 1
    """Further processes for batches, so that searching and HTTP do not wait for one interpreter. Each maps the index
    and loads the encoder; 0 searches in this process alone."""
    settings: RetrievalServerSettings = RetrievalServerSettings()

    def unread(self) -> Unread:
        # an index of words has no encoder
        if self.index.startswith("bm25:"):
            yield from needing("an index of vectors", "encoder")
            if self.rerank is None or not self.rerank.model.startswith("hf:"):
                yield from needing("an index of vectors, or --rerank hf:FOLDER", "device")


def main(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    config = read_options(ServeRetrieval, argv, prog="turngym serve retrieval", about=__doc__)
    # before faiss loads: its threads spin while they wait for each other, which takes the cores from the clients
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from turngym.retrieval.batching import ProcessRetriever
    from turngym.retrieval.open_retriever import open_retriever
    from turngym.retrieval.server import RetrievalApp

    named: dict[str, Any] = {"device": config.device}
    if config.rerank is not None:
        named |= {"rerank": config.rerank.model, "rerank_depth": config.rerank.rerank_depth}
    opener = partial(open_retriever, config.index, encoder=config.encoder, **named)
    retriever = ProcessRetriever(opener, processes=config.processes) if config.processes else opener()
    settings = changed(config.settings, workers=max(config.processes, config.settings.workers))
    app = RetrievalApp(retriever, settings)
    service = app.service
    try:
        front = retrieval_front(app, threads=config.threads)
        server = DrainingServer(front, **structs.asdict(config.listen))
        server.stop_on_signals()
        passages = "?" if service.passages is None else f"{service.passages:,}"
        print(f"ready: {server.url}, {passages} passages, fingerprint {service.fingerprint}", flush=True)
        server.run()
    finally:
        service.close()
    ending = "stopped; everything accepted was answered" if server.drained else "stopped before all was answered"
    # the process that started this may have stopped reading
    with contextlib.suppress(BrokenPipeError):
        print(ending, flush=True)
    return 0
