"""Secrets that ranks print, raise, name, run and are given: in no file of a run, and in none of the plugin's own lines."""

import ast
import json
import re

import pytest

from nsa.trace.secrets import masked, masked_source
from pytest_nsa.evidence.source import read_sources
from pytest_nsa.session.masking import shown_ids
from pytest_nsa.testing import ExampleResult, run_example

ARGUMENTS = ("argvtoken66", "argvpw67", "pwargv68")  # of child processes: masked in any case
IN_SOURCE = (
    "sk-LITERALLITERALLITERAL99",
    "hf_SOURCELINESOURCELINE1234",
    "AKIAABCDEFGHIJKLMNOP",
    "AAAABBBBCCCCDDDD1111",
    "literalpw71",
)
SAID = (
    "sk-PRINTEDPRINTEDPRINTED00", "hunter2print", "pw_in_url", "urltoken55", "warntoken88", "hf_THREADTHREADTHREAD12",
    "notetoken72",
)  # fmt: skip
RECORDED = ("propertytoken73", "storetoken74", "npm_STORESTORESTORESTORE75")
GIVEN = ("sk-PARAMPARAMPARAMPARAM44", "sk-PARAMPARAMPARAMPARAM45")  # parameters, which are in ids
VARIABLES = ("variable90", "variable91")
CANARIES = (*ARGUMENTS, *IN_SOURCE, *SAID, *GIVEN, *VARIABLES, *RECORDED)

SOURCE = """
import subprocess, warnings

def connect(key, url):
    raise ConnectionError(f"cannot reach {url} with key={key} Authorization: Bearer AAAABBBBCCCCDDDD1111 and AKIAABCDEFGHIJKLMNOP")

def test_raises(group):
    print("printing sk-PRINTEDPRINTEDPRINTED00 password=hunter2print")
    connect(key="sk-LITERALLITERALLITERAL99", url="https://user:pw_in_url@host/x?token=urltoken55")

@pytest.mark.timeout(8)
def test_hangs(group):
    key = group.rank  # a name, and no secret
    if key == 0:
        dist.barrier()
    time.sleep(60) if "hf_SOURCELINESOURCELINE1234" != dict(password="literalpw71") else None

@pytest.mark.timeout(8)
def test_waits_for_a_child(group):
    warnings.warn("warned token=warntoken88")
    left = threading.Thread(target=lambda: time.sleep(60), name="hf_THREADTHREADTHREAD12", daemon=True)
    left.start()
    secrets = ["--token", "argvtoken66", "--password=argvpw67", "https://u:pwargv68@h/"]
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *secrets]).wait()

def test_leaves_a_child(group):
    subprocess.Popen(["sleep", "60", "--token", "argvtoken66"])
    error = ValueError("bad")
    error.add_note("token: notetoken72")
    raise error

@pytest.mark.timeout(8)
def test_waits_for_a_key(group, record_property):
    record_property("access_token", "property" + "token73")
    store = dist.distributed_c10d._get_default_store()
    store.set("npm_" + "STORE" * 4 + "75", "1")
    if group.rank == 1:
        store.get("of/token=store" + "token74")
    dist.barrier()

@pytest.mark.parametrize("given", ["sk-PARAMPARAMPARAMPARAM44", "sk-PARAMPARAMPARAMPARAM45"])
def test_given(group, given):
    assert given == 1
"""
assert len(CANARIES) == 22


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str) -> ExampleResult:
    monkeypatch.setenv("NCCL_AUTH_TOKEN", VARIABLES[0])
    monkeypatch.setenv("TORCH_HOME", f"https://me:{VARIABLES[1]}@host")
    return run_example(pytester, SOURCE, *options, "--junitxml=junit.xml")


def where(canaries: tuple[str, ...], result: ExampleResult) -> set[tuple[str, str]]:
    files = [path for path in result.run.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(result.run)): path.read_bytes().decode(errors="replace") for path in files}
    texts |= {f"the name {path.name}": path.name for path in result.run.rglob("*")}
    # pytest itself prints a test's id, and its source where it fails there.
    ours = result.stdout.partition("= nsa diagnosis =")[2].partition("short test summary")[0]
    texts["the closing lines"] = ours
    return {(canary, name) for canary in canaries for name, text in texts.items() if canary in text}


def test_no_canary_is_in_a_file_of_tests_that_raise(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, "-o", "ranks_mask_output=true", "-k", "raises or leaves or given or key")
    assert result.outcomes["failed"] == 5
    assert where(CANARIES, result) == set()


@pytest.mark.slow
def test_no_canary_is_in_a_file_of_a_masked_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, "-o", "ranks_mask_output=true", "--ranks-keep=all")
    assert result.outcomes["failed"] == 7
    assert where(CANARIES, result) == set()
    junit = (pytester.path / "junit.xml").read_text()
    for text in (junit, result.stdout):
        assert [c for c in CANARIES if c in text and c not in GIVEN] == []
    entries = [json.loads(line) for line in (result.run / "verdicts.jsonl").read_text().splitlines()]  # type: ignore[operator]
    ids = [entry["nodeid"].partition("::")[2] for entry in entries]
    assert ids[-2:] == ["test_given[***]", "test_given[***]-2"]  # no verdict is lost
    causes = {entry["nodeid"].partition("::")[2]: entry.get("cause", "") for entry in entries}
    assert causes["test_hangs"] == "sleeping"
    assert causes["test_waits_for_a_child"] == "child_process"
    for folder in {entry["folder"] for entry in entries}:
        snippets = read_sources(result.run / folder).snippets  # type: ignore[operator]
        assert all(snippet.statements() for snippet in snippets)


@pytest.mark.slow
def test_arguments_of_children_are_masked_in_any_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, "-k", "child or raises or given or hangs")
    assert result.outcomes["failed"] == 6
    found = where(CANARIES, result)
    with_source = ("source.jsonl", "report.html", "reports.jsonl")  # which the test has them in
    assert {name for c, name in found if c in ARGUMENTS and not name.endswith(with_source)} == set()
    assert {name for c, name in found if c in VARIABLES} == set()
    assert "--token ***" in result.stdout
    assert "waits for" in (result.run / "SUMMARY.md").read_text()  # type: ignore[operator]
    assert {c for c, _ in found} >= {*SAID[:2], *GIVEN}  # without the option, the rest is as the test gave it


FUNCTION = '''
    @decorated(password="letmein-123")
    def step(self, x, key=None):
        """Send Authorization: Bearer abcdefghijkl

        more"""
        key = self.get_key(x)  # token=abcdefghijkl
        named = f"sk-{'x' * 20}"
        options = {"password": 'letmein-123', "rate": "fast"}
        return login(key=key, token="""letmein-123
""", value="sk-abcdefghijklmnopqrstuvwx" "hf_abcdefghijklmnopqrst", auth=b"letmein-123")
'''.strip("\n")


def test_a_masked_function_parses_as_before_in_as_many_lines() -> None:
    found = masked_source(FUNCTION)
    assert not re.search("letmein|abcdefghijkl", found)
    assert found.count("\n") == FUNCTION.count("\n")

    def shape(text: str) -> str:
        tree = ast.parse(f"if True:\n{text}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                node.value = ""
        return ast.dump(tree)

    assert shape(found) == shape(FUNCTION)
    assert "key = self.get_key(x)  # token=***" in found
    assert '"rate": "fast"' in found


def test_what_cannot_be_parsed_is_masked_by_line() -> None:
    text = 'f(\n  "a", password="letmein-123",\n'
    assert masked_source(text) == 'f(\n  "a", password="***",\n'


def test_to_mask_twice_is_to_mask_once() -> None:
    for text in (
        "token=`x`",
        "a --token x`b",
        "https://u:p@h",
        "key: x|y",
        "Bearer abcdefg",
        "sk-abcdefghijklmnopqrstuvwx",
    ):
        once = masked(text)
        assert masked(f"{once}` | rest") == f"{once}` | rest"


def test_ids_that_become_equal_are_numbered() -> None:
    ids = ["t.py::a[sk-PARAMPARAMPARAMPARAM44]", "t.py::a[sk-PARAMPARAMPARAMPARAM45]@group", "t.py::a[plain]"]
    assert list(shown_ids(ids).values()) == ["t.py::a[***]", "t.py::a[***]-2", "t.py::a[plain]"]
