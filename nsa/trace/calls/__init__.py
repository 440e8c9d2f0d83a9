"""Calls that a rank waits in: collectives, messages, keys of a store, batches of a loader, and their time limits."""
