"""Pages that only the catalogue decides: written once, as long as it stays the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from carpool.link.door import Catalog


class CatalogPages:
    """Of the catalogue that was asked about last: there is only one at a time."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._written: dict[Hashable, bytes] = {}

    def read(self, catalog: Catalog, write: Callable[[Catalog], bytes]) -> bytes:
        if catalog is not self._catalog:
            self._catalog = catalog
            self._written.clear()
        page = self._written.get(write)
        if page is None:
            page = self._written[write] = write(catalog)
        return page
