"""The registry of causes: what each means, the outcome that it has, and what to do.

To add one: a row here, a rule in `rules/` (in the order of `engine.RULES`), a planted fault and a page in docs/causes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A cause that a verdict may name.

    ``outcome`` is the outcome of every verdict of this cause; '' if it follows from how the test ended. ``of_the_rank``: the
    model has no part in it. ``at_work``: the rank computes, so it is announced later. ``retry``: whether a second run may help:
    'never' if the program causes it, 'once' if it may not recur, 'elsewhere' if the machine may cause it.
    """

    name: str
    chapter: str
    summary: str
    advice: str
    outcome: Literal["", "FAIL", "CRASH", "SLOW"] = ""
    of_the_rank: bool = False
    at_work: bool = False
    retry: Literal["never", "once", "elsewhere"] = "never"


# By chapter of the documentation.
_order = partial(Cause, chapter="The order of collectives")
_rank = partial(Cause, chapter="The rank itself")
_blocked = partial(Cause, chapter="What it is blocked in")
_autograd = partial(Cause, chapter="Autograd and DDP")
_numbers = partial(Cause, chapter="Numbers")
_speed = partial(Cause, chapter="Speed")
_else = partial(Cause, chapter="Else")

_REGISTRY = (
    _order(name="skipped_collective", of_the_rank=True,
           summary="a rank went on without a collective that the others wait in.",
           advice="make every rank reach this call the same number of times, or take it out on all ranks"),
    _order(name="extra_collective", of_the_rank=True,
           summary="a rank entered a collective that no other rank entered.",
           advice="take the extra call out, or make every rank reach it"),
    _order(name="collective_mismatch", of_the_rank=True,
           summary="the ranks called different operations, shapes, dtypes or orders at the same place of their sequence.",
           advice="make every rank call the same operation with the same shape and dtype, in the same order"),
    _order(name="group_order_deadlock", of_the_rank=True,
           summary="ranks wait in different groups, each for a rank that waits elsewhere.",
           advice="take the two groups in the same order on every rank"),
    _order(name="p2p_unmatched", of_the_rank=True,
           summary="a send or receive has no other half.",
           advice="pair each send with a receive and wait for each Work; where both ranks receive first, let one send first"),
    _order(name="missing_collective",
           summary="others wait in a collective, or for a key, that a rank never reached; nothing more is known of that rank.",
           advice="look at the rank's location: it never reached the call that the others wait in"),
    _rank(name="rank_exception", outcome="FAIL", of_the_rank=True,
          summary="one rank raised; the others waited for it.",
          advice="fix the exception; what the other ranks report is a consequence of it"),
    _rank(name="rank_exited", outcome="FAIL", of_the_rank=True,
          summary="a rank's process exited, or raised SystemExit, before its test was done.",
          advice="the rank exited before the others were done: let every rank run to the end, or let all exit together"),
    _rank(name="rank_died", outcome="CRASH", of_the_rank=True, retry="once",
          summary="a signal ended a rank.",
          advice="find the sender of the signal: the kernel's OOM killer (dmesg, the container's limit), a scheduler, an operator"),
    _rank(name="rank_stopped", of_the_rank=True, retry="once",
          summary="a rank is stopped: SIGSTOP, or a debugger.",
          advice="continue the process (SIGCONT), or detach the debugger that holds it"),
    _rank(name="oom", outcome="FAIL", of_the_rank=True,
          summary="a rank ran out of memory.",
          advice="lower the batch or sequence, checkpoint more layers, or give the rank more memory"),
    _rank(name="init_timeout", of_the_rank=True, retry="once",
          summary="a process group never formed.",
          advice="look at the named rank: why it does not arrive, or has a wrong RANK or WORLD_SIZE"),
    _rank(name="network_unusable", outcome="FAIL", retry="elsewhere",
          summary="an interface, a host name or a port that a group needs cannot be used.",
          advice="the reason names what cannot be used: mend it, or name another; no code of the test is at fault"),
    _blocked(name="lock_deadlock",
             summary="a rank waits for a lock, a queue, an event or a thread.",
             advice="make what it waits for happen on every path (release locks by `with`)"),
    _blocked(name="infinite_loop", at_work=True,
             summary="Python code runs without making progress.",
             advice="give the loop a condition that ends it; the stack names its line"),
    _blocked(name="sleeping",
             summary="a rank sleeps while others wait for it.",
             advice="the rank sleeps while others wait: take the sleep out, or let all ranks wait at a barrier"),
    _blocked(name="native_busy", at_work=True, retry="once",
             summary="native code is at work.",
             advice="the rank is at work in native code: give it time, or make the call smaller"),
    _blocked(name="device_busy", at_work=True, retry="once",
             summary="a rank waits for its GPU, and a kernel on it does not end.",
             advice="a kernel launched before this line does not end: CUDA_LAUNCH_BLOCKING=1 shows the line that launches it"),
    _blocked(name="gil_held",
             summary="native code holds the GIL.",
             advice="native code holds the GIL: release it around the call, or make the call shorter"),
    _blocked(name="io_stuck", retry="elsewhere",
             summary="a rank waits for a file, a pipe or a socket.",
             advice="the file, pipe or socket does not answer: check the mount, the writer at the other end, add a timeout"),
    _blocked(name="child_process", retry="once",
             summary="a rank waits for a process that it has started.",
             advice="the rank waits for a process it started: see why that one does not end or has failed; wait with a timeout"),
    _blocked(name="dataloader_stuck", retry="once",
             summary="the data loader's worker does not deliver.",
             advice="look at the data loader's worker: its dataset blocks; try num_workers=0 and a loader timeout"),
    _blocked(name="compiling", outcome="SLOW", at_work=True, retry="once",
             summary="a compile is under way.",
             advice="a compile is under way on this rank: warm up before timing, or raise the timeout"),
    _blocked(name="transport_stuck", retry="elsewhere",
             summary="every rank is inside the same collective, and it does not end.",
             advice="all ranks are inside the same collective: look at the network, the interface, or NCCL's settings"),
    _autograd(name="ready_twice", outcome="FAIL",
              summary="DDP: a parameter was marked ready twice in one backward.",
              advice="use non-reentrant checkpointing (use_reentrant=False), or static_graph=True, or drop find_unused_parameters"),
    _autograd(name="unused_parameters", outcome="FAIL",
              summary="parameters got no gradient in a backward that ended.",
              advice="let every parameter take part in the loss on every rank, or set DDP's find_unused_parameters=True"),
    _autograd(name="static_graph_changed", outcome="FAIL",
              summary="DDP was promised a static graph, and it changed.",
              advice="the graph must be the same each step under static_graph=True: make it so, or drop static_graph"),
    _autograd(name="data_dependent_branch",
              summary="ranks took different paths through the model, or only some of them skipped a test.",
              advice="let every rank run the same modules whatever its data, with weights of zero where needed"),
    _autograd(name="hook_deadlock",
              summary="a collective in a gradient hook waits for ranks that never enter it.",
              advice="do not call collectives or take locks in gradient hooks"),
    _autograd(name="backward_deadlock",
              summary="a rank is blocked in backward, and no gradient has arrived.",
              advice="the first backward node does not return: run it alone under torch.autograd.set_detect_anomaly(True)"),
    _numbers(name="silent_divergence", outcome="FAIL",
             summary="ranks end with different gradients or parameters, though DDP keeps them equal.",
             advice="find what differs: a seed, a learning rate, an unreduced gradient (use non-reentrant checkpointing)"),
    _numbers(name="nan_loss", outcome="FAIL",
             summary="a loss is not finite, and the test failed after it or left NaN in its model.",
             advice="find the first step with a NaN; lower the learning rate, clip gradients, check the data"),
    _speed(name="slow", outcome="SLOW", at_work=True, retry="once",
           summary="the ranks make progress, but too slowly for the time limit.",
           advice="the ranks make progress: raise the timeout, or make the step smaller"),
    _speed(name="graph_explosion", outcome="SLOW", at_work=True,
           summary="one module makes most of a very large autograd graph.",
           advice="vectorise the module that owns the autograd nodes"),
    _speed(name="straggler", outcome="SLOW", at_work=True, retry="elsewhere",
           summary="one rank is slower, and the others wait for it.",
           advice="balance the work between ranks, or raise the timeout"),
    _else(name="assertion", outcome="FAIL", of_the_rank=True,
          summary="an ordinary failure of the test: its own assertion, or an exception that all ranks raised alike.",
          advice="no rank differs: the ranks that fail do so alike; look at the exception, as in a test of one process"),
    _else(name="unknown", retry="once",
          summary="no rule fits.",
          advice="no rule fits; all the evidence is in the folder"),
)  # fmt: skip

CAUSES: dict[str, Cause] = {cause.name: cause for cause in _REGISTRY}
