"""Implements `carpool cache`: what a running server stores of a model's answers, and to drop it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from carpool.cli import show
from carpool.cli import verb_options as o

Action = StrEnum("Action", ["status", "clear"])
_KINDS = {
    "hit": "the same request",
    "similar": "the same scene",
    "joined": "joined another",
    "shared": "from other servers",
    "miss": "computed",
    "bypass": "not looked up",
}


@dataclass(frozen=True, kw_only=True)
class CacheVerb(o.AsksServer):
    """Show a model's response cache in a running server, or clear it.

    Hit rates, and how often a hit for a similar image was wrong:

        carpool cache status detector

    Clear it in every front end, and in all servers that share it:

        carpool cache clear detector
    """

    action: Action = o.argument("The action.", metavar="status|clear")
    name: str = o.argument("The model.")
    url: o.ServerUrl = o.DEFAULT_URL

    def run(self) -> None:
        from carpool.lab.load.facts import Failed, RunningServer

        server = RunningServer(self.url, self.trust())
        path = f"/v2/models/{quote(self.name, safe='')}/cache"
        reached = server.delete(path).get("shared") if self.action is Action.clear else None
        document = server.get(path)
        if self.as_json:
            print(json.dumps(document, indent=2))
        else:
            _print(document)
        if reached is False:
            raise Failed("the shared cache is not cleared: Redis does not answer")


def _print(document: dict[str, Any]) -> None:
    who = f"{document['name']} version {document['version']}"
    settings = document["settings"]
    if settings is None:
        print(f"{who}: responses are not cached; [cache] in its model.toml turns it on")
        return
    kinds = [kind for kind in ("exact", "similar") if settings[kind]]
    kept = f"{document['entries']} responses, {document['bytes'] / 1e6:.1f} MB"
    print(f"{who}: {' and '.join(kinds)}; {kept} kept")
    requests = document["requests"]
    all_of_them = sum(requests.values()) or 1
    rows = [
        [words, str(requests[kind]), f"{requests[kind] / all_of_them:.1%}"]
        for kind, words in _KINDS.items()
        if kind in requests
    ]
    if rows:
        show.table(("requests", "number", "share"), rows, left=("requests",))
    audits = document["audits"]
    trials = audits.get("same", 0) + audits.get("differs", 0)
    if document["wrong"] is not None:
        low, high = document["wrong"]
        print(
            f"of {trials} similar hits that were also computed {audits.get('differs', 0)} differed: "
            f"{low:.1%} to {high:.1%} of all would (99 % sure)"
        )
    shared = document["shared"]
    if shared is not None:
        up, timeouts = shared["front_ends_up"], shared["timeouts"]
        print(f"shared with other servers: {up} front ends reach Redis, which timed out {timeouts} times")
    if document["sources_off"]:
        print(f"{document['sources_off']} sources differed too often: their requests are computed for now")
