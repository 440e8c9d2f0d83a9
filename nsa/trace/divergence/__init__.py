"""What must be equal on all ranks, and the lines that change it: `check_divergence`."""
