"""Finds docstrings whose first sentence is a fragment: one whose main clause has no finite verb.

"Return the batch." and "Returns the batch." are whole, and so is "A request that waits is dropped.". "The
batch that runs." is a fragment. There is no dictionary: a word counts as a verb if it is listed here, or if
it stands where only a verb can stand. In doubt a sentence counts as whole.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_AUXILIARIES = _words(
    "is are was were has have had does do did can could may might must will would shall should cannot "
    "isn't aren't wasn't weren't hasn't haven't doesn't don't didn't can't couldn't won't wouldn't "
    "mustn't came went took gave began knew saw stood fell grew became said got ran"
)

_VERBS = _words(  # forms of the third person that are never nouns
    "aborts accepts acknowledges acts adds admits aims allows appears applies arrives asks assigns "
    "attaches averages awaits becomes begins believes belongs binds brings builds buys cancels carries "
    "catches chooses clears closes collects comes compares compiles completes computes concerns connects "
    "consists constructs contains contradicts converts covers creates decides declares decodes "
    "decompresses defines depends describes detects dies differs disturbs divides does embeds empties "
    "enables encodes ensures enters evaluates exists exits expects explains fails fares fetches fills "
    "finds finishes follows forgets frees gathers generates gets gives goes grows handles happens has "
    "hears hides holds identifies implements includes infers inflates insists installs interpolates joins "
    "judges keeps kills knows lacks lasts launches learns leaves lends lets lies listens looks loses "
    "lowers makes matters means meets merges moves multiplies observes occupies opens outlives overwrites "
    "owns packs parses passes pays predicts prepares prevents proposes provides puts raises ranks reaches "
    "reads recalls receives recognises refers refreshes refuses registers rejects releases remembers "
    "removes renews replaces replays represents resembles reserves resolves restores returns rewrites "
    "says seems sees selects sends serialises serves settles shines shrinks shuts simulates sits sleeps "
    "speaks spends spins stays submits takes tells tidies transforms translates trusts understands undoes "
    "unloads uses validates varies verifies waits wants warms warns widens wonders wraps writes yields"
)

_ALSO_NOUNS = _words(
    "answers audits backs batches blocks bounds calls captures cares changes charges checks claims "
    "colours controls copies costs counts cuts delays demands documents draws drives drops ends estimates "
    "exports falls feeds figures fits flags forks forms gates groups guards helps hits hosts imports "
    "labels leads limits links lists lives loads locks logs maps marks matches measures moves names needs "
    "notes offers orders picks places plans plays plots points polls pools posts prints promises quotes "
    "records repeats replies reports requests resizes responds restarts rests results rides rolls rounds "
    "routes runs samples saves scales scans schedules scores searches sets shares shows signals signs "
    "sizes slices sorts spans spares splits spreads stacks stalls stands starts states steps stops stores "
    "streams sums switches tags talks tests times totals touches traces tracks travels tries turns values "
    "watches weighs wishes works"
)

_PLURALS = _words(  # forms of the plural that are never nouns
    "become begin belong bring come consist contain depend differ exist expect follow get give go "
    "happen hold keep know lack let lie make mean need receive remain seem send share stay take tell "
    "wait want"
)

_BASES = {
    form
    for verb in _VERBS | _ALSO_NOUNS
    for form in (
        verb[:-1],
        *([verb[:-2]] if verb.endswith(("es",)) else []),
        *([verb[:-3] + "y"] if verb.endswith("ies") else []),
    )
} | {"be", "have", "do", "go"}

_DETERMINERS = _words(
    "a an the it them its their his what which whether how where when every each no all any both this "
    "that these those one two some many nothing something only so as to until at once if none us you "
    "more"
)
_SUBJECTS = _words("it he she this nothing everything something everyone anything none each neither")
_PLURAL_SUBJECTS = _words("they we you i all both these those others")
_RELATIVES = _words("that which who whom whose where when while what how whether if because unless why")


class Docstring(NamedTuple):
    name: str
    line: int
    first: str


def first_sentence(text: str) -> str:
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`(\"'0-9])", paragraph)[0]


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Walks them, and what holds some. The expressions beside them are most of a tree, and hold none."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += statements_in(node)


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Those directly in it, or what holds some."""
    holds = ast.stmt | ast.excepthandler | ast.match_case
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, holds))


def docstrings(tree: ast.Module, module: str) -> Iterator[Docstring]:
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                name, line = getattr(node, "name", module), getattr(node, "lineno", 1)
                yield Docstring(name, line, first_sentence(text))


def _is_finite(words: list[str], at: int) -> bool:
    word, before = words[at], words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    if word in _AUXILIARIES or word in _VERBS:
        return before not in ("to", "the", "a", "of")
    if before in _SUBJECTS | {"that", "which", "who", "what"} and word in _ALSO_NOUNS:
        return True
    if word in _ALSO_NOUNS:
        return after in _DETERMINERS and before not in (*_DETERMINERS, "of", "with", "and", "or", "by", "for")
    if before in _PLURAL_SUBJECTS | _RELATIVES | {"it"} and word in _BASES | _PLURALS:
        return True
    if word in _PLURALS:
        return before.endswith("s") and before not in ("as", "its", "is")
    return word.endswith("ed") and before in (_SUBJECTS | _PLURAL_SUBJECTS | {"who", "which"})


def _opens_with_a_verb(words: list[str]) -> bool:
    """Tells an order or a report from a noun of the same form: "Answers of a model" has no verb."""
    first, second = words[0], words[1] if len(words) > 1 else ""
    if first in _VERBS:
        return True
    return first in _ALSO_NOUNS | _BASES and second not in (
        "of",
        "that",
        "which",
        "from",
        "for",
        "are",
        "is",
        "in",
    )


_LEADING = re.compile(
    r"(?!from (?:here|now) on)(?:of|as|until|by|for|from|with|without|in|where|at|on)\b[^,]*$", re.IGNORECASE
)


def is_fragment(sentence: str) -> bool:
    if _LEADING.match(re.split(r"[:;]\s", sentence)[0]):
        return True  # no main clause follows: "Until it is done.", "Of one instance; the server has all."
    clauses = re.split(r"[:;–—]\s|[()]", re.sub(r"`[^`]*`", "code", sentence))
    return not any(_has_main_verb(clause) for clause in clauses)


def _has_main_verb(clause: str) -> bool:
    words = re.findall(r"[a-z0-9'_]+|,", clause.lower())
    plain = [word for word in words if word != ","]
    if not plain:
        return False
    if _opens_with_a_verb(plain):
        return True
    owed, joined, taken = 0, False, False  # verbs that belong to clauses which are part of another
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if word in _RELATIVES:
            owed, taken = owed + 1, False
        elif (
            word in ("it", "they", "he", "we", "you", "one") and before and before not in (",", "and", "but")
        ):
            owed, taken = (owed, taken) if before in _RELATIVES else (owed + 1, False)
        elif word in ("and", "or", "but", "nor"):
            joined = taken
        elif _is_finite(words, at):
            if owed:
                owed, taken, joined = owed - 1, True, False
            elif joined:
                joined = False
            else:
                return True
    return False


if __name__ == "__main__":
    for file in (file for folder in sys.argv[1:] for file in sorted(Path(folder).rglob("*.py"))):
        for one in docstrings(ast.parse(file.read_text("utf-8")), file.stem):
            if is_fragment(one.first):
                sys.stdout.write(f"{file}:{one.line} {one.name}: {one.first}\n")
