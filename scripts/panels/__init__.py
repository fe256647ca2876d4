"""Parts of `turngym panel` that need a file of their own."""
