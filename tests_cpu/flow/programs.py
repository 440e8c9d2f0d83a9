"""Programs of a rank for the alignment: `call` begins a call that ranks must match. No torch.

The statement at which ranks part ends in ``# HERE``. A program whose name begins with ``fits`` has none: ranks differ, and their
calls fit.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator

Call = Callable[..., None]


def leaves_a_loop_by_its_own_value(rank: int, call: Call) -> None:
    best = 9.0
    for step in range(6):
        local = 4.0 - step + 3 * (rank == 1 and step == 3)
        if local > best:  # HERE
            break
        best = local
        call("all_reduce")
    call("barrier")


def skips_a_batch(rank: int, call: Call) -> None:
    for step in range(5):
        size = 0 if (rank, step) == (2, 3) else 4
        if not size:  # HERE
            continue
        call("all_reduce")


def counts_other_things(rank: int, call: Call) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.count = 0

        def step(self, number: int) -> None:
            self.count += 2 if (rank, number) == (0, 2) else 1

        def is_due(self) -> bool:
            return self.count % 4 == 0

        def train(self) -> None:
            for number in range(7):
                self.step(number)
                if self.is_due():  # HERE
                    call("evaluate")
                call("all_reduce")

    Trainer().train()


def makes_more_passes(rank: int, call: Call) -> None:
    for size in (2, 2, 3 if rank == 1 else 2):
        for _part in range(size):  # HERE
            call("all_reduce")
    call("barrier")


def waits_until_it_is_done(rank: int, call: Call) -> None:
    done = 0
    while done < 4:  # HERE
        done += 1 if rank else 2
        call("all_reduce")


def swallows_an_exception(rank: int, call: Call) -> None:
    def load(step: int) -> int:
        return [1, 2, 3][step if rank == 0 else min(step, 2)]  # HERE

    for step in range(4):
        try:
            load(step)
        except IndexError:
            continue
        call("all_reduce")


def calls_another_function(rank: int, call: Call) -> None:
    hooks: list[Callable[[], None]] = [lambda: call("all_reduce"), lambda: None]

    def run(hook: Callable[[], None]) -> None:
        hook()  # HERE

    run(hooks[rank == 1])
    call("barrier")


def asks_a_generator_for_more(rank: int, call: Call) -> None:
    def batches(number: int):
        yield from range(number)

    for _batch in batches(3 + (rank == 2)):  # HERE
        call("all_reduce")


def stops_a_trainer_by_a_callback(rank: int, call: Call) -> None:
    class Trainer:
        stop = False

        def batches(self):
            for number in range(4):
                yield number * 2

        def after(self, number: int) -> None:
            loss = 9.0 if (rank, number) == (1, 2) else 1.0
            if loss > 5:
                self.stop = True

        def run(self) -> None:
            for number in self.batches():
                call("all_reduce")
                self.after(number)
                if self.stop:  # HERE
                    break

    Trainer().run()
    call("barrier")


def fits_in_turns(rank: int, call: Call) -> None:
    for number in range(6):
        if number % 3 != rank:
            continue
        call("all_to_all")
    call("barrier")


def takes_fewer_turns(rank: int, call: Call) -> None:
    for number in range(5):
        if number % 3 != rank:  # HERE
            continue
        call("all_to_all")
    call("barrier")


def goes_deeper(rank: int, call: Call) -> None:
    def visit(depth: int) -> None:
        call("all_reduce")
        if depth < 2 + (rank == 1):  # HERE
            visit(depth + 1)

    visit(0)


def gives_another_size(rank: int, call: Call) -> None:
    width = 4 if rank else 8
    call("all_reduce", what=f"float32 x {width}")  # HERE


def chooses_in_an_expression(rank: int, call: Call) -> None:
    flag = rank == 0
    call("all_reduce") if flag else call("barrier")  # HERE


def filters_in_a_comprehension(rank: int, call: Call) -> None:
    limit = 2 if rank == 1 else 3
    [call("all_reduce") for part in range(4) if part < limit]  # HERE
    call("barrier")


def matches_a_case(rank: int, call: Call) -> None:
    kind = "train" if rank else "evaluate"
    match kind:  # HERE
        case "train":
            call("all_reduce")
        case _:
            pass
    call("barrier")


def parts_in_a_thread(rank: int, call: Call) -> None:
    def work() -> None:
        for step in range(4):
            if (rank, step) != (1, 2):  # HERE
                call("all_reduce")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def fits_though_one_rank_logs(rank: int, call: Call) -> None:
    lines = []
    for step in range(4):
        if rank == 0:
            lines.append(f"step {step}")
        call("all_reduce")


def fits_though_one_rank_handles_an_error(rank: int, call: Call) -> None:
    for step in range(4):
        try:
            [][step if rank == 0 else 0 :]
            if rank == 1:
                raise ValueError
        except ValueError:
            pass
        call("all_reduce")


def fits_though_branches_differ(rank: int, call: Call) -> None:
    if rank % 2:
        call("all_reduce")
    else:
        call("all_reduce")
    call("barrier")


def fits_though_a_loop_is_long(rank: int, call: Call) -> None:
    total = 0
    for step in range(20_000 + 5_000 * rank):
        if step % 3:
            total += step
    call("all_reduce")


def does_what_a_function_returned(rank: int, call: Call) -> None:
    losses: list[float] = []

    def next_task(step: int) -> str:
        if len(losses) > 2 and losses[-1] > 2 * losses[-2]:  # DECIDED
            return "go back"
        return "evaluate" if step % 4 == 3 else "train"

    def do(task: str) -> None:
        if task == "go back":  # HERE
            call("broadcast")
        call("all_reduce")

    for step in range(8):
        losses.append(9.0 - step + 30 * (rank == 2 and step == 5))
        do(next_task(step))


def calls_what_one_rank_has_registered(rank: int, call: Call) -> None:
    class Events:
        def __init__(self) -> None:
            self.callbacks = [lambda: None]

        def register(self) -> None:
            self.callbacks.append(lambda: call("all_gather"))

        def fire(self) -> None:
            for callback in self.callbacks:  # HERE
                callback()

    events = Events()
    if rank == 0:  # DECIDED
        events.register()
    for _ in range(3):
        call("all_reduce")
        events.fire()


def decides_in_the_line_of_a_call_that_fails(rank: int, call: Call) -> None:
    def wait() -> None:
        call("all_gather")
        raise RuntimeError("closed by another rank")

    with contextlib.suppress(RuntimeError):
        wait() if rank != 1 else None  # HERE
    call("barrier")


def raises_after_it_left_out_a_call(rank: int, call: Call) -> None:
    def mean() -> float:
        if rank == 0:  # HERE
            return 0.0
        call("all_reduce")
        return 1.5

    with contextlib.suppress(ValueError):
        if mean() == 0.0:
            raise ValueError("no mean")


def raises_in_what_a_library_calls_while_others_lose_the_connection(rank: int, call: Call) -> None:
    documents = ["first", "second"][: 2 - (rank == 1)]
    save = eval("lambda position, call: (position(), call('all_gather'), {}['closed by another rank'])")

    def position() -> str:
        return documents[1]  # HERE

    with contextlib.suppress(LookupError):
        save(position, call)


def calls_in_its_handler(rank: int, call: Call) -> None:
    if rank == 0:  # HERE
        try:
            raise ValueError("not saved")
        except ValueError:
            call("all_reduce")
    call("barrier")


def begins_a_call_that_fails(rank: int, call: Call) -> None:
    def wait() -> None:
        call("barrier")
        raise RuntimeError("closed by another rank")

    call("all_reduce")
    try:
        if rank == 0:  # HERE
            wait()
    except RuntimeError:
        return


def saves_on_one_rank(rank: int, call: Call) -> None:
    def full_state() -> None:
        call("all_gather")

    is_main = rank == 0
    for step in range(4):
        call("all_reduce")
        if is_main and step == 2:  # HERE
            full_state()
    call("barrier")


def raises_where_others_call(rank: int, call: Call) -> None:
    def reduce(step: int) -> None:
        if rank == 2 and step == 2:  # HERE
            raise ValueError("no room")
        call("all_reduce")

    for step in range(4):
        try:
            reduce(step)
        except ValueError:
            break
    call("barrier")


def fits_until_a_tag_differs(rank: int, call: Call) -> None:
    """Without its messages, no call differs."""
    for step in range(4):
        tag = step + (rank == 1 and step == 2)
        if rank == 0:
            call("send", kind="send", peer=1, note=f"tag {tag}")
        elif rank == 1:
            call("recv", kind="receive", peer=0, note=f"tag {tag}")
        call("all_reduce")


def fits_though_messages_have_another_order(rank: int, call: Call) -> None:
    for step in range(3):
        if rank == 0:
            call("isend", kind="send", peer=1, note=f"tag {step}")
            call("isend", kind="send", peer=1, note="tag 9")
        elif rank == 1:
            call("irecv", kind="receive", peer=0, note="tag 9")
            call("irecv", kind="receive", peer=0, note=f"tag {step}")
        call("all_reduce")


def decides_in_one_line(rank: int, call: Call) -> None:
    for step in range(5):
        size = 0 if (rank, step) == (2, 3) else 4  # DECIDED
        if not size: continue  # noqa: E701  # fmt: skip  # HERE
        call("all_reduce")


def saves_where_the_ranking_says(rank: int, call: Call) -> None:
    scores = (3, 1, 2) if rank == 0 else (1, 3, 2)
    ranking = max(scores) == scores[0]
    is_best = ranking
    for step in range(3):
        if is_best and step == 1:  # HERE
            call("all_gather")
        call("all_reduce")


def calls_in_a_later_round(rank: int, call: Call) -> None:
    is_main = rank == 0
    for step in range(4):
        if is_main or step == 3:  # HERE
            call("all_gather")
        call("all_reduce")


def reduces_in_another_group(rank: int, call: Call) -> None:
    group = "dp" if rank else "tp"
    call("all_reduce", group=group), call("stuck")  # HERE


def leaves_a_generator_at_its_limit(rank: int, call: Call) -> None:
    def read(sizes: list[int]) -> Iterator[int]:
        try:
            yield from sizes
        finally:
            call("barrier")

    def take(batches: Iterator[int]) -> Iterator[int]:
        used = 0
        for size in batches:
            yield size
            used += size
            if used > 9:  # HERE
                break

    batches = read([3, 3, 5 if rank == 1 else 3])
    for _size in take(batches):
        pass
    call("all_gather")
    batches.close()


def leaves_an_expert_unused(rank: int, call: Call) -> None:
    def reduce(expert: int) -> None:
        call("all_reduce")

    for step in range(3):
        used = []
        for expert in range(2):
            rows = 0 if (rank, step, expert) == (1, 2, 0) else 4
            if rows:  # HERE
                used.append(expert)
        loss = types.SimpleNamespace(backward=functools.partial(list, map(reduce, used)))  # as of a C++ function
        loss.backward()
        call("barrier")


def reduces_where_a_budget_is_reached(rank: int, call: Call) -> None:
    def is_reached(tokens: int) -> bool:
        return tokens > 8  # HERE

    for step in range(3):
        tokens = 9 if (rank, step) == (1, 2) else 4
        reduced = map(call, ["all_reduce"] if is_reached(tokens) else [])
        loss = types.SimpleNamespace(backward=functools.partial(list, reduced))
        loss.backward()
        call("barrier")


def reduces_where_a_flag_is_set(rank: int, call: Call) -> None:
    for step in range(3):
        tokens = 9 if (rank, step) == (1, 2) else 4
        is_reached = tokens > 8  # HERE
        reduced = map(call, ["all_reduce"] if is_reached else [])
        loss = types.SimpleNamespace(backward=functools.partial(list, reduced))
        loss.backward()
        call("barrier")


def raises_inside_a_span(rank: int, call: Call) -> None:
    @contextlib.contextmanager
    def span() -> Iterator[None]:
        yield
        call("all_gather")

    def divide(rows: int) -> float:
        total = 4
        return total / rows  # HERE

    for step in range(3):
        rows = 0 if (rank, step) == (1, 2) else 2
        with contextlib.suppress(ZeroDivisionError), span():
            divide(rows)
        call("barrier")


def fits_though_messages_cross(rank: int, call: Call) -> None:
    left, right = (rank - 1) % 3, (rank + 1) % 3
    begin = functools.partial(functools.partial, call)
    for _ in range(2):
        sent = begin("send", kind="send", peer=right, note="1"), begin("send", kind="send", peer=left, note="2")
        taken = begin("recv", kind="receive", peer=left, note="1"), begin("recv", kind="receive", peer=right, note="2")
        list(map(functools.partial.__call__, (*sent, *taken)))
