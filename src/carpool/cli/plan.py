"""`carpool plan`: how many replicas, and why."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from carpool.cli import options as o


@dataclass(frozen=True, kw_only=True)
class PlanVerb:
    """How many replicas keep this promise, with which settings, at what cost, and why.

    500 requests a second, which triple for ten seconds now and then:

        carpool plan --curve 4+1 --slo-ms 50 --rate 500 --surge 3 --surge-seconds 10

    Measured batch times, one GPU to spare, at 2.50 an hour:

        carpool plan --curve 1:6.2,16:21,64:74 --slo-ms 100 --rate 2400 --redundancy 1 --price-per-hour 2.5

    JPEGs for a model on the CPU, where decoding and the protocol take their part of the cores:

        carpool plan --curve 1:13,8:85 --slo-ms 250 --rate 60 --cores 2 --infer-cores 2 --decode-ms 2.5
    """

    curve: o.Curve
    slo_ms: o.SloMs
    rate: o.PlanRate
    surge: o.SurgeFactor = 1.0
    surge_seconds: o.SurgeSeconds = 60.0
    price_per_hour: o.PricePerHour = None
    redundancy: o.Redundancy = 0
    instances: o.ReplicaInstances = 1
    cores: o.Cores = None
    infer_cores: o.InferCores = 0.0
    decode_ms: o.DecodeMs = 0.0
    protocol_ms: o.ProtocolMs = 0.0
    max_batch: o.MaxBatch = None
    buckets: o.Buckets = None
    noise: o.Noise = 0.05
    seed: o.Seed = 1
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.cli.plan_run import run

        if not run(self):
            raise typer.Exit(1)
