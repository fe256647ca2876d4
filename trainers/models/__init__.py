"""Models as the trainers see them: hidden states, heads, packing, scoring, sizes."""
