"""Where torch is missing or too old, or the loopback interface is down, each test on ranks reports that in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests_cpu.namespaces import NETWORK, in_namespace
from tests_cpu.warm import WarmPython

SOURCE = """
import pytest
from pytest_nsa import world_size

@world_size(2)
def test_on_ranks(group): pass

def test_else(): pass
"""


@pytest.mark.own_python
@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("", "tests on ranks need torch, which {python} does not have: install torch>=2.6"),
        ("2.4.1", "tests on ranks need torch 2.6 or newer, and {python} has 2.4.1: upgrade it"),
    ],
    ids=["missing", "old"],
)
def test_a_test_on_ranks_reports_it(pytester: pytest.Pytester, version: str, says: str) -> None:
    # A test cannot remove an interpreter's own packages: it changes what Python finds of torch.
    pytester.makeconftest(
        f"""
        import importlib.metadata, importlib.util
        version_of, find = importlib.metadata.version, importlib.util.find_spec

        def version(name):
            if name == "torch" and not {version!r}:
                raise importlib.metadata.PackageNotFoundError(name)
            return {version!r} if name == "torch" else version_of(name)

        importlib.metadata.version = version
        importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
        """
    )
    pytester.makepyfile(test_example=SOURCE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    assert says.format(python=sys.executable) in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert not Path(pytester.path, "artifacts").exists()


def test_a_loopback_interface_that_is_down_is_named_in_a_line(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(
        "from pytest_nsa import world_size\n\n@world_size(2)\ndef test_a(group): pass\n"
    )
    done = warm.call(*in_namespace(NETWORK, "true", "pytest", "-p", "no:cacheprovider", "-q"), cwd=tmp_path)
    assert "FAIL: ranks 0 and 1, network_unusable" in done.stdout
    assert (
        "no network interface has the address 127.0.0.1: the loopback interface is down (ip link set lo up)"
        in done.stdout
    )
