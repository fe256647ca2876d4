"""What `turngym report` reads and draws."""
