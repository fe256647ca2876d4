"""How vLLM is spoken to: /inference/v1/generate, and new weights from a folder, as LoRA adapters, or by broadcast.

Ids go in and out there, with the weights of each; `--enable-scale-out` opens the route. What the server computes is
tried on connecting: the log-probabilities of its responses are those that drew them with
`--logprobs-mode processed_logprobs`, else those of temperature 1.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.servers.server_connection import (
    NEUTRAL,
    OWN_NAME,
    BadAnswer,
    Call,
    Connection,
    DrawRequest,
    GeneratedPart,
    NotThere,
    Score,
    ServerDown,
    ServerError,
    ServerInfo,
    SyncError,
    architecture,
    check_part,
    check_scores,
    count_in,
    fields_of_other_types,
    model_config,
    seed_of,
)
from turngym.agents.servers.server_options import Busy
from turngym.core.http_client import SMALL_ANSWER, TOKEN_BYTES
from turngym.core.memory_mapped import array_of_bytes
from turngym.core.redaction import excerpt

ENTRY_BYTES = 128
"""Most bytes of JSON for one log-probability with its id and rank; about 75 are usual."""
NO_LOGPROB = -9999.0
"""What the server says for a log-probability of minus infinity or NaN."""
ID_PREFIX = "generate-tokens-"
"""What the server puts before the id of a request."""
SLOW = 60.0
"""Seconds that its first answers may take longer than others: it looks at the machine for /server_info."""
HOLD: Mapping[Busy, str] = {"wait": "wait", "retract": "keep", "abort": "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDialect:
    """Implements `ServerDialect`."""

    processed: bool = True
    """Whether responses come with the log-probabilities that drew them, at any temperature."""
    full: bool = False
    """Whether it gives the log-probabilities of the whole vocabulary (--max-logprobs -1)."""
    rows: bool = False
    """Whether the server gives log-probabilities of chosen ids (`prompt_logprob_token_ids`); on a CPU it does not."""

    name: ClassVar[str] = "vLLM"
    supported: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 32), (0, 34))
    tried: ClassVar[str] = "vllm==0.32.0"
    generate_path: ClassVar[str] = "/inference/v1/generate"
    ready_path: ClassVar[str] = "/health"
    weights_path: ClassVar[str] = "/weight_info"
    block: ClassVar[int] = 1 << 30  # the server computes the whole row for each request

    async def read_info(self, connection: Connection, patience: float) -> ServerInfo:
        async def ask(method: str, path: str, body: Any = None) -> Any:
            """The answer; an error where the server has no such route or refuses."""
            try:
                return await connection.request(method, path, body, timeout=patience + SLOW, limit=4 * SMALL_ANSWER)
            except (ServerDown, BadAnswer):
                raise
            except ServerError as error:
                return error

        async def generate(ids: list[int], **params: Any) -> Any:
            reply = await ask("POST", self.generate_path, {"token_ids": ids, "sampling_params": params})
            if isinstance(reply, NotThere):
                raise ServerError(f"{connection.url} has no {self.generate_path}: start vLLM with --enable-scale-out")
            return reply

        where = f"{connection.url} on connecting"
        # log-probabilities of ids at the highest temperature, where those of temperature 1 would be quite others
        drawn = await generate([0], max_tokens=16, temperature=2.0, seed=0, logprobs=0, ignore_eos=True)
        with fields_of_other_types(where):
            ids, hot, _ = _response(drawn)
            prompt = [0, *ids.tolist()]
            scored = await generate(prompt, max_tokens=1, prompt_logprobs=0)
            cold = [table[token] for token, table in zip(prompt[1:], _tables(scored), strict=True)]
            check_scores(np.array([hot, cold], np.float32), where)
            processed = bool(np.abs(np.subtract(hot, cold)).max() > 0.3)
        dialect = VllmDialect(
            processed=processed,
            full=isinstance(await generate([0, 0], max_tokens=1, prompt_logprobs=-1), Mapping),
            rows=isinstance(await generate([0, 0], max_tokens=1, prompt_logprob_token_ids=[[0]]), Mapping),
        )
        version, models = await ask("GET", "/version"), await ask("GET", "/v1/models")
        info, weights = await ask("GET", "/server_info?config_format=json"), await ask("GET", self.weights_path)
        lora = await ask("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        with fields_of_other_types(where):
            served = next((model for model in models["data"] if model.get("parent") is None), None)
            if served is None:
                raise BadAnswer(f"{where}: /v1/models lists no model of the server's own: {excerpt(models, 200)}")
            config = info["vllm_config"] if isinstance(info, Mapping) else {}
            parallel = config.get("parallel_config", {})
            return ServerInfo(
                url=connection.url,
                dialect=dialect,
                version=str(version["version"]),
                model=str(served["root"]),
                kind=architecture(model_config(str(served["root"]))),
                weights=str(weights["weight_version"]) if isinstance(weights, Mapping) else "default",
                max_prompt=count_in(served, "max_model_len", where),
                max_length=count_in(served, "max_model_len", where),
                ranks=count_in(parallel, "world_size", where, 1),
                replicas=count_in(parallel, "data_parallel_size", where, 1),
                dtype=str(config.get("model_config", {}).get("dtype", "auto")).removeprefix("torch."),
                missing="" if isinstance(weights, Mapping) else "VLLM_SERVER_DEV_MODE=1",
                adapters=not isinstance(lora, NotThere),
            )

    def generate_body(self, ask: DrawRequest, rid: str, model: str | None) -> dict[str, Any]:
        temperature, raw = ask.sampling.temperature, self._raw(ask)
        if raw and not self.full:
            drawn_at = f"{ask.shared} of {ask.vocabulary} ids" if ask.bias else f"temperature {temperature:g}"
            raise ServerError(
                f"{ask.where}: this vLLM gives responses of {drawn_at} the log-probabilities of temperature 1 and all "
                "ids: start it with --logprobs-mode processed_logprobs (or with --max-logprobs -1, and they are "
                "computed)"
            )
        params: dict[str, Any] = {
            "max_tokens": ask.count,
            "temperature": temperature,
            # each request has a generator of its own: the next part of a response must not get the same numbers again
            "seed": seed_of((*ask.stream, ask.drawn) if ask.drawn else ask.stream),
            "logprobs": -1 if raw else 0,
            **NEUTRAL,
            "top_k": 0,
            "min_tokens": 0,
            "watermarking": False,
            **({"logit_bias": ask.bias} if ask.bias else {}),
            "stop_token_ids": list(ask.sampling.stop_ids),
            "stop": list(ask.sampling.stop_text),
        }
        return {"request_id": rid, "model": model, "token_ids": ask.prompt.tolist(), "sampling_params": params}

    def read_generation(self, answer: Any, ask: DrawRequest) -> GeneratedPart:
        with fields_of_other_types(ask.where):
            scored, logprobs, content = _response(answer)
            if self._raw(ask):
                for index, entry in enumerate(content):
                    pairs = ((int(top["token_id"]), _logprob(top)) for top in entry["top_logprobs"])
                    # they are listed as before the bias
                    table = {token: logp for token, logp in pairs if token < ask.shared}
                    # at temperature 0 they are those of 1
                    _, logp = _tempered(table, ask.shared, ask.sampling.temperature or 1.0)
                    logprobs[index] = logp[list(table).index(int(scored[index]))]
            choice = answer["choices"][0]
            part = GeneratedPart(
                ids=np.asarray(choice.get("token_ids") or [], np.int32),
                logprobs=logprobs,
                finish=str(choice.get("finish_reason")),
                spans=_spans(answer, len(scored)),
            )
        return check_part(part, scored, ask)

    def score_body(self, ask: Score, rid: str, model: str | None) -> dict[str, Any]:
        # detokenize: nobody reads the one id that must be drawn
        params: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": ask.top, "detokenize": False}
        if self._dense(ask):
            params["prompt_logprobs"] = -1
        elif ask.chosen is not None:
            rows = np.zeros((len(ask.ids) - 1 - ask.start, ask.chosen.shape[1]), np.int64)
            rows[ask.positions - ask.start - 1] = ask.chosen
            params |= {"prompt_logprob_token_ids": rows.tolist(), "prompt_logprob_start": ask.start}
        return {"request_id": rid, "model": model, "token_ids": ask.ids.tolist(), "sampling_params": params}

    def read_scores(self, answer: Any, ask: Score) -> tuple[NDArray[np.float32], str]:
        with fields_of_other_types(ask.where):
            logprobs, tables = np.full(len(ask.ids) - ask.start, np.nan, np.float32), self._read(answer, ask)
            if len(tables) != len(ask.ids) - 1:
                raise BadAnswer(f"{ask.where}: {len(tables)} log-probabilities came for {len(ask.ids) - 1} ids")
            for position in range(ask.start + 1, len(ask.ids)):
                listed, logp = tables[position - 1]
                matches = np.flatnonzero(listed == ask.ids[position])
                if not len(matches):
                    raise BadAnswer(
                        f"{ask.where}: no log-probability of id {ask.ids[position]} came for position {position}"
                    )
                logprobs[position - ask.start] = logp[matches[0]]
            weights = _spans(answer, 0)[0][0]
        check_scores(logprobs[1:], ask.where)
        return logprobs, weights

    def read_top(self, answer: Any, ask: Score) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        shape = (len(ask.positions), ask.top)
        ids, logp = np.empty(shape, np.int32), np.empty(shape, np.float32)
        with fields_of_other_types(ask.where):
            tables = self._read(answer, ask)
            for line, position in enumerate(ask.positions):
                listed, table_logp = tables[int(position) - 1]
                if len(listed) < ask.top:
                    raise BadAnswer(
                        f"{ask.where}: {len(listed)} of {ask.top} log-probabilities came for position {position}"
                    )
                # the row's own id is there, too, whether it is among the most likely ones or not
                best = np.argsort(-table_logp, kind="stable")[: ask.top]
                ids[line], logp[line] = listed[best], table_logp[best]
        return ids, check_scores(logp, ask.where)

    def read_chosen(self, answer: Any, ask: Score) -> NDArray[np.float32]:
        assert ask.chosen is not None
        with fields_of_other_types(ask.where):
            if self._dense(ask):
                tables = self._read(answer, ask)
                logp = np.empty(ask.chosen.shape, np.float32)
                for line, position in enumerate(ask.positions):
                    listed, table_logp = tables[int(position) - 1]
                    order = np.argsort(listed)
                    logp[line] = table_logp[order][np.searchsorted(listed[order], ask.chosen[line])]
            else:
                text = answer["prompt_token_id_logprobs"]
                rows = array_of_bytes(base64.b64decode(text, validate=True))
                if rows.shape != (len(ask.ids) - 1 - ask.start, ask.chosen.shape[1]):
                    raise BadAnswer(f"{ask.where}: log-probabilities of shape {rows.shape} came")
                logp = rows[ask.positions - ask.start - 1].astype(np.float32)
        return check_scores(logp, ask.where)

    def answer_limit(self, ask: DrawRequest | Score) -> int:
        if isinstance(ask, DrawRequest):
            per_id = ENTRY_BYTES * ask.vocabulary if self._raw(ask) else 0
            return SMALL_ANSWER + (TOKEN_BYTES + per_id) * ask.count
        chosen = 0 if ask.chosen is None else ask.chosen.shape[1]
        per_id = ask.vocabulary if self._dense(ask) else 1 + ask.top + chosen
        return SMALL_ANSWER + ENTRY_BYTES * len(ask.ids) * per_id

    def abort_call(self, rid: str) -> Call:
        return "POST", "/inference/v1/abort_requests", {"request_ids": [ID_PREFIX + rid]}

    def text_calls(self, texts: Sequence[str], ids: Sequence[int]) -> list[Call]:
        encoded: list[Call] = [("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}) for text in texts]
        return encoded + [("POST", "/detokenize", {"tokens": [token]}) for token in ids]

    def read_texts(self, answers: Sequence[Any]) -> list[Any]:
        return [answer.get("tokens", answer.get("prompt")) for answer in answers if isinstance(answer, Mapping)]

    def hold_calls(self, busy: Busy) -> tuple[list[Call], list[Call]]:
        # keys and values of the former weights go, those of requests that were held included
        forget = ("POST", "/reset_prefix_cache?reset_running_requests=true", None)
        return [("POST", f"/pause?mode={HOLD[busy]}", None)], [forget, ("POST", "/resume", None)]

    def folder_calls(self, folder: str, name: str) -> list[Call]:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        return [("POST", "/collective_rpc", reload), ("POST", "/update_weight_version", {"new_version": name})]

    def adapter_calls(self, folder: str, name: str) -> tuple[Call, Call]:
        load = {"lora_name": name, "lora_path": folder}
        return ("POST", "/v1/load_lora_adapter", load), ("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sleep_calls(self) -> tuple[Call, Call]:
        return ("POST", "/sleep?level=1", None), ("POST", "/wake_up", None)

    def group(self, backend: str) -> type[VllmGroup]:
        if backend != "nccl":
            raise SyncError(f"--weight-sync {backend}: vLLM takes weights from the disk or by nccl")
        return VllmGroup

    def _raw(self, ask: DrawRequest) -> bool:
        """Whether a response comes with other log-probabilities than those that drew it."""
        return not self.processed and (bool(ask.bias) or ask.sampling.temperature not in (0.0, 1.0))

    def _dense(self, ask: Score) -> bool:
        """Whether the whole vocabulary is asked for: to normalize at another temperature, or to look ids up in it."""
        needed = ask.temperature != 1.0 or (ask.chosen is not None and not self.rows)
        if needed and not self.full:
            problem = f"scores at temperature 1, not at {ask.temperature:g}"
            if ask.temperature == 1.0:
                problem = "does not score chosen ids (it has not vLLM's model runner V2)"
            raise ServerError(
                f"{ask.where}: this vLLM {problem}: start it with --max-logprobs -1, which gives the whole vocabulary, "
                "or load the teacher into this process with --teacher, without --teacher-server"
            )
        return needed

    def _read(self, answer: Any, ask: Score) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Ids and log-probabilities that came for each position from 1 on."""
        tables = []
        for table in _tables(answer):
            if self._dense(ask):
                tables.append(_tempered(table, ask.vocabulary, ask.temperature))
            else:
                tables.append((np.array(list(table)), np.array(list(table.values()))))
        return tables


class VllmGroup:
    """Implements `WeightGroup` by vLLM's own communicator, which its package brings: it must be installed here, too."""

    begin: ClassVar[Call] = ("POST", "/start_weight_update", None)

    def __init__(self, address: str, port: int, world: int, name: str, timeout: float) -> None:
        """The signature is that of `WeightGroup`; `name` and `timeout` are not used."""
        try:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init
        except ImportError as error:
            raise SyncError(
                f"--weight-sync nccl to vLLM needs its package in this environment ({error}); valid without: disk"
            ) from error
        try:
            self._group = trainer_init({"master_address": address, "master_port": port, "world_size": world})
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"no nccl group of {world} members at {address}:{port}: {error}") from error

    @staticmethod
    def join(address: str, port: int, world: int, name: str, offset: int) -> Call:
        """The signature is that of `WeightGroup.join`; `name` is not used."""
        info = {"master_address": address, "master_port": port, "rank_offset": offset, "world_size": world}
        return "POST", "/init_weight_transfer_engine", {"init_info": info}

    @staticmethod
    def bucket(weights: Sequence[tuple[str, Any]], name: str, version: str | None) -> Call:
        info = {
            "names": [key for key, _ in weights],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
            "shapes": [list(tensor.shape) for _, tensor in weights],
        }
        return "POST", "/update_weights", {"update_info": info}

    @staticmethod
    def end(version: str) -> Call:
        return "POST", "/finish_weight_update", {"weight_version": version}

    @staticmethod
    def leave(name: str) -> Call:
        return "POST", "/shutdown_weight_transfer_engine", None

    def send(self, tensor: Any) -> Callable[[], bool]:
        import torch

        self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        event: Any = torch.cuda.Event()
        event.record()
        done: Callable[[], bool] = event.query
        return done

    def close(self) -> None:
        self._group.destroy()


def _response(answer: Any) -> tuple[NDArray[np.int32], NDArray[np.float32], list[Any]]:
    """Ids that log-probabilities are said of, the log-probabilities, and the entries that say so."""
    if isinstance(answer, ServerError):
        raise answer
    content = (answer["choices"][0]["logprobs"] or {}).get("content") or []
    logprobs = np.array([_logprob(entry) for entry in content], np.float32)
    return np.array([entry["token_id"] for entry in content], np.int32), logprobs, content


def _tables(answer: Any) -> list[dict[int, float]]:
    """Id to log-probability at each position of the prompt from 1 on."""
    if isinstance(answer, ServerError):
        raise answer
    first, *rows = answer["prompt_logprobs"]
    if first is not None:
        raise BadAnswer(f"position 0 has log-probabilities: {excerpt(first, 100)}")
    return [{int(token): _logprob(entry) for token, entry in row.items()} for row in rows]


def _logprob(entry: Mapping[str, Any]) -> float:
    """Minus infinity where the server knows none, which no id that is drawn or scored may have."""
    value = float(entry["logprob"])
    return value if value > NO_LOGPROB else -np.inf


def _tempered(
    table: Mapping[int, float], vocabulary: int, temperature: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids and log-softmax(logits / temperature) of a whole vocabulary."""
    if len(table) < vocabulary:
        raise BadAnswer(f"{len(table)} log-probabilities came for {vocabulary} ids")
    logp = np.array(list(table.values())) / temperature
    highest = logp.max()
    # a row without any number becomes NaN, which is refused where it is read
    with np.errstate(invalid="ignore"):
        return np.array(list(table)), logp - (highest + np.log(np.exp(logp - highest).sum()))


def _spans(answer: Any, count: int) -> tuple[tuple[str, int, int], ...]:
    """Weights that drew `count` ids: the adapter that the answer names, else the server's own weights at the time."""
    if str(answer.get("model")).startswith(OWN_NAME):
        return ((str(answer["model"]), 0, count),)
    versions = answer["choices"][0].get("weight_versions") or []
    spans = tuple((str(entry["version"]), int(entry["start"]), int(entry["end"])) for entry in versions)
    return spans or (("None", 0, count),)
