"""SessionTable of the proxy: who is talking, what is recorded, and what becomes an episode."""
