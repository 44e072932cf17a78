"""What differs between pages as a repository shows them and as the site does."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = r"\[([^\]]+)\]\((?:\.\./){%d}[^)]+\)"
_SECOND = re.compile(r"(\]\([\w./-]*#[\w-]+)-(\d)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Files outside of docs/ are not part of the site: links to them become their words. The second heading
    of one name is `#name-1` there and `#name_1` here."""
    outside = _OUTSIDE % (page.file.src_uri.count("/") + 1)
    return _SECOND.sub(r"\1_\2)", re.sub(outside, r"\1", markdown))
