"""Compares the figures of tests/measures.py with the code."""

from __future__ import annotations

import ast

import measures
import test_shape

WORSE_OR_BETTER = "raise no figure of tests/measures.py, and lower what is better now"


def test_the_records_have_so_many_fields() -> None:
    assert measures.fields() == measures.FIELDS, WORSE_OR_BETTER


def test_so_many_groups_of_files_import_each_other() -> None:
    """Imports for types alone count: who reads one of these files has to read the others."""
    graph = {name: test_shape.imported_files(path) for name, path in test_shape.MODULES.items()}
    assert len(list(test_shape.circles(graph))) == measures.CIRCLES, WORSE_OR_BETTER


def test_so_many_files_of_the_server_name_a_feature() -> None:
    found = {feature: len(files) for feature, files in measures.named().items()}
    assert found == measures.NAMED, WORSE_OR_BETTER


def test_words_of_features_are_found_in_identifiers() -> None:
    code = "from collections.abc import Sequence\nclass RolloutDesk: ...\ndef f(x):\n    x.no_cache = 'drift'"
    assert measures.features_in(measures.identifiers(ast.parse(code))) == {"rollout", "cache"}
