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
    "attaches audits averages awaits becomes begins believes belongs binds blocks bounds brings builds "
    "buys cancels captures cares carries chooses clears closes collects comes compares compiles completes "
    "computes concerns connects consists constructs contains contradicts converts counts covers creates "
    "cuts decides declares decodes decompresses defines depends describes detects dies differs disturbs "
    "divides does draws drives drops embeds empties enables encodes ensures enters estimates evaluates "
    "exists exits expects explains exports fails falls fares feeds fetches fills finds finishes fits "
    "follows forgets frees gathers gets gives goes grows guards handles happens has hears helps hides "
    "holds identifies implements imports includes infers inflates insists installs interpolates joins "
    "judges keeps kills knows lacks lasts launches leads learns leaves lends lets lies listens lists "
    "lives looks loses lowers makes maps marks matters means measures meets merges moves multiplies names "
    "needs occupies offers opens outlives overwrites owns packs parses passes pays picks places plans "
    "plays predicts prepares prevents prints proposes provides puts raises ranks reaches reads recalls "
    "receives recognises records refers refuses registers rejects releases remembers removes renews "
    "repeats replaces replays reports represents resembles reserves resizes resolves restores rests "
    "returns rewrites rides rounds routes runs says scales schedules searches seems sees selects sends "
    "serialises serves settles shines shrinks shuts simulates sits sleeps sorts speaks spends spins "
    "splits stands starts stays stops submits takes talks tells tests tidies touches transforms "
    "translates travels tries trusts turns understands undoes unloads uses validates varies verifies "
    "waits wants warms warns watches weighs widens wonders works wraps writes yields"
)

_ALSO_NOUNS = _words(
    "answers batches calls captures changes charges checks claims colours controls copies costs counts "
    "delays demands documents ends feeds figures flags forks forms gates guards groups hits hosts "
    "labels limits links lists loads locks logs maps matches names notes orders plots points polls "
    "pools posts promises quotes records replies reports requests responds resizes restarts results "
    "rolls routes runs samples scans scores sets shares shows signals signs sizes slices spares spans "
    "spreads stacks stalls states steps stores streams sums switches tags times totals traces tracks "
    "values watches wishes"
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
    file: Path
    name: str
    line: int
    first: str


def first_sentence(text: str) -> str:
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`(\"'0-9])", paragraph)[0]


def docstrings(file: Path) -> Iterator[Docstring]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                name, line = getattr(node, "name", file.stem), getattr(node, "lineno", 1)
                yield Docstring(file, name, line, first_sentence(text))


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


def is_fragment(sentence: str) -> bool:
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


def fragments(folder: Path) -> tuple[int, list[Docstring]]:
    """Returns how many docstrings the Python files of a folder have, and which are fragments."""
    found = [
        one for file in sorted(folder.rglob("*.py")) if "proto" not in file.parts for one in docstrings(file)
    ]
    return len(found), [one for one in found if is_fragment(one.first)]


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        every, broken = fragments(folder)
        for one in broken:
            sys.stdout.write(f"{one.file}:{one.line} {one.name}: {one.first}\n")
        sys.stdout.write(f"{folder}: {len(broken)} of {every}\n")
