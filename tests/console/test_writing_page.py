"""The strip of slots of a model that writes, in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from playwright.sync_api import expect

from carpool.extensions.text.text_columns import FIRST_TOKEN, SLOTS, TOKENS
from carpool.observe.counters import CounterRow
from console.conftest import Watched
from console.stage import Stage

WRITES = {
    "mode": "eager",
    "instances": 1,
    "encoder": [[1, 5.0], [8, 8.0]],
    "step": [[1, 1.0], [8, 1.6]],
    "slots": 8,
    "ttft_ms": 60.0,
    "per_token_ms": 5.0,
    "choices": [],
}
"""What the engine says of such a model: there are no batches, and so no points, fit or speed."""


def writing(stage: Stage, model: str) -> None:
    """As if this model wrote."""
    door = stage.front.door
    entries = {
        key: replace(entry, extra={"text": {}}) if entry.name == model else entry
        for key, entry in door.catalog.entries.items()
    }
    stage.front.run(lambda: door.renew(entries=entries))


def write(stage: Stage, model: str, used: int, tokens: int = 0, first: float = 0.02) -> None:
    """As if it had `used` of 8 slots in use, and had written so many tokens more."""
    row = stage.block.row(CounterRow(*stage.front.door.catalog.newest[model].row))

    def count() -> None:
        row.set(SLOTS["used"], used)
        row.set(SLOTS["free"], 8 - used)
        row.add(TOKENS, tokens)
        if tokens:
            row.observe(FIRST_TOKEN, first)

    stage.front.run(count)


def test_slots_tokens_and_the_first_token(console: Watched) -> None:
    stage = console.stage

    def profile(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["name"] == "embedder":
            return {**WRITES, **arguments}
        return stage.profile(arguments)

    stage.front.door.answers["profile"] = profile
    writing(stage, "embedder")
    write(stage, "embedder", 3)
    page = console.open()
    panel, curve = page.locator("#writing"), page.locator("section.curve")
    expect(curve).to_be_visible()
    expect(panel).to_be_hidden()  # the detector has no slots
    console.choose("embedder")
    expect(panel).to_be_visible()
    expect(curve).to_be_hidden()  # there are no batches
    expect(panel).to_contain_text("3 of 8 in use")
    expect(panel).to_contain_text("SLO 60 ms")
    expect(panel).to_contain_text("First token, p99–")
    write(stage, "embedder", 8, tokens=40)
    expect(panel).to_contain_text("8 of 8 in use")
    expect(panel).to_contain_text(re.compile(r"First token, p99[0-9.]+ ms in 10 s, SLO 60 ms"))
    expect(panel).to_contain_text(re.compile(r"Tokens[1-9][0-9.]* /s"))
    strip = panel.locator("svg.strip")
    expect(strip).to_have_attribute(
        "aria-label", re.compile(r"^Slots: 8 of 8 in use\. Tokens: .*; First token, p99: ")
    )
    whole = strip.evaluate("node => node.viewBox.baseVal.height")
    page.wait_for_function(
        """([strip, whole]) =>
            [...strip.querySelectorAll("rect")].some((one) => one.getAttribute("height") == whole)""",
        arg=[strip.element_handle(), whole],
    )
    write(stage, "embedder", 0)
    expect(panel).to_contain_text("0 of 8 in use")
    console.choose("detector")
    expect(panel).to_be_hidden()
    expect(curve).to_be_visible()
