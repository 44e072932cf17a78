"""Every verb that can ask a running server takes its address and key from the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from carpool.cli.verbs import listed
from carpool.demo import pictures
from cli_run import params, run_cli

LATER = ("frigate", "optimize")
"""Verbs that ask the server only when another program asks them, or when minutes of work are done."""
ASK = [
    verb
    for verb in listed()
    if verb not in LATER and any("--insecure" in param.opts for param in params(verb))
]
WORDS = {
    "cache": ["status", "m"],
    "drift": ["status", "m"],
    "evaluate": ["--data", "{pictures}"],
    "load": ["--rate", "5", "--duration", "1"],
    "models": ["list"],
    "predict": ["{pictures}/a/cat.jpg"],
    "profile": ["--name", "m"],
    "rollout": ["status", "m"],
    "sweep": ["--name", "m", "--rates", "1", "--out", "{folder}"],
    "top": ["--once"],
    "watch": ["{video}"],
}


@contextmanager
def refusing() -> Iterator[tuple[str, list[str | None]]]:
    """A server that lets nobody in, and the keys it was shown."""
    shown: list[str | None] = []

    class Refuses(BaseHTTPRequestHandler):
        def parse_request(self) -> bool:
            """The same answer to every method."""
            return super().parse_request() and self._refuse()

        def _refuse(self) -> bool:
            shown.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_response(401)
            self.send_header("Content-Length", "16")
            self.end_headers()
            self.wfile.write(b'{"error": "no!"}')
            return False

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", shown
        finally:
            server.shutdown()


@pytest.mark.parametrize("verb", ASK)
def test_a_verb_asks_the_server_that_the_environment_names(verb: str, tmp_path: Path) -> None:
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    (tmp_path / "pictures" / "a" / "cat.jpg").write_bytes(pictures()[0].read_bytes())
    given = {"pictures": tmp_path / "pictures", "folder": tmp_path / "sweep"}
    if verb == "watch":
        from extensions.cameras.made_videos import video  # in the folder of the verb's extension

        given["video"] = video(tmp_path / "gate.mp4", frames=2)
    words = [word.format_map(given) for word in WORDS[verb]]
    with refusing() as (url, shown):
        environment = {"CARPOOL_URL": url, "CARPOOL_API_KEY": "k-of-mine"}
        done = run_cli([verb, *words], env=environment)
    assert shown, done.output
    assert {*shown} == {"Bearer k-of-mine"}
    assert done.exit_code
