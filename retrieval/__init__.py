"""Retrieval: BM25 as Lucene ranks, dense and hybrid search, their server and client. Imports no other room."""
