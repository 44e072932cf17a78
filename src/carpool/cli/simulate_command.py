"""`carpool simulate`: the real scheduler in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.cli import shared_options as o


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Play traffic against a model in virtual time, with the scheduler that serves it.

    Three times the traffic that can be promised, beside what other servers do:

        carpool simulate --curve 4+1 --slo-ms 50 --load 3 --compare

    A hundred cameras on measured batch times:

        carpool simulate --curve 1:8,8:12,32:22,64:35,128:60 --slo-ms 100 --arrivals cameras --cameras 100

    What carpool serve --record FILE saw, on two instances:

        carpool simulate --curve 16+4 --slo-ms 200 --arrivals trace:FILE --instances 2
    """

    curve: o.Curve
    slo_ms: o.SloMs
    max_batch: o.MaxBatch = None
    buckets: o.Buckets = None
    instances: o.Instances = 1
    load: o.Load = None
    rate: o.Rate = None
    arrivals: o.Arrivals = "poisson"
    model: o.TraceModel = ""
    burst_factor: o.BurstFactor = 3.0
    burst_seconds: o.BurstSeconds = 0.5
    burst_period: o.BurstPeriod = 2.5
    cameras: o.CameraCount = None
    fps: o.Fps = None
    aligned: o.Aligned = False
    per_source: o.PerSource = False
    latest: o.Latest = False
    mode: o.ModeOption = o.Mode.promise
    max_delay_ms: o.MaxDelayMs = 5.0
    preferred: o.Preferred = None
    max_queue: o.MaxQueue = 0
    queue_timeout_ms: o.QueueTimeoutMs = 0.0
    timeout_action: o.TimeoutAction = o.Timeout.reject
    noise: o.Noise = 0.05
    stall_share: o.StallShare = 0.002
    stall_factor: o.StallFactor = 2.0
    profile_error: o.ProfileError = 1.0
    seconds: o.Seconds = None
    seed: o.Seed = 1
    seeds: o.Seeds = 1
    compare: o.Compare = False
    plot: o.Plot = None
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.cli.simulate_run import run

        run(self)
