"""Opens servers that play, or teach, and checks that they have the model that is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers.canary import Canary
from turngym.agents.servers.fleet import Fleet, check_model, check_names, check_tokenizer
from turngym.agents.servers.policy import ServerPolicy, ServerScorer
from turngym.agents.servers.server_connection import ClientLimits, OwnServer, ServerError, model_config, text_part
from turngym.agents.servers.server_options import Addressed, Disk, Limits, ServersOf, Synced, TeacherServed
from turngym.agents.servers.weights import BroadcastSync, DiskSync, SyncedPolicy
from turngym.core.errors import ModelError
from turngym.core.files import weights_hash
from turngym.core.plugins import need
from turngym.core.protocols import WeightSink, WeightSource
from turngym.core.redaction import brief
from turngym.core.setting import kind_of
from turngym.core.user_files import json_object


def eval_policy(options: Addressed, folder: Path, tokenizer: Any, max_length: int | None) -> ServerPolicy:
    """Servers that play with the weights of `folder`, which are not loaded here.

    Raises ServerError if a server has another model, vocabulary or weights.
    """
    config = model_config(str(folder))
    vocabulary = _vocabulary(config, folder)
    with open_fleet(options, options.policy_server) as fleet:
        check_names(fleet)
        check_model(fleet, config)
        for server in fleet.servers:
            served = Path(server.model)
            # a folder that cannot be read from here is trusted
            if not served.is_dir() or served.resolve() == folder.resolve():
                continue
            if weights_hash(served) != weights_hash(folder):
                raise ServerError(f"{server.url} serves the weights of {served}; those of {folder} are meant")
        return _policy(fleet, vocabulary, tokenizer, max_length)


def train_policy(
    options: Synced,
    model: Any,
    tokenizer: Any,
    max_length: int | None,
    out: Path,
    *,
    weights: WeightSource,
    vocab_size: int | None = None,
    live: bool = False,
    own: OwnServer | None = None,
) -> SyncedPolicy:
    """Servers that play with the weights of `model`.

    They get them before the first request and after each change of `model`; with `live`, only when `weights_changed` is
    called, and they answer while `model` changes.

    Raises ServerError if a server has another architecture, shape or vocabulary, or cannot take new weights.

    Args:
        max_length: most ids of prompt and response together; None: what the servers allow.
        out: folder of the run; weights are written to a folder in it, unless `options` name another one.
        own: the server that this run has started, which replaces the addresses in `options`.
    """
    from turngym.agents.local_engine.model import CausalModel

    config = model.config.to_dict()
    sync = options.weight_sync
    assert own is not None or isinstance(options, ServersOf)
    with open_fleet(options, options.policy_server if isinstance(options, ServersOf) else own.url) as fleet:  # type: ignore[union-attr]
        check_model(fleet, config)
        policy = _policy(fleet, _vocabulary(config, "the student"), tokenizer, max_length, vocab_size)

        # Whether adapters go to the servers, or whole weights: adapters are megabytes, and a server that loads them has
        # its own weights all the time.
        adapters = bool(weights.adapter) and isinstance(sync, Disk) and all(server.adapters for server in fleet.servers)
        fleet.versions.adapters = adapters
        for server in fleet.servers:
            if server.missing and not adapters:
                raise ServerError(
                    f"{server.url} has no routes for new weights: start it with {server.missing} in its environment, "
                    "as `turngym serve policy --engine vllm` does; or train adapters (--lora.rank), which it loads "
                    "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
                )
        if adapters and options.when_busy != "wait":
            raise ServerError(
                f"--when-busy {options.when_busy}: a response ends with the adapter that it began with; valid: wait"
            )

        # The way to them.
        sink: WeightSink
        if isinstance(sync, Disk):
            sink = DiskSync(
                fleet=fleet,
                save=weights.save_adapter if adapters else weights.save,
                folder=sync.weight_folder or out / "weights",
                busy=options.when_busy,
                restart=None if own is None else own.restart,
            )
        else:
            sink = BroadcastSync(
                fleet=fleet,
                weights=weights.named_weights,
                address=sync.weight_address,
                backend=str(kind_of(type(sync))),
                busy=options.when_busy,
            )
    stamp: Callable[[], int] | None = None if live else CausalModel(model).weights_stamp
    canary = Canary(fleet=fleet, vocabulary=policy.vocabulary, scorer=weights.scorer, rounding=weights.rounding)
    sleeps = own is not None and own.sleeps and not live
    return SyncedPolicy(policy=policy, sink=sink, stamp=stamp, canary=canary, sleeps=sleeps)


def teacher_scorer(
    options: TeacherServed,
    folder: Path | None,
    tokenizer: Any,
    student_size: int,
    temperature: float,
    load: Callable[[Path], WeightSource] | None = None,
) -> tuple[ServerScorer, int]:
    """A teacher on servers, and the number of ids that it shares with the student.

    Raises ServerError if its vocabulary is not the student's, or it computes or scores in another way.

    Args:
        folder: the teacher that is meant; None: whatever model the servers have.
        load: reads the weights in `folder`, so that the servers' scores are compared with them. It raises ModelError
            where this machine cannot hold them. None: they are not compared.
    """
    with open_fleet(options, options.teacher_server) as fleet:
        check_names(fleet)
        model = fleet.servers[0].model if folder is None else folder
        config = model_config(str(model))
        if folder is not None:
            check_model(fleet, config)
        check_tokenizer(fleet, tokenizer, min(len(tokenizer), student_size))
        # a folder that cannot be read from here is trusted
        vocabulary = _vocabulary(config, model) if config else student_size
        shared = min(vocabulary, student_size)
        scorer = ServerScorer(fleet=fleet, vocabulary=vocabulary, shared=shared, temperature=temperature)
        if temperature != 1.0:  # tried now, so that it does not fail after the first rollout
            scorer.logprobs([np.array([0, 1], np.int32)], [np.array([1])])
        if folder is not None and load is not None:
            try:
                teacher = load(folder)
            except ModelError as error:
                print(
                    f"note: the teacher's servers are not compared with {folder}, which cannot be loaded here: {error}"
                )
            else:
                Canary(
                    fleet=fleet,
                    vocabulary=vocabulary,
                    scorer=teacher.scorer,
                    rounding=teacher.rounding,
                    meant=f"the teacher in {folder}",
                ).check()
    return scorer, shared


def load_outside(folder: str) -> Any:
    """What is known here of a model that servers run: an object with its `generation_config` and the size of its
    vocabulary.

    Raises ServerError if its config.json or generation_config.json cannot be read.
    """
    size = _vocabulary(model_config(folder), folder)
    file = Path(folder) / "generation_config.json"
    settings = json_object(file, ServerError) if file.exists() else {}
    generation_config = SimpleNamespace(eos_token_id=settings.get("eos_token_id"))
    return SimpleNamespace(generation_config=generation_config, config=SimpleNamespace(vocab_size=size))


@contextmanager
def open_fleet(options: Limits, urls: str) -> Iterator[Fleet]:
    """Open connections to `urls`, separated by commas; closed if the body of the `with` statement fails."""
    settings = ClientLimits(parallel=options.server_parallel, deadline=options.server_deadline)
    addresses = [url.strip() for url in urls.split(",") if url.strip()]
    fleet = Fleet(urls=[url if "://" in url else f"http://{url}" for url in addresses], settings=settings).open()
    try:
        yield fleet
    except BaseException:
        fleet.close()
        raise


def _vocabulary(config: Mapping[str, Any], model: str | Path) -> int:
    """The number of ids that the model with this config.json knows. Raises ServerError if nothing says it."""
    text = text_part(config)
    size, kind = text.get("vocab_size"), text.get("model_type")
    if size is None and isinstance(kind, str):
        # the files of some models, Gemma 3's for one, leave out what is the default of their type
        types = need("transformers", "a model's config.json", "train").CONFIG_MAPPING
        size = getattr(types[kind](), "vocab_size", None) if kind in types else None
    if type(size) is not int or size < 1:
        problem = "" if size is None else f"; it is {brief(size, 80)} there, and must be a whole number of at least 1"
        raise ServerError(f"{model} holds no model whose config.json names a vocab_size{problem}")
    return size


def _policy(
    fleet: Fleet, size: int, tokenizer: Any, max_length: int | None, vocab_size: int | None = None
) -> ServerPolicy:
    check_tokenizer(fleet, tokenizer, min(len(tokenizer), size))
    if not all(server.seeded for server in fleet.servers):
        print(
            "note: a server ignores seeds (it runs without --enable-deterministic-inference): episodes differ from run "
            "to run; `turngym serve policy` starts one that takes them"
        )
    return ServerPolicy(fleet, vocabulary=size, vocab_size=vocab_size, max_length=max_length, stops=StopText(tokenizer))
