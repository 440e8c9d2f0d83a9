"""Token batches for training: where documents come from, how they become samples, and which rank gets which.

`documents`, `parquet` and `plain` yield texts from files, `packing` cuts the stream of their bytes into numbered samples,
`loader` reads them ahead in other processes; it needs torch, which the others do without.
"""

from nsa.data.packing import Batch, Position, Source, batches
from nsa.data.sources import identity, open_source, open_validation

__all__ = ["Batch", "Position", "Source", "batches", "identity", "open_source", "open_validation"]
