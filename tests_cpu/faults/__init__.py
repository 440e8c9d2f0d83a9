"""The corpus: planted faults with the verdict that each must get, and healthy tests that must get none."""
