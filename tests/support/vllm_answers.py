"""What the real vLLM answers to the requests of its dialect: recorded once in `vllm_answers.json`, and compared.

    python tests/support/vllm_answers.py URL      # records again

The server is one of `turngym serve policy FOLDER --engine vllm --device cpu --adapters 8 --top -1`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from turngym.agents.servers.server_connection import DrawRequest, Score
from turngym.agents.servers.vllm_dialect import VllmDialect
from turngym.core.protocols import Sampling

FILE = Path(__file__).with_suffix(".json")
KEPT = {"model_config": ("dtype", "logprobs_mode"), "parallel_config": ("world_size", "data_parallel_size")}
"""What is kept of a long description."""


def answers(url: str) -> dict[str, Any]:
    """Status and body of each kind of answer."""
    dialect, row = VllmDialect(full=True), np.arange(2, 6, dtype=np.int32)
    sampling = Sampling(max_new_tokens=2, temperature=0.7)
    draw = DrawRequest(where="", prompt=row, sampling=sampling, stream=(1,), count=2, vocabulary=448, shared=448)
    score = Score(where="", ids=row, start=0, positions=np.array([1]), vocabulary=448, top=2)
    generate = dialect.generate_path
    asked: dict[str, tuple[str, str, Any]] = {
        "version": ("GET", "/version", None),
        "models": ("GET", "/v1/models", None),
        "server_info": ("GET", "/server_info?config_format=json", None),
        "weight_info": ("GET", dialect.weights_path, None),
        "health": ("GET", dialect.ready_path, None),
        "no_route": ("GET", "/workers", None),
        "drawn": ("POST", generate, dialect.generate_body(draw, "r", None)),
        "scored": ("POST", generate, dialect.score_body(score, "r", None)),
        "no_model": ("POST", generate, dialect.generate_body(draw, "r", "turngym-none")),
        "refused": ("POST", generate, {"token_ids": [10**6], "sampling_params": {}}),
        "no_rows": ("POST", generate, {"token_ids": [0, 0], "sampling_params": {"prompt_logprob_token_ids": [[0]]}}),
        "no_adapter": ("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}),
        "tokens": dialect.text_calls(["go to"], [])[0],
        "text": dialect.text_calls([], [5])[0],
        "abort": dialect.abort_call("r"),
        "hold": dialect.hold_calls("wait")[0][0],
        "forget": dialect.hold_calls("wait")[1][0],
        "go_on": dialect.hold_calls("wait")[1][1],
        "named": ("POST", "/update_weight_version", {"new_version": "default"}),
    }
    recording: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        for name, (method, path, body) in asked.items():
            answer = client.request(method, path, json=body)
            content: Any = answer.text
            if "json" in answer.headers.get("content-type", ""):
                content = answer.json()
            if name == "server_info":
                config = content["vllm_config"]
                content = {"vllm_config": {part: {key: config[part][key] for key in KEPT[part]} for part in KEPT}}
            recording[name] = [answer.status_code, content]
    return recording


def shape(value: Any) -> Any:
    """What kind of thing `value` is: keys and types; of a list its first entry, of a table by ids one of its rows."""
    if isinstance(value, dict):
        if value and all(key.isdigit() for key in value):
            return {"id": shape(next(iter(value.values())))}
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(next((item for item in value if item is not None), None))]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def recorded() -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return recording


if __name__ == "__main__":
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers(sys.argv[1]).items())
    FILE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
