"""A retriever behind HTTP: Search-R1's endpoint with micro-batching, a cache, limits, statistics and a clean end."""
