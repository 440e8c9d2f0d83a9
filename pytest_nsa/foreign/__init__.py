"""What other tools leave of a job that hangs: flight recorder dumps, logs of watchdogs, texts of analyzers and of stacks."""
