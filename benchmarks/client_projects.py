"""The projects of clients.py whose tests no package has: where they are, at which tag, and which of their tests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project whose tests are in its repository alone; a plugin of benchmarks/clients runs them on ranks."""

    address: str
    tag: str
    parts: tuple[str, ...]  # what its tests need of the repository
    packages: tuple[str, ...]
    plugin: str
    files: tuple[str, ...]  # of tests, from ``folder``
    folder: str = "."  # where its pytest runs
    prepare: str = ""  # a program that runs once
    leaves: str = ""  # files that its tests leave behind, as glob takes them: removed after each batch


PROJECTS = {
    "torchsnapshot": Project(
        address="https://github.com/pytorch/torchsnapshot", tag="0.1.0", parts=("torchsnapshot", "tests", "pytest.ini"),
        packages=("aiofiles", "aiohttp", "importlib-metadata", "nest_asyncio", "psutil", "PyYAML", "pytest-asyncio"),
        plugin="torchsnapshot_on_ranks",
        files=tuple(
            f"tests/test_{name}.py"
            for name in ("replication_glob", "sharded_tensor_io_preparer", "partitioner", "ddp", "ddp_replication_glob")
        ),
    ),
    "mmengine": Project(
        address="https://github.com/open-mmlab/mmengine", tag="v0.10.7", parts=("mmengine", "tests", "pytest.ini"),
        packages=(
            "addict", "lmdb", "matplotlib", "opencv-python-headless", "parameterized", "PyYAML", "rich", "termcolor", "yapf",
        ),
        plugin="mmengine_on_ranks",
        files=(
            "tests/test_dist/test_dist.py", "tests/test_dist/test_utils.py",
            "tests/test_model/test_wrappers/test_model_wrapper.py", "tests/test_optim/test_optimizer/test_optimizer.py",
            "tests/test_optim/test_optimizer/test_optimizer_wrapper.py", "tests/test_hooks/test_sync_buffers_hook.py",
        ),
    ),
    "deepspeed": Project(
        address="https://github.com/deepspeedai/DeepSpeed", tag="v0.19.5",
        parts=("deepspeed", "accelerator", "op_builder", "csrc", "tests", "requirements", "setup.py", "version.txt"),
        packages=(
            "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "setuptools", "tqdm",
        ),
        plugin="deepspeed_on_ranks", folder="tests",
        files=(
            "unit/comm/test_dist.py", "unit/runtime/pipe/test_topology.py", "unit/runtime/utils/test_partition.py",
            "unit/runtime/test_runtime_utils.py", "unit/checkpoint/test_tag_validation.py",
        ),
        leaves="/dev/shm/deepspeed_allreduce_buffer_*",
        prepare="""
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
""",
    ),
}  # fmt: skip
