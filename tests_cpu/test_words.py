"""Words that readers in their second language trip over become fewer (CONTRIBUTING.md, Words).

Docstrings, comments and messages of the packages count, the names that they define, and the prose of the pages; code and names
between backticks do not.
"""

import ast
import functools
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MADE = {ROOT / "docs" / "api.md"}  # from docstrings, which are counted where they are

# A word: its forms, and how often it may be used at most. A limit only falls.
LIMITS: dict[str, tuple[str, int]] = {
    "stand": (r"stands?|standing|stood(?! still s\b)", 1),  # not `Verdict.stood_still_s`, which other repositories read
    "tell": (r"tells?|telling|told", 0),
    "say": (r"says?|saying|said", 1),
    "apart": (r"apart", 0),
    "beside": (r"besides?", 0),
    "anew": (r"anew", 0),
    "left out": (r"(leaves?|leaving|left) out", 0),
    "of its own": (r"of (its|their|his|your|our) own", 0),
    "whose": (r"whose", 29),
    "is none": (r"(is|are|was|were) none", 3),
    "what it is": (r"what (it|they) (is|are|was|were)", 3),
    "has not come": (r"(has|have|had) not come", 0),
    "but for": (r"but for", 0),
    "meanwhile": (r"meanwhile", 0),
    "nobody": (r"nobody|somebody|whoever|no one|someone", 0),
    "heed": (r"heed(s|ed|ing)?", 0),
}


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file, each with the line where it begins; what is code is blank."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    yield 1, _spelled(path.stem)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(found)) if " " in found:
                yield node.lineno, found
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield node.lineno, _spelled(name)


def _spelled(name: str) -> str:
    """Return the words of a name, which stand between underscores or begin with a capital letter."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ")


@functools.cache
def texts() -> tuple[tuple[Path, int, str], ...]:
    """Return each text that counts, with its file and the line where it begins."""
    files = [path for package in ("pytest_nsa", "nsa") for path in sorted((ROOT / package).rglob("*.py"))]
    files += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    return tuple(
        (path.relative_to(ROOT), first, re.sub(r"`[^`\n]*`", "", text))
        for path in files
        if path not in MADE
        for first, text in _prose(path)
    )


def places(forms: str) -> list[str]:
    """Return where a word is used, as FILE:LINE: its surroundings."""
    spaced = forms.replace(" ", r"\s+")  # a phrase may be broken across two lines
    pattern = re.compile(rf"\b({spaced})\b", re.I)
    found = []
    for path, first, text in texts():
        for match in pattern.finditer(text):
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            found.append(f"{path}:{first + text.count(chr(10), 0, match.start())}: ...{around}...")
    return found


# A limit that can fall is shown, and no branch fails because another has reduced a word.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("word", LIMITS)
def test_a_word_is_not_used_more_often(word: str) -> None:
    forms, limit = LIMITS[word]
    found = places(forms)
    assert len(found) <= limit, f"{word!r}: at most {limit}, found {len(found)}; use another word:\n" + "\n".join(found)
    if len(found) < limit:
        warnings.warn(f"{word!r} is used {len(found)} times: write {len(found)} for {limit} in LIMITS", stacklevel=1)
