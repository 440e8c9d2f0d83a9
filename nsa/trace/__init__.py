"""Tracers that watch a training step of any nn.Module. One file per tracer:

- `board`: the mapped page that survives whatever happens to the rank
- `observe`: hooks that update the board (phase, module, gradients), `calls/`: calls that ranks wait in
- `stall/`: heartbeat (the thread that shows that the interpreter still runs, and on which line), stacks, loop counters, exceptions
- `divergence/`: checksums of what must be equal on all ranks
- `gradients`, `module_backward`, `ddp_buckets`, `memory`, `statistics`: the traces a user asks for
- `session`: starts the always-on ones together

What they print goes through the stdlib logger ``nsa.trace``, so a listener need not import this.
"""

import logging

logger = logging.getLogger("nsa.trace")
