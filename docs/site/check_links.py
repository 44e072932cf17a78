"""Every link of the built site leads somewhere: pages, anchors and pictures."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag in ("a", "img", "script", "link"):
                self.links.append(value)


def broken(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = target in pages or target.is_file()
            if not there or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                wrong.append(f"{path.relative_to(site.resolve())}: {link}")
    return wrong


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    sys.stdout.write("\n".join(found or ["no link is broken"]) + "\n")
    sys.exit(1 if found else 0)
