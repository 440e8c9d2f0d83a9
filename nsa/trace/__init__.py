"""Tracers that watch a training step of any nn.Module. One file a tracer:

- `board`: the mapped page that survives whatever happens to the rank
- `observe`: hooks that keep the board true (phase, module, gradients), `collectives`: those of the process group
- `heartbeat`: the thread that shows that the interpreter still runs, and on which line
- `gradients`, `module_backward`, `ddp_buckets`, `memory`, `statistics`: the traces a user asks for
- `session`: starts the always-on ones together

What they print goes through the stdlib logger ``nsa.trace``, so a listener need not import this.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("nsa.trace")
