"""Describes how front ends divide the requests for a model while one version takes over from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from carpool.link.catalog import Catalog


class RolloutSplit(NamedTuple):
    """Says which version answers requests that name none, while one takes over from another."""

    stable: str
    candidate: str
    share: float = 0.0  # of the candidate
    salt: str = ""  # the candidate's digest: all replicas choose alike
    sticky: str = "source"  # what keeps to one side: source, header:NAME, request
    mirrored: float = 0.0  # of stable's requests, run on the candidate too
    compared: bool = False  # the candidate's answers are compared with stable's
    fallback: bool = True  # what the candidate fails is run again on stable
    epoch: int = 0  # what is counted under one number belongs together
    keeps: bool = False  # pictures that are answered differently are kept
    limits: Mapping[str, float] = {}  # from when on answers differ
    slower: float = 0.0  # times as long as stable: such answers are counted; 0: they are not


def splits_of(catalog: Catalog) -> dict[str, RolloutSplit]:
    """Returns how requests are divided, by model, as the engine has published it."""
    routes = catalog.extra.get("rollout", {}).get("routes", {})
    return {name: RolloutSplit(**route) for name, route in routes.items()}
