"""Mask secrets in written texts, by the name of a variable or option, and by the form of a value. Both packages use it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Mapping

MASK = "***"
_WORDS = (
    r"(?:API|ACCESS|PRIVATE|AUTH)?[_-]?"
    r"(?:TOKEN|SECRET|KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE)S?"
)
# Whole words of the name: TOKENIZERS_PARALLELISM and MONKEY do not match.
_NAME = re.compile(rf"(?:^|[_-]){_WORDS}(?:$|[_-])", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*?(?:^|[_-]){_WORDS}$", re.IGNORECASE)
_VALUES = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{16}|gh[opsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_NEW = rf"(?!{re.escape(MASK)})"  # does not match what is masked already
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(\w://)[^/\s@]+@"), rf"\1{MASK}@"),  # user:password@host
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {MASK}"),
    (
        re.compile(rf"((?:^|[\s;,&?_\"'-]){_WORDS}[\"']?\s*[=:]\s*[\"']?){_NEW}[^\s;,&\"']+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (re.compile(rf"((?<![\w-])--[\w-]*{_WORDS}\s+){_NEW}[^\s-]\S*", re.IGNORECASE), rf"\1{MASK}"),
    # The same in a program's source: "--token", "value".
    (re.compile(rf"([\"']--?[\w-]*{_WORDS}[\"']\s*,\s*[\"'])[^\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (_VALUES, MASK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), MASK),
)


def masked(text: str) -> str:
    """Return ``text`` with everything masked that has the form of a secret."""
    for form, by in _FORMS:
        text = form.sub(by, text)
    return text


def masked_in_place(text: str) -> str:
    """Return ``text`` with asterisks, as many as characters, for each value that has the form of a secret by itself."""
    return _VALUES.sub(lambda match: "*" * len(match[0]), text)


_LITERAL = re.compile(r"""([A-Za-z]*)(\'{3}|"{3}|\'|")(.*)\2\Z""", re.DOTALL)
# From Python 3.12 on, each text in an f-string is a token.
_TEXT_TOKENS = frozenset({tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT)})
_SPACE = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


def masked_source(text: str) -> str:
    """Return a Python function with secrets masked: texts in strings and comments that have the form of a secret, and whole strings
    that are assigned to such a name, as in ``password="..."``. It keeps its number of lines, and still parses.
    """
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _SPACE]
    except (tokenize.TokenError, SyntaxError):  # cut off, or for another version of Python
        return "".join(masked(line) for line in text.splitlines(keepends=True))
    lines = text.splitlines(keepends=True)
    for number, token in reversed([*enumerate(tokens)]):
        if token.type in _TEXT_TOKENS:
            by = masked(token.string)
        elif token.type == tokenize.STRING:
            by = _masked_literal(token.string, _is_given_to_a_secret(tokens[max(0, number - 2) : number]))
        else:
            continue
        if by != token.string:
            (first, begin), (last, end) = token.start, token.end
            whole = lines[first - 1][:begin] + by + lines[last - 1][end:]
            lines[first - 1 : last] = whole.splitlines(keepends=True)
    return "".join(lines)


def _is_given_to_a_secret(before: list[tokenize.TokenInfo]) -> bool:
    """Return whether two tokens are the name of a secret and an assignment, or an option and the comma after it."""
    if len(before) < 2:
        return False
    name, mark = before[0].string.strip("\"'"), before[1].string
    if mark == ",":
        return _OPTION.fullmatch(name) is not None
    return mark in ("=", ":", "==") and _NAME.search(name) is not None


def _masked_literal(literal: str, is_secret: bool) -> str:
    match = _LITERAL.fullmatch(literal)
    if match is None:
        return literal
    prefix, quote, inner = match.groups()
    by = MASK if is_secret and inner else masked(inner)
    end = "\n" if len(quote) == 3 else "\\\n"
    return f"{prefix}{quote}{by}{end * (inner.count(chr(10)) - by.count(chr(10)))}{quote}"


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """Return a command's arguments with secrets masked, also those after an option such as ``--token``."""
    found: list[str] = []
    follows = False
    for argument in arguments:
        found.append(MASK if follows and not argument.startswith("-") else masked(argument))
        follows = _OPTION.fullmatch(argument) is not None
    return found


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables of the environment with secrets masked; the whole value if the name is that of a secret."""
    return {name: MASK if _NAME.search(name) else masked(value) for name, value in variables.items()}
