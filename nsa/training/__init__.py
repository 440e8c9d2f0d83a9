"""The training program: a run, its trainer, parallelism, checkpoints and figures."""
