"""Which kernels take the time of a forward and backward, and of a decoded token, on a GPU: what to look at before tuning.

python benchmarks/kernel_times.py --json benchmarks/results/kernel_times.json

Milliseconds of each kernel in one call, and its launches, by torch.profiler; shapes are those of attention_gpu.py. Kernels of one
name are added: the window's and the compressed branch's are the same program.
"""

from __future__ import annotations

import sys
from typing import Any

import decode
import torch
from ahead import compile_ahead
from attention_gpu import DEVICE, DTYPE, OTHER_SIZES, SHAPES, Call, both_ways, contenders, sizes_of
from figures import environment, keep, parser_of
from torch.profiler import ProfilerActivity, profile

from nsa.kernels.triton.tiles import capability
from nsa.trace.strict_json import to_json

WARM_UPS, CALLS = 2, 3


def kernels_of(call: Call) -> dict[str, dict[str, float]]:
    """Return milliseconds and launches by kernel, the slowest first, of one call."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    return {
        event.key: {"ms": event.device_time_total / 1e3 / CALLS, "launches": event.count / CALLS}
        for event in events
        if event.device_time_total > 0
    }


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 8192])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments = parser.parse_args()
    if DEVICE != "cuda":
        sys.exit("kernel_times.py: no GPU here, and its profiler is what measures")
    shapes = [(SHAPES[shape], sizes_of(shape)) for shape in arguments.shapes]
    compile_ahead(shapes, arguments.lengths, DTYPE, capability(torch.device(DEVICE)))
    found: dict[str, Any] = {}
    for shape in arguments.shapes:
        for S in arguments.lengths:
            forward, inputs = contenders(shape, S)["nsa"]
            ways = {"forward and backward": kernels_of(both_ways(forward, inputs)["both"])}
            del forward, inputs
            torch.cuda.empty_cache()
            if shape not in OTHER_SIZES:
                with torch.inference_mode():
                    calls = decode.calls(SHAPES[shape], S, 1)
                    ways |= {f"a token, {name}": kernels_of(call) for name, call in calls.items()}
            found.setdefault(shape, {})[str(S)] = ways
            for way, kernels in ways.items():
                print(f"{shape} {S} {way}: {sum(k['ms'] for k in kernels.values()):.3f} ms", file=sys.stderr)
            if arguments.json:  # a run that is cut off keeps what it has
                arguments.json.write_text(to_json({"kernels": found, **environment()}, indent=1), encoding="utf-8")
    keep({"kernels": found}, arguments.json)


if __name__ == "__main__":
    main()
