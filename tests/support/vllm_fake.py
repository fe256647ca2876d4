"""A server that speaks vLLM's dialect, with the language model of `sglang_fake`; its answers are recorded ones, filled.

`vllm_answers.json` has what the real server said (0.32.0 on a CPU); the job `vllm` compares the two.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import vllm_answers
from servers import Answer
from sglang_fake import END, VOCABULARY, FakeServer, Reply, biased, draw, tempered

RECORDED = vllm_answers.recorded()
GENERATE = "/inference/v1/generate"


def said(name: str) -> Any:
    """The body of a recorded answer."""
    return copy.deepcopy(RECORDED[name][1])


def refused(name: str, message: str) -> Reply:
    body = said(name)
    body["error"]["message"] = message
    return RECORDED[name][0], body


@dataclass
class FakeVllm(FakeServer):
    """`with FakeVllm() as server:`; what a `FakeServer` can be ordered to do, this one can, too."""

    version: str = "0.32.0"
    processed: bool = True
    top: int = -1
    """Most log-probabilities of a position; -1: all."""
    dev: bool = True
    """Whether it has the routes through which new weights come."""
    loads: bool = False
    """Whether it loads adapters."""
    scale_out: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    """Name to folder of those that it has."""
    computes: str | None = None
    """The weights that it computes with, whatever it says: a server that lies."""

    def answer(self, path: str, body: Any, headers: Any) -> Answer | None:
        """As the real one: texts, and answers without a body, have no type."""
        answer = super().answer(path, body, headers)
        if answer is not None and isinstance(answer.body, bytes):
            answer.headers = {"Content-Type": ""}
        return answer

    def reply(self, path: str, body: Any) -> Reply | None:
        self.asked.append((path, body))
        for order in list(self.orders):
            ordered = order(path, body)
            if ordered is not None:
                return None if ordered[0] == 0 else ordered
        if path == GENERATE and self.scale_out:
            return self.guarded(body)
        route = path.partition("?")[0].replace("/", "_")
        served = {
            "_health": lambda: said("health") or None,
            "_version": lambda: {**said("version"), "version": self.version},
            "_v1_models": self.models,
            "_tokenize": lambda: {**said("tokens"), "tokens": self.encode(body["prompt"])},
            "_detokenize": lambda: {**said("text"), "prompt": self.decode(body["tokens"])},
            "_inference_v1_abort_requests": lambda: self.aborted.update(body["request_ids"]),
        }
        if self.dev:
            served |= {
                "_server_info": self.described,
                "_weight_info": lambda: {**said("weight_info"), "weight_version": self.weights},
                "_pause": lambda: self.hold(path.partition("mode=")[2]),
                "_resume": lambda: self.hold(None),
                "_reset_prefix_cache": lambda: said("forget"),
                "_collective_rpc": lambda: {"results": [None]},
                "_update_weight_version": lambda: self.named(body["new_version"]),
                "_init_weight_transfer_engine": lambda: {"message": "Weight transfer initialized"},
                "_start_weight_update": lambda: {"message": "Weight update started"},
                "_update_weights": lambda: {"message": "Weights updated"},
                "_finish_weight_update": lambda: self.named(body["weight_version"]),
                "_shutdown_weight_transfer_engine": lambda: {"message": "Weight transfer shut down"},
            }
        if self.loads and route == "_v1_load_lora_adapter":
            if not body["lora_name"]:
                return RECORDED["no_adapter"][0], said("no_adapter")
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, b"Success: LoRA adapter added successfully."
        if self.loads and route == "_v1_unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return refused("no_model", "The lora adapter cannot be found.")
            return 200, b"Success: LoRA adapter removed successfully."
        if route not in served:
            return RECORDED["no_route"][0], said("no_route")
        return 200, served[route]()

    def models(self) -> Any:
        body = said("models")
        own = body["data"][0]
        own |= {"id": self.model, "root": self.model, "max_model_len": self.max_prompt + 4}
        for name, root in self.adapters.items():
            body["data"].append({**own, "id": name, "root": root, "parent": self.model})
        return body

    def described(self) -> Any:
        body = said("server_info")
        body["vllm_config"]["model_config"]["dtype"] = f"torch.{self.dtype}"
        return body

    def hold(self, mode: str | None) -> Any:
        self.paused = {"keep": "retract", "abort": "abort"}.get(mode or "")
        if mode == "abort":
            self.aborted |= {f"generate-tokens-{asked.get('request_id')}" for asked in self.of(GENERATE)}
        return said("hold" if mode else "go_on")

    def named(self, name: str) -> Any:
        self.weights = name
        return {**said("named"), "new_version": name}

    def guarded(self, body: Any) -> Reply:
        params, model = body["sampling_params"], body.get("model")
        if not 0 <= min(body["token_ids"]) <= max(body["token_ids"]) < VOCABULARY:
            return refused("refused", "Token id is out of vocabulary")
        if model is not None and model not in self.adapters:
            return refused("no_model", f"The model `{model}` does not exist.")
        if not 0 <= params.get("temperature", 1.0) <= 2:
            return refused("refused", "temperature must be in [0, 2]")
        if params.get("prompt_logprob_token_ids"):
            return RECORDED["no_rows"][0], said("no_rows")
        wanted = max(params.get("prompt_logprobs") or 0, params.get("logprobs") or 0)
        if -1 in (params.get("prompt_logprobs"), params.get("logprobs")):
            wanted = VOCABULARY
        if self.top >= 0 and wanted > self.top:
            text = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.top}"
            return refused("refused", text)
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return 200, self.edit(self.drawn(body, params, model))
        finally:
            with self.lock:
                self.running -= 1

    def drawn(self, body: Any, params: Any, model: str | None) -> Any:
        prompt, output, marks, entries = list(body["token_ids"]), list[int](), list[list[Any]](), list[Any]()
        finish, rid = "length", f"generate-tokens-{body['request_id']}" if "request_id" in body else ""
        heat = params.get("temperature", 1.0)
        while len(output) < params.get("max_tokens", 16):
            while self.paused and rid not in self.aborted:
                self.hung.wait(0.002)
            if self.token_seconds:
                self.hung.wait(self.token_seconds)
            if rid in self.aborted:
                finish = "abort"
                break
            own = self.computes or model or self.weights
            raw = self.logp(prompt + output, own)
            drawn = biased(raw, params)
            token, _ = draw(prompt + output, own, heat, params.get("seed") or 0, drawn)
            shown = (tempered(drawn, heat) if heat else drawn) if self.processed else raw
            top = range(VOCABULARY) if params.get("logprobs") == -1 else [token]
            first = [{"token_id": token, "logprob": float(shown[token]), "rank": 1, "top_logprobs": []}]
            first[0]["top_logprobs"] = [{"token_id": each, "logprob": float(shown[each]), "rank": 1} for each in top]
            entries += first
            if not marks or marks[-1][0] != self.weights:
                marks.append([self.weights, len(output)])
            output.append(token)
            if (token == END and not params.get("ignore_eos")) or token in params.get("stop_token_ids", []):
                finish = "stop"
                break
            if any(stop in self.decode(output) for stop in params.get("stop", [])):
                finish = "stop"
                break
        answer = said("drawn")
        ends = [start for _, start in marks[1:]] + [len(output)]
        spans = [{"version": n, "start": s, "end": e} for (n, s), e in zip(marks, ends, strict=bool(marks))]
        answer["choices"][0] |= {"finish_reason": finish, "token_ids": output, "weight_versions": spans}
        answer["choices"][0]["logprobs"] = None if params.get("logprobs") is None else {"content": entries}
        answer |= {"request_id": rid, "model": model or self.model}
        if (count := params.get("prompt_logprobs")) is not None:
            own = self.computes or model or self.weights
            rows = self.logps(prompt, own)
            answer["prompt_logprobs"] = [None, *(self.row(row, prompt[n + 1], count) for n, row in enumerate(rows))]
        return answer

    def row(self, logp: Any, own: int, count: int) -> Any:
        best = (-logp).argsort().tolist()
        chosen = [own, *(token for token in best[: VOCABULARY if count < 0 else count] if token != own)]
        return {
            str(token): {"logprob": float(logp[token]), "rank": best.index(token) + 1, "decoded_token": None}
            for token in chosen
        }
