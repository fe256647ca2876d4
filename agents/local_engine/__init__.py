"""The local engine: a transformers model in this process whose KV cache is kept across turns."""
