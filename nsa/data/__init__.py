"""Token batches for training: where documents come from, how they become samples, and which rank gets which.

`documents` yields texts from parquet files or from the hub, `tokens` turns them into numbers, `packing` cuts the stream of
tokens into numbered samples, `loader` reads them ahead in other processes; it needs torch, which the others do without.
"""

from nsa.data.packing import Batch, Position, Source, batches
from nsa.data.sources import identity, open_source, open_validation

__all__ = ["Batch", "Position", "Source", "batches", "identity", "open_source", "open_validation"]
