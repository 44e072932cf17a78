"""How a client knows the server, and how the server knows the client."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Trust:
    """`ca` signs the server's certificate; `insecure` believes any. `key` goes with every request."""

    ca: str = ""
    insecure: bool = False
    key: str = field(default="", repr=False)

    def context(self) -> ssl.SSLContext:
        """For an https:// address."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ValueError):  # no such file, or no certificate in it
            raise InvalidInput(f"--ca {self.ca} is not a certificate in PEM form", field="--ca") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def credentials(self) -> Any:
        """For a grpcs:// address."""
        import grpc

        if self.insecure:
            raise InvalidInput(
                "--insecure goes with https://; for grpcs:// give the server's own certificate as --ca",
                field="--insecure",
            )
        try:
            roots = Path(self.ca).read_bytes() if self.ca else None
        except OSError:
            raise InvalidInput(f"--ca {self.ca} cannot be read", field="--ca") from None
        return grpc.ssl_channel_credentials(roots)

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self.key}"),) if self.key else ()


TRUSTING = Trust()
