"""The schedules of `schedules.py`: healthy programs, of which it makes one statement another one.

More than 400 lines: a table of programs.
"""

from __future__ import annotations

# By name: the numbers of ranks, and the source. What may go wrong ends with #~ and what it is.
SCHEDULES: dict[str, tuple[tuple[int, ...], str]] = {
    "stages": (
        (3, 4),
        """\
def forward_chunk(x, rank, step):
    if rank > 0:
        dist.recv(x, rank - 1)  #~ message
    x = x * 2 + step
    if rank < dist.get_world_size() - 1:
        dist.send(x, rank + 1)  #~ message
    return x

def backward_chunk(g, rank, step):
    if rank < dist.get_world_size() - 1:
        dist.recv(g, rank + 1)  #~ message
    g = g / 2
    if rank > 0:
        dist.send(g, rank - 1)  #~ message
    return g

def TEST(group):
    rank = dist.get_rank()
    x, g = torch.ones(4), torch.ones(4)
    for step in range(5):
        forward_chunk(x, rank, step)
        backward_chunk(g, rank, step)
        norm = g.norm()
        dist.all_reduce(norm)  #~ collective
""",
    ),
    "micro-batches": (
        (3, 4),
        """\
def schedule(stage, stages, micro):
    warm = stages - stage - 1
    return ["F"] * warm + ["F", "B"] * (micro - warm) + ["B"] * warm

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    act, grad = torch.zeros(8), torch.zeros(8)
    for step in range(3):
        pending = []
        for op in schedule(rank, n, 6):
            if op == "F":
                if rank > 0:
                    dist.recv(act, rank - 1, tag=1)  #~ message
                if rank < n - 1:
                    pending.append(dist.isend(act.clone(), rank + 1, tag=1))  #~ message
            else:
                if rank < n - 1:
                    dist.recv(grad, rank + 1, tag=2)  #~ message
                if rank > 0:
                    pending.append(dist.isend(grad.clone(), rank - 1, tag=2))  #~ message
        for work in pending:
            work.wait()
        dist.all_reduce(grad)  #~ collective
""",
    ),
    "halo": (
        (3, 4),
        """\
class Field:
    def __init__(self, rank, n):
        self.rank, self.n = rank, n
        self.u = torch.full((6,), float(rank))

    def exchange(self, step):
        left, right = self.rank - 1, self.rank + 1
        works = []
        if left >= 0:
            works.append(dist.isend(self.u[1:2].clone(), left))  #~ message
        if right < self.n:
            works.append(dist.isend(self.u[-2:-1].clone(), right))  #~ message
        if left >= 0:
            dist.recv(self.u[0:1], left)  #~ message
        if right < self.n:
            dist.recv(self.u[-1:], right)  #~ message
        for w in works:
            w.wait()

    def residual(self, step):
        r = self.u.diff().abs().max()
        dist.all_reduce(r, op=dist.ReduceOp.MAX)  #~ collective
        return r.item()

def TEST(group):
    f = Field(dist.get_rank(), dist.get_world_size())
    for step in range(6):
        f.exchange(step)
        if step % 2 == 1:
            f.residual(step)
    dist.barrier()
""",
    ),
    "tree": (
        (4, 6, 7),
        """\
def reduce_up(x, rank, n, step):
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            part = torch.empty_like(x)
            dist.recv(part, child)  #~ message
            x = x + part
    if rank:
        dist.send(x, (rank - 1) // 2)  #~ message
    return x

def fan_down(x, rank, n, step):
    if rank:
        dist.recv(x, (rank - 1) // 2)  #~ message
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.send(x, child)  #~ message
    return x

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        x = reduce_up(torch.ones(3), rank, n, step)
        fan_down(x, rank, n, step)
    dist.barrier()
""",
    ),
    "requests": (
        (3, 4),
        """\
def serve(n, rounds):
    left = n - 1
    answers = 0
    ask = torch.zeros(1)
    while left:
        who = dist.recv(ask)
        job = torch.tensor([float(answers)])
        if ask.item() < 0:
            left -= 1
            continue
        answers += 1
        dist.send(job, who)

def work(rank, rounds):
    job = torch.zeros(1)
    for step in range(rounds):
        dist.send(torch.tensor([float(step)]), 0)  #~ message
        dist.recv(job, 0)  #~ message
        time.sleep(0.002)
    step = 99
    dist.send(torch.tensor([-1.0]), 0)  #~ message

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    serve(n, 5) if rank == 0 else work(rank, 5)
    dist.barrier()
""",
    ),
    "leader": (
        (2, 3, 4),
        """\
def publish(store, step, rank):
    store.set(f"round/{step}", str(step))  #~ key

def follow(store, step, rank):
    store.wait([f"round/{step}"], timedelta(minutes=20))

def arrive(store, step, rank):
    store.add(f"arrived/{step}", 1)  #~ key

def TEST(group):
    store = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore("job", store)
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        leader = step % n
        if rank == leader:
            publish(store, step, rank)
        else:
            follow(store, step, rank)
        x = torch.ones(2)
        dist.all_reduce(x)  #~ collective
    dist.barrier()
""",
    ),
    "keys": (
        (3, 4),
        """\
def exchange(store, rank, n, step):
    store.set(f"{step}/from/{rank}", f"{rank * step}")  #~ key
    return [store.get(f"{step}/from/{r}") for r in range(n)]

def TEST(group):
    store = dist.PrefixStore("meta", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        exchange(store, rank, n, step)
        dist.all_reduce(torch.ones(1))  #~ collective
""",
    ),
    "mesh": (
        (4, 6),
        """\
class Mesh:
    def __init__(self, rank, n):
        rows = [[a, a + 1] for a in range(0, n, 2)]
        cols = [list(range(0, n, 2)), list(range(1, n, 2))]
        self.rows = [dist.new_group(r) for r in rows]
        self.cols = [dist.new_group(c) for c in cols]
        self.row, self.col = self.rows[rank // 2], self.cols[rank % 2]

def block(mesh, x, step):
    dist.all_reduce(x, group=mesh.row)  #~ collective
    x = x / 2
    out = [torch.empty_like(x) for _ in range(dist.get_world_size(mesh.col))]
    dist.all_gather(out, x, group=mesh.col)  #~ collective
    return torch.stack(out).mean(0)

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(rank, n)
    x = torch.ones(4)
    for step in range(6):
        x = block(mesh, x, step)
        if step % 3 == 2:
            dist.all_reduce(torch.ones(1))  #~ collective
    dist.barrier()
""",
    ),
    "handles": (
        (2, 3, 4),
        """\
class Reducer:
    def __init__(self, params):
        self.params, self.works = params, []

    def launch(self, step):
        for p in self.params:
            self.works.append(dist.all_reduce(p, async_op=True))  #~ collective

    def finish(self, step):
        while self.works:
            self.works.pop(0).wait()

def TEST(group):
    r = Reducer([torch.ones(3), torch.ones(5)])
    rank = dist.get_rank()
    for step in range(6):
        r.launch(step)
        y = torch.randn(32, 32) @ torch.randn(32, 32)
        r.finish(step)
        if step % 2:
            dist.broadcast(r.params[0], 0)  #~ collective
    dist.barrier()
""",
    ),
    "objects": (
        (2, 3, 4),
        """\
def agree(step, rank, n):
    plan = [None]
    if rank == step % n:
        plan = [{"step": step, "lr": 0.1}]
    dist.broadcast_object_list(plan, src=step % n)  #~ collective
    return plan[0]

def collect(step, rank, n):
    rows = [None] * n if rank == 0 else None
    dist.gather_object({"rank": rank, "step": step}, rows, dst=0)  #~ collective
    return rows

def deal(step, rank, n):
    mine = [None]
    shards = [[r, step] for r in range(n)] if rank == 0 else None
    dist.scatter_object_list(mine, shards, src=0)  #~ collective
    return mine[0]

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        agree(step, rank, n)
        deal(step, rank, n)
        dist.all_reduce(torch.ones(1))  #~ collective
        collect(step, rank, n)
        dist.barrier()  #~ collective
""",
    ),
    "gradients": (
        (2, 3, 4),
        """\
def average_gradients(model, step):
    n = dist.get_world_size()
    for p in model.parameters():
        dist.all_reduce(p.grad)  #~ collective
        p.grad /= n

def TEST(group):
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        opt.zero_grad()
        loss = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        average_gradients(model, step)
        opt.step()
        logged = loss.detach()
        dist.reduce(logged, 0)  #~ collective
    dist.barrier()
""",
    ),
    "batch": (
        (3, 4),
        """\
def swap(rank, n, step, x):
    up, down = (rank + 1) % n, (rank - 1) % n
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, up), dist.P2POp(dist.irecv, got, down)]
    for w in dist.batch_isend_irecv(ops):
        w.wait()
    return got

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))
    for step in range(6):
        x = swap(rank, n, step, x)  #~ message
        if step % 2 == 0:
            dist.all_reduce(torch.ones(1))  #~ collective
    dist.barrier()
""",
    ),
    "rows": (
        (3, 4),
        """\
def shuffle(rank, n, step, rows):
    out = [torch.empty(2) for _ in range(n)]
    out[rank] = rows[rank]
    works = []
    for other in range(n):
        if other != rank:
            works.append(dist.isend(rows[other], other, tag=step))  #~ message
    for other in range(n):
        if other != rank:
            dist.recv(out[other], other, tag=step)  #~ message
    for w in works:
        w.wait()
    return out

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.full((2,), float(r)) for r in range(n)]
    for step in range(5):
        rows = shuffle(rank, n, step, rows)
        dist.barrier()  #~ collective
""",
    ),
    "side thread": (
        (2, 3, 4),
        """\
class Metrics(threading.Thread):
    def __init__(self, group, rounds):
        super().__init__(daemon=True)
        self.group, self.rounds, self.sums = group, rounds, []

    def run(self):
        for step in range(self.rounds):
            x = torch.tensor([float(step)])
            dist.all_reduce(x, group=self.group)  #~ collective
            self.sums.append(x.item())

def TEST(group):
    rank = dist.get_rank()
    side = dist.new_group(list(range(dist.get_world_size())))
    m = Metrics(side, 6)
    m.start()
    for step in range(6):
        x = torch.ones(4)
        dist.all_reduce(x)  #~ collective
    m.join()
    dist.barrier()
""",
    ),
    "callbacks": (
        (2, 3, 4),
        """\
class Callback:
    def on_step(self, trainer, step): ...
    def on_epoch(self, trainer, step): ...

class EarlyStop(Callback):
    def on_epoch(self, trainer, step):
        flag = torch.zeros(1)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  #~ collective
        trainer.stop = bool(flag.item())

class Logger(Callback):
    def on_step(self, trainer, step):
        if step % 2 == 0:
            v = torch.ones(1)
            dist.all_reduce(v)  #~ collective

class Checkpoint(Callback):
    def on_epoch(self, trainer, step):
        if dist.get_rank() == 0:
            time.sleep(0.01)
        dist.barrier()  #~ collective

class Trainer:
    def __init__(self, callbacks):
        self.callbacks, self.stop = callbacks, False
        self.w = torch.ones(4)

    def fit(self, epochs, batches):
        step = 0
        for epoch in range(epochs):
            for batch in range(batches):
                g = torch.ones(4)
                dist.all_reduce(g)  #~ collective
                for c in self.callbacks:
                    c.on_step(self, step)
                step += 1
            for c in self.callbacks:
                c.on_epoch(self, step)
            if self.stop:
                break

def TEST(group):
    rank = dist.get_rank()
    Trainer([EarlyStop(), Logger(), Checkpoint()]).fit(3, 3)
    dist.barrier()
""",
    ),
}
