"""The stand-in for an SGLang server with a real model behind it: it draws, scores and takes new weights from a folder.

`python tests/support/sglang_model.py FOLDER [PORT]` serves one until its standard input ends.
"""

from __future__ import annotations

import sys
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang_fake import FakeServer, Reply
from transformers import AutoTokenizer

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.models import load_model
from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.rendering.stop_text import StopText
from turngym.core.protocols import GenerateRequest, Generation, Sampling


@dataclass
class ModelServer(FakeServer):
    """`with ModelServer(folder=...) as server:`; the model is that of `folder`, and so is its vocabulary."""

    folder: Path = Path()
    names: list[str] = field(default_factory=list)
    """Of the weights so far; the engine's version is the place in here."""

    def __post_init__(self) -> None:
        self.model, self.names = str(self.folder), [self.weights]
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.network = load_model(self.folder)
        self.engine = LocalEngine(self.network, tokenizer=self.tokenizer)
        self.max_prompt = self.engine.max_length - 4
        self.queue = EngineQueue(self.engine, stops=StopText(self.tokenizer), max_waiting=1000)
        self.held = 0
        self.decode = lambda ids: str(
            self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        self.encode = lambda text: list(self.tokenizer.encode(text, add_special_tokens=False))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.queue.close()

    def guarded(self, body: Any) -> Reply:
        return 200, self.generate(body)

    def generate(self, body: Any) -> Any:
        prompt, params = list(body["input_ids"]), body["sampling_params"]
        drawn = self.draw(body["rid"], prompt, params) if params["max_new_tokens"] else None
        ids = [] if drawn is None else drawn.ids.tolist()
        spans = [] if drawn is None else drawn.version_spans or ((drawn.policy_version, 0, len(ids)),)
        named = [{"version": self.names[version], "start": start, "end": end} for version, start, end in spans]
        last: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        if drawn is not None and drawn.finish != "length":
            last = {"type": "abort", "message": "aborted"} if drawn.finish == "aborted" else {"type": "stop"}
        meta = {
            "id": body["rid"],
            "finish_reason": last,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weights,
            "weight_versions": named or [{"version": self.weights, "start": 0, "end": 0}],
            "output_token_logprobs": []
            if drawn is None
            else [[logp, token, None] for token, logp in zip(ids, drawn.logprobs.tolist(), strict=True)],
            **self.scores(body, prompt),
        }
        return {"text": self.decode(ids), "output_ids": ids, "meta_info": meta}

    def draw(self, rid: str, prompt: list[int], params: Any) -> Generation:
        sampling = Sampling(
            max_new_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            stop_ids=tuple(params["stop_token_ids"]),
            stop_text=tuple(params["stop"]),
        )
        request = GenerateRequest(
            session=rid,
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling,
            stream=(params["sampling_seed"], len(prompt)),
        )
        # its bias is for the rows that pad a head
        self.engine._model.drawn = min(map(int, params.get("logit_bias") or ()), default=None)
        pending = self.queue.submit(request)
        try:
            return pending.answer.result()
        except CancelledError:
            raise RuntimeError("the request was dropped") from None
        finally:
            self.queue.release(rid)

    def scores(self, body: Any, prompt: list[int]) -> dict[str, Any]:
        start = body.get("logprob_start_len")
        if start is None:
            return {"input_token_logprobs": []}
        with torch.inference_mode():
            logp = self.network(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        rows = [float(logp[place - 1, prompt[place]]) for place in range(start + 1, len(prompt))]
        given = [[None, prompt[start], None]]
        return {"input_token_logprobs": given + [[row, prompt[start + 1 + n], None] for n, row in enumerate(rows)]}

    def post_pause_generation(self, body: Any) -> Reply:
        self.held += 1
        self.queue.pause(None if body["mode"] == "abort" else 0.0)
        return 200, {"status": "ok"}

    def post_continue_generation(self, body: Any) -> Reply:
        self.held -= 1
        self.queue.resume()
        return 200, {"status": "ok"}

    def post_update_weights_from_disk(self, body: Any) -> Reply:
        new = load_model(body["model_path"])
        self.queue.pause()
        try:
            self.network.load_state_dict(new.state_dict())
            self.names.append(body["weight_version"])
            self.weights, self.model = body["weight_version"], body["model_path"]
            self.engine.weights_changed(len(self.names) - 1)
        finally:
            self.queue.resume()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ModelServer(folder=Path(sys.argv[1]), port=int("".join(sys.argv[2:]) or 0)) as server:
        print(f"ready: {server.url}", flush=True)
        sys.stdin.read()
