"""Implements `carpool rollout`: how a new version takes over, and to say what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

Action = StrEnum("Action", ["start", "status", "promote", "pause", "resume", "abort", "history"])
_DONE_BY_HAND = ("start", "promote", "pause", "resume", "abort")


@dataclass(frozen=True, kw_only=True)
class RolloutVerb(o.AsksServer):
    """Replace a model's version by a new one, step by step.

    Its state:

        carpool rollout status detector

    Roll back to the old version at once:

        carpool rollout abort detector --reason "false alarms at night"

    Start one by hand. The server accepts it with --allow-rollouts, with
    --model-control-mode explicit, or with an admin key:

        carpool rollout start detector --to 2 --canary 0.1,0.5
    """

    action: Action = o.argument("The action.", metavar="|".join(Action))
    name: str = o.argument("The model.")
    url: o.ServerUrl = o.DEFAULT_URL
    to: int | None = o.option(None, "start: version to roll out. Default: the newest.")
    reason: str = o.option("", "Reason, for the history.")
    shadow: float | None = o.option(None, "start: share of the requests in the shadow step, 0 to 1.")
    shadow_h: float | None = o.option(None, "start: length of the shadow step, in hours.")
    canary: str | None = o.option(
        None, "start: shares that it answers in the canary steps, like 0.1,0.5; 0 for no canary."
    )
    canary_h: float | None = o.option(None, "start: length of each canary step, in hours.")
    standby_h: float | None = o.option(None, "start: time that the old version stays loaded, in hours.")
    least: int | None = o.option(
        None, "start: least number of comparisons or responses before a step may end."
    )
    slower: float | None = o.option(
        None, "start: roll back if its latency exceeds that of stable by this factor, even within the SLO."
    )

    def run(self) -> int:
        from carpool.lab.load.facts import RunningServer

        plan = self._plan()
        if (plan or self.to is not None) and self.action is not Action.start:
            raise InvalidInput(f"--to and the options of a plan go with start, not with {self.action}")
        server = RunningServer(self.url, self.trust())
        path = f"/v2/models/{quote(self.name, safe='')}/rollout"
        if self.action in _DONE_BY_HAND:
            asked: dict[str, Any] = {"action": str(self.action), "reason": self.reason}
            if self.to is not None:
                asked["version"] = self.to
            if plan:
                asked["plan"] = plan
            found = server.send(path, asked)
        else:
            found = server.get(path)
        if self.as_json:
            print(json.dumps(found["history"] if self.action is Action.history else found, indent=2))
        elif self.action is Action.history:
            _show_history(found["history"])
        else:
            for sentence in sentences(found):
                show.paragraph(sentence)
        return 0

    def _plan(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "shadow": self.shadow,
            "shadow_h": self.shadow_h,
            "canary": None if self.canary is None else _steps(self.canary),
            "canary_h": self.canary_h,
            "standby_h": self.standby_h,
            "least": self.least,
            "guards": None if self.slower is None else {"slower": self.slower},
        }
        return {key: value for key, value in given.items() if value is not None}


def _steps(text: str) -> list[float]:
    try:
        return [share for share in map(float, text.split(",")) if share]
    except ValueError:
        raise InvalidInput(f"--canary must be like 0.1,0.5, not {text!r}") from None


def sentences(found: dict[str, Any]) -> Iterator[str]:
    """Yields sentences that say how the rollout stands, without the guards that are switched off."""
    name, state = found["model"], found["state"]
    if state == "none":
        yield f"{name}: nothing is being rolled out; version {found['stable']} answers."
        if trouble := found.get("trouble"):
            yield _sentence(trouble)
        return
    stable, candidate = found["stable"], found["candidate"]
    yield f"{name}: {_where(found)}; {found['why'] or 'it waits for nothing'}."
    if state in ("done", "rolled-back", "failed"):
        yield _sentence(found["trouble"] or f"version {stable} answers everything")
        return
    yield f"Version {stable} is stable, version {candidate} the candidate{_answers(found['share'])}."
    for guard in (guard for guard in found["guards"].values() if guard["verdict"] != "off"):
        yield f"{guard['name']}: {guard['verdict']}. {guard['sentence']}"
    counts = found["counts"]
    skipped = ", ".join(f"{count:,} {why}" for why, count in sorted(counts["skipped"].items()))
    yield (
        f"Compared: {counts['compared']:,} responses, and {counts['seen']:,} more of the same "
        f"scenes{f'; not compared: {skipped}' if skipped else ''}; {counts['fallbacks']:,} fell back to "
        "stable."
    )
    for sentence in (*found["needs"], found["capacity"].get("sentence", ""), found["trouble"]):
        if sentence:
            yield _sentence(sentence)
    if "shared" in found:
        yield _together(found["shared"])
    yield f"Possible actions: {' or '.join(found['actions'])}."


def _together(shared: dict[str, Any]) -> str:
    if not shared["reached"]:
        return (
            f"{shared['where']}, where replicas share it, cannot be reached ({shared['trouble']}): it can "
            "only roll back."
        )
    alive = [part for part in shared["replicas"].values() if part["alive"]]
    ready = sum(part["ready"] for part in alive)
    shares = "shares" if len(alive) == 1 else "share"
    return f"{show.count(len(alive), 'replica')} {shares} it; {ready} have loaded the candidate."


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _where(found: dict[str, Any]) -> str:
    if found["state"] == "canary":
        return f"canary, step {found['step']} of {found['steps']}"
    if found["state"] == "paused":
        return f"paused in {found['paused_in']}"
    return str(found["state"])


def _answers(share: float) -> str:
    return f", which answers {share * 100:g} % of the requests that name no version" if share else ""


def _show_history(lines: list[dict[str, Any]]) -> None:
    from datetime import datetime

    titles = ("time", "from", "to", "versions", "why")
    rows = [
        (
            datetime.fromtimestamp(line["time"]).isoformat(sep=" ", timespec="seconds"),
            line["from"],
            f"{line['to']} {line['step']}" if line["step"] else line["to"],
            f"{line['stable']} → {line['candidate']}",
            line["why"],
        )
        for line in lines
    ]
    show.table(titles, rows, left=titles)
