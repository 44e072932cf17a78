"""Key files: what is in them, what will not do, and what is never said."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.errors import ConfigError, Forbidden, Unauthenticated
from carpool.frontend.access.guard import Guard, presented
from carpool.frontend.access.key_files import read_keys
from carpool.frontend.access.route_rules import Kind, Rule
from carpool.link.senders import Sender
from carpool.types import RequestOptions
from frontend.access.key_files import ALICE, BOB, ROOT, admin_keys, api_keys, write

INFERENCE, CONTROL = Rule(Kind.INFERENCE, False), Rule(Kind.CONTROL, True)


def test_a_key_tells_who_it_is_and_what_for(tmp_path: Path) -> None:
    keys = read_keys(api_keys(tmp_path), admin_keys(tmp_path))
    alice, bob, root = (keys.find(key.encode()) for key in (ALICE, BOB, ROOT))
    assert alice is not None
    assert bob is not None
    assert root is not None
    assert (alice.name, alice.admin, alice.priority) == ("alice", False, 0)
    assert (bob.priority, bob.may_use("echo-FP32"), bob.may_use("pair")) == (3, True, False)
    assert root.admin
    assert alice.may_use("anything")
    assert keys.find(b"alice-0123456788") is None
    assert keys.find(b"") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no key"),
        ("# nobody\n\n", "it has no key"),
        ("alice\n", "line 1: must be"),
        ("alice SECRET1234567890\nalice SECRET3456789012\n", "the name alice is given twice"),
        ("alice SECRET1234567890\nbob SECRET1234567890\n", "alice and bob have the same key"),
        ("alice SECRET123456789\n", "16 to 512"),
        ("al/ice SECRET1234567890\n", "line 1: a name"),
        ("alice SECRET1234567890 priority=0\n", "line 1: priority"),
        ("alice SECRET1234567890 priority=\n", "line 1: priority"),
        ("alice SECRET1234567890 priority=1 priority=2\n", "once each"),
        ("alice SECRET1234567890 SECRET3456789012\n", "line 1: after the key"),
        ("alice SECRET1234567890 models=\n", "line 1: models"),
        ("alice SECRET1234567890 models=a,,b\n", "line 1: models"),
        ("alice SECRET1234567890 weight=0\n", "line 1: weight"),
        ("alice SECRET1234567890 weight=nan\n", "line 1: weight"),
        ("alice SECRET1234567890 weight=1001\n", "line 1: weight"),
        ("alice SECRET1234567890 weight=2 weight=2\n", "once each"),
        ("alice SECRET1\u00e9\n", "not ASCII"),
        ("alice SECRET1234567890\nbob SECRET34567890123", "last line has no end"),
    ],
)
def test_what_will_not_do_is_named_without_its_secret(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path / "keys", text)
    with pytest.raises(ConfigError, match=said) as raised:
        read_keys(file, "")
    assert file in raised.value.message
    assert "SECRET" not in raised.value.message


def test_a_key_has_a_weight(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "alice SECRET1234567890 weight=2.5\nbob SECRET3456789012\n")
    keys = read_keys(file, "")
    alice, bob = keys.find(b"SECRET1234567890"), keys.find(b"SECRET3456789012")
    assert alice is not None
    assert bob is not None
    assert (alice.weight, bob.weight) == (2.5, 1.0)


def test_what_a_holder_calls_its_sources_is_its_own(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path / "keys", "alice SECRET1234567890 weight=2\n"), "")
    alice = keys.find(b"SECRET1234567890")
    assert alice is not None
    assert Sender().with_key(alice) == Sender("alice", holder="alice", weight=2.0)
    assert Sender("bob", latest=True).with_key(alice).source == "alice/bob"
    by_parameter = Sender().with_key(alice).with_options(RequestOptions(source="left"))
    assert (by_parameter.source, by_parameter.holder, by_parameter.weight) == ("alice/left", "alice", 2.0)
    by_header = Sender("right").with_key(alice).with_options(RequestOptions(source="left"))
    assert by_header.source == "alice/right"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_file_for_everybody_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="every user of this machine"):
        read_keys(write(tmp_path / "keys", f"alice {ALICE}\n", mode), "")


def test_one_key_is_not_in_both_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alice and root have the same key"):
        read_keys(api_keys(tmp_path), write(tmp_path / "admin", f"root {ALICE}\n"))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), "")
    with pytest.raises(ConfigError):
        read_keys(str(tmp_path), "")


def test_a_bad_new_file_leaves_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = api_keys(tmp_path)
    guard = Guard(api_key_file=file)
    before = guard.generation
    write(tmp_path / "api", "carol\n")
    guard.reload()
    assert guard.generation == before
    assert guard.check(INFERENCE, ALICE.encode(), "x") is not None
    assert "keys-not-read" in caplog.text
    write(tmp_path / "api", f"carol {ROOT}\n")
    guard.reload()
    assert guard.generation != before
    with pytest.raises(Unauthenticated, match="not known"):
        guard.check(INFERENCE, ALICE.encode(), "x")
    carol = guard.check(INFERENCE, ROOT.encode(), "x")
    assert carol is not None
    assert carol.name == "carol"
    assert not any(key in caplog.text for key in (ALICE, BOB, ROOT))


def test_which_keys_open_what(tmp_path: Path) -> None:
    both = Guard(api_key_file=api_keys(tmp_path), admin_key_file=admin_keys(tmp_path))
    with pytest.raises(Unauthenticated, match="a key is needed"):
        both.check(INFERENCE, None, "x")
    with pytest.raises(Forbidden, match="alice is for inference"):
        both.check(CONTROL, ALICE.encode(), "x")
    for rule in (INFERENCE, CONTROL):
        assert both.check(rule, ROOT.encode(), "x") is not None
    only_api = Guard(api_key_file=api_keys(tmp_path))
    with pytest.raises(Unauthenticated):
        only_api.check(CONTROL, None, "x")
    only_admin = Guard(admin_key_file=admin_keys(tmp_path))
    assert only_admin.check(INFERENCE, None, "x") is None
    with pytest.raises(Unauthenticated):
        only_admin.check(CONTROL, None, "x")
    nobody = Guard()
    assert nobody.check(CONTROL, None, "x") is None


def test_a_key_for_some_models_is_for_nothing_else(tmp_path: Path) -> None:
    admin = write(tmp_path / "admin", f"root {ROOT} models=yolo*\n")
    guard = Guard(admin_key_file=admin)
    assert guard.check(CONTROL, ROOT.encode(), "load", "yolo5") is not None
    with pytest.raises(Forbidden, match="not for model 'resnet'"):
        guard.check(CONTROL, ROOT.encode(), "load", "resnet")
    with pytest.raises(Forbidden, match="whole server"):
        guard.check(CONTROL, ROOT.encode(), "logging")


def test_where_a_key_is_looked_for() -> None:
    assert presented(b"Bearer abc", None) == b"abc"
    assert presented(b"bearer  abc", b"other") == b"abc"
    assert presented(b"Basic abc", b"other") == b"other"
    assert presented(None, b"other") == b"other"
    assert presented(b"Basic abc", None) is None


def test_a_secret_of_kubernetes_needs_no_end_of_line(tmp_path: Path) -> None:
    published = tmp_path / "..2026_11_19"
    published.mkdir()
    write(published / "keys", "alice SECRET1234567890 models=a")
    (tmp_path / "..data").symlink_to(published.name)
    (tmp_path / "keys").symlink_to("..data/keys")
    alice = read_keys(str(tmp_path / "keys"), "").find(b"SECRET1234567890")
    assert alice is not None
    assert not alice.may_use("b")
