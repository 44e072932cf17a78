"""Implements `carpool limit`."""

from dataclasses import dataclass

from carpool.cli import verb_options as o


@dataclass(frozen=True, kw_only=True)
class LimitVerb(o.AsksServer):
    """Show the limit of a model in a running server."""

    name: str = o.argument("The model.")
    url: o.ServerUrl = o.DEFAULT_URL

    def run(self) -> None:
        from carpool.lab.load.facts import RunningServer

        print(RunningServer(self.url, self.trust()).get(f"/v2/models/{self.name}/limit"))
