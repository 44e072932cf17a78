"""In a run of all tests by several processes, each of them imports only the test files that it runs.

A plugin of pytest, whose processes would each import all files and the libraries that these need: 10 s of
CPU for each. Here what they share out is files: one item stands for a file, whose tests are collected when
its turn comes, and are run and reported one by one. A run of some files, or by one process, is pytest's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BY_FILE = "carpool_by_file"  # in what the process that shares out the tests sends to the others


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called in the process that shares out the tests, for each that is to run them."""
    config: pytest.Config = node.config
    whole = config.args == config.getini("testpaths") and not config.getoption("keyword")
    node.workerinput[_BY_FILE] = whole and config.getoption("dist") == "loadfile"
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if node.workerinput[_BY_FILE] and not isinstance(reporter._progress_nodeids_reported, _Files):
        reporter._progress_nodeids_reported = _Files()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    given = getattr(parent.config, "workerinput", {})
    return _LaterModule.from_parent(parent, path=module_path) if given.get(_BY_FILE) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, _TestsOfFile):
        return None
    item.run_each(nextitem)
    return True


class _LaterModule(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _TestsOfFile.from_parent(self, name="*")


class _TestsOfFile(pytest.Item):
    def run_each(self, nextitem: pytest.Item | None) -> None:
        assert self.parent is not None
        assert self.parent.parent is not None
        module: pytest.Module = pytest.Module.from_parent(self.parent.parent, path=self.path)
        found = list(self.session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=found)
        if not found:  # what the file before this one left for it to share in ends here
            self.session._setupstate.teardown_exact(nextitem)
        running = self.session.items
        place = running.index(self)
        try:
            for one, following in zip(found, [*found, nextitem][1:], strict=True):
                running[place] = one  # pytest-xdist reports on the item that stands there
                self.config.hook.pytest_runtest_protocol(item=one, nextitem=following)
        finally:
            running[place] = self

    def runtest(self) -> None:
        raise AssertionError("each of its tests runs in its place")

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid


class _Files(set[Any]):
    """The tests that were reported: the percentage in the margin is of files, as what was shared out is."""

    def add(self, node: object) -> None:
        super().add(str(node).partition("::")[0])
