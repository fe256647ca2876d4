"""The verb `quickstart`: methods trained side by side, models evaluated while a core is free, a report."""
