"""Parts of EnvContract (turngym.envs.testing): how it plays, and what it asks of snapshots."""
