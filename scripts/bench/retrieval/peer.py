"""An endpoint that does per request what Search-R1's does; the peer of `turngym bench retrieval`.

What it models, from Search-R1's retrieval_server.py: a synchronous endpoint, which FastAPI runs in a pool of 40
threads; each request encodes its own queries, calls `index.search` on them alone, looks the passages up one by one in
a list of rows, and pairs them with scores. faiss stays as it comes: all cores in each call, and a BLAS threshold that
no request reaches. What is not modeled: uvicorn and pydantic (both sides run in waitress and Flask, so that the ratio
is about batching and the threshold, not about web frameworks), the `datasets` library, whose rows cost more than those
of a list, and a neural encoder: both sides use the same hashing encoder.

Run as a process of its own: `python -m turngym.scripts.bench.retrieval.peer INDEX_FOLDER [THREADS]`; prints
`ready: URL`. THREADS are faiss' threads in each request: with all cores in each of 40, they wait for each other, so
somebody who tunes that server sets 1.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

THREADS = 40
"""Of FastAPI's pool for endpoints that are plain functions."""


def make_app(folder: Path, threads: int = 0) -> Any:
    """The endpoint over an index folder of ours: the same faiss file, passages and encoder.

    `threads`: of faiss in each request; 0 leaves them as they come.
    """
    import faiss
    from flask import Flask, Response, request

    from turngym.retrieval.corpus import PassageStore
    from turngym.retrieval.encoders import HashingEncoder
    from turngym.retrieval.index import ENCODER, FAISS, PASSAGES

    store = PassageStore(folder / PASSAGES)
    corpus = [{"id": passage.id, "contents": passage.contents} for passage in store]
    encoder = HashingEncoder.load(folder / ENCODER)
    index = faiss.read_index(str(folder / FAISS))
    app = Flask("peer", root_path=str(folder), instance_path=str(folder.resolve()), static_folder=None)

    @app.post("/retrieve")
    def retrieve() -> Response:
        if threads:
            # a setting of the calling thread, of which the pool has many
            faiss.omp_set_num_threads(threads)
        asked = json.loads(request.get_data())
        vectors = encoder.encode_queries(asked["queries"])
        scores, rows = index.search(vectors, asked["topk"] or 3)
        result = [
            [{"document": corpus[row], "score": score} for row, score in zip(*found, strict=True)]
            for found in zip(rows.tolist(), scores.tolist(), strict=True)
        ]
        return Response(json.dumps({"result": result}), mimetype="application/json")

    return app


def main() -> int:
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    app = make_app(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    server = create_server(
        app, host="127.0.0.1", port=0, threads=THREADS, connection_limit=1000, asyncore_use_poll=True
    )
    print(f"ready: http://127.0.0.1:{server.effective_port}/retrieve", flush=True)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
