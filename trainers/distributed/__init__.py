"""Distributed training: collectives, sharded models (FSDP2), divided rollouts and scoring, sharded checkpoints."""
