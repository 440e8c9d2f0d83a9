"""What is known of a rank's GPU: whether the rank waits for it, and what CUDA and the driver report of it."""

from __future__ import annotations

import re

from pytest_nsa.diagnosis.verdict import NO_RANK, Fact
from pytest_nsa.evidence.values import STILL_LOOKS, Evidence, RankEvidence
from pytest_nsa.evidence.waiting import FOR_A_DEVICE

BUSY = 50  # percent
# Functions of torch that return when the device has come to the end of what it was given.
_SYNCHRONIZES = re.compile(r"/torch/(cuda|xpu|accelerator)/(__init__|streams)\.py$")
# CUDA's own words; torch names them so whatever the kernel was.
_LATE = ("cuda error", "cuda kernel errors might be asynchronously reported", "device-side assert")
LATE_HINT = "CUDA reports an error at a later call than the one that failed: CUDA_LAUNCH_BLOCKING=1 names the line that launched it"
# NVIDIA's catalogue of Xid errors: those that a program causes, and those of the machine.
_XIDS = {
    13: "a kernel's illegal instruction or address", 31: "a kernel's access to an address that is not mapped",
    43: "a program's work was stopped", 45: "a program's work was cleaned up", 48: "memory with an error that cannot be corrected",
    63: "a row of memory was remapped", 64: "a row of memory could not be remapped", 74: "NVLink",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error", 95: "an uncontained memory error", 119: "the GPU's own processor does not answer",
    120: "the GPU's own processor", 154: "the GPU needs to be reset or drained",
}  # fmt: skip
_OF_THE_MACHINE = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120, 154})


def waits_for_its_device(rank: RankEvidence) -> str:
    """Return in words that a rank waits for its GPU to come to the end of what it was given; '' where nothing shows that.

    Its main thread stays in one native call, which is torch's `synchronize`, or a line that needs a result of the device.
    """
    stack, n = rank.stack, rank.board.numbers if rank.board is not None else {}
    if stack is None or not stack.frames or n.get("still_looks", 0.0) < STILL_LOOKS or n.get("still_moves", 0.0) > 1:
        return ""
    frame = stack.frames[0]
    by_call = frame.function == "synchronize" and bool(_SYNCHRONIZES.search(frame.file))
    busy = str(rank.gpu.get("utilization.gpu", ""))
    if not by_call:
        line = rank.sources.line(frame.file, frame.line) if frame.is_user else ""
        idle = busy.isdecimal() and int(busy) < BUSY
        if idle or "GPU" not in rank.machine or not FOR_A_DEVICE.search(line):
            return ""
    share = f" ({busy}% busy)" if busy.isdecimal() else ""
    return f"waits for its GPU{share} to come to the end of what it was given before"


def is_late(message: str) -> bool:
    """Return whether a message is CUDA's of an error that an earlier call made."""
    return any(words in message.lower() for words in _LATE)


def xid_facts(evidence: Evidence) -> tuple[Fact, ...]:
    """Return what the driver logged of the GPUs while the test ran."""
    found = ((f"GPU {gpu}: Xid {xid}", _XIDS.get(xid, "see NVIDIA's catalogue")) for gpu, xid in evidence.xids)
    return tuple(
        Fact(rank=NO_RANK, kind="xid", file="host.jsonl", says=f"{error}, {meaning}") for error, meaning in found
    )


def is_of_the_machine(evidence: Evidence) -> bool:
    """Return whether the driver logged an error that the program did not cause."""
    return any(xid in _OF_THE_MACHINE for _, xid in evidence.xids)
