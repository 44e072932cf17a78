"""Compares the figures of tests/measures.py with the code; test_shape.py, which reads all sources, counts the
groups of files."""

from __future__ import annotations

import ast

import measures


def test_the_records_have_so_many_fields() -> None:
    assert measures.fields() == measures.FIELDS, measures.WORSE_OR_BETTER


def test_so_many_files_of_the_server_name_a_feature() -> None:
    found = {feature: len(files) for feature, files in measures.named().items()}
    assert found == measures.NAMED, measures.WORSE_OR_BETTER


def test_words_of_features_are_found_in_identifiers() -> None:
    code = "from collections.abc import Sequence\nclass RolloutDesk: ...\ndef f(x):\n    x.no_cache = 'drift'"
    assert measures.features_in(measures.identifiers(ast.parse(code))) == {"rollout", "cache"}
