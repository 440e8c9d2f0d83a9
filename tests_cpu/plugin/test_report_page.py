"""report.html as its reader uses it: what is on top, what the pictures say, and, in a real browser, that its tools work."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.testing import HEADER, ExampleResult, run_folder

SOURCE = """
lock = threading.Lock()

def helper():
    with lock:
        lock.acquire()

@world_size(12)
@pytest.mark.timeout(60)
def test_one_of_many(group):
    for i in range(4):
        dist.all_reduce(torch.ones(4))
        if i == 2 and group.rank == 7:
            helper()

@pytest.mark.timeout(60)
def test_cycle(group):
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=a if group.rank else b)

def test_hostile(group):
    print("</script><b>out</b>")
    dist.barrier()
    assert group.rank == 0, "</script><script>document.title = 'owned'</script>"

@pytest.mark.parametrize("n", range(3))
def test_passes(ddp, n, artifacts):
    ddp.wrap(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExampleResult:
    folder = tmp_path_factory.mktemp("page")
    (folder / "test_example.py").write_text(HEADER + SOURCE)
    return run_folder(folder, "-o", "ranks_hang_after=2")


@pytest.fixture(scope="module")
def page(run: ExampleResult) -> str:
    return (run.run / "report.html").read_text(encoding="utf-8")


def article(page: str, name: str) -> str:
    return next(a for a in re.findall(r"<article.*?</article>", page, re.S) if f"::{name} " in a)


def test_failures_come_first_and_passing_tests_fold_into_rows(page: str) -> None:
    assert page.index("<h1>") < page.index("<article") < page.index("All tests")
    assert len(re.findall("<article", page)) == 3
    rows = re.findall(r'<tr data-outcome="(\w+)"', page)
    assert sorted(rows) == ["FAIL", "HANG", "HANG", "PASS", "PASS", "PASS"]
    assert rows[3:] == ["PASS"] * 3
    assert "<b>3</b> PASS" in page


def test_the_culprit_s_line_is_marked_in_its_source(page: str) -> None:
    (marked,) = re.findall(r'<span class="line here">(.*?)</span>', article(page, "test_one_of_many"))
    assert marked.split() == ["10", "lock.acquire()"]


def test_all_stacks_are_one_tree(page: str) -> None:
    text = article(page, "test_one_of_many")
    assert re.findall(r'<span class="who culprit">([^<]*)', text) == ["rank 7"]
    assert re.findall(r'<span class="who">([^<]*)', text) == ["ranks 0-6, 8-11"]
    assert '<div class="frame user culprit"><code>test_example.py:10 in helper</code></div>' in text
    cycle = article(page, "test_cycle")
    assert 'class="who' not in cycle, "both ranks are at one line: the tree does not part"


def test_the_hole_in_the_collectives_is_marked(page: str) -> None:
    table = re.search(r'<table class="calls">.*?</table>', article(page, "test_one_of_many"), re.S)
    rows = re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', table[0], re.S)
    assert [name for name, _ in rows] == ["0-6, 8-11", "7"], "equal rows once"
    assert [cells.count('class="hole"') for _, cells in rows] == [0, 1]


def test_arrows_lead_from_who_waits_to_who_is_waited_for(page: str) -> None:
    titles = re.findall(r"<title>(rank \d+ waits for rank \d+)</title>", article(page, "test_cycle"))
    assert sorted(titles) == ["rank 0 waits for rank 1", "rank 1 waits for rank 0"]
    assert "Ranks 0-6, 8-11 wait for rank 7." in article(page, "test_one_of_many")


def test_lanes_begin_with_the_first_call_and_are_explained(page: str) -> None:
    text = article(page, "test_hostile")
    starts = {int(r): float(x) for r, x in re.findall(r'<g data-lane="(\d)"><rect x="([\d.]+)"', text)}
    calls = {int(r): float(x) for x, r in re.findall(r'<path d="M([\d.]+) [^>]*><title>rank (\d): barrier', text)}
    assert set(calls) == {0, 1}
    assert all(starts[rank] <= x + 0.1 for rank, x in calls.items())
    assert '<i style="background:var(--body)"></i>body</span>' in text


def test_nothing_of_a_test_acts_on_the_page(page: str) -> None:
    assert page.count("<script") == page.count("</script>") == 1 + 3  # the page's, and the data of each failure
    assert "<b>out</b>" not in page
    assert tag("a", "<b>", ["&", Markup("<i>")], href='"', download=True, id=None) == (
        '<a href="&quot;" download>&lt;b&gt;&amp;<i></a>'
    )
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S):
        json.loads(data)


# What a reader does, and what the page must show then; run in the page, its answers are read from the DOM.
USE = """
<script>
const found = {};
const rows = () => [...document.querySelectorAll("#tests tbody tr")].filter((r) => !r.hidden).map((r) => r.dataset.outcome);
found.all = rows();
search.value = "CYCLE"; search.dispatchEvent(new Event("input")); found.searched = rows();
search.value = ""; only.value = "PASS"; only.dispatchEvent(new Event("change")); found.only = rows();
only.value = ""; only.dispatchEvent(new Event("change"));
const sort = [...document.querySelectorAll(".sort")].find((b) => b.textContent === "result");
sort.click(); found.up = rows(); sort.click(); found.down = rows();
found.sorted = sort.closest("th").getAttribute("aria-sort");
const box = document.querySelector(".zoomable");
box.dispatchEvent(new KeyboardEvent("keydown", { key: "+" })); found.zoom = box.querySelector("svg.lanes").dataset.zoom;
box.dispatchEvent(new KeyboardEvent("keydown", { key: "0" })); found.whole = box.querySelector("svg.lanes").dataset.zoom;
found.axis = [...document.querySelectorAll("svg.lanes .axis")].every((t) => t.getBoundingClientRect().right <= innerWidth);
found.wide = document.documentElement.scrollWidth <= innerWidth;
document.title = JSON.stringify(found);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1200, 500])
def test_its_tools_work_in_a_browser(run: ExampleResult, page: str, tmp_path: Path, width: int) -> None:
    copy = tmp_path / "report.html"
    use = re.search(r"<script>(.*)</script>", USE, re.S)[1]  # type: ignore[index]
    hashed = base64.b64encode(hashlib.sha256(use.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src &#x27;sha256-{hashed}&#x27; ")
    copy.write_text(allowed.replace("</body>", USE + "</body>"), encoding="utf-8")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--disable-background-networking", "--enable-logging=stderr", f"--window-size={width},900", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.S)
    assert title is not None, done.stdout[:300]
    found = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert len(found["all"]) == 6
    assert found["searched"] == ["HANG"]
    assert found["only"] == ["PASS"] * 3
    assert found["up"] == sorted(found["all"])
    assert found["down"] == sorted(found["all"], reverse=True)
    assert found["sorted"] == "descending"
    assert (float(found["zoom"]), float(found["whole"])) == (2, 1)
    assert found["axis"], "both ends of the axis are on the screen"
    assert found["wide"], "the page itself does not scroll sideways"
    assert len(set(re.findall(r'data-lane="(\d+)"', article(page, "test_one_of_many")))) == 12
