"""Dense retrieval over faiss."""
