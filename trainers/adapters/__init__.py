"""Other people's trainers on our environments: one file each, all thin over `EpisodeSession` and `Trajectory`."""
