"""`carpool profile URL`: nothing is measured, a running server is asked what it measured and believes now."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any
from urllib.parse import quote

from carpool.cli import show
from carpool.cli.models_run import Failed, Server
from carpool.cli.profile_command import ProfileVerb
from carpool.cli.running_server import trust
from carpool.engine.numerals import numeral
from carpool.errors import InvalidInput

_GOES_WITH_A_URL = ("model", "name", "as_json", "api_key_file", "ca", "insecure")
_MOST_NAMED = 8


def run(options: ProfileVerb) -> bool:
    """Whether the server told."""
    _check(options)
    server = Server(options.model, trust(options.api_key_file, options.ca, options.insecure))
    try:
        name = options.name or _only_model(server)
        found = server.get(f"/v2/models/{quote(name, safe='')}/profile")
    except Failed as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return False
    if options.as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return True


def _check(options: ProfileVerb) -> None:
    for field in fields(options):
        if field.name not in _GOES_WITH_A_URL and getattr(options, field.name) != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise InvalidInput(
                f"{option} is for measuring; a running server is only asked what it knows", field=option
            )


def _only_model(server: Server) -> str:
    try:
        names = [str(name) for name in server.get("/health")["models"]]
    except (KeyError, TypeError):
        raise Failed("what answers there is no Carpool server") from None
    if len(names) != 1:
        there = ", ".join(names[:_MOST_NAMED]) or "none"
        raise InvalidInput(f"--name: which model? The server has {there}", field="--name")
    return names[0]


def _print(found: dict[str, Any]) -> None:
    instances = "1 instance" if found["instances"] == 1 else f"{found['instances']} instances"
    threads = f" × {found['threads']} threads" if found["threads"] else ""
    promise = found["promise"]
    promised = f"promises {promise['slo_ms']:g} ms" if promise else f"no promise ({found['mode']})"
    show.paragraph(f"{found['name']} version {found['version']}: {promised}, {instances}{threads}.")
    measured = {point["size"]: point["ms"] for point in found["points"]}
    believed = dict(found["believed"])
    ran = {size: (batches, ms) for size, batches, ms in found["recent"]["sizes"]}
    show.table(
        ("batch", "measured", "believed now", f"ran in {found['recent']['seconds']} s", "took"),
        [
            (
                f"{size}",
                _ms(measured.get(size)),
                _ms(believed.get(size)),
                f"{ran[size][0]}" if size in ran else "–",
                _ms(ran[size][1] if size in ran else None),
            )
            for size in sorted({*measured, *believed, *ran})
        ],
    )
    show.paragraph("")
    for note in _notes(found):
        show.paragraph(note, "· ")


def _notes(found: dict[str, Any]) -> list[str]:
    fit, speed, promise = found["fit"], found["speed"], found["promise"]
    notes = [
        f"t(B) = {numeral(fit['fixed_ms'])} ms + B × {numeral(fit['per_image_ms'])} ms, as it was loaded."
    ]
    again = "; the curve was re-learned" if speed["relearned"] else ""
    notes.append(f"Batches take {speed['factor']:.2f} × what was loaded{again}.")
    if promise:
        notes.append(
            f"Largest batch {promise['largest_batch']}, under load near {promise['promised_batch'] or '–'}: "
            f"that carries {numeral(promise['capacity_rps'])} images/s."
        )
    curve = ",".join(f"{size}:{ms:.4g}" for size, ms in found["curve"])
    return [*notes, *map(str, found["choices"]), f"For simulate and plan: --curve {curve}"]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{numeral(value, 4)} ms"
