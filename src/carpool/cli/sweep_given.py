"""From the options of `carpool sweep` to an order."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from carpool.cli import checks
from carpool.cli.load_given import read_shape
from carpool.cli.sweep import Sweep
from carpool.cli.trust_options import trust
from carpool.config.repository import ModelSource, find_models
from carpool.config.server import server_settings
from carpool.core.policy import Promise
from carpool.demo import bundled_models
from carpool.demo.cache import prepare
from carpool.demo.recipes import RECIPES
from carpool.errors import InvalidInput
from carpool.lab.load.aim import read_pictures, read_url
from carpool.lab.load.schedule import Phase, check_length
from carpool.lab.load.trust import TRUSTING, Trust
from carpool.lab.sweep.grid import AS_IS, Setting, settings_of
from carpool.lab.sweep.order import SLO_MS, Order
from carpool.lab.sweep.variant import check_place

DEMO_DETECTOR = "nanodet"
_MOST_SETTINGS, _MOST_RATES, _MOST_RUNS = 16, 64, 2000


def order(given: Sweep) -> Order:
    url = given.target if "://" in given.target else ""
    place, source = (None, None) if url else _model(given)
    slo_ms = _slo_ms(given, source)
    settings = (Setting(AS_IS),) if url else _settings(given, slo_ms or SLO_MS)
    rates, loads = _rates(given)
    runs = len(settings) * len(rates or loads) * checks.whole("--repeats", given.repeats, least=1, most=100)
    if runs > _MOST_RUNS:
        raise InvalidInput(
            f"these are {runs:,} runs, and {_MOST_RUNS:,} are the most: give fewer settings or rates"
        )
    if url:
        read_url(url)
    if given.curve:
        checks.batch_curve(given.curve, None, None)
    pictures = tuple(path.absolute() for path in given.images or ())
    read_pictures(pictures)
    if pictures and given.shapes:
        raise InvalidInput("--shape goes with tensors, not with --image", field="--shape")
    found = Order(
        settings=settings,
        model=source.config.name if source is not None else given.name,
        url=url,
        place=place,
        source=source,
        slo_ms=slo_ms,
        rates=rates,
        loads=loads,
        seconds=checks.number("--seconds", given.seconds, above=0, most=3600),
        warmup=checks.number("--warmup", given.warmup, most=3600),
        repeats=given.repeats,
        seed=given.seed,
        pictures=pictures,
        shapes=dict(read_shape(text) for text in given.shapes or ()),
        curve=given.curve or "",
        instances=checks.whole("--instances", given.instances, least=1, most=256),
        command=shlex.join(["carpool", *sys.argv[1:]]),
        trust=_trust(given, url),
    )
    check_length([Phase(rate, found.warmup + found.seconds) for rate in rates])
    return found


def _trust(given: Sweep, url: str) -> Trust:
    """Servers of our own ask for no key."""
    if url:
        return trust(given.api_key_file, given.ca, given.insecure)
    if given.api_key_file or given.ca or given.insecure:
        raise InvalidInput("--api-key-file, --ca and --insecure go with the address of a running server")
    return TRUSTING


def _slo_ms(given: Sweep, source: ModelSource | None) -> float | None:
    """None leaves it to the server, which may have a promise of its own."""
    if given.slo_ms is not None:
        return checks.number("--slo-ms", given.slo_ms, above=0, most=3.6e6)
    if source is None:
        return None
    policy = source.config.policy
    return policy.slo * 1e3 if isinstance(policy, Promise) else SLO_MS


def _settings(given: Sweep, slo_ms: float) -> tuple[Setting, ...]:
    delays = numbers("--max-delay-ms", given.max_delay_ms, most=60_000, example="0,5,20")
    found = settings_of(given.mode, slo_ms, delays, checks.sizes("--max-batch", given.max_batch))
    if len(found) > _MOST_SETTINGS:
        raise InvalidInput(
            f"these are {len(found)} settings, and {_MOST_SETTINGS} are the most: each has its own server"
        )
    return tuple(found)


def _rates(given: Sweep) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if given.rates is not None:
        return numbers("--rates", given.rates, above=0, most=100_000, example="10,20,40"), ()
    return (), numbers("--loads", given.loads, above=0, most=100, example="0.3,0.6,0.9")


def numbers(
    option: str, text: str, *, above: float | None = None, most: float, example: str
) -> tuple[float, ...]:
    """Rising and different."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} must be numbers like {example}, not {text!r}", field=option) from None
    if len(found) > _MOST_RATES:
        raise InvalidInput(f"{option}: {_MOST_RATES} at most, not {len(found)}", field=option)
    return tuple(sorted({checks.number(option, value, above=above, most=most) for value in found}))


# ---- the model


def _model(given: Sweep) -> tuple[Path, ModelSource]:
    """Where it lies, and what its settings say."""
    path = _path(given.target)
    found, _ = find_models([path], only=[given.name] if given.name else None)
    if len(found) > 1:
        names: Sequence[str] = [source.config.name for source in found]
        raise InvalidInput(
            f"{path} has several models: say which with --name: {', '.join(names)}", field="--name"
        )
    place = path.absolute() if path.is_file() else found[0].config.path
    check_place(place)
    return place, found[0]


def _path(target: str) -> Path:
    if target and Path(target).exists():
        return Path(target)
    name = target or DEMO_DETECTOR
    if (bundled_models() / name).is_dir():
        return bundled_models() / name
    cache = server_settings({})[0].cache_dir
    for recipe in RECIPES:
        if recipe.name == name and cache is not None:
            return prepare(recipe, cache / "demo", lambda line: print(line, file=sys.stderr, flush=True))
    demos = ", ".join((DEMO_DETECTOR, *(recipe.name for recipe in RECIPES)))
    raise InvalidInput(
        f"there is no file or folder {target!r}, nor a demo model of that name ({demos}), nor is it an "
        "address like http://localhost:8000",
        field="MODEL",
    )
