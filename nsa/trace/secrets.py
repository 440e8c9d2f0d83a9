"""Secrets in what is written: masked by the name of a variable or option, and by the form of a value. Both programs use it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"
_WORDS = (
    r"(?:API|ACCESS|PRIVATE|AUTH)?[_-]?"
    r"(?:TOKEN|SECRET|KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE)S?"
)
# A word of the name, so that TOKENIZERS_PARALLELISM and MONKEY are none.
_NAME = re.compile(rf"(?:^|[_-]){_WORDS}(?:$|[_-])", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*?(?:^|[_-]){_WORDS}$", re.IGNORECASE)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(\w://)[^/\s@]+@"), rf"\1{MASK}@"),  # user:password@host
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(rf"((?:^|[\s;,&?_\"'-]){_WORDS}[\"']?\s*[=:]\s*[\"']?)[^\s;,&\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(--[\w-]*{_WORDS}\s+)[^\s-]\S*", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(
            r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{16}|gh[opsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MASK,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), MASK),
)


def masked(text: str) -> str:
    """Return ``text`` without what has the form of a secret."""
    for form, by in _FORMS:
        text = form.sub(by, text)
    return text


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """Return a command's arguments, those masked that stand behind an option such as ``--token``, too."""
    found: list[str] = []
    follows = False
    for argument in arguments:
        found.append(MASK if follows and not argument.startswith("-") else masked(argument))
        follows = _OPTION.fullmatch(argument) is not None
    return found


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables of the environment; one whose name speaks of a secret has none of its value."""
    return {name: MASK if _NAME.search(name) else masked(value) for name, value in variables.items()}
