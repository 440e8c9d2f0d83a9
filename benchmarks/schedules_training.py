"""More schedules of `schedules.py`, of what surrounds training: evaluation, checkpoints, sharded layers, experts, a ring, keys."""

from __future__ import annotations

# As in schedules_text: the numbers of ranks, and the source. What may go wrong ends with #~ and what it is.
SCHEDULES: dict[str, tuple[tuple[int, ...], str]] = {
    "evaluation": (
        (2, 3, 4),
        """\
class Meter:
    def __init__(self):
        self.sums = torch.zeros(2)

    def update(self, loss, n):
        self.sums += torch.tensor([loss * n, float(n)])

    def compute(self, step):
        total = self.sums.clone()
        dist.all_reduce(total)  #~ collective
        self.sums.zero_()
        return (total[0] / total[1]).item()

def train_epoch(step, rank):
    for batch in range(3):
        grads = [torch.ones(16), torch.ones(4)]
        for g in grads:
            dist.all_reduce(g)  #~ collective
    return step + 1

def evaluate(meter, step, rank):
    for batch in range(2):
        meter.update(1.0, 4)
        hits = torch.zeros(3)
        dist.all_reduce(hits)  #~ collective
    return meter.compute(step)

def TEST(group):
    rank, best, meter = dist.get_rank(), 9.0, Meter()
    for step in range(5):
        train_epoch(step, rank)
        loss = evaluate(meter, step, rank)
        if loss < best:
            best = loss
            state = torch.ones(8)
            dist.broadcast(state, 0)  #~ collective
        flag = torch.zeros(1)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  #~ collective
""",
    ),
    "checkpoints": (
        (2, 3),
        """\
class Manager:
    def __init__(self, rank, every):
        self.rank, self.every = rank, every

    def maybe_save(self, step):
        if step % self.every:
            return
        self.save(step)

    def save(self, step):
        plan = [None] * dist.get_world_size()
        dist.all_gather_object(plan, {"rank": self.rank, "step": step})  #~ collective
        if self.rank == 0:
            time.sleep(0.005)
        dist.barrier()  #~ collective

def TEST(group):
    rank = dist.get_rank()
    manager = Manager(rank, 2)
    for step in range(7):
        for part in range(2):
            dist.all_reduce(torch.ones(6))  #~ collective
        manager.maybe_save(step)
        if step == 5:
            manager.save(step)
    dist.barrier()
""",
    ),
    "sharded layers": (
        (2, 3, 4),
        """\
class Layer:
    def __init__(self, n, size):
        self.shard, self.n = torch.ones(size), n

    def forward(self, x, step):
        parts = [torch.empty_like(self.shard) for _ in range(self.n)]
        dist.all_gather(parts, self.shard)  #~ collective
        return x + torch.cat(parts).sum()

    def backward(self, step):
        grads = [torch.ones_like(self.shard) for _ in range(self.n)]
        out = torch.empty_like(self.shard)
        dist.reduce_scatter(out, grads)  #~ collective
        self.shard = self.shard - 0.01 * out

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    layers = [Layer(n, 4), Layer(n, 4), Layer(n, 2)]
    for step in range(5):
        for micro in range(2):
            x = torch.zeros(1)
            for layer in layers:
                x = layer.forward(x, step)
            for layer in reversed(layers):
                layer.backward(step)
        norm = torch.ones(1)
        dist.all_reduce(norm)  #~ collective
""",
    ),
    "experts": (
        (2, 4),
        """\
def dispatch(x, counts, step):
    sizes = torch.tensor(counts)
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes)
    out = torch.empty(int(received.sum()))
    dist.all_to_all_single(out, x, received.tolist(), counts)  #~ collective
    return out, received.tolist()

def combine(y, received, counts, step):
    back = torch.empty(sum(counts))
    dist.all_to_all_single(back, y, counts, received)  #~ collective
    return back

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        for layer in range(2):
            counts = [1 + (rank + layer) % 2] * n
            y, received = dispatch(torch.ones(sum(counts)), counts, step)
            combine(y, received, counts, step)
        dist.all_reduce(torch.ones(3))  #~ collective
""",
    ),
    "ring": (
        (3, 4),
        """\
def rotate(block, step, hop):
    rank, n = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(block)
    if rank % 2 == 0:
        dist.send(block, (rank + 1) % n)  #~ message
        dist.recv(got, (rank - 1) % n)  #~ message
    else:
        dist.recv(got, (rank - 1) % n)  #~ message
        dist.send(block, (rank + 1) % n)  #~ message
    return got

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        kv = torch.full((4,), float(rank))
        for hop in range(n - 1):
            kv = rotate(kv, step, hop)
        dist.all_reduce(torch.ones(2))  #~ collective
""",
    ),
    "store barrier": (
        (2, 3, 4),
        """\
def meet(store, name, step):
    n = dist.get_world_size()
    if store.add(f"{name}/{step}", 1) == n:
        store.set(f"{name}/{step}/all", "1")
    store.wait([f"{name}/{step}/all"])

def publish(store, step):
    if dist.get_rank() == 0:
        store.set(f"config/{step}", f"{step}")  #~ key
    return store.get(f"config/{step}")

def TEST(group):
    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        publish(store, step)
        meet(store, "start", step)  #~ key
        dist.all_reduce(torch.ones(5))  #~ collective
        meet(store, "end", step)  #~ key
""",
    ),
    "rollouts": (
        (3, 4),
        """\
def serve(step, workers):
    for worker in workers:
        n = torch.zeros(1)
        dist.recv(n, worker)  #~ message
        rollout = torch.empty(int(n))
        dist.recv(rollout, worker)  #~ message

def generate(step):
    rollout = torch.ones(3 + step % 2)
    dist.send(torch.tensor([float(len(rollout))]), 0)  #~ message
    dist.send(rollout, 0)  #~ message

def TEST(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        if rank == 0:
            serve(step, range(1, n))
        else:
            generate(step)
        weights = [torch.ones(4), torch.ones(2)]
        for w in weights:
            dist.broadcast(w, 0)  #~ collective
""",
    ),
    "two dimensions": (
        (4,),
        """\
class Grid:
    def __init__(self):
        rank = dist.get_rank()
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.row, self.column = rows[rank // 2], columns[rank % 2]

    def layer(self, step):
        h = torch.ones(6)
        dist.all_reduce(h, group=self.row)  #~ collective
        return h

    def sync(self, step):
        for g in (torch.ones(8), torch.ones(3)):
            dist.all_reduce(g, group=self.column)  #~ collective

def TEST(group):
    grid = Grid()
    for step in range(5):
        for _ in range(3):
            grid.layer(step)
        grid.sync(step)
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)  #~ collective
""",
    ),
    "replicas": (
        (2, 3),
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())

def TEST(group):
    model = torch.nn.parallel.DistributedDataParallel(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        for micro in range(2):
            model(torch.randn(3, 4)).sum().backward()  #~ collective
        opt.step()
        opt.zero_grad()
        stats = torch.ones(2)
        dist.all_reduce(stats)  #~ collective
        if step % 3 == 2:
            names = [None] * dist.get_world_size()
            dist.all_gather_object(names, str(step))  #~ collective
""",
    ),
    "window": (
        (2, 3),
        """\
class Prefetch:
    def __init__(self, depth):
        self.depth, self.pending = depth, []

    def push(self, step):
        x = torch.full((4,), float(step))
        self.pending.append(dist.all_reduce(x, async_op=True))  #~ collective
        if len(self.pending) > self.depth:
            self.pending.pop(0).wait()

    def drain(self, step):
        for work in self.pending:
            work.wait()
        self.pending.clear()

def TEST(group):
    window = Prefetch(2)
    for step in range(6):
        window.push(step)
        if step % 3 == 2:
            window.drain(step)
            dist.barrier()  #~ collective
    window.drain(6)
""",
    ),
}
