"""Judges with hindsight: an expert, a local model, an endpoint, keywords; and hints in prompts."""
