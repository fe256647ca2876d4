"""The kernel: what every room needs. Tasks, episodes, traces, protocols, errors, settings, plug-ins, tables."""
