"""What becomes of two features that meet: one cell for every pair, and the part of a page made of them.

`python tests/reference.py` writes it into docs/limits.md.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from carpool.config.settings_part import why_not
from carpool.extensions import installed

WORKS, REFUSED = "works", "refused"

FEATURES: dict[str, tuple[str, str]] = {
    "exact": ("exact cache", "[`[cache]`](caching.md), or Triton's `response_cache`"),
    "similar": ("similar cache", "[`similar = true`](caching.md#similar) in `[cache]`"),
    "rollout": ("rollout", "[`[rollout]`](rollouts.md) or `carpool rollout start`"),
    "pipeline": ("pipeline", "[`pipeline.toml`](pipelines.md)"),
    "ensemble": ("ensemble", "Triton's [`ensemble_scheduling`](pipelines.md#triton-ensembles)"),
    "sequence": ("sequence", "[`[sequences]`](sequences.md#sequences), or Triton's `sequence_batching`"),
    "decoupled": (
        "decoupled",
        "[`decoupled = true`](sequences.md#many-responses), or `model_transaction_policy`",
    ),
    "text": ("text", "[`[generate]`](text.md#models-that-generate-text)"),
    "demand": ("on-demand", "[`--on-demand`](models.md#more-models-than-memory)"),
    "keys": ("keys", "[`--api-key-file`](security.md#keys)"),
    "memory": ("shared memory", "[`--allow-client-shm`](protocols.md#shared-memory)"),
    "live": ("live source", "[`X-Carpool-Latest`](protocols.md#deadlines-and-sources)"),
    "device": ("device pictures", '[`decode = "device"`](gpu.md) in `[image]`'),
    "tracing": ("tracing", "[`--otlp-endpoint`](metrics.md#opentelemetry)"),
    "recording": ("recording", "[`--record`](planning.md#replay-recorded-traffic)"),
}


class Cell(NamedTuple):
    verdict: str
    sentence: str
    test: str  # its file in tests/interactions, and its function; the pair is the parameter


_TOGETHER = "test_together.py::test_together"
_KINDS = "test_together.py::test_two_kinds"
_AT_LOAD = "test_refused.py::test_refused"
_BY_REQUEST = "test_together.py::test_refused_with_the_request"

_PICTURE_IN_MEMORY = (
    "A picture comes with the request: one in shared memory is answered with 501. Tensors may be there"
)

EXTENSIONS = {
    "exact": "cache",
    "similar": "cache",
    "rollout": "rollout",
    "pipeline": "pipelines",
    "ensemble": "ensembles",
    "sequence": "sequences",
    "decoupled": "streams",
    "text": "text",
    "tracing": "tracing",
    "recording": "recording",
}
"""Which features are extensions: what their manifests reject stands in no table here."""

KEYS = {"sequence": "[sequences]", "decoupled": "decoupled", "text": "[generate]"}
"""What stands for those in a file, where that is not the extension's name."""

MADE_OF_STEPS = ("pipeline", "ensemble")
_STEPS_OF_A_VERSION = "A step is asked in its stable version until the candidate has taken over."
NOTES = {
    ("exact", "pipeline"): "The caches of its steps answer requests to those models only.",
    ("similar", "pipeline"): "The caches of its steps answer requests to those models only.",
    ("rollout", "pipeline"): _STEPS_OF_A_VERSION,
    ("rollout", "decoupled"): "The newest version takes over.",
}
"""What follows the sentence of a manifest."""

OWN: dict[tuple[str, str], Cell] = {
    # ── kinds of models with each other
    ("exact", "similar"): Cell(
        WORKS, "The same bytes are looked for first, then the same scene of the source.", _KINDS
    ),
    ("exact", "rollout"): Cell(
        WORKS, "Each version's answers are kept apart; a hit names the version that computed it.", _KINDS
    ),
    ("exact", "ensemble"): Cell(
        WORKS, "An ensemble's answers are dropped, here and in Redis, when one of its steps changes.", _KINDS
    ),
    ("exact", "device"): Cell(WORKS, "A hit is answered before the device sees the picture.", _KINDS),
    ("similar", "rollout"): Cell(
        WORKS, "A picture is compared with those that the same version computed.", _KINDS
    ),
    ("similar", "ensemble"): Cell(
        REFUSED, "An ensemble takes tensors; its `config.pbtxt` has `response_cache` alone.", _AT_LOAD
    ),
    ("similar", "device"): Cell(
        WORKS, "Pictures are compared on the CPU; those that differ are decoded by the device.", _KINDS
    ),
    ("rollout", "ensemble"): Cell(
        REFUSED,
        "`does not go with ensemble_scheduling`: roll out its steps. The ensemble asks the stable version "
        "of a step until the candidate has taken over.",
        _AT_LOAD,
    ),
    ("rollout", "device"): Cell(WORKS, "Either version decodes its share of the pictures.", _KINDS),
    ("pipeline", "device"): Cell(
        WORKS, "Steps decode on their device, and crops are cut out of pictures that stay there.", _KINDS
    ),
    ("ensemble", "device"): Cell(
        WORKS, "A step whose device decodes pictures gets the pixels as a tensor.", _KINDS
    ),
    ("sequence", "device"): Cell(
        REFUSED, "Requests of a sequence bring tensors: no `task` and no `[image]`.", _AT_LOAD
    ),
    ("decoupled", "device"): Cell(
        REFUSED, '`decoupled: image.decode = "device"` is for models with one answer to a picture.', _AT_LOAD
    ),
    ("text", "device"): Cell(
        REFUSED,
        '`image.decode cannot be "device" with [generate]`: front ends decode its pictures.',
        _AT_LOAD,
    ),
    # ── kinds of models on a server with --on-demand
    ("exact", "demand"): Cell(WORKS, "Answers go when the model is unloaded.", _TOGETHER),
    ("similar", "demand"): Cell(WORKS, "Answers go when the model is unloaded.", _TOGETHER),
    ("rollout", "demand"): Cell(
        WORKS,
        "The first request loads the version that serves, then the candidate; the rollout goes on.",
        _TOGETHER,
    ),
    ("pipeline", "demand"): Cell(WORKS, "The first request loads the steps, then the pipeline.", _TOGETHER),
    ("ensemble", "demand"): Cell(
        WORKS, "The first request loads the steps; a step that is freed takes the ensemble along.", _TOGETHER
    ),
    ("sequence", "demand"): Cell(
        WORKS, "A model is not freed while one of its sequences is open.", _TOGETHER
    ),
    ("decoupled", "demand"): Cell(WORKS, "A model is not freed while it answers.", _TOGETHER),
    ("text", "demand"): Cell(WORKS, "A model is not freed while it writes.", _TOGETHER),
    ("demand", "device"): Cell(WORKS, "A picture waits as a file while its model is loaded.", _TOGETHER),
    # ── with keys
    ("exact", "keys"): Cell(WORKS, "A key's answers are its own.", _TOGETHER),
    ("similar", "keys"): Cell(WORKS, "A source is the key's own, and so are its answers.", _TOGETHER),
    ("rollout", "keys"): Cell(
        WORKS, "A key's requests are divided like others'; to change a rollout takes an admin key.", _TOGETHER
    ),
    ("pipeline", "keys"): Cell(
        WORKS, "A key needs to be allowed the pipeline, not the models that are its steps.", _TOGETHER
    ),
    ("ensemble", "keys"): Cell(
        WORKS, "A key needs to be allowed the ensemble, not the models that are its steps.", _TOGETHER
    ),
    ("sequence", "keys"): Cell(
        WORKS, "Sequence ids are the key's own, and no key takes all places.", _TOGETHER
    ),
    ("decoupled", "keys"): Cell(WORKS, "No key takes all places for streams.", _TOGETHER),
    ("text", "keys"): Cell(WORKS, "As for any other model.", _TOGETHER),
    ("keys", "device"): Cell(WORKS, "As for any other model.", _TOGETHER),
    # ── with clients' shared memory
    ("exact", "memory"): Cell(
        WORKS, "Such a request is never looked up: its bytes can change at any time.", _TOGETHER
    ),
    ("similar", "memory"): Cell(REFUSED, f"{_PICTURE_IN_MEMORY}, and are not looked up.", _BY_REQUEST),
    ("rollout", "memory"): Cell(
        WORKS, "Inputs are copied once, so that both versions can see the same.", _TOGETHER
    ),
    ("pipeline", "memory"): Cell(
        REFUSED, "A picture comes with the request: one in shared memory is answered with 501.", _BY_REQUEST
    ),
    ("ensemble", "memory"): Cell(WORKS, "As for any other model.", _TOGETHER),
    ("sequence", "memory"): Cell(WORKS, "As for any other model.", _TOGETHER),
    ("decoupled", "memory"): Cell(WORKS, "Inputs may be there; answers come with the stream.", _TOGETHER),
    ("text", "memory"): Cell(WORKS, "The picture's pixels may be there.", _TOGETHER),
    ("memory", "device"): Cell(REFUSED, f"{_PICTURE_IN_MEMORY}.", _BY_REQUEST),
    # ── with live sources
    ("exact", "live"): Cell(WORKS, "A hit is answered at once and replaces no frame.", _TOGETHER),
    ("similar", "live"): Cell(WORKS, "A frame that shows the same scene replaces none.", _TOGETHER),
    ("rollout", "live"): Cell(
        WORKS, "A source keeps to one version, where frames replace each other.", _TOGETHER
    ),
    ("pipeline", "live"): Cell(
        WORKS, "A newer frame takes the place of an older one that waits for the same step.", _TOGETHER
    ),
    ("ensemble", "live"): Cell(
        WORKS, "Frames replace each other before the first step; what has begun is answered.", _TOGETHER
    ),
    ("sequence", "live"): Cell(
        REFUSED, "Every frame of a sequence counts: `latest` is answered with 400.", _BY_REQUEST
    ),
    ("decoupled", "live"): Cell(
        WORKS, "Frames that wait replace each other; a stream that began goes on.", _TOGETHER
    ),
    ("text", "live"): Cell(
        WORKS,
        "Of frames whose text has not begun the first and the newest stay; what began is finished.",
        _TOGETHER,
    ),
    ("live", "device"): Cell(WORKS, "A frame that is replaced is never decoded.", _TOGETHER),
    # ── with spans for OpenTelemetry
    ("exact", "tracing"): Cell(WORKS, "A hit has a span, which says so.", _TOGETHER),
    ("similar", "tracing"): Cell(WORKS, "A hit has a span, which says so.", _TOGETHER),
    ("rollout", "tracing"): Cell(WORKS, "A span names the version that answered.", _TOGETHER),
    ("pipeline", "tracing"): Cell(WORKS, "Each step is a span below the request's.", _TOGETHER),
    ("ensemble", "tracing"): Cell(WORKS, "Each step is a span below the request's.", _TOGETHER),
    ("sequence", "tracing"): Cell(WORKS, "Each request of a sequence has its own span.", _TOGETHER),
    ("decoupled", "tracing"): Cell(WORKS, "One span from the request to the last answer.", _TOGETHER),
    ("text", "tracing"): Cell(WORKS, "One span from the request to the last token.", _TOGETHER),
    ("device", "tracing"): Cell(WORKS, "As for any other model.", _TOGETHER),
    # ── with --record
    ("exact", "recording"): Cell(WORKS, 'A hit is recorded as well, with `"cached": true`.', _TOGETHER),
    ("similar", "recording"): Cell(WORKS, 'A hit is recorded as well, with `"cached": true`.', _TOGETHER),
    ("rollout", "recording"): Cell(WORKS, "A request is one line, also if both versions run it.", _TOGETHER),
    ("pipeline", "recording"): Cell(
        WORKS, "A picture is one line, of the pipeline and not of its steps.", _TOGETHER
    ),
    ("ensemble", "recording"): Cell(
        WORKS, "A request is one line, of the ensemble and not of its steps.", _TOGETHER
    ),
    ("sequence", "recording"): Cell(
        WORKS, "Each request is a line; which sequence it belongs to is not recorded.", _TOGETHER
    ),
    ("decoupled", "recording"): Cell(WORKS, "A request is one line, however many answers it has.", _TOGETHER),
    ("text", "recording"): Cell(WORKS, "A request is one line; its length is not recorded.", _TOGETHER),
    ("device", "recording"): Cell(WORKS, "As for any other model.", _TOGETHER),
    # ── settings of the server with each other
    ("demand", "keys"): Cell(WORKS, "A request without a key loads nothing.", _TOGETHER),
    ("demand", "memory"): Cell(WORKS, "Regions are the server's: they stay when a model goes.", _TOGETHER),
    ("demand", "live"): Cell(WORKS, "Frames that wait for the load are offered when it is done.", _TOGETHER),
    ("demand", "tracing"): Cell(
        WORKS,
        "The span of the first request begins when its model is loaded; the log has the load.",
        _TOGETHER,
    ),
    ("demand", "recording"): Cell(
        WORKS, "Recorded is when a request came, not when its model was there.", _TOGETHER
    ),
    ("keys", "memory"): Cell(
        WORKS, "Regions are the server's, for all keys: trust clients that may register.", _TOGETHER
    ),
    ("keys", "live"): Cell(
        WORKS, "A source belongs to its key: a client cannot replace another key's frames.", _TOGETHER
    ),
    ("keys", "tracing"): Cell(WORKS, "No span has a key in it.", _TOGETHER),
    ("keys", "recording"): Cell(
        WORKS, "A line has the key's name before its source, never the key.", _TOGETHER
    ),
    ("memory", "live"): Cell(WORKS, "As for any other request.", _TOGETHER),
    ("memory", "tracing"): Cell(WORKS, "As for any other request.", _TOGETHER),
    ("memory", "recording"): Cell(WORKS, "As for any other request.", _TOGETHER),
    ("live", "tracing"): Cell(WORKS, "A frame that is replaced has a span, too.", _TOGETHER),
    ("live", "recording"): Cell(
        WORKS, "Every frame is a line, with its source, also one that is replaced.", _TOGETHER
    ),
    ("tracing", "recording"): Cell(WORKS, "A request has a span and a line.", _TOGETHER),
}


def rejection(one: str, other: str) -> str:
    """Returns the sentence with which a manifest rejects the pair; empty: none does."""
    for name, met in ((one, other), (other, one)):
        extension, key = installed().get(EXTENSIONS.get(name, "")), EXTENSIONS.get(met, "")
        if extension is not None and key in extension.meets:
            return f"`{why_not(extension.name, key, KEYS.get(met, ''))}`."
        if extension is not None and extension.no_step and met in MADE_OF_STEPS:
            return f"Not as a step: such a model {extension.no_step}."
    return ""


def _all_cells() -> dict[tuple[str, str], Cell]:
    """Returns the cells of manifests, then those that only the server knows."""
    found = {}
    for pair in combinations(FEATURES, 2):
        said = rejection(*pair)
        if said:
            found[pair] = Cell(REFUSED, " ".join(filter(None, (said, NOTES.get(pair)))), _AT_LOAD)
    return found | OWN


HEAD = """Every pair of features works together or is rejected. A rejection comes when the model is loaded,
with a sentence that names the setting, or with the request that asks for it. Each cell has a test
(`tests/interactions`).

| feature | enabled by |
|---|---|
"""


TABLE = _all_cells()


def cell(one: str, other: str) -> Cell:
    return TABLE.get((one, other)) or TABLE[other, one]


def part() -> str:
    """What each feature is, whether two go together, and what then happens."""
    names = list(FEATURES)
    titles = {name: title for name, (title, _) in FEATURES.items()}
    lines = [f"| {titles[name]} | {how} |" for name, (_, how) in FEATURES.items()]
    lines += ["", "✓ works, ✗ is rejected.", ""]
    lines += ["| | " + " | ".join(titles.values()) + " |", "|---" * (len(names) + 1) + "|"]
    marks = {WORKS: "✓", REFUSED: "✗"}
    for row in names:
        cells = (" " if row == column else marks[cell(row, column).verdict] for column in names)
        lines.append(f"| **{titles[row]}** | {' | '.join(cells)} |")
    lines += ["", "| features | | what happens |", "|---|---|---|"]
    for row, column in pairs():
        found = cell(row, column)
        lines.append(f"| {titles[row]}, {titles[column]} | {marks[found.verdict]} | {found.sentence} |")
    return HEAD + "\n".join(lines) + "\n"


def pairs() -> list[tuple[str, str]]:
    return list(combinations(FEATURES, 2))
