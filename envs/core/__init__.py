"""What every room needs: tasks, episodes, traces, protocols, errors, settings."""
