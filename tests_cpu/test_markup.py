"""Texts of tests and of strangers' runs in Markdown and on a page: they are shown, and nothing of them acts."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import NO_RANK, Fact, Verdict
from pytest_nsa.report import compare, summary
from pytest_nsa.report.plain import cell, code, inline, markdown

markdown_it = pytest.importorskip("markdown_it", reason="the extra 'test' has it")
RENDER = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render

TEXTS = (
    '<img src="x" onerror="x">',
    '\\<img src="x" onerror="x">', '\\\\<img src="x">', '\\<a href="javascript:x">x\\</a>', "<!-- x", "<?x?>",
    "[click](http://x)", "\\[click\\](http://x)", "![i](http://x)", "[click][ref]", "[ref]: http://x",
    "<http://x.example>",
    "a | b", "a \\| b", "a \\\\| b", "\\", "`", "``` x", "`a` <b>", "&lt;b&gt; &amp; &#60;b>", "# Everything passed", "- x", "1. x",
    "12) x",
    "    indented", "> x", "---", "===", "| a | b |", "~~~", "a\n\n# b", "line\n| --- |", "x < 3 and y > 2",
    "plain_text[1] (as it is)",
)  # fmt: skip


class _Reader(HTMLParser):
    """The elements of a page, their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.elements.append("comment")

    handle_pi = handle_comment


def shown(text: str) -> str:
    return " ".join(text.split())


def table_of(columns: int) -> list[str]:
    """Return the elements of a table with a head and one row."""
    return ["table", "thead", "tr", *["th"] * columns, "tbody", "tr", *["td"] * columns]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_one_paragraph_of_text(text: str) -> None:
    page = _Reader(RENDER(markdown(text)))
    assert page.elements in (["p"], ["p", "code"])  # a text may have a code span of its own
    assert not page.attributes
    if "`" not in text:
        assert shown(page.text) == shown(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_a_table_is_one_cell(text: str) -> None:
    rows = f"| {cell(inline(text))} | {code(text)} | last |"
    page = _Reader(RENDER(f"| a | b | c |\n| --- | --- | --- |\n{rows}\n"))
    assert [e for e in page.elements if e != "code"] == table_of(3)
    assert not page.attributes
    assert page.text.rstrip().endswith("last")
    if "`" not in text:
        assert shown(page.text).count(shown(text)) == 2


@pytest.mark.parametrize("text", TEXTS)
def test_summary_has_the_same_structure_whatever_the_texts_are(text: str) -> None:
    def page(text: str) -> _Reader:
        verdict = Verdict(
            nodeid=text, outcome="FAIL", cause=text, where=text, module=text, reason=text, advice=text, called_from=text,
            parameters_missing=(text,), machines=(text,), reads_as=text, backend=text, ranks=(0,),
            evidence=(Fact(rank=0, kind=text, file=text, text=text), Fact(rank=NO_RANK, kind=text, file=text, text=text)),
        )  # fmt: skip
        decision = Decision(
            sentence=text, action=text, path=(text,), hypotheses=((text, text),), readiness=text, tree=((text, text),), taken=text
        )  # fmt: skip
        env = {"schema": 1, text: text, "variables": {text: text}}
        entry = summary.Entry(folder="", verdict=verdict)
        rendered = summary.render([entry], decision, env, interrupted=False, not_run=[text])
        return _Reader(RENDER(rendered))

    def structure(found: _Reader) -> list[str]:
        return [e for e in found.elements if e not in ("code", "s")]  # what is emphasised acts on nothing

    found = page(text)
    assert structure(found) == structure(page("x"))
    assert found.elements.count("li") == page("x").elements.count("li") == 12
    assert {name for name, _ in found.attributes} <= {"class", "start"}


def test_two_runs_beside_each_other_have_one_table() -> None:
    for text in TEXTS:
        difference = compare.Difference(test=text, what=text, base=text, new=text, kind="worse")
        page = _Reader(RENDER(compare.as_markdown([difference], (text, text), 1)))
        assert [e for e in page.elements if e != "code"] == ["p", *table_of(5)]
        assert not page.attributes


def make_run(run: Path, *more: dict[str, Any], **verdict: Any) -> Path:
    """Make a run of a test that fails, and more; each verdict has other fields."""
    run.mkdir(exist_ok=True)
    usual = {
        "schema": 1,
        "folder": "",
        "nodeid": "t.py::test_x",
        "outcome": "FAIL",
        "cause": "unknown",
        "world_size": 2,
    }
    lines = [json.dumps(usual | of) for of in (more or [verdict])]
    (run / "verdicts.jsonl").write_text("\n".join(lines) + "\n")
    return run


ODD: list[dict[str, Any]] = [
    {"outcome": "FAIL);background-image:url(http://x);position:fixed"},
    {"outcome": "<img src=x onerror=x>"},
    {"outcome": ["FAIL"]},
    {"duration_s": 10**400},
    {"confidence": float("nan")},
    {"evidence": [{"rank": "x", "kind": "k", "file": "f", "says": "s"}]},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: next(iter(odd)))
def test_a_stranger_s_verdict_of_another_form_is_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", **odd)
    assert summary.read_entries(run) == []
    assert main(["report", str(run)]) == 0
    for name in ("SUMMARY.md", "report.html"):
        assert "http://x" not in (run / name).read_text()
        assert "<img" not in (run / name).read_text()


def test_figures_that_are_no_numbers_are_left_out_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"steps": 10, "step_ms": "slow", "loss": None, "peak_mib": 10**400, "property.x": 1.5}
    base, new = (make_run(tmp_path / name, figures=figures) for name in ("base", "new"))
    assert main(["compare", str(base), str(new)]) == 0
    assert "Nothing is worse" in capsys.readouterr().out


def test_a_page_forbids_every_request_and_every_script_but_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reason="<script>x</script>")
    main(["report", str(run)])
    page = (run / "report.html").read_text()
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    assert directives.get("script-src", "") == " ".join(hashes)
    assert len(scripts) == 1
    # The policy comes before all that it is to hold for.
    assert page.index("Content-Security-Policy") < page.index("<style") < page.index("<body")


def test_no_name_of_a_test_is_the_id_of_a_part_of_the_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    names = ("search", "tests", "only", "all", "head", "way", "still")
    for name in names:
        (run / name).mkdir()
        job = {"nodeid": name, "folder": str(run / name), "world_size": 2, "backend": "gloo"}
        (run / name / "job.json").write_text(json.dumps(job))
    main(["report", str(make_run(run, *({"folder": name, "nodeid": name, "where": name} for name in names)))])
    page = (run / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert [ids.count(own) for own in ("search", "tests", "only", "all")] == [1] * 4
    for name in names:
        assert page.count(f'id="test-{name}"') == 1
        assert f'href="#test-{name}"' in page
