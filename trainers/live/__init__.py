"""A proxy whose clients train the model that answers them."""
