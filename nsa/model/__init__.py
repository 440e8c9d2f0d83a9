"""The model: NSA attention, its gates, the transformer, decoding, and activation checkpointing."""
