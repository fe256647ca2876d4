"""The public names of `turngym.retrieval`; `__init__.py` imports each when first used, type checkers read this."""

from .bm25_retriever import BM25Retriever as BM25Retriever
from .core import Encoder as Encoder
from .core import Hit as Hit
from .core import Passage as Passage
from .core import RetrievalError as RetrievalError
from .core import Retriever as Retriever
from .core import RetrieverUnavailable as RetrieverUnavailable
from .corpus import corpus_sha256 as corpus_sha256
from .corpus import read_corpus as read_corpus
from .dense import DenseRetriever as DenseRetriever
from .encoders import EncoderStyle as EncoderStyle
from .encoders import HashingEncoder as HashingEncoder
from .encoders import HuggingFaceEncoder as HuggingFaceEncoder
from .http_retriever import HttpRetriever as HttpRetriever
from .hybrid import CoverageReranker as CoverageReranker
from .hybrid import CrossEncoderReranker as CrossEncoderReranker
from .hybrid import HybridRetriever as HybridRetriever
from .hybrid import Reranker as Reranker
from .hybrid import RerankingRetriever as RerankingRetriever
from .open_retriever import open_retriever as open_retriever
