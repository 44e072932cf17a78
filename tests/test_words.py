"""README, docs and what the program says use the field's words, in sentences that are read once.

Run as a program it lists what it finds; docstrings.py lists the docstrings that are fragments.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from docstrings import Docstring, docstrings, is_fragment

ROOT = Path(__file__).parents[1]
OF_ROOT = ("README", "ARCHITECTURE", "CONTRIBUTING", "DECISIONS", "SECURITY")
OF_EXTENSIONS = [
    ROOT / "docs" / "apis.md",
    *sorted((ROOT / "src" / "carpool" / "extensions").glob("*/README.md")),
]
"""Pages about extensions alone: the book is short without them."""
PAGES = [
    *(ROOT / f"{name}.md" for name in OF_ROOT),
    *sorted((ROOT / "docs").rglob("*.md")),
    *OF_EXTENSIONS[1:],
]

AVOIDED = {
    r"doors?": "endpoint, protocol, front end",
    r"knobs?": "batching settings",
    r"carr(?:y|ies|ied|ying)": "sustain, contain, have",
    r"in time": "within the SLO",
    r"told|tells?": "reported, logged, answered with",
    r"whoever|nobody|somebody|everybody|anybody|who comes": "client, caller, request",
    r"one's own": "name whose it is",
    r"rides?|rode|riders?|riding": "is part of a batch",
    r"twins?": "identical concurrent requests",
    r"asks? again|asked again|tr(?:y|ies) again": "retry",
    r"the better Triton": "Triton, its faster setting",
    r"spare (?:work|turns?)": "background work",
    r"stands? by": "standby",
    r"(?:goes|go|went) back|(?:comes|come|came) back": "rolls back, restarts, recovers, returns",
    r"turn(?:s|ed) away": "rejected",
    r"sa(?:y|ys|id|ying) no|a no": "reject",
    r"seen": "measured, observed",
}
"""Patterns of words, and what to write instead."""

ALLOWED: dict[str, int] = {}
"""Pages, and how many avoided words each may have: quotations of what the program prints."""

AVOIDED_IN_MESSAGES = {
    r"promis(?:e|es|ed|ing)": "SLO",
    r"refus(?:e|es|ed|al|als|ing)": "reject",
    r"pictures?": "image",
    r"who asks?|who sends?|who is asking": "client",
    r"believes?": "accept, estimate",
}
"""Also not said by the program: the README may use these to explain."""

ALLOWED_IN_MESSAGES = {
    "config/table.py": 1,  # a list of keys
    "lab/fleet_plan.py": 1,  # a value in --json
    "lab/sweep/sweep_runs.py": 2,  # names in files
    "observe/prometheus.py": 2,  # names of columns
}
"""Files below src/carpool, and how many of their messages may have avoided words."""

LONGEST = 35  # words of a sentence
MOST_LONG = 0.01  # the share of sentences that may be longer
MOST_AVOIDED = 0.2  # in 1,000 words
# Of docs: with the pages of models and of extensions.
MOST_WORDS = {"README.md": 900, "docs": 65_000, "docs and extensions": 75_000}
MOST_PAGES = 36

_AVOIDED = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in AVOIDED), re.IGNORECASE)


def prose(text: str) -> Iterator[str]:
    """Paragraphs, items of lists, headings and cells of tables, without code, addresses and comments."""
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "\n", text, flags=re.DOTALL)  # the code's own words
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]+`", "Code", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|#]|\d+\.) ?)", text):
        cells = block.strip().strip("|").split(" | ") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            plain = " ".join(re.sub(r"^\s*(?:[-*>#]+|\d+\.)\s+|[*_|]", " ", cell).split())
            if re.search(r"\w", plain):
                yield plain


def sentences(text: str) -> Iterator[str]:
    for part in prose(text):
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9“\"(…])", part)


def avoided(page: Path) -> list[str]:
    return [found for part in prose(page.read_text("utf-8")) for found in _AVOIDED.findall(part)]


def long_sentences(page: Path) -> list[str]:
    return [said for said in sentences(page.read_text("utf-8")) if len(said.split()) > LONGEST]


def words_of(page: Path) -> int:
    """Code and tables included, without the strokes that draw them."""
    return len(re.findall(r"\S*\w\S*", page.read_text("utf-8")))


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_fields_words_are_used(page: Path) -> None:
    found = avoided(page)
    assert len(found) <= ALLOWED.get(named(page), 0), found


def test_few_words_are_allowed_to_stay() -> None:
    words = sum(map(words_of, PAGES))
    assert sum(ALLOWED.values()) <= MOST_AVOIDED * words / 1000
    assert {*ALLOWED} <= {named(page) for page in PAGES}


def test_sentences_are_short() -> None:
    every = sum(1 for page in PAGES for _ in sentences(page.read_text("utf-8")))
    long = {named(page): long_sentences(page) for page in PAGES}
    assert sum(map(len, long.values())) <= MOST_LONG * every, {
        page: said for page, said in long.items() if said
    }


def test_the_book_stays_short() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page not in OF_EXTENSIONS]
    assert len(pages) <= MOST_PAGES
    assert sum(map(words_of, pages)) <= MOST_WORDS["docs"]
    assert sum(map(words_of, [*pages, *OF_EXTENSIONS])) <= MOST_WORDS["docs and extensions"]
    assert words_of(ROOT / "README.md") <= MOST_WORDS["README.md"]


SRC = ROOT / "src" / "carpool"
CODE = [file for file in sorted(SRC.rglob("*.py")) if "proto" not in file.parts]
CONSOLE = sorted(
    file
    for folder in (SRC / "console" / "page", SRC / "lab" / "sweep")
    for file in folder.iterdir()
    if file.suffix in (".js", ".html")
)
_IN_MESSAGES = re.compile(
    "|".join(rf"(?<![-\w./`])(?:{pattern})(?![-\w/=`(])" for pattern in (*AVOIDED, *AVOIDED_IN_MESSAGES)),
    re.IGNORECASE,
)
_JS_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`", re.DOTALL
)


def _is_prose(text: str) -> bool:
    return " " in text.strip() and len(re.findall(r"[A-Za-z]{2,}", text)) >= 2


def _literal(node: ast.AST) -> str | None:
    """The text of a string; whatever an f-string computes is one word of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else "Code" for one in node.values)
    return None


_WITHOUT_STRINGS = (ast.Name, ast.alias, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
"""Half of a tree."""


def strings(node: ast.AST) -> Iterator[str]:
    """The strings of code line by line, without docstrings."""
    yield from (_literal(node) or "").splitlines()
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
            continue
        if isinstance(child, _WITHOUT_STRINGS):
            continue
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from strings(child)


def _helps(tree: ast.Module) -> Iterator[str]:
    """The docstrings that are shown by --help: those of a verb's class, and of the program."""
    for node in tree.body:
        is_verb = isinstance(node, ast.ClassDef) and any(
            getattr(one, "name", "") == "run" for one in node.body
        )
        if is_verb or (isinstance(node, ast.FunctionDef) and node.name == "carpool"):
            yield ast.get_docstring(node) or ""


class Said(NamedTuple):
    """What the tests ask of a Python file, whose tree is made once for all of them, and not kept."""

    messages: list[str]
    docstrings: list[Docstring]


@cache
def said_by(file: Path) -> Said:
    tree = ast.parse(file.read_text("utf-8"))
    helps = _helps(tree) if file.parent.name == "cli" else ()
    return Said([*strings(tree), *helps], [*docstrings(tree, file.stem)])


@cache
def messages(file: Path) -> list[str]:
    """What a file of the program can say to its users: help, errors, log lines, labels, text of a page."""
    if file.suffix == ".py":
        return [one for one in said_by(file).messages if _is_prose(one)]
    text = file.read_text("utf-8")
    if file.suffix == ".js":
        quoted = (one for one in _JS_STRING.findall(text) if one[0] in "\"'`")
        found: Iterator[str] = (re.sub(r"\$\{[^{}]*\}", "Code", one[1:-1]) for one in quoted)
    else:
        plain = re.sub(r"<(script|style|code)\b.*?</\1>", "Code", text, flags=re.DOTALL)
        titles = re.findall(r'(?:title|placeholder|content|aria-label)="([^"]*)"', plain)
        blocks = re.split(r"</?(?:p|li|h\d|td|th|div|section|button|label|dt|dd|title|option)\b[^>]*>", plain)
        found = (html.unescape(re.sub(r"<[^>]*>", " ", one)) for one in (*titles, *blocks))
    return [one for one in found if _is_prose(one)]


def avoided_in_messages(file: Path) -> list[str]:
    return [text for text in messages(file) if _IN_MESSAGES.search(re.sub(r"`[^`\n]+`", "Code", text))]


def test_messages_use_the_fields_words() -> None:
    found = {file.relative_to(SRC).as_posix(): avoided_in_messages(file) for file in (*CODE, *CONSOLE)}
    assert {name: said for name, said in found.items() if len(said) > ALLOWED_IN_MESSAGES.get(name, 0)} == {}


def long_messages(file: Path) -> list[str]:
    return [
        said for text in messages(file) for said in sentences(text.strip()) if len(said.split()) > LONGEST
    ]


def test_messages_are_short() -> None:
    every = sum(1 for file in CODE for text in messages(file) for _ in sentences(text))
    long = [said for file in (*CODE, *CONSOLE) for said in long_messages(file)]
    assert len(long) <= MOST_LONG * every, long


AVOIDED_IN_SOURCE = (
    r"whoever|whomever|nobody|somebody|everybody|anybody|told|tells?|doors?|knobs?|rides?|riders?|riding",
    r"turn(?:s|ed) away|says? no|a no|who comes|one's own|twins?|spare (?:work|turns?)",
)
"""Patterns of words that docstrings and comments of the source do without, as the manual does."""

_IN_SOURCE = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in AVOIDED_IN_SOURCE), re.IGNORECASE)
_REMARK = re.compile(r'"""(.*?)"""|(?:^|\s)#\s([^\n]*)', re.DOTALL | re.MULTILINE)


def test_docstrings_and_comments_use_the_fields_words() -> None:
    found = [
        f"{file.relative_to(SRC)}: {line.strip()}"
        for file in CODE
        for remark in _REMARK.finditer(file.read_text("utf-8"))
        for line in re.sub(r"`[^`\n]+`", "Code", remark[1] or remark[2] or "").splitlines()
        if _IN_SOURCE.search(line)
    ]
    assert found == []


MOST_FRAGMENTS = 0.02  # of docstrings, see docstrings.py


def test_docstrings_begin_with_whole_sentences() -> None:
    found: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    for file in CODE:
        folder = file.relative_to(SRC).parts[0]
        for one in said_by(file).docstrings:
            count[folder] = count.get(folder, 0) + 1
            if is_fragment(one.first):
                found.setdefault(folder, []).append(f"{file.relative_to(SRC)}:{one.line}: {one.first}")
    assert sum(map(len, found.values())) <= MOST_FRAGMENTS * sum(count.values()), found
    for folder, fragments in found.items():
        assert len(fragments) <= max(1, MOST_FRAGMENTS * count[folder]), fragments


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("Return the batch.", False),
        ("Returns the batch that runs.", False),
        ("A request that waits is dropped.", False),
        ("It is over.", False),
        ("False where nobody asks: the client has gone.", False),
        ("The batch that runs.", True),
        ("Of one line.", True),
        ("Of one instance; the server reports what all of them take.", True),
        ("Until everything that was asked of the device is done.", True),
        ("Until something is known, half of it is assumed.", False),
        ("Whether it is lower than in the reference.", True),
        ("What a model promises.", True),
        ("Names of those that are wanted.", True),
        ("The engine's end, which believes nothing and says so.", True),
    ],
)
def test_fragments_are_told_from_sentences(text: str, fragment: bool) -> None:
    assert is_fragment(text) is fragment


if __name__ == "__main__":
    for page in PAGES:
        lines = [f"{named(page)}: {avoided(page)}", *(f"  long: {said}" for said in long_sentences(page))]
        sys.stdout.write("\n".join(lines) + "\n")
    for file in (*CODE, *CONSOLE):
        for said in avoided_in_messages(file):
            sys.stdout.write(f"{file.relative_to(SRC)}: {said!r}\n")
        for said in long_messages(file):
            sys.stdout.write(f"{file.relative_to(SRC)}: long: {said!r}\n")
