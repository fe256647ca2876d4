"""The local engine in a process of its own, whose weights lie in shared memory."""
