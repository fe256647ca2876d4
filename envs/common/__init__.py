"""What every room may use: standard library and numpy only."""
