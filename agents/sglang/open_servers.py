"""Opens SGLang servers that play, or teach, and checks that they have the model that is meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from turngym.agents.sglang.client import PolicyServer, ServerError, SglangSettings, TrainServers
from turngym.agents.sglang.fleet import Fleet, check_model, check_names, check_tokenizer, model_config
from turngym.agents.sglang.policy import SglangPolicy, SglangScorer, StopFinder
from turngym.agents.sglang.weights import BroadcastSync, DiskSync, LivePolicy, SyncedPolicy
from turngym.envs.core.files import weights_hash
from turngym.envs.core.protocols import Scorer, WeightSink, WeightSource

TOLERANCE = {"float32": 1e-3, "auto": 0.5}
"""Most that a log-probability of a server may differ from ours, by its precision; 0.5 where that is a half one."""


def open_fleet(options: PolicyServer, urls: str) -> Fleet:
    """Open connections to `urls`, with commas in between."""
    settings = SglangSettings(parallel=options.server_parallel, deadline=options.server_deadline)
    named = [url.strip() for url in urls.split(",") if url.strip()]
    return Fleet(urls=[url if "://" in url else f"http://{url}" for url in named], settings=settings).open()


def eval_policy(options: PolicyServer, folder: Path, tokenizer: Any, max_length: int | None) -> SglangPolicy:
    """Servers that play with the weights of `folder`, which need not be loaded here.

    Raises ServerError where a server has another model, vocabulary or weights.
    """
    fleet = open_fleet(options, options.policy_server)
    config = _config(folder)

    def check() -> None:
        check_names(fleet)
        check_model(fleet, config)
        _same_folder(fleet, folder)

    _checked(fleet, check)
    return _policy(fleet, config, tokenizer, max_length)


def train_policy(
    options: TrainServers, model: Any, tokenizer: Any, max_length: int | None, out: Path, *, weights: WeightSource
) -> SyncedPolicy:
    """Servers that play with the weights of `model`, whatever they have now; `weights` hands them on.

    They get them before the first request, and whenever `model` has changed.
    Raises ServerError where a server has another architecture, shape or vocabulary.
    """
    from turngym.agents.local_engine.model import CausalModel

    policy, sink, compare = _followed(options, model, tokenizer, max_length, out, weights)
    return SyncedPolicy(policy=policy, sink=sink, stamp=CausalModel(model).weights_stamp, first=compare)


def live_policy(
    options: TrainServers, model: Any, tokenizer: Any, max_length: int | None, out: Path, *, weights: WeightSource
) -> LivePolicy:
    """As `train_policy`, but the servers get the weights only when told so, and answer while `model` is changed."""
    policy, sink, compare = _followed(options, model, tokenizer, max_length, out, weights)
    return LivePolicy(policy=policy, sink=sink, first=compare)


def _followed(
    options: TrainServers, model: Any, tokenizer: Any, max_length: int | None, out: Path, weights: WeightSource
) -> tuple[SglangPolicy, WeightSink, Callable[[], None]]:
    """Servers that play, who gives them weights, and a comparison of what they compute with the model."""
    fleet = open_fleet(options, options.policy_server)
    config = model.config.to_dict()
    _checked(fleet, lambda: check_model(fleet, config))
    policy = _policy(fleet, config, tokenizer, max_length)

    def compare() -> None:
        check_numbers(fleet, weights.scorer(), policy.vocabulary)

    return policy, _sink(options, fleet, weights, out), compare


def teacher_scorer(
    options: TrainServers, folder: Path | None, tokenizer: Any, student_size: int, temperature: float
) -> tuple[SglangScorer, int]:
    """A teacher on servers, and the number of ids that it shares with the student.

    Raises ServerError for another vocabulary than the student's, or a temperature at which this one does not score.
    """
    fleet = open_fleet(options, options.teacher_server)

    def size() -> int:
        check_names(fleet)
        where = fleet.servers[0].model if folder is None else str(folder)
        config = model_config(where)
        if folder is not None:
            check_model(fleet, config)
        check_tokenizer(fleet, tokenizer, min(len(tokenizer), student_size))
        return int(config.get("vocab_size", student_size))

    vocabulary = _checked(fleet, size)
    shared = min(vocabulary, student_size)
    scorer = SglangScorer(fleet=fleet, vocabulary=vocabulary, shared=shared, temperature=temperature)
    if temperature != 1.0:  # now, and not after the first rollout
        _checked(fleet, lambda: scorer.logprobs([np.array([0, 1], np.int32)], [np.array([1])]))
    return scorer, shared


def load_outside(folder: str) -> tuple[Any, Any]:
    """What is known of a model that servers run: its generation_config (as an attribute), and its tokenizer.

    Raises ServerError for a folder without a tokenizer.
    """
    try:
        from transformers import AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise ServerError(f"tokenizers need transformers: pip install 'turngym[train]' ({error})") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ServerError(f"no tokenizer in {folder}: {str(error).strip().splitlines()[0]}") from error
    config = GenerationConfig.from_pretrained(folder) if (Path(folder) / "generation_config.json").exists() else None
    return SimpleNamespace(generation_config=config), tokenizer


def check_numbers(fleet: Fleet, ours: Scorer, vocabulary: int, length: int = 48) -> None:
    """Raises ServerError unless the servers give some ids the log-probabilities that `ours` gives them."""
    row = np.random.default_rng(0).integers(0, vocabulary, length).astype(np.int32)
    where = np.arange(1, length)
    theirs = SglangScorer(fleet=fleet, vocabulary=vocabulary).logprobs([row], [where])[0]
    mine = ours.logprobs([row], [where])[0]
    # a median: random ids are so unlikely that single ones differ by much in half precision
    worst = float(np.median(np.abs(theirs - mine)))
    limit = TOLERANCE.get(fleet.servers[0].dtype, 0.5)
    if worst > limit:
        raise ServerError(
            f"{fleet.servers[0].url} has the weights, but its log-probabilities differ from this process's by "
            f"{worst:.3g} (at most {limit:g} is rounding): is it another model, quantised, or scaled in another way?"
        )


def _policy(fleet: Fleet, config: dict[str, Any], tokenizer: Any, max_length: int | None) -> SglangPolicy:
    size = int(config["vocab_size"])
    _checked(fleet, lambda: check_tokenizer(fleet, tokenizer, min(len(tokenizer), size)))
    if not all(server.seeded for server in fleet.servers):
        print(
            "note: a server ignores seeds (it runs without --enable-deterministic-inference): episodes differ from run "
            "to run; `turngym serve policy` starts one that takes them"
        )
    return SglangPolicy(fleet, vocabulary=size, max_length=max_length, stops=StopFinder(tokenizer))


def _sink(options: TrainServers, fleet: Fleet, weights: WeightSource, out: Path) -> WeightSink:
    if options.weight_sync == "disk":
        folder = options.weight_folder or out / "weights"
        return DiskSync(fleet=fleet, save=weights.save, folder=folder, busy=options.when_busy)
    return BroadcastSync(
        fleet=fleet,
        weights=weights.named_weights,
        address=options.weight_address,
        backend=options.weight_sync,
        busy=options.when_busy,
    )


def _same_folder(fleet: Fleet, folder: Path) -> None:
    """The server's folder holds the weights of ours; taken on trust where it cannot be read from here."""
    for server in fleet.servers:
        theirs = Path(server.model)
        if not theirs.is_dir() or theirs.resolve() == folder.resolve():
            continue
        if weights_hash(theirs) != weights_hash(folder):
            raise ServerError(f"{server.url} serves the weights of {theirs}; those of {folder} are meant")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "vocab_size": int(found["vocab_size"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{folder} holds no model whose config.json names a vocab_size: {error}") from error


def _checked(fleet: Fleet, check: Callable[[], Any]) -> Any:
    """What `check` gives; where it fails the connections are closed."""
    try:
        return check()
    except BaseException:
        fleet.close()
        raise
