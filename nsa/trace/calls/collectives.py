"""Record every collective on the board, when it is entered and when it is left.

The methods of torch's ProcessGroup are wrapped, not the functions of torch.distributed: so calls by names bound early
(``from torch.distributed import all_reduce``) are recorded too. DDP's reducer is C++ and calls none of them: its buckets
come through the communication hook of `nsa.trace.ddp_buckets`, and its own waits between backwards are wrapped here.
Other calls that C++ starts are recorded by the hooks that torch's process groups have from 2.14 on. The values of a hook lack
reduction, tag, splits and time limit: a call that Python starts is recorded by its method alone.
The board's ``blocked_in`` is the index + 1 of the collective that the main thread waits in, else 0.
"""

import atexit
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from nsa.trace.board import Board
from nsa.trace.calls import functional
from nsa.trace.calls.arguments import (
    global_rank,
    group_of,
    is_done_after_wait,
    new_group,
    numbered,
    payload_of,
    root_and_reduction,
    split_sizes,
    was_refused,
)
from nsa.trace.calls.compiled import leave_uncompiled, outside_graphs
from nsa.trace.calls.labels import GroupLabels, Made
from nsa.trace.calls.limits import limit_of_call, limit_of_group, report_new_limits
from nsa.trace.calls.pending import Pending
from nsa.trace.calls.stores import Limit, StoreRecorder
from nsa.trace.calls.thread_starts import path_of_call
from nsa.trace.files import wall_clock

_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "gather_single",
    "gather_into_tensor", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "monitored_barrier",
)  # fmt: skip
NEW_GROUP = "new_group"
ANY = -2  # the peer of a receive from any rank
_SPLIT = ("alltoall_base", "all_to_all_single")
_OUTPUT_FIRST = ("alltoall", "all_to_all", "gather_single", "gather_into_tensor")  # ranks may take unequal amounts
_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_UNEVEN = ("gather", "scatter", "alltoall")
# The operations that hooks name (torch 2.14); not those that make a group or a window of memory.
_HOOKED = {
    operation: name.lower()
    for name, operation in getattr(getattr(torch._C._distributed_c10d, "HookOpName", None), "__members__", {}).items()
    if name not in ("SPLIT", "NEW_WINDOW", "UNKNOWN")
}
# Their interface may change, and an error in a hook would end the program's call.
_GIVEN = getattr(torch._C._distributed_c10d, "PreHookArgs", None)
HAS_HOOKS = all(hasattr(_GIVEN, name) for name in ("name", "root", "input_tensors", "output_tensors"))
_BY_INPUT = ("gather", "alltoall")  # outputs of ranks may differ
_HOOK_ID = 0x6E7361  # a group has one hook of each number
_OWN_RANK = re.compile(r"\brank \d+ (?=of )")  # in the note of a new group


class CollectiveRecorder:
    """Wraps ProcessGroup's methods in this process for as long as the process lives."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._labels = GroupLabels()
        self._pending: dict[int, Pending] = {}  # by id of the Work
        self._lock = threading.RLock()  # while it is held, the garbage collector may end a Work, and so call `_dropped`
        self._has_failed = False
        self._limit = Limit(board)
        self.stores = StoreRecorder(board, self._limit)
        self._limits: dict[str, float] = {}  # time limits of groups, if short, in seconds
        self._waits: set[Any] = set()
        self._groups: set[Any] = set()  # Python classes that are wrapped
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.forget(0, 0)

    def forget(self, rank: int, world_size: int) -> None:
        """Reset for another test on a new board: sequence numbers start again on all its ranks."""
        self._sequence: defaultdict[str, int] = defaultdict(int)
        self._inside = threading.local()
        self._labels.begin(rank, world_size)
        self._blocked_in, self._limit.until = 0, 0.0
        self.stores.forget()
        self._functional = WeakIdKeyDictionary()  # a functional collective's result -> its index, its limit
        self._ends_by_wait: dict[tuple[str, str], bool] = {}  # by group and type of device
        self._on_group: Callable[[str, Sequence[int], int | None], None] = lambda *_: None
        self.on_reduce: Callable[[Any, Any], None] | None = None  # the group and the tensors of an all-reduce
        self.on_call: Callable[[dict[str, Any]], None] | None = None  # what ranks must match of a call that begins
        with self._lock:
            self._pending.clear()

    def install(self) -> None:
        """Replace the methods. Those that this version of torch lacks are skipped."""
        group_class = dist.ProcessGroup
        for name in (*_METHODS, *_POINT_TO_POINT):
            original = getattr(group_class, name, None)
            if original is not None:
                setattr(group_class, name, self._wrap(name, original))
        self._wrap_wait(torch._C._distributed_c10d.Work)
        # What DDP does between backwards, in C++: agree on new buckets, broadcast buffers.
        self._wrap_blocking(torch._C._distributed_c10d.Reducer, "_rebuild_buckets", "ddp_rebuild_buckets")
        self._wrap_blocking(dist, "_broadcast_coalesced", "broadcast_coalesced")
        # A new group: its ranks meet in the store, and in gloo's own rendezvous.
        self._wrap_blocking(dist.distributed_c10d, "_new_process_group_helper", NEW_GROUP)
        self._wrap_meeting()
        self._hook_groups()
        report_new_limits(lambda group, limit: self._limits.update({self._labels.of(group): limit}))
        functional.install(self._functional_collective, self._functional_wait)
        self.stores.install()
        # The construction of DDP begins by comparing the parameters' shapes over all ranks.
        self._wrap_blocking(dist, "_verify_params_across_processes", "ddp_verify_parameters")

    def _wrap_wait(self, work_class: Any) -> None:
        """Wrap ``wait`` of a class of Work: that of C++, or a Python class that overrides it."""
        wait = work_class.wait

        def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            entry = self._pending.get(id(work))
            if entry is None:
                return wait(work, *args, **kwargs)
            with _Blocked(self, entry.index, limit_of_call((*args, *kwargs.values())) or entry.limit):
                result = wait(work, *args, **kwargs)
            # If collectives run on a device, it returns at once: the heartbeat polls whether the work is done.
            if entry.ends_by_wait or work.is_completed():
                self._leave(id(work))
            else:
                self.board.number("on_device", 1)
            return result

        work_class.wait = outside_graphs(recorded_wait)
        self._waits.add(work_class)

    def _wrap_python_group(self, group: Any) -> None:
        """Wrap the methods of ProcessGroup that a backend written in Python overrides."""
        for owner in type(group).__mro__:
            if owner is dist.ProcessGroup:
                return
            if owner in self._groups:
                continue
            self._groups.add(owner)
            for name in (*_METHODS, *_POINT_TO_POINT):
                if name in vars(owner):
                    setattr(owner, name, self._wrap(name, vars(owner)[name]))

    def _enter(self, op: str, label: str, dtype: str = "", count: int = 0, *, size: int, **more: Any) -> int:
        """Enter a call on the board, with its number in the group and the user's lines that led to it; return its index."""
        self._take_back()
        site, callers = path_of_call()
        self._sequence[label] += more.get("peer", -1) == -1
        number = self._sequence[label]
        if self.on_call is not None:
            self.on_call(matched_facts(op, label, dtype, count, **more))
        return self.board.enter(
            op, label, number, dtype, count, site, size=size, callers=callers, side_thread=_is_in_side_thread(), **more
        )

    def _wrap_blocking(self, owner: Any, name: str, op: str) -> None:
        """Wrap a call that waits inside C++ and returns no Work. Such calls are numbered as those of a separate group."""
        original = getattr(owner, name, None)
        if original is None:
            return

        def recorded(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            first = args[0] if args else None
            group = first if isinstance(first, dist.ProcessGroup) else None  # the reducer does not name its group
            new = new_group(args, kwargs) if op == NEW_GROUP else None
            made = self._labels.make(op, new) if new is not None else Made(op, "", ())
            named = self._labels.of(group) if group is not None else ""
            label = made.making if op == NEW_GROUP else f"ddp:{named}" if named else "ddp"
            size = first if isinstance(first, int) else group.size() if group is not None else dist.get_world_size()
            if new is not None and not new.ranks and not dist.is_initialized():
                self._restart()
            if made.making != op:
                self._note_group(made.making, made)  # others may wait for this rank in it
            index = self._enter(op, label, size=size, note=new.note if new is not None else "")
            depth = getattr(self._inside, "depth", 0)
            self._inside.depth = depth or int(op != NEW_GROUP)  # the calls that DDP's make are part of them
            try:
                with _Blocked(self, index, self._limits.get(named, 0.0)):
                    result = original(*args, **kwargs)
            finally:
                self._inside.depth = depth
            self.board.leave(index)
            if new is not None:
                group = result[0] if isinstance(result, tuple) else result
                if isinstance(group, dist.ProcessGroup):
                    self._wrap_python_group(group)
                self._limits[made.label] = limit_of_group(kwargs.get("timeout"))
                self._note_group(made.label, made)
            return result

        setattr(owner, name, outside_graphs(recorded))

    def _restart(self) -> None:
        """Restart the numbering when a default group is made: earlier groups no longer exist."""
        kept = {label: number for label, number in self._sequence.items() if label.startswith(NEW_GROUP)}
        self._sequence = defaultdict(int, kept)
        self.board.number("calls_from", self.board.count("collectives_entered"))

    def _note_group(self, label: str, made: Made) -> None:
        if made.ranks:
            self._on_group(label, made.ranks, made.number)

    def report_groups(self, to: Callable[[str, Sequence[int], int | None], None]) -> None:
        """Call ``to`` with label, ranks and number of each existing group, and of each that is made later."""
        self._on_group = to
        for made in self._labels.all_made(NEW_GROUP):
            for label in {made.label, made.making} - {NEW_GROUP}:
                self._note_group(label, made)

    def _wrap_meeting(self) -> None:
        """Wrap the creation of the store of env:// and tcp://: the first rank serves it, and waits in it for the others."""
        owner = sys.modules.get("torch.distributed.rendezvous")  # dist has a function of this name
        original = getattr(owner, "_create_c10d_store", None)
        if original is None:
            return

        def recorded(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            label = self._labels.of_rendezvous(NEW_GROUP, port, world_size)
            note = f"default: {numbered(rank, world_size)}, by port {port} of {hostname}"
            index = self._enter(NEW_GROUP, label, size=world_size, note=note)
            with _Blocked(self, index):
                store = original(hostname, port, rank, world_size, *args, **kwargs)
            self.board.leave(index)
            return store

        setattr(owner, "_create_c10d_store", recorded)  # noqa: B010 - a name of torch's own

    def _functional_collective(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        if getattr(self._inside, "depth", 0):
            return original(*args, **kwargs)
        given = (group_of(v) for v in (*kwargs.values(), *reversed(args)))
        group = next((g for g in given if g is not None), dist.group.WORLD)
        if group is None:
            return original(*args, **kwargs)
        dtype, count, _ = payload_of(args)
        label, size = self._labels.of(group), group.size()
        index = self._enter(
            name.strip("_").removesuffix("_out"), label, dtype, count, size=size,
            root=global_rank(group, args[1]) if name.startswith("broadcast") and len(args) > 1 else -1,
            reduction=functional.reduction_of(name, args, kwargs), note=split_sizes(args, size) if name in _SPLIT else "",
        )  # fmt: skip
        self._inside.depth = 1
        try:
            with _Blocked(self, index, self._limits.get(label, 0.0)):
                result = original(*args, **kwargs)
        finally:
            self._inside.depth = 0
        # Counts as left once begun: the compiler and DTensor decide where, and whether, the program waits for it.
        self.board.leave(index)
        for tensor in functional.tensors_of([result]):
            self._functional[tensor] = index, self._limits.get(label, 0.0)
        return result

    def _functional_wait(
        self, _: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        calls = (
            [self._functional.pop(tensor, None) for tensor in functional.tensors_of(args)] if self._functional else []
        )
        call = next((c for c in calls if c is not None), None)
        if call is None:
            return original(*args, **kwargs)
        with _Blocked(self, *call):
            return original(*args, **kwargs)

    @property
    def is_waiting(self) -> bool:
        """Whether a collective was entered and has not completed."""
        return bool(self._pending)

    def poll(self) -> None:
        """Mark collectives that have completed without a wait. Called by the heartbeat."""
        for key in list(self._pending):  # the keys are numbers: the copy frees no object
            entry = self._pending.get(key)
            if entry is not None and entry.is_done():
                self._leave(key)

    def _leave(self, key: int) -> None:
        entry = self._take(key)
        if entry is not None:
            self.board.leave(entry.index)

    def _take(self, key: int) -> Pending | None:
        with self._lock:
            return self._pending.pop(key, None)

    def _follow(self, work: Any, entry: Pending) -> None:
        """Follow a Work until it is done, without keeping it alive."""
        key = id(work)
        entry.follow(work, lambda _: self._dropped(key))
        with self._lock:
            self._pending[key] = entry

    def _dropped(self, key: int) -> None:
        """Note that the program dropped a Work that it never waited for. Its id may be reused from now on."""
        entry = self._take(key)
        if entry is None:
            return
        if entry.is_message or entry.has_failed():
            self.board.drop(entry.index)
        elif entry.outlives_its_work():
            with self._lock:
                self._pending[id(entry)] = entry
        else:
            self.board.leave(entry.index)

    def _ends(self, group: Any, label: str, device: str) -> bool:
        """Return whether a call is done when its wait returns."""
        if (ends := self._ends_by_wait.get((label, device))) is None:
            ends = self._ends_by_wait[label, device] = is_done_after_wait(group, device)
        return ends

    def _refused(self, index: int, label: str, is_message: bool) -> None:
        """Note that a call raised before it began: the next one pairs with the others' call."""
        self._sequence[label] -= not is_message
        self.board.leave(index, refused=True)

    def _hook_groups(self) -> None:
        """Record what C++ starts in each group of this process, where this version of torch has hooks."""
        if not HAS_HOOKS:
            return
        owner = dist.distributed_c10d
        register = owner._register_process_group

        def registered(name: Any, group: Any) -> Any:
            self._hook(group)
            return register(name, group)

        owner._register_process_group = registered
        for group in owner._world.pg_map:
            self._hook(group)
        atexit.register(self._unhook_groups)

    def _hook(self, group: Any) -> None:
        of = weakref.ref(group)  # a group that its hooks keep would never be destroyed

        def before(call: Any) -> None:
            if not getattr(self._inside, "depth", 0) and (owner := of()) is not None:
                self._begin_in_cpp(owner, call)

        def after(call: Any) -> None:
            if not getattr(self._inside, "depth", 0) and getattr(self._inside, "begun", None):
                self._follow_in_cpp(call)

        for hook in (before, after):  # a graph that runs may call them
            leave_uncompiled(hook.__code__, calls=True)
        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)
        self._hooked.add(group)

    def _unhook_groups(self) -> None:
        """Remove the hooks before Python ends: C++ frees later the groups that still exist, and a hook cannot be freed then
        (SIGSEGV).
        """
        for group in self._hooked:
            group.unregister_pre_hook(_HOOK_ID)
            group.unregister_post_hook(_HOOK_ID)

    def _begin_in_cpp(self, group: Any, call: Any) -> None:
        """Enter a call that C++ starts. The post hook, from which on it is followed, is not called if it raises."""
        op, peer = _HOOKED.get(call.name, ""), -1
        if not op:
            return
        given = (call.output_tensors, call.input_tensors)
        dtype, count, device = payload_of(given[op in _BY_INPUT :])
        root = global_rank(group, call.root) if call.root >= 0 else -1
        if op in _POINT_TO_POINT:
            op, root, peer = ("recv_anysource", -1, ANY) if root < 0 else (op, -1, root)
        label = self._labels.of(group)
        index = self._enter(op, label, dtype, count, size=group.size(), peer=peer, root=root)
        self._inside.begun = index, label, peer != -1, self._ends(group, label, device)

    def _follow_in_cpp(self, call: Any) -> None:
        index, label, _, ends = self._inside.begun
        self._inside.begun = None
        if call.work is None:
            self.board.leave(index)
            return
        entry = Pending(index, self._limits.get(label, 0.0), ends_by_wait=ends, is_message=False)
        entry.keep(call.work)
        with self._lock:
            self._pending[id(entry)] = entry

    def _take_back(self) -> None:
        """Note that the last call of this thread that C++ started raised, if it has not begun."""
        if begun := getattr(self._inside, "begun", None):
            self._inside.begun = None
            self._refused(*begun[:3])

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        point_to_point = name in _POINT_TO_POINT

        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if getattr(self._inside, "depth", 0):  # a method may call another one
                return original(group, *args, **kwargs)
            # The payload is the input.
            dtype, count, device = payload_of((*args, *kwargs.values())[1 if name.startswith(_OUTPUT_FIRST) else 0 :])
            label = self._labels.of(group)
            size = group.size()
            peer, note = -1, split_sizes(args, size) if name in _SPLIT else ""
            if point_to_point:
                given, tag = ([a for a in args[1:] if isinstance(a, int)] + [-1, 0])[:2]
                note = f"tag {tag}" if tag > 0 else ""
                peer = ANY if name == "recv_anysource" else global_rank(group, given)
            root, reduction = root_and_reduction((*args, *kwargs.values()))
            root = global_rank(group, root) if root >= 0 else root
            index = self._enter(
                name.strip("_"), label, dtype, count, size=size, peer=peer, root=root, reduction=reduction, note=note
            )  # fmt: skip
            limit = limit_of_call((*args, *kwargs.values())) or self._limits.get(label, 0.0)
            if self.on_reduce is not None and name == "allreduce" and args:
                self.on_reduce(group, args[0])
            self._inside.depth = 1
            try:
                with _Blocked(self, index, limit):  # some calls wait before they return
                    work = original(group, *args, **kwargs)
            except (ValueError, TypeError, RuntimeError) as error:
                if was_refused(error, name):
                    self._refused(index, label, point_to_point)
                raise
            finally:
                self._inside.depth = 0
            if work is None:
                self.board.leave(index)
            else:
                if "wait" in vars(type(work)) and type(work) not in self._waits:
                    self._wrap_wait(type(work))
                ends = self._ends(group, label, device)
                self._follow(work, Pending(index, limit, ends_by_wait=ends, is_message=point_to_point))
            return work

        recorded.__doc__ = original.__doc__
        return outside_graphs(recorded)


def matched_facts(
    op: str, group: str, dtype: str, count: int, *, peer: int = -1, root: int = -1, reduction: str = "", note: str = ""
) -> dict[str, Any]:
    """Return what must match of a call on the ranks of its group: as a JSON object."""
    uneven = op in _SPLIT or op in _UNEVEN
    size = "" if uneven or not count else f" x {count}"  # ranks may give different numbers of elements
    what = _OWN_RANK.sub("", note) if op == NEW_GROUP else f"{dtype}{size}{f', {reduction}' if reduction else ''}"
    kind = {"send": "send", "recv": "receive", "recv_anysource": "receive"}.get(op, "collective")
    facts = {"kind": kind, "op": op, "group": group, "what": what}
    if kind != "collective":
        facts["note"] = note
    return facts | ({"peer": peer} if peer != -1 else {}) | ({"root": root} if root >= 0 else {})


def _is_in_side_thread() -> bool:
    """Return whether a thread that Python started calls, other than the main one. Those of torch's autograd are not Python's."""
    ident = threading.get_ident()
    return ident != threading.main_thread().ident and any(
        thread.ident == ident and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate()
    )


class _Blocked:
    """A mark on the board while the main thread waits in collective ``index``, for ``limit`` seconds if that is not 0. If an
    exception ends the wait, ``failed_in`` keeps the call.

    A class, because a context by a generator costs three times as much, and every collective has two.
    """

    __slots__ = ("index", "limit", "on_main", "outer", "recorder", "until")

    def __init__(self, recorder: CollectiveRecorder, index: int, limit: float = 0.0) -> None:
        self.recorder, self.index, self.limit = recorder, index, limit

    def __enter__(self) -> None:
        recorder = self.recorder
        self.on_main = threading.get_ident() == threading.main_thread().ident
        self.outer, self.until = recorder._blocked_in, recorder._limit.until
        if self.on_main:
            recorder._blocked_in = self.index + 1
            recorder.board.number("blocked_in", self.index + 1)
            if recorder._has_failed:
                recorder._has_failed = False
                recorder.board.number("failed_in", 0)
            if self.limit:
                recorder._limit.set(wall_clock() + self.limit)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder = self.recorder
        recorder._blocked_in = self.outer
        if self.on_main:
            if self.limit:
                recorder._limit.set(self.until)
            if kind is not None and not self.outer:  # the rank's last call, in case the exception ends its test
                recorder._has_failed = True
                recorder.board.number("failed_in", self.index + 1)
            # Restores the mark of an outer call: a new group may be made inside a call.
            recorder.board.number("blocked_in", self.outer)
