"""Pictures as text: base64, with or without the head of a data: URL."""

from __future__ import annotations

import binascii

from carpool.errors import InvalidInput


def from_base64(text: str, where: str) -> bytes:
    """`where` names the field in the error."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidInput(f"{where} is a data: URL that is not in base64", field=where)
    if any(blank in text for blank in "\r\n \t"):  # some encoders break their lines
        text = "".join(text.split())
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # of strings that are not ASCII, too
        raise InvalidInput(f"{where} is not valid base64", field=where) from None
