"""Playing episodes: agents, the rollout that drives many episodes at once, scripted players."""
