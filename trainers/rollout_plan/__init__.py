"""What is played next: depth, curriculum, demonstration prefixes, group filters, statistics by turn."""
