"""BM25 that ranks exactly as Lucene does: analysis, index, scores and order."""

from turngym.retrieval.lucene.analysis import analyze
from turngym.retrieval.lucene.index import LuceneIndex

__all__ = ["LuceneIndex", "analyze"]
