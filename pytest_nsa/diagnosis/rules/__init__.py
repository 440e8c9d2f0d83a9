"""Evidence to findings: one module per family of causes."""
