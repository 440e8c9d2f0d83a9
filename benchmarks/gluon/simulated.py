"""Run Gluon kernels for Hopper in Python, as hardware may order what they start: for want of an interpreter of Gluon.

Tensors are torch's; layouts are ignored, as the compiler checks them. The partitions of `warp_specialize` take turns at random,
some much faster than others. A copy by TMA makes its destination NaN at once and arrives at a random moment, perhaps as late as
it can. A product reads its operands when it starts and again when it is waited for: if they differ, or a result is used before,
`Hazard` is raised, as it is where all partitions wait for ever. Scalars are Python's: a division rounds down, where a GPU rounds
to zero.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Value = Any


class Hazard(Exception):
    """What a kernel may do on a GPU but must not: read early, write early, arrive too often, wait for ever."""


class Scalar(int):
    """A number that a kernel converts."""

    def to(self, dtype: torch.dtype) -> Scalar:
        return self


@dataclass
class Descriptor:
    """A TMA descriptor of a matrix: blocks [rows, columns] with zeros outside of it."""

    matrix: torch.Tensor
    block: tuple[int, int]
    layout: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def read(self, row: int, column: int) -> torch.Tensor:
        found = torch.zeros(self.block, dtype=self.dtype)
        first, end = max(row, 0), min(row + self.block[0], len(self.matrix))
        if first < end:
            part = self.matrix[first:end, column : column + self.block[1]]
            found[first - row : end - row, : part.shape[1]] = part
        return found


@dataclass
class Pointer:
    """A pointer, or a tensor of them, to elements of a tensor."""

    memory: torch.Tensor
    at: Value = 0

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Value) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.at[index])


@dataclass
class Shared:
    """Shared memory, or barriers in it; ``written`` is called with the address that threads wrote."""

    data: torch.Tensor
    written: Callable[[int], None] = print
    barriers: list[Barrier] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Value:
        return self.barriers[i] if self.barriers else Shared(self.data[i], self.written)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length], self.written)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.written)

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)
        self.written(self.data.data_ptr())

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.data.clone()


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were expected are there."""

    count: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.left < 0:
            raise Hazard(f"more than {self.count} arrivals in a phase")
        if self.count and self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, 1 - self.phase


@dataclass
class Product:
    """A product under way: what it read when it started, and from where."""

    operands: list[tuple[Value, torch.Tensor]]
    before: Value  # the accumulator: a tensor, or a product under way
    is_added: bool
    result: torch.Tensor | None = None

    def end(self) -> None:
        for operand, read in self.operands:
            now = operand.data if isinstance(operand, Shared) else operand
            if not torch.equal(now.nan_to_num(1e30), read.nan_to_num(1e30)):
                raise Hazard("an operand changed while its product was under way")
        a, b = (read.float() for _, read in self.operands)
        before = self.before.result if isinstance(self.before, Product) else self.before
        self.result = a @ b + before if self.is_added else a @ b


class Turns:
    """Who runs: one partition at a time, chosen at random at each step, as are the copies that arrive."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.copies: list[Callable[[], None]] = []
        self.slow_copies: list[Callable[[], None]] = []
        self.speeds: dict[int, int] = {}  # of partitions: some run many steps while others run one
        self.running: int | None = -1
        self.failed: BaseException | None = None
        self.own = threading.local()

    @property
    def number(self) -> int:
        """The number of this partition; -1 before `warp_specialize`."""
        return getattr(self.own, "number", -1)

    @property
    def products(self) -> list[Product]:
        """The products of this partition under way, the oldest first."""
        if not hasattr(self.own, "products"):
            self.own.products = []
        return self.own.products

    def step(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, until it is this partition's turn and ``is_ready``."""
        me = self.number
        with self.changed:
            self.waiting[me] = is_ready
            self._choose()
            self.changed.wait_for(lambda: self.running == me or self.failed)
            if self.failed:
                raise self.failed
            del self.waiting[me]

    def send(self, land: Callable[[], None]) -> None:
        """Let a copy arrive soon, or, every second one, only when all partitions wait."""
        (self.copies if self.random.random() < 0.5 else self.slow_copies).append(land)

    def _choose(self) -> None:
        while not self.failed:
            ready = [who for who, is_ready in self.waiting.items() if is_ready()]
            arriving = self.copies if ready or self.copies else self.slow_copies
            if not ready and not arriving:
                self.running = None
                if self.waiting:
                    self.failed = Hazard(f"deadlock: partitions {sorted(self.waiting)} wait for barriers")
                break
            weights = [self.speeds.setdefault(who, self.random.choice((1, 20))) for who in ready]
            (i,) = self.random.choices(range(len(ready) + len(arriving)), [*weights, *[1] * len(arriving)])
            if i < len(ready):
                self.running = ready[i]
                break
            arriving.pop(i - len(ready))()
        self.changed.notify_all()

    def fork(self, calls: list[Callable[[], Any]]) -> None:
        """Run partitions to their ends."""

        def run(number: int, call: Callable[[], Any]) -> None:
            self.own.number = number
            try:
                with self.changed:
                    self.changed.wait_for(lambda: self.running == number or self.failed)
                    self.waiting.pop(number, None)
                if not self.failed:
                    call()
                    if self.products:
                        raise Hazard("a partition ended with products under way")
            except BaseException as error:
                self.failed = self.failed or error
            with self.changed:
                self._choose()

        threads = [threading.Thread(target=run, args=(i, call)) for i, call in enumerate(calls)]
        with self.changed:
            self.waiting = {i: lambda: True for i in range(len(calls))}
            self._choose()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed


class Machine:
    """The functions of Gluon's language, for one program."""

    def __init__(self, program: tuple[int, ...], seed: int) -> None:
        self.program, self.turns = program, Turns(seed)
        # What threads wrote that no fence has shown to the asynchronous units, and who did.
        self.unfenced: dict[int, int] = {}
        self.simulated: dict[Any, Callable[..., Any]] = {}

    def names(self) -> dict[str, Any]:
        """Return what the globals of a kernel's module are replaced with."""

        def binary(f: Callable[..., torch.Tensor], plain: Callable[..., Value]) -> Callable[..., Value]:
            def call(a: Value, b: Value) -> Value:
                if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
                    return plain(a, b)
                return f(*(x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b)))

            return call

        def where(condition: Value, a: Value, b: Value) -> Value:
            return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b

        class Layout:
            def __init__(self, *arguments: Any, **settings: Any) -> None: ...

            @staticmethod
            def get_default_for(*arguments: Any) -> None: ...

        gl = types.SimpleNamespace(
            program_id=lambda axis: Scalar(self.program[axis]), cdiv=lambda a, b: -(-a // b), where=where,
            minimum=binary(torch.minimum, min), maximum=binary(torch.maximum, max),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
            arange=lambda first, end, layout=None: torch.arange(first, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            convert_layout=lambda x, layout: x, load=self.load, store=self.store, static_range=range, static_assert=self.check,
            allocate_shared_memory=self.allocate, warp_specialize=self.warp_specialize, constexpr=lambda x: x,
            int32=torch.int32, int64=torch.int64, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
            **{f"{name}Layout": Layout for name in ("Slice", "Blocked", "DotOperand", "NVMMADistributed", "NVMMAShared")},
        )  # fmt: skip
        mbarrier = types.SimpleNamespace(
            init=self.init, expect=self.expect, arrive=self.arrive, wait=self.wait, MBarrierLayout=Layout
        )
        return {
            "gl": gl, "mbarrier": mbarrier, "load_tile": self.copy, "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_for_products,
        }  # fmt: skip

    def function(self, kernel: Any) -> Callable[..., Any]:
        """Return the function of a `gluon.jit` kernel, and those that it calls, with this machine's language."""
        if kernel not in self.simulated:
            known = self.simulated[kernel] = types.FunctionType(
                kernel.fn.__code__, {}, kernel.fn.__name__, kernel.fn.__defaults__
            )
            for name, value in kernel.fn.__globals__.items():
                is_kernel = type(value).__name__ == "GluonJITFunction"
                known.__globals__[name] = self.function(value) if is_kernel else getattr(value, "value", value)
            known.__globals__.update(self.names())
        return self.simulated[kernel]

    # --- memory ---------------------------------------------------------------------------------------------------

    def load(self, pointer: Pointer, mask: Value = None, other: float = 0.0) -> Value:
        if not isinstance(pointer.at, torch.Tensor):
            return pointer.memory.flatten()[pointer.at].item()
        mask = torch.ones_like(pointer.at, dtype=torch.bool) if mask is None else mask.expand(pointer.at.shape)
        found = torch.full(pointer.at.shape, other, dtype=pointer.memory.dtype)
        found[mask] = pointer.memory.flatten()[pointer.at[mask]]
        return found

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        assert value.dtype == pointer.memory.dtype
        mask = mask.expand(pointer.at.shape)
        pointer.memory.view(-1)[pointer.at[mask]] = value.expand(pointer.at.shape)[mask]

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Value:
        if dtype == torch.int64:
            return (
                Shared(torch.empty(0), barriers=[Barrier() for _ in range(shape[0])]) if len(shape) > 1 else Barrier()
            )
        return Shared(torch.full(shape, math.nan, dtype=dtype), self.note)

    def note(self, address: int) -> None:
        self.unfenced[address] = self.turns.number

    def fence(self) -> None:
        self.unfenced = {address: who for address, who in self.unfenced.items() if who != self.turns.number}

    # --- barriers and copies --------------------------------------------------------------------------------------

    def check(self, condition: bool) -> None:
        assert condition

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count
        self.note(id(barrier))

    def expect(self, barrier: Barrier, size: int) -> None:
        if id(barrier) in self.unfenced:
            raise Hazard("a copy may meet a barrier that no fence has shown to it")
        self.turns.step()
        barrier.bytes += size
        barrier.left -= 1
        barrier.settle()

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        self.turns.step()
        if pred:
            barrier.left -= count
            barrier.settle()

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.turns.step(lambda: barrier.phase != phase)

    def copy(self, source: Descriptor, at: list[int], barrier: Barrier, target: Shared) -> None:
        found = source.read(*at)
        target.data.fill_(math.nan)

        def land() -> None:
            target.data.copy_(found)
            barrier.bytes -= found.nbytes
            barrier.settle()

        self.turns.send(land)
        self.turns.step()

    # --- products -------------------------------------------------------------------------------------------------

    def multiply(
        self, a: Value, b: Shared, acc: Value, use_acc: bool = True, precision: Any = None, is_async: bool = False
    ) -> Value:
        self.turns.step()
        for operand in (a, b):
            if isinstance(operand, Shared) and operand.data.data_ptr() in self.unfenced:
                raise Hazard("a product reads what threads wrote, without a fence")
        operands = [(x, (x.data if isinstance(x, Shared) else x).clone()) for x in (a, b)]
        product = Product(operands, acc, use_acc)
        self.turns.products.append(product)
        return product if is_async else self.wait_for_products(0, [product])

    def wait_for_products(self, num_outstanding: int, deps: list[Value]) -> Value:
        self.turns.step()
        flying = self.turns.products
        while len(flying) > num_outstanding:
            flying.pop(0).end()
        found = []
        for x in deps:
            if isinstance(x, Product) and x.result is None:
                raise Hazard("the result of a product is used before it is there")
            found.append(x.result if isinstance(x, Product) else x)
        return found[0] if len(found) == 1 else tuple(found)

    def warp_specialize(
        self, partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]
    ) -> None:
        self.turns.fork([lambda f=f, values=values: f(*values) for f, values in partitions])


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, seed: int = 0, **settings: Any) -> None:
    """Run all programs of a kernel, one after another. Raise `Hazard`."""
    values = [Pointer(x) if isinstance(x, torch.Tensor) else _described(x) for x in arguments]
    for i in range(math.prod(grid)):
        program = i % grid[0], i // grid[0] % (grid[1] if len(grid) > 1 else 1)
        Machine(program, seed + i).function(kernel)(*values, **settings)


def _described(x: Any) -> Any:
    return Descriptor(x.base, tuple(x.block_shape)) if hasattr(x, "block_shape") else x
