"""The attention on a CPU, from products of PyTorch; `tiles` has the design."""
