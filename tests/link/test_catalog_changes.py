"""What a front end has after any changes is the whole catalogue, whenever it began to hear of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.link import catalog_changes
from carpool.link.catalog import (
    Batching,
    Catalog,
    IndexEntry,
    ModelEntry,
    PublishedModel,
    PublishedServer,
    Traits,
)
from carpool.link.catalog_changes import PIECE_BYTES, CatalogReader, CatalogWriter
from carpool.link.records import (
    CATALOG,
    CATALOG_PIECE,
    TO_FRONTEND,
    ProtocolError,
    RecordReader,
)
from carpool.memory.client_files import Region
from carpool.types import Datatype, Signature
from link.echo import MODELS, catalog_of, entry
from link.joined import joined, run
from waiting import until_in_loop as until


def hear(reader: CatalogReader, said: bytes) -> tuple[list[tuple[int, int]], Catalog]:
    """What one catalogue is sent as, by kind and bytes, and what it was read as."""
    kinds, found = [], Catalog()
    for record, payload in RecordReader(TO_FRONTEND, 1 << 30).feed(said):
        kinds.append((record[0], len(payload)))
        if record[0] == CATALOG_PIECE:
            reader.piece(payload)
        else:
            found = reader.end(record[2], payload)
    assert [kind for kind, _ in kinds] == [CATALOG_PIECE] * (len(kinds) - 1) + [CATALOG]
    return kinds, found


def plain(value: Any) -> Any:
    """Without the difference between a list and a tuple, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (ModelEntry, Batching, Traits, PublishedModel, PublishedServer)):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    if isinstance(value, Signature):  # how many classes may be asked for follows from the labels
        return repr((value.model, value.inputs, value.outputs, value.max_batch, value.told))
    return value


def labelled(model: ModelEntry, labels: Mapping[str, Sequence[str]]) -> ModelEntry:
    return replace(model, published=replace(model.published, labels=labels))


def chosen(model: ModelEntry) -> ModelEntry:
    return replace(model, published=replace(model.published, choices=("x",)))


def same(one: Catalog, other: Catalog) -> bool:
    return all(plain(getattr(one, each.name)) == plain(getattr(other, each.name)) for each in fields(Catalog))


def test_a_catalogue_survives_the_way() -> None:
    index = [IndexEntry("fixed", "1", "READY"), IndexEntry("late", "2", "LOADING", "not yet")]
    catalog = replace(
        catalog_of(5, MODELS),
        newest={"fixed": MODELS[0]},
        index=index,
        leaving=[entry(77, "going", Datatype.FP32, (4,))],
        down=frozenset((2, 3)),
        regions={"r": Region(3, "r", "shm", 0, 64, 12)},
        extra={
            "rollout": {"routes": {"fixed": {"share": 0.5}}},
            "drift": {"cameras": {"fixed": {"gate": "dark"}}},
        },
    )
    kinds, back = hear(CatalogReader(), CatalogWriter(catalog).whole())
    assert len(kinds) == 1
    assert same(back, catalog)
    assert back.newest["fixed"] is back.entries["fixed", "1"]


def test_only_what_changed_travels_and_all_else_stays_the_same_object() -> None:
    labels = {"y": [f"class {number}" for number in range(20_000)]}
    large = labelled(entry(1, "large", Datatype.FP32, (4,)), labels)
    first = catalog_of(1, (large, *MODELS[1:]))
    writer, reader = CatalogWriter(first), CatalogReader()
    kinds, before = hear(reader, writer.whole())
    assert sum(size for _, size in kinds) > 200_000
    new = entry(50, "new", Datatype.FP32, (4,))
    ((_, size),), after = hear(reader, writer.change(catalog_of(2, (large, *MODELS[1:-1], new))))
    assert size < 3_000
    assert all(after.entries[name] is before.entries[name] for name in after.entries if name[0] != "new")
    assert ("many", "1") not in after.entries
    ((_, size),), loading = hear(
        reader, writer.change(replace(catalog_of(3, (large,)), server=PublishedServer(loading="now")))
    )
    assert size < 1_000
    assert (list(loading.entries), loading.server.loading) == ([("large", "1")], "now")


def test_a_large_whole_comes_in_pieces_that_count_together() -> None:
    labels = {"y": ["a name of a class"] * 2_000}
    catalog = catalog_of(
        7, [labelled(entry(key, f"m{key}", Datatype.FP32, (4,)), labels) for key in range(1, 60)]
    )
    writer, reader = CatalogWriter(catalog), CatalogReader()
    kinds, back = hear(reader, writer.whole())
    assert len(kinds) > 5
    assert max(size for _, size in kinds) < PIECE_BYTES + 1_000
    assert same(back, catalog)


def test_a_change_of_something_unknown_is_not_read() -> None:
    writer = CatalogWriter(catalog_of(1, MODELS))
    lost, change = writer.change(catalog_of(2, MODELS[:3])), writer.change(catalog_of(3, MODELS[:2]))
    assert lost
    reader = CatalogReader()
    with pytest.raises(ProtocolError, match="catalogue 3 follows 2, not 0"):
        hear(reader, change)
    hear(reader, writer.whole())
    hear(reader, writer.change(catalog_of(4, MODELS)))


VERSIONS = [
    replace(
        entry(key, name, Datatype.FP32, (size,)), version=version, published=PublishedModel(config={"n": key})
    )
    for key, (name, version, size) in enumerate(
        (name, version, size) for name in "abc" for version in "12" for size in (1, 2)
    )
]


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """Any of the versions serve or leave, as loads, rollouts and rollbacks have them in any order."""
    served = draw(st.lists(st.sampled_from(VERSIONS), unique_by=lambda one: (one.name, one.version)))
    changed = [
        draw(st.sampled_from((one, chosen(one), replace(one, extra={"drift": {"n": 1}})))) for one in served
    ]
    leaving = [one for one in draw(st.lists(st.sampled_from(VERSIONS), unique_by=id)) if one not in served]
    return Catalog(
        0,
        draw(st.booleans()),
        {(one.name, one.version): one for one in changed},
        {one.name: one for one in changed},
        [IndexEntry(one.name, one.version, "READY") for one in served],
        leaving,
        frozenset(one.key for one in served if draw(st.booleans())),
        extra={"rollout": {"routes": {one.name: draw(st.sampled_from((0.0, 0.5))) for one in served[:1]}}},
        server=PublishedServer(loading=draw(st.sampled_from(("", "now")))),
    )


@given(st.lists(st.tuples(catalogs(), st.booleans()), min_size=1, max_size=8))
def test_changes_from_anywhere_on_come_to_the_whole(story: list[tuple[Catalog, bool]]) -> None:
    writer, readers = CatalogWriter(Catalog()), [CatalogReader()]
    hear(readers[0], writer.whole())
    for number, (drawn, another) in enumerate(story, 1):
        catalog = replace(drawn, number=number)
        change = writer.change(catalog)
        for reader in readers:
            assert same(hear(reader, change)[1], catalog)
        if another:
            readers.append(CatalogReader())
            assert same(hear(readers[-1], writer.whole())[1], catalog)


def test_a_front_end_that_comes_late_has_all_of_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, with another front end that heard of every change; each acknowledges the same number."""
    monkeypatch.setattr(catalog_changes, "PIECE_BYTES", 600)

    async def main() -> None:
        async with joined() as link:
            first = await link.door()
            for _ in range(3):
                await first.door.ask("load", {})
            late = await link.door()
            assert same(late.door.catalog, first.door.catalog)
            assert late.door.catalog.number == 4
            newest = await late.door.ask("load", {})
            assert f"model{newest}" in first.door.catalog.newest
            assert same(late.door.catalog, first.door.catalog)
            assert {one.seen for one in link.side.links} == {5}

    run(main())


def test_what_follows_another_catalogue_ends_the_link() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            (engine,) = link.side.links
            writer = CatalogWriter(catalog_of(8, MODELS))
            engine.publish(writer.change(catalog_of(9, MODELS[:2])))
            await until(lambda: not client.door.serving)
            assert client.door.catalog.number == 0

    run(main())
