"""Pure per-token losses, their weights, and language modeling beside them."""
