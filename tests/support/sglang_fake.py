"""A server that speaks SGLang's protocol, with a tiny language model made of hashes; every failure can be ordered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from servers import Answer, JsonServer

from turngym.agents.servers.server_connection import ClientLimits, DrawRequest, Score
from turngym.core.protocols import GenerateRequest, Sampling

VOCABULARY = 40
END = 1
QUICK = ClientLimits(deadline=20.0, backoff=0.01, connect_timeout=5.0)
"""A client's settings for servers on this machine."""
Reply = tuple[int, Any]


def logprobs(prefix: list[int], weights: str) -> Any:
    """Log-probabilities float64 [V] of the next id: they depend on the last two ids and on the weights' name."""
    entropy = [*prefix[-2:], len(prefix) % 7, *weights.encode()]
    logits = 2.0 * np.random.default_rng(entropy).standard_normal(VOCABULARY)
    return logits - np.log(np.exp(logits).sum())


def draw(prefix: list[int], weights: str, temperature: float, seed: int, logp: Any = None) -> tuple[int, float]:
    """The next id, which (seed, its place) fix, and its log-probability at the temperature."""
    logp = logprobs(prefix, weights) if logp is None else logp
    if temperature == 0:
        best = int(logp.argmax())
        return best, float(logp[best])
    scaled = logp / temperature
    scaled = scaled - np.log(np.exp(scaled).sum())
    noise = np.random.default_rng([seed, len(prefix)]).gumbel(size=len(logp))
    best = int((scaled + noise).argmax())
    return best, float(scaled[best])


def as_it_is(answer: Any) -> Any:
    return answer


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def numbers(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


class Words:
    """A tokenizer that encodes and decodes as the server does."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> str:
        return letters(list(token_ids))

    def encode(self, text: str, /, **kwargs: Any) -> list[int]:
        return numbers(text)


class SizedWords(Words):
    """The same with a size, as tokenizers have."""

    def __len__(self) -> int:
        return VOCABULARY


def ask(
    *prompt: int, most: int = 6, stream: tuple[int, ...] = (0,), session: str = "a", **more: Any
) -> GenerateRequest:
    """A request for at most `most` ids after `prompt`; `more` is for its sampling."""
    sampling = Sampling(max_new_tokens=most, **more)
    return GenerateRequest(session=session, prompt_ids=np.array(prompt, np.int32), sampling=sampling, stream=stream)


def draw_of(ids: Any, count: int, stream: tuple[int, ...] = (0,), sampling: Sampling | None = None) -> DrawRequest:
    """What a dialect is asked for `count` ids after `ids`."""
    return DrawRequest(
        where="here",
        prompt=np.asarray(ids, np.int32),
        sampling=sampling or Sampling(),
        stream=stream,
        count=count,
        vocabulary=VOCABULARY,
        shared=VOCABULARY,
    )


def score_of(ids: Any, start: int, positions: Any, **more: Any) -> Score:
    """What a dialect is asked about given ids."""
    row, places = np.asarray(ids, np.int32), np.asarray(positions)
    return Score(where="here", ids=row, start=start, positions=places, vocabulary=VOCABULARY, **more)


def tempered(logp: Any, temperature: float) -> Any:
    """log-softmax(logits / temperature) from log-softmax(logits)."""
    scaled = np.asarray(logp, np.float64) / temperature
    return scaled - np.log(np.exp(scaled).sum())


def biased(logp: Any, params: Any) -> Any:
    """Log-probabilities after the `logit_bias` of a request."""
    logits = np.array(logp, np.float64)
    for name, value in (params.get("logit_bias") or {}).items():
        logits[int(name)] += value
    return tempered(logits, 1.0)


@dataclass
class FakeServer:
    """`with FakeServer() as server:` listens on a free port. Whatever it was asked is in `asked`."""

    version: str = "0.5.23"
    kind: str = "Qwen3ForCausalLM"
    model: str = "/models/tiny"
    weights: str = "default"
    max_prompt: int = 60
    seeded: bool = True
    tempers: bool = False
    """Scores at `input_logprob_temperature`, as a later release may."""
    dtype: str = "float32"
    workers: list[str] | None = None
    """Urls behind it: it is a router then."""
    check: Callable[[str, Any], None] | None = None
    """Called with `request` or `answer` and its JSON, for every /generate."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    orders: list[Callable[[str, Any], Reply | None]] = field(default_factory=list)
    """Looked at for each request, first to last: a reply instead of the usual one."""
    edit: Callable[[Any], Any] = as_it_is
    """Changes answers of /generate on their way out."""
    token_seconds: float = 0.0
    """How long an id takes: requests that can be aborted or paused."""
    running: int = 0
    most: int = 0
    """Most requests of /generate under way at a time."""
    decode: Callable[[list[int]], str] = letters
    encode: Callable[[str], list[int]] = numbers
    port: int = 0

    def __enter__(self) -> FakeServer:
        self.lock = threading.Lock()
        self.aborted: set[str] = set()
        self.paused: str | None = None
        self.session = False
        self.hung = threading.Event()
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hung.set()
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen (again, on the same port)."""
        self.http = JsonServer(self.answer, self.port)
        self.port = self.http.port

    def stop(self) -> None:
        """Listen no more."""
        self.http.stop()

    def answer(self, path: str, body: Any, headers: Any) -> Answer | None:
        reply = self.reply(path, body)
        return None if reply is None else Answer(b"" if reply[1] is None else reply[1], reply[0])

    def of(self, path: str) -> list[Any]:
        """Bodies of the requests to `path`, in order."""
        return [body for asked, body in self.asked if asked == path]

    def reply(self, path: str, body: Any) -> Reply | None:
        self.asked.append((path, body))
        for order in list(self.orders):
            ordered = order(path, body)
            if ordered is not None:
                return None if ordered[0] == 0 else ordered
        if path == "/generate":
            return self.guarded(body)
        return getattr(self, "post" + path.replace("/", "_"), lambda _: (404, {"detail": "Not Found"}))(body)

    def logp(self, prefix: list[int], weights: str) -> Any:
        """Log-probabilities of the id after `prefix`; a test may give the server a model that computes them."""
        return logprobs(prefix, weights)

    def logps(self, ids: list[int], weights: str) -> list[Any]:
        """Those after every beginning of `ids` that is not all of it; a model computes them at once."""
        return [self.logp(ids[:place], weights) for place in range(1, len(ids))]

    # what the server says about itself

    def post_ready(self, body: Any) -> Reply:
        return 200, None

    def post_workers(self, body: Any) -> Reply:
        if self.workers is None:
            return 404, {"detail": "Not Found"}
        return 200, {"workers": [{"url": url} for url in self.workers]}

    def post_server_info(self, body: Any) -> Reply:
        limits = {"max_req_input_len": self.max_prompt, "enable_deterministic_inference": self.seeded}
        return 200, {"version": self.version, "tp_size": 1, "dp_size": 1, "dtype": self.dtype, **limits}

    def post_model_info(self, body: Any) -> Reply:
        names = {"model_path": self.model, "weight_version": self.weights, "architectures": [self.kind]}
        return 200, {"is_generation": True, **names}

    def post_tokenize(self, body: Any) -> Reply:
        return 200, {"tokens": [self.encode(text) for text in body["prompt"]], "count": []}

    def post_detokenize(self, body: Any) -> Reply:
        return 200, {"text": [self.decode(ids) for ids in body["tokens"]]}

    # requests

    def guarded(self, body: Any) -> Reply:
        if self.check is not None:
            self.check("request", body)
        if not 0 <= min(body["input_ids"]) <= max(body["input_ids"]) < VOCABULARY:
            # the real one ends, too
            self.stop()
            return 0, None
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            answer = self.edit(self.generate(body))
        finally:
            with self.lock:
                self.running -= 1
        if self.check is not None:
            self.check("answer", answer)
        return 200, answer

    def generate(self, body: Any) -> Any:
        prompt, params = list(body["input_ids"]), body["sampling_params"]
        output: list[int] = []
        pairs: list[list[Any]] = []
        marks: list[tuple[str, int]] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        while len(output) < params["max_new_tokens"]:
            while self.paused in ("retract", "in_place") and body["rid"] not in self.aborted:
                self.hung.wait(0.002)
            if self.token_seconds:
                self.hung.wait(self.token_seconds)
            if body["rid"] in self.aborted:
                finish = {"type": "abort", "message": "Abort in the middle"}
                break
            own = biased(self.logp(prompt + output, self.weights), params)
            token, logp = draw(prompt + output, self.weights, params["temperature"], params["sampling_seed"], own)
            if not marks or marks[-1][0] != self.weights:
                marks.append((self.weights, len(output)))
            output.append(token)
            pairs.append([logp, token, None])
            text = self.decode(output)
            if token in [END, *params["stop_token_ids"]]:
                finish = {"type": "stop", "matched": token}
                break
            if any(stop in text for stop in params["stop"]):
                finish = {"type": "stop", "matched": text}
                break
        marks = marks or [(self.weights, 0)]
        ends = [start for _, start in marks[1:]] + [len(output)]
        spans = [{"version": n, "start": s, "end": e} for (n, s), e in zip(marks, ends, strict=True)]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "weight_version": self.weights,
            "weight_versions": spans,
            "output_token_logprobs": pairs,
            **self.scores(body, prompt),
        }
        return {"text": self.decode(output), "output_ids": output, "meta_info": meta}

    def scores(self, body: Any, prompt: list[int]) -> dict[str, Any]:
        start = body.get("logprob_start_len")
        if start is None:
            return {"input_token_logprobs": []}
        heat = body.get("input_logprob_temperature", 1.0) if self.tempers else 1.0
        rows = [tempered(row, heat) for row in self.logps(prompt, self.weights)[start:]]
        # the real one does that
        ids = [0 if token == VOCABULARY - 1 else token for token in prompt]
        given = [[None, ids[start], None]]
        given += [[float(row[prompt[start + 1 + n]]), ids[start + 1 + n], None] for n, row in enumerate(rows)]
        scores: dict[str, Any] = {"input_token_logprobs": given}
        if self.tempers:
            scores["input_logprob_temperature"] = heat
        if top := body.get("top_logprobs_num"):
            best = [[[float(row[i]), int(i), None] for i in np.argsort(-row)[:top]] for row in rows]
            scores["input_top_logprobs"] = [None, *best]
        if chosen := body.get("token_ids_logprob"):
            scores["input_token_ids_logprobs"] = [None, *([[float(row[i]), i, None] for i in chosen] for row in rows)]
        return scores

    def post_abort_request(self, body: Any) -> Reply:
        self.aborted.add(body["rid"])
        return 200, None

    # weights

    def post_pause_generation(self, body: Any) -> Reply:
        self.paused = body["mode"]
        if body["mode"] == "abort":
            self.aborted |= {asked["rid"] for asked in self.of("/generate")}
        return 200, {"status": "ok"}

    def post_continue_generation(self, body: Any) -> Reply:
        self.paused = None
        return 200, {"status": "ok"}

    def post_update_weights_from_disk(self, body: Any) -> Reply:
        self.weights, self.model = body["weight_version"], body["model_path"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def post_update_weight_version(self, body: Any) -> Reply:
        self.weights = body["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.weights}

    def post_begin_weight_update(self, body: Any) -> Reply:
        self.session = True
        return 200, {"success": True, "message": "Success"}

    def post_end_weight_update(self, body: Any) -> Reply:
        self.session = False
        return 200, {"success": True, "message": "Success"}
