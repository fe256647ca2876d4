"""Servers (SGLang, vLLM) as a policy and as a scorer, and new weights for them."""
