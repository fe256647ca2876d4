"""How SGLang is spoken to: /generate, its weights from a folder or by broadcast.

Log-probabilities of responses are those at the sampling temperature, those of given ids at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from turngym.agents.servers.server_connection import (
    NEUTRAL,
    BadAnswer,
    Call,
    Connection,
    DrawRequest,
    GeneratedPart,
    Score,
    ServerError,
    ServerInfo,
    SyncError,
    architecture,
    check_part,
    check_scores,
    count_in,
    fields_of_other_types,
    seed_of,
)
from turngym.agents.servers.server_options import Busy
from turngym.core.http_client import SMALL_ANSWER, TOKEN_BYTES
from turngym.core.redaction import excerpt

SCORE_TEMPERATURE = "input_logprob_temperature"
"""A field of requests for scores at a temperature, and of the answers' `meta_info` (sglang, pull request 36213)."""
SCORE_BYTES = 64
"""Most bytes of JSON for one log-probability with its id; about 35 are usual."""
HEADROOM = 4
"""SGLang limits prompts to 5 ids less than prompt and response together, which is 1 less than the context."""


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """Implements `ServerDialect`. Earlier releases update weights in another way."""

    name: ClassVar[str] = "SGLang"
    supported: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 5, 21), (0, 6))
    tried: ClassVar[str] = "sglang==0.5.23"
    generate_path: ClassVar[str] = "/generate"
    ready_path: ClassVar[str] = "/ready"
    weights_path: ClassVar[str] = "/model_info"
    block: ClassVar[int] = 16  # a request names its ids once for all of its positions

    async def read_info(self, connection: Connection, patience: float) -> ServerInfo:
        info = await connection.get_until("/server_info", patience)
        model = await connection.get_until("/model_info", patience)
        where = f"{connection.url} on connecting"
        with fields_of_other_types(where):
            if not isinstance(model, dict):
                raise ServerError(f"{connection.url} is not an SGLang server: /model_info says {excerpt(model, 200)}")
            if not model.get("is_generation", True):
                raise ServerError(f"{connection.url} serves {model.get('model_path')!r}, which does not generate")
            if info.get("skip_tokenizer_init"):
                raise ServerError(
                    f"{connection.url} runs with --skip-tokenizer-init: it cannot stop at texts; leave that out"
                )
            if info.get("max_req_input_len") is None:
                raise ServerError(
                    f"{connection.url} does not say max_req_input_len; SGLang {excerpt(info['version'], 80)} is not "
                    "supported"
                )
            limit = count_in(info, "max_req_input_len", where)
            return ServerInfo(
                url=connection.url,
                dialect=self,
                version=str(info["version"]),
                model=str(model.get("model_path", info.get("model_path", ""))),
                kind=architecture(model),
                weights=str(model.get("weight_version")),
                max_prompt=limit,
                max_length=limit + HEADROOM,
                seeded=bool(info.get("enable_deterministic_inference")),
                ranks=count_in(info, "tp_size", where, 1) * count_in(info, "pp_size", where, 1),
                replicas=count_in(info, "dp_size", where, 1),
                dtype=str(info.get("dtype", "auto")),
            )

    def generate_body(self, ask: DrawRequest, rid: str, model: str | None) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": ask.count,
            "temperature": ask.sampling.temperature,
            # the server samples the nth id of a sequence with (seed, n): one seed for all parts of a response
            "sampling_seed": seed_of(ask.stream),
            **NEUTRAL,
            "top_k": -1,
            "min_new_tokens": 0,
            **({"logit_bias": ask.bias} if ask.bias else {}),
            "stop_token_ids": list(ask.sampling.stop_ids),
            "stop": list(ask.sampling.stop_text),
        }
        return {"rid": rid, "input_ids": ask.prompt.tolist(), "sampling_params": params, "return_logprob": True}

    def read_generation(self, answer: Any, ask: DrawRequest) -> GeneratedPart:
        with fields_of_other_types(ask.where):
            meta = _meta(answer, ask.where)
            ids = np.asarray(answer.get("output_ids") or [], np.int32)
            logprobs, scored = _pairs(meta.get("output_token_logprobs") or [])
            reason = meta.get("finish_reason")
            if not isinstance(reason, Mapping):
                raise BadAnswer(f"{ask.where}: finish_reason is {reason!r}; it must be of type stop, length or abort")
            entries = meta.get("weight_versions") or []
            spans = tuple((str(entry["version"]), int(entry["start"]), int(entry["end"])) for entry in entries)
            status = reason.get("status_code")
            part = GeneratedPart(
                ids=ids,
                logprobs=logprobs,
                finish=str(reason.get("type")),
                spans=spans or ((str(meta.get("weight_version")), 0, len(ids)),),
                cached=int(meta.get("cached_tokens") or 0),
                reason=str(reason.get("message") or ""),
                status=None if status is None else int(status),
            )
        return check_part(part, scored, ask)

    def score_body(self, ask: Score, rid: str, model: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": ask.ids.tolist(),
            # this temperature does not change the scores of given ids
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": ask.start,
        }
        if ask.temperature != 1.0:
            body[SCORE_TEMPERATURE] = ask.temperature  # a server that does not know it ignores it, see `_scored`
        if ask.top:
            body["top_logprobs_num"] = ask.top
        if ask.chosen is not None:
            body["token_ids_logprob"] = np.unique(ask.chosen).tolist()
        return body

    def read_scores(self, answer: Any, ask: Score) -> tuple[NDArray[np.float32], str]:
        with fields_of_other_types(ask.where):
            meta = _scored(answer, ask)
            logprobs, scored = _pairs(meta.get("input_token_logprobs") or [])
        wanted = ask.ids[ask.start :]
        if len(scored) != len(wanted):
            raise BadAnswer(f"{ask.where}: {len(scored)} log-probabilities came for {len(wanted)} ids")
        # the last id of the vocabulary is reported as id 0, with the right log-probability
        wrong = (scored != wanted) & ((scored != 0) | (wanted != ask.vocabulary - 1))
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise BadAnswer(f"{ask.where}: row {first} is of id {scored[first]}; {wanted[first]} was asked for")
        check_scores(logprobs[1:], ask.where)
        return logprobs, str(meta.get("weight_version"))

    def read_top(self, answer: Any, ask: Score) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return _rows(answer, "input_top_logprobs", ask, ask.top)

    def read_chosen(self, answer: Any, ask: Score) -> NDArray[np.float32]:
        assert ask.chosen is not None
        union = np.unique(ask.chosen)
        scored, logp = _rows(answer, "input_token_ids_logprobs", ask, len(union))
        if not np.array_equal(scored, np.broadcast_to(union, scored.shape)):
            raise BadAnswer(f"{ask.where}: the server answered other ids than it was asked for")
        chosen: NDArray[np.float32] = np.take_along_axis(logp, np.searchsorted(union, ask.chosen), axis=1)
        return chosen

    def answer_limit(self, ask: DrawRequest | Score) -> int:
        if isinstance(ask, DrawRequest):
            return SMALL_ANSWER + 2 * SCORE_BYTES * len(ask.prompt) + TOKEN_BYTES * ask.count
        per_id = 2 + ask.top + (0 if ask.chosen is None else ask.chosen.size)
        return SMALL_ANSWER + SCORE_BYTES * len(ask.ids) * per_id

    def abort_call(self, rid: str) -> Call:
        return "POST", "/abort_request", {"rid": rid}

    def text_calls(self, texts: Sequence[str], ids: Sequence[int]) -> list[Call]:
        if texts:
            return [("POST", "/tokenize", {"prompt": list(texts), "add_special_tokens": False})]
        return [("POST", "/detokenize", {"tokens": [[token] for token in ids], "skip_special_tokens": False})]

    def read_texts(self, answers: Sequence[Any]) -> list[Any]:
        (answer,) = answers
        rows = (answer.get("tokens") or answer.get("text")) if isinstance(answer, Mapping) else None
        return list(rows) if isinstance(rows, list) else []

    def hold_calls(self, busy: Busy) -> tuple[list[Call], list[Call]]:
        if busy == "wait":  # the server itself lets requests end before it takes new weights
            return [], []
        return [("POST", "/pause_generation", {"mode": busy})], [("POST", "/continue_generation", {})]

    def folder_calls(self, folder: str, name: str) -> list[Call]:
        body = {"model_path": folder, "weight_version": name, "flush_cache": True, "abort_all_requests": False}
        return [("POST", "/update_weights_from_disk", body)]

    def adapter_calls(self, folder: str, name: str) -> tuple[Call, Call]:
        raise NotImplementedError  # `adapters` is never said of these servers

    def sleep_calls(self) -> tuple[Call, Call]:
        return ("POST", "/release_memory_occupation", {}), ("POST", "/resume_memory_occupation", {})

    def group(self, backend: str) -> type[TorchGroup]:
        return NcclGroup if backend == "nccl" else TorchGroup


class TorchGroup:
    """Implements `WeightGroup` over gloo.

    SGLang's workers make a group of torch beside their own. torch.distributed.init_process_group would make it the
    default group here, which the trainer needs for itself; so this is the backend alone, at the keys of the store
    under which a group of that name would look for it.
    """

    backend: ClassVar[str] = "gloo"
    begin: ClassVar[Call] = ("POST", "/begin_weight_update", {})

    def __init__(self, address: str, port: int, world: int, name: str, timeout: float) -> None:
        """The signature is that of `WeightGroup`."""
        import torch.distributed as dist

        limit = timedelta(seconds=timeout)
        device = "cuda" if self.backend == "nccl" else "cpu"
        try:
            store: Any = dist.TCPStore(address, port, world, is_master=True, timeout=limit, wait_for_workers=False)
            store.set_timeout(limit)
            for part in (name, f"{name}/", f"{device}/"):
                store = dist.PrefixStore(part, store)
            self._group = self._open(store, world, limit)
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"no {self.backend} group of {world} members at {address}:{port}: {error}") from error

    def _open(self, store: Any, world: int, limit: timedelta) -> Any:
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, 0, world, limit)

    @classmethod
    def join(cls, address: str, port: int, world: int, name: str, offset: int) -> Call:
        """The signature is that of `WeightGroup.join`."""
        body = {"master_address": address, "master_port": port, "rank_offset": offset, "world_size": world}
        return "POST", "/init_weights_update_group", body | {"group_name": name, "backend": cls.backend}

    @staticmethod
    def bucket(weights: Sequence[tuple[str, Any]], name: str, version: str | None) -> Call:
        body = {
            "names": [key for key, _ in weights],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
            "shapes": [list(tensor.shape) for _, tensor in weights],
            "group_name": name,
            # only with the last bucket: until then the weights are a mixture
            "flush_cache": version is not None,
            "weight_version": version,
        }
        return "POST", "/update_weights_from_distributed", body

    @staticmethod
    def end(version: str) -> Call:
        return "POST", "/end_weight_update", {}

    @staticmethod
    def leave(name: str) -> Call:
        return "POST", "/destroy_weights_update_group", {"group_name": name}

    def send(self, tensor: Any) -> Callable[[], bool]:
        done: Callable[[], bool] = self._group.broadcast(tensor, 0).is_completed
        return done

    def close(self) -> None:
        del self._group


class NcclGroup(TorchGroup):
    """Broadcasts the weights over nccl, between GPUs."""

    backend: ClassVar[str] = "nccl"

    def _open(self, store: Any, world: int, limit: timedelta) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(store, 0, world, options)


def _rows(answer: Any, name: str, ask: Score, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities [P, K] at the positions, from `meta_info[name]`; entry i is of position `start` + i."""
    rows = _scored(answer, ask).get(name) or []
    ids, logp = np.empty((len(ask.positions), k), np.int32), np.empty((len(ask.positions), k), np.float32)
    with fields_of_other_types(ask.where):
        for line, position in enumerate(ask.positions):
            index = int(position) - ask.start
            row = rows[index] if 0 <= index < len(rows) else None
            if row is None or len(row) != k:
                raise BadAnswer(
                    f"{ask.where}: {0 if row is None else len(row)} of {k} log-probabilities came for position "
                    f"{position}"
                )
            for column, entry in enumerate(row):
                logp[line, column], ids[line, column] = entry[0], entry[1]
    return ids, check_scores(logp, ask.where)


def _meta(answer: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), Mapping):
        raise BadAnswer(f"{where}: an answer of /generate has a meta_info; this one is {excerpt(answer, 200)!r}")
    meta: Mapping[str, Any] = answer["meta_info"]
    return meta


def _scored(answer: Any, ask: Score) -> Mapping[str, Any]:
    """The `meta_info` of scores. Raises ServerError unless they are at the temperature that was asked for."""
    meta = _meta(answer, ask.where)
    if ask.temperature != 1.0 and meta.get(SCORE_TEMPERATURE) != ask.temperature:
        raise ServerError(
            f"{ask.where}: this server scores at temperature 1, not at {ask.temperature:g} (releases with "
            f"{SCORE_TEMPERATURE} can): take --distill.temperature 1, or load the teacher into this process with "
            "--teacher, without --teacher-server"
        )
    return meta


def _pairs(entries: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities (nan for null) and ids of entries [logprob, id, text]."""
    logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
    return logprobs, np.array([entry[1] for entry in entries], np.int32)
