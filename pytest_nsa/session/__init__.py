"""In the pytest process: one run, from its items to their verdicts."""
