"""Chat messages and tool calls as token ids, and answers read back."""
