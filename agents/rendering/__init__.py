"""Prompts and responses as token ids: chat templates, dialects, and what a prompt keeps of an episode."""
