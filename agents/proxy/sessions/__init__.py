"""Sessions of the proxy: the open ones, their records on disk, and the episodes that they become."""
