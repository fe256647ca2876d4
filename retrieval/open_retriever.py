"""How a name becomes a retriever: an index folder, a server's address, or a corpus to index in memory."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from turngym.core.errors import RetrievalError
from turngym.core.rows import Stamp, path_stamp
from turngym.core.user_files import user_path
from turngym.retrieval.bm25_retriever import BM25Retriever, LuceneIndex
from turngym.retrieval.core import Encoder, Retriever
from turngym.retrieval.corpus import PassageStore, read_corpus
from turngym.retrieval.corpus import corpus_sha256 as hash_of
from turngym.retrieval.dense import DenseRetriever
from turngym.retrieval.encoders import (
    EncoderStyle,
    HashingEncoder,
    HuggingFaceEncoder,
    find_encoder,
    is_hugging_face,
    recorded_encoder,
    recorded_model,
)
from turngym.retrieval.http_retriever import HttpRetriever
from turngym.retrieval.hybrid import HybridRetriever, Reranker, RerankingRetriever, open_reranker
from turngym.retrieval.index import (
    ENCODER,
    FAISS,
    LUCENE,
    PASSAGES,
    EncoderRecord,
    IndexFolderError,
    check_files,
    read_manifest,
)

IN_MEMORY = ("bm25", "dense", "hybrid")
"""Kinds that `kind:corpus.jsonl` builds in memory; dense and hybrid use the hashing encoder unless one is given."""


def open_retriever(
    spec: str | Path,
    *,
    encoder: Encoder | str | None = None,
    corpus_sha256: str | None = None,
    parameters: Mapping[str, float] | None = None,
    device: str = "cpu",
    rerank: Reranker | str | None = None,
    rerank_depth: int = 20,
) -> Retriever:
    """Opens the retriever that `spec` names.

    Args:
        spec: Folder of an index; `http://...` of a retrieval server; or `bm25:corpus.jsonl` (`dense:`, `hybrid:`).
        encoder: What encodes a corpus in memory: `minilm`, `hf:FOLDER`, a name for `find_encoder`, or an object. For an
            index folder, whose manifest names its encoder: where that model lies now. Its fingerprint must be the one
            that the index was built with.
        corpus_sha256: If given, an index of any other corpus is refused.
        parameters: faiss search settings that replace the stored ones, by name (`nprobe`, `efSearch`).
        device: Where a Hugging Face encoder and reranker run.
        rerank: Orders the best hits again: `hf:FOLDER` (a cross-encoder), `coverage`, or a `Reranker` of your own.
        rerank_depth: How many hits are ordered again, unless more are asked for.

    Raises:
        RetrievalError: something is wrong with the folder, address, corpus, encoder or reranker.
    """
    if rerank is not None:
        # first, because a wrong name shows at once and an index may take minutes to open
        reranker = open_reranker(rerank, device=device)
        inner = open_retriever(spec, encoder=encoder, corpus_sha256=corpus_sha256, parameters=parameters, device=device)
        return RerankingRetriever(inner, reranker, depth=rerank_depth)
    text = str(spec)
    if text.startswith(("http://", "https://")):
        _refuse(text, "its server has these", encoder=encoder, corpus_sha256=corpus_sha256, parameters=parameters)
        return HttpRetriever(text)
    kind, colon, path = text.partition(":")
    # a folder may have a colon in its name
    if not colon or kind not in IN_MEMORY or user_path(text).exists():
        if colon and not user_path(text).exists() and (close := get_close_matches(kind, IN_MEMORY, 1)):
            raise RetrievalError(f"no retriever {text!r}; did you mean {close[0]}:{path}?")
        return open_index(
            user_path(text), encoder=encoder, corpus_sha256=corpus_sha256, parameters=parameters, device=device
        )
    # a corpus, which is indexed in memory
    if kind == "bm25":
        _refuse(text, "write dense: or hybrid:", encoder=encoder, parameters=parameters)
    passages = list(read_corpus(user_path(path)))
    if corpus_sha256 is not None:
        _same_corpus(Path(path), hash_of(passages), corpus_sha256)
    parts: list[Retriever] = []
    if kind != "dense":
        parts.append(BM25Retriever.from_passages(passages))
    if kind != "bm25":
        if encoder is None or encoder == "hashing":
            encoder = HashingEncoder.fit(passages)
        elif isinstance(encoder, str):
            is_model, name = is_hugging_face(encoder), encoder.removeprefix("hf:")
            encoder = HuggingFaceEncoder(name, device=device) if is_model else find_encoder(name)(device)
        parts.append(DenseRetriever.from_passages(passages, encoder, parameters=parameters))
    return parts[0] if len(parts) == 1 else HybridRetriever(parts)


def _refuse(spec: str, advice: str, **given: object) -> None:
    """Raises RetrievalError for an argument that `spec` does not read."""
    if names := [name for name, value in given.items() if value is not None]:
        raise RetrievalError(f"{spec} takes no {names[0]}; {advice}")


def spec_stamp(spec: str) -> Stamp:
    """The stamp of the files that a retriever or reranker is opened from; empty for a server or a name."""
    return path_stamp(user_path(spec)) or path_stamp(user_path(spec.partition(":")[2]))


def open_index(
    folder: str | Path,
    *,
    encoder: Encoder | str | None = None,
    corpus_sha256: str | None = None,
    parameters: Mapping[str, float] | None = None,
    device: str = "cpu",
) -> Retriever:
    """Maps an index folder; `open_retriever` explains the arguments.

    Raises:
        IndexFolderError: it is no whole index of this version, or of another corpus or encoder.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if problems := check_files(folder, manifest):
        raise IndexFolderError(f"{folder}: {'; '.join(problems)}; build the index again")
    _same_corpus(folder, manifest.corpus_sha256, corpus_sha256)
    store = PassageStore(folder / PASSAGES)
    _same_corpus(folder / PASSAGES, store.sha256, manifest.corpus_sha256)
    if manifest.faiss is None and (encoder is not None or parameters):
        raise IndexFolderError(f"{folder} is a {manifest.kind} index; it takes no encoder and no faiss settings")
    parts: list[Retriever] = []
    if manifest.kind != "dense":
        parts.append(BM25Retriever(LuceneIndex.open(folder / LUCENE), store))
    if manifest.kind != "bm25":
        if manifest.encoder is None or manifest.faiss is None:
            raise IndexFolderError(
                f"{folder}: the manifest of a {manifest.kind} index names no encoder; build it again"
            )
        own = open_encoder(manifest.encoder, folder, given=encoder, device=device)
        settings = {**manifest.faiss.parameters, **(parameters or {})}
        fingerprint = manifest.fingerprint
        parts.append(DenseRetriever(folder / FAISS, store, own, fingerprint=fingerprint, parameters=settings))
    return parts[0] if len(parts) == 1 else HybridRetriever(parts)


def open_encoder(record: EncoderRecord, folder: Path, *, given: Encoder | str | None, device: str) -> Encoder:
    """Opens the encoder of an index and compares its fingerprint with the stored one.

    Raises:
        IndexFolderError: it cannot be loaded, or is another one.
    """
    if given is not None and not isinstance(given, str):
        encoder, name = given, type(given).__name__
    elif record.kind == "hashing":
        if given not in (None, "hashing"):
            raise IndexFolderError(f"{folder} was built with the hashing encoder, not {given!r}; leave `encoder` out")
        encoder, name = HashingEncoder.load(folder / ENCODER), "hashing"
    elif record.kind == "other":
        name = given or str(record.model)
        try:
            encoder = (recorded_encoder(name) if given is None else find_encoder(name))(device)
        except RetrievalError as error:
            raise IndexFolderError(f"{folder}: {error}") from error
    else:
        if given is not None and not is_hugging_face(given):
            raise IndexFolderError(
                f"{folder} was built with the model {record.model}; give it as hf:FOLDER, not {given!r}"
            )
        name = given.removeprefix("hf:") if given is not None else str(record.model)
        try:
            for model in (name if given is None else None, record.passage_model):
                if model is not None:
                    recorded_model(model)
            style = EncoderStyle(**(record.style or {}))
            encoder = HuggingFaceEncoder(name, style, passage_model=record.passage_model, device=device)
        except (RetrievalError, TypeError) as error:
            raise IndexFolderError(
                f"{folder} needs the encoder {name!r}: {error}; name where it lies with encoder='hf:FOLDER'"
            ) from error
    if encoder.fingerprint != record.fingerprint:
        raise IndexFolderError(
            f"{folder} was built with another encoder: it stores {record.fingerprint} ({record.model or record.kind}), "
            f"{name} is {encoder.fingerprint}; open it with the model and style it was built with, or build it again"
        )
    return encoder


def _same_corpus(where: Path, corpus: str, wanted: str | None) -> None:
    if wanted is not None and corpus != wanted:
        raise IndexFolderError(
            f"{where} is of another corpus: its content hash is {corpus[:16]}..., {wanted[:16]}... is needed; build "
            "the index from the corpus you mean"
        )
