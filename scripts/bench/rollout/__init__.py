"""`turngym bench rollout`: the local engine against transformers' `generate`."""
