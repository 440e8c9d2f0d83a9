"""Mask secrets in written texts, by the name of a variable or option, and by the form of a value. Both packages use it."""

import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
# The front of a name of a secret: account_key is one, and monkey is not.
_KINDS = (
    "API|ACCESS|ACCOUNT|AUTH|CLIENT|ENCRYPTION|MASTER|PRIVATE|SECRET|SESSION|SHARED[_-]?ACCESS|SIGNING|SUBSCRIPTION"
)
_NUMBERED = rf"(?:{_KINDS})?[_-]?(?:TOKEN|KEY|AUTH|AUTHORIZATION|COOKIE|CREDENTIAL)S?"  # but tokens=4096
_WORDS_ALONE = r"\w{0,20}(?:PASSWORD|PASSWD|PASSPHRASE|SECRET)S?|(?<=[A-Z0-9]_)(?:PWD|(?-i:PASS))"
_WORDS = rf"(?:{_NUMBERED}|{_WORDS_ALONE})"
_BEGIN = r"(?:(?<![^\W_])|(?-i:(?<=[a-z])(?=[A-Z])))"  # of a word of a name: my_token, accessToken
# Whole words of the name: TOKENIZERS_PARALLELISM and MONKEY do not match.
_NAME = re.compile(rf"{_BEGIN}(?:(?P<weak>{_NUMBERED})|{_WORDS_ALONE})(?:$|[_-])", re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]*?{_BEGIN}{_WORDS}$", re.IGNORECASE)
_PLAIN = re.compile(r"(?:true|false|none|null|)", re.IGNORECASE)
_ORDINARY = frozenset({"key", "keys"})  # of a dictionary or a store, if nothing else is in the name
# What issuers put at the front of their secrets, so that scanners find them.
_ISSUED = (
    r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}\b", r"LTAI[A-Za-z0-9]{16,}",  # AWS, Alibaba
    r"AIza[\w-]{30,}", r"ya29\.[\w-]{10,}", r"GOCSPX-[\w-]{20,}",  # Google
    r"gh[opsur]_[A-Za-z0-9]{20,}", r"github_pat_\w{20,}", r"gl(?:pat|ptt|dt|rt|cbt|ft|agent|oas|soat|imt)-[\w-]{16,}",
    r"ATATT3[\w=-]{20,}", r"ATBB[A-Za-z0-9]{20,}", r"PMAK-[a-f0-9]{20,}[\w-]*", r"lin_(?:api|oauth)_[A-Za-z0-9]{20,}",
    r"xox[abeoprs]-[\w-]{10,}", r"xapp-\d-[\w-]{10,}", r"\d{8,10}:AA[\w-]{30,}",  # Slack, Telegram
    r"hf_[A-Za-z0-9]{16,}", r"api_org_[A-Za-z0-9]{20,}", r"wandb_v1_\w{20,}", r"KGAT_[a-f0-9]{20,}", r"r8_[A-Za-z0-9]{20,}",
    r"sk-[\w-]{16,}", r"(?:xai|pplx|fw|csk|pul|ico)-[A-Za-z0-9]{20,}", r"gsk_[A-Za-z0-9]{20,}",
    r"(?:lsv2_pt|lsv2_sk|ntn|sbp|nfp|rdme|rubygems|tfp)_[A-Za-z0-9]{20,}", r"ops_eyJ[\w-]{20,}",
    r"(?:pcsk|figd|dckr_pat|dckr_oat|pscale_(?:tkn|pw|oauth))_[\w.-]{20,}", r"(?:nvapi|tvly|tskey)-[\w-]{20,}",
    r"dapi[0-9a-f]{32}(?:-\d)?", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{20,}", r"do[opr]_v1_[a-f0-9]{32,}",
    r"npm_[A-Za-z0-9]{20,}", r"pypi-[A-Za-z0-9][\w-]{30,}", r"AKCp[A-Za-z0-9]{20,}", r"cmVmdGtuO[A-Za-z0-9]{20,}",
    r"(?:sk|rk)_(?:live|test|prod)_[A-Za-z0-9]{16,}", r"sq0(?:atp|csp)-[\w-]{20,}", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{20,}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}", r"SK[0-9a-f]{32}\b", r"key-[0-9a-f]{32}\b", r"[0-9a-f]{32}-us\d{1,2}\b", r"xkeysib-[\w-]{20,}",
    r"hv[bsr]\.[\w-]{20,}", r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{20,}", r"gl(?:c|sa)_[\w=+/]{20,}", r"NRAK-[A-Z0-9]{20,}",
    r"sntry[su]_[\w=+/.-]{20,}", r"AGE-SECRET-KEY-1[A-Z0-9]{20,}", r"(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # a JWT
)  # fmt: skip
_VALUES = re.compile(rf"\b(?:{'|'.join(_ISSUED)})")
_NEW = rf"(?!{re.escape(MASK)})"  # does not match what is masked already
_OF_PAIR = rf"({_BEGIN}"
_GIVEN = r"[\"']?\s*[=:]\s*(?:[\[({]?[\"'])?)"
_VALUE = rf"{_NEW}(?!(?:true|false|none|null)\b)[^\s;,&\"']+"
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(\w://)[^/\s@]+@"), rf"\1{MASK}@"),  # user:password@host
    (re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+"), rf"\1{MASK}"),
    (re.compile(r"([?&](?:sig|signature|x-\w+-signature)=)[^\s&\"']+", re.IGNORECASE), rf"\1{MASK}"),  # of a signed URL
    (re.compile(rf"\b((?:set-)?cookie[\"']?:\s*[\"']?){_NEW}[^\r\n\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"\b(authorization[\"']?\s*[=:]\s*[\"']?\w+\s+){_NEW}[\w.~+/=-]{{6,}}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"\b(Bearer|Basic)\s+(?=\S*[\d=+/])[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(r"\b(login\s+\S+\s+password\s+)\S+"), rf"\1{MASK}"),  # in a .netrc
    (re.compile(rf"{_OF_PAIR}{_NUMBERED}{_GIVEN}(?!\d+(?![\w.-])){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"{_OF_PAIR}(?:{_WORDS_ALONE}){_GIVEN}{_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"((?<![\w-])--[\w-]*{_WORDS}\s+){_NEW}[^\s-]\S*", re.IGNORECASE), rf"\1{MASK}"),
    # The same in a program's source: "--token", "value".
    (re.compile(rf"([\"']--?[\w-]*{_WORDS}[\"']\s*,\s*[\"'])[^\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (_VALUES, MASK),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|$)", re.DOTALL
        ),
        MASK,
    ),
)


def masked(text: str) -> str:
    """Return ``text`` with everything masked that has the form of a secret."""
    for form, by in _FORMS:
        text = form.sub(by, text)
    return text


def masked_value(value: Any) -> Any:
    """Return a JSON value with its texts masked, also the names in objects: pytest's reports have tests' ids there.

    A text that is given to the name of a secret is masked as a whole: in an object, and in a list of a name and a value.
    """
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list | tuple):
        if len(value) == 2 and _is_secret(value[0], value[1]):
            return [masked(value[0]), MASK]
        return [masked_value(one) for one in value]
    if isinstance(value, dict):
        return {
            masked(name) if isinstance(name, str) else name: MASK if _is_secret(name, one) else masked_value(one)
            for name, one in value.items()
        }
    return value


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether a value is a secret by its name."""
    if not isinstance(name, str) or not isinstance(value, str) or name in _ORDINARY or _PLAIN.fullmatch(value):
        return False
    match = _NAME.search(name)
    return match is not None and not (match["weak"] and value.isdecimal())


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
    return {name: MASK if _is_secret(name, value) else masked(value) for name, value in variables.items()}
