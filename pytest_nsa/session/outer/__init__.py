"""Under an outer launcher (torchrun, SLURM): each pytest process hosts one rank."""
