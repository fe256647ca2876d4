"""Generated shops that need no download."""
