"""What `turngym trace` selects, and its HTML page."""
