"""Holds the console: a page that shows what the server does. Only files here; the HTTP front end serves
them."""

from __future__ import annotations

from importlib import resources


def page_files() -> dict[str, bytes]:
    """Every file of the page by its name; `index.html` is where it starts."""
    folder = resources.files(__name__) / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
