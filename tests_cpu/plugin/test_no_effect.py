"""A repository that never asks for ranks: its tests end as without the plugin, whatever names, files and options it has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nsa.testing import run_example

MARKS = (
    "gpu", "gpu(1)", "gpu('a100')", "gpu(reason='needs one')", "backend", "backend('postgres')", "branch('main')", "branch",
    "cores", "cores(min=4)", "reuse", "reuse(True)", "scenario", "scenario('user logs in')", "trace", "trace('sql')",
    "trace_kinds('x')",
    "static_graph", "gc_range(1)", "check_divergence", "rank_env(A=1)", "hash_seeds", "hash_seeds(1)", "fails_as('x')",
    "world_size", "world_size(2)", "world_size(8, 'x')", "world_size(val=2)", "world_size([1, 2])",
)  # fmt: skip
FIXTURES = ("group", "ddp", "fsdp", "trace", "launch", "artifacts", "branch", "gc_range", "rank_tmp_path")
SOURCE = """
import os, sys, unittest
import pytest

def test_imports():
    assert "torch" not in sys.modules and "nsa" not in sys.modules
    assert len([name for name in sys.modules if name.partition(".")[0] == "pytest_nsa"]) <= 15

@pytest.mark.gpu
class TestCase(unittest.TestCase):
    def test_method(self):
        self.assertNotIn("PYTEST_NSA", str(os.environ.keys()))

@pytest.mark.parametrize("group", [None, [0, 1]])
def test_parameter(group):
    assert group in (None, [0, 1])
"""


def session(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, str], list[str]]:
    """Run pytest in a process; return its exit code, the outcome of each test, and the files that it has left."""
    (folder / "conftest.py").write_text(
        "import json\noutcomes = {}\n"
        "def pytest_runtest_logreport(report):\n"
        "    if report.when == 'call' or not report.passed: outcomes[report.nodeid] = report.outcome\n"
        "def pytest_unconfigure(config):\n"
        "    if not hasattr(config, 'workerinput'): open('outcomes.json', 'w').write(json.dumps(outcomes))\n"
    )
    before = {name for name in os.environ if name.startswith(("NSA_", "RANK", "WORLD_SIZE", "MASTER_", "TORCH"))}
    environment = {name: value for name, value in os.environ.items() if name not in before} | variables
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(folder), *arguments)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    written = folder / "outcomes.json"
    outcomes = json.loads(written.read_text()) if written.exists() else {}
    written.unlink(missing_ok=True)
    return done.returncode, outcomes, sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


def assert_no_effect(folder: Path, *arguments: str, **variables: str) -> None:
    without = session(folder, "-p", "no:nsa", *arguments, **variables)
    assert session(folder, *arguments, **variables) == without
    assert without[0] == 0


def test_marks_and_parameters_of_the_same_names(tmp_path: Path) -> None:
    marked = [
        f"@pytest.mark.{mark}\ndef test_mark_{n}(): assert 'RANK' not in os.environ\n" for n, mark in enumerate(MARKS)
    ]
    (tmp_path / "test_it.py").write_text(SOURCE + "\n".join(marked))
    assert_no_effect(tmp_path, "-p", "no:warnings")


@pytest.mark.parametrize("where", ["a plugin", "the module"])
def test_fixtures_of_the_same_names_win(tmp_path: Path, where: str) -> None:
    fixtures = "".join(f"@pytest.fixture\ndef {name}(): return 'mine'\n" for name in FIXTURES)
    body = f"def test_it({', '.join(FIXTURES)}): assert {{{', '.join(FIXTURES)}}} == {{'mine'}}\n"
    (tmp_path / "other.py").write_text(f"import pytest\n{fixtures}")
    (tmp_path / "test_it.py").write_text(body if where == "a plugin" else f"import pytest\n{fixtures}{body}")
    arguments = ("-p", "other") if where == "a plugin" else ()
    assert_no_effect(tmp_path, *arguments, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_BACKEND": "inductor", "NSA_TRACE_LEVEL": "2", "NSA_FAKE_GPUS": "x"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.invalid", "MASTER_PORT": "http"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "MASTER_ADDR": "localhost"},
    ],
    ids=lambda variables: next(iter(variables)),
)
@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_variables_files_and_settings_of_the_same_names(
    tmp_path: Path, variables: dict[str, str], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    (tmp_path / "artifacts").write_text("a file")
    (tmp_path / "pytest.ini").write_text("[pytest]\nartifacts_dir = .\n")
    (tmp_path / "other.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('artifacts', 'bisect-env', 'pdb-rank', 'ranks'): parser.addoption(f'--{name}', default='mine')\n"
        "    try: parser.addini('artifacts_dir', 'of another tool')\n"
        "    except ValueError: pass\n"
    )
    assert_no_effect(tmp_path, "-p", "other", *arguments, PYTHONPATH=str(tmp_path), **variables)


@pytest.mark.parametrize(
    ("ini", "header", "outcomes"),
    [
        ("", "", {"passed": 1}),
        ("ranks_marks = true", "", {"errors": 1}),
        ("", "import pytest_nsa", {"errors": 1}),
        ("", "from pytest_nsa import gpu as ours", {"errors": 1}),
    ],
)
def test_a_mark_of_pytest_counts_where_the_repository_asks(
    pytester: pytest.Pytester, ini: str, header: str, outcomes: dict[str, int]
) -> None:
    """world_size('two') is refused where it is ours; elsewhere it is another suite's."""
    pytester.makeini(f"[pytest]\n{ini}\n")
    source = f"{header}\nimport pytest\n@pytest.mark.world_size('two')\ndef test_it(): pass\n"
    (pytester.path / "test_it.py").write_text(source)
    done = pytester.runpytest_subprocess()
    done.assert_outcomes(**outcomes)


def test_a_wrong_setting_is_an_error_of_the_tests_on_ranks(pytester: pytest.Pytester) -> None:
    (pytester.path / "artifacts").write_text("a file")
    result = run_example(pytester, "@world_size(2)\ndef test_ranked(group): pass\ndef test_plain(): pass")
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "ini artifacts_dir artifacts: is a file" in result.stdout


def test_a_module_with_a_proxy_that_is_not_bound(tmp_path: Path) -> None:
    """As flask's `request` outside of a request: it raises for its class and for each attribute."""
    (tmp_path / "test_it.py").write_text(
        "class Proxy:\n    def __getattribute__(self, name): raise RuntimeError('working outside of a request')\n"
        "request = Proxy()\nimport pytest\n@pytest.mark.world_size(2)\ndef test_it(): pass\n"
    )
    assert_no_effect(tmp_path, "-p", "no:warnings")


def test_options_and_their_values_have_our_prefix(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--help").stdout.str()
    section = text.partition("tests on ranks (pytest-nsa):\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^  (--[\w-]+)", section, re.M)
    assert len(shown) > 5
    assert all(option.startswith("--ranks-") for option in shown), shown
    with_plugin, without = pytester.parseconfig(), pytester.parseconfig("-p", "no:nsa")
    added = vars(with_plugin.option).keys() - vars(without.option).keys()
    assert len(added) == len(shown)
    assert all(name.startswith("nsa_") for name in added), added
