"""A row of `gpu.json` as a line to read while it runs."""

from collections.abc import Mapping
from typing import Any


def shown(entry: Mapping[str, Any]) -> str:
    asked = f"{entry['concurrency']} clients" if entry["concurrency"] else f"{entry['rate']:,.0f}/s offered"
    line = (
        f"  {entry['what']:<22} {asked:>16}  {entry['images_per_s']:>9,.0f} images/s  "
        f"p50 {entry['p50_ms'] or 0:6.2f}  p99 {entry['p99_ms'] or 0:6.2f} ms  "
        f"batch {entry['batch_mean'] or 0:5.1f}  in time {entry['attainment']:.4f}"
    )
    if entry["rate"]:
        line += f" of {entry['offered_rps']:,.0f}/s: {entry['goodput_rps']:,.0f}/s"
    if entry["server_in_time"] is not None:
        line += f"  (of answered {entry['in_time_of_answered']}, the server says {entry['server_in_time']})"
    costs = ", ".join(
        f"{name} {entry['us_per_request'][name]:g} µs"
        for name in ("engine loop", "runner", "front ends")
        if name in entry["us_per_request"]
    )
    line += f"  {costs}  gpu {entry['device'].get('busy')}  steal {entry['machine'].get('steal')}"
    line += f"  began late by p99 {entry['generator_start_lag_p99_ms']:g} ms"
    return line + ("  (generator late)" if entry["generator_late"] else "")
