"""The public names of `turngym.retrieval`, for type checkers and editors; `__init__.py` imports them lazily."""

from turngym.retrieval.bm25 import BM25Retriever as BM25Retriever
from turngym.retrieval.client import HttpRetriever as HttpRetriever
from turngym.retrieval.core import Encoder as Encoder
from turngym.retrieval.core import Hit as Hit
from turngym.retrieval.core import Passage as Passage
from turngym.retrieval.core import RetrievalError as RetrievalError
from turngym.retrieval.core import Retriever as Retriever
from turngym.retrieval.core import RetrieverUnavailable as RetrieverUnavailable
from turngym.retrieval.corpus import corpus_sha256 as corpus_sha256
from turngym.retrieval.corpus import read_corpus as read_corpus
from turngym.retrieval.dense.retriever import DenseRetriever as DenseRetriever
from turngym.retrieval.encoders.hashing import HashingEncoder as HashingEncoder
from turngym.retrieval.encoders.hugging_face import EncoderStyle as EncoderStyle
from turngym.retrieval.encoders.hugging_face import HuggingFaceEncoder as HuggingFaceEncoder
from turngym.retrieval.hybrid import HybridRetriever as HybridRetriever
from turngym.retrieval.open import open_retriever as open_retriever
from turngym.retrieval.rerank import CoverageReranker as CoverageReranker
from turngym.retrieval.rerank import CrossEncoderReranker as CrossEncoderReranker
from turngym.retrieval.rerank import Reranker as Reranker
from turngym.retrieval.rerank import RerankingRetriever as RerankingRetriever
