"""Rollouts of a whole server: who answers, what is refused, and what is the same after a restart."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from absent import needs
from carpool.extensions.rollout import rollouts
from engine.scripted import weights
from extensions.rollout.staged import QUICK, Behaving, Staged, settings, staged
from waiting import until

HELD = "shadow = 0\ncanary = [0.5]\ncanary_h = 24\nleast = 20\n"
SOURCES = [f"camera-{number}" for number in range(40)]


@pytest.fixture(scope="module", name="held")
def held_in_the_canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    """For whoever only asks."""
    with staged(tmp_path_factory.mktemp("held"), HELD) as one:
        one.until("canary")
        yield one


@pytest.fixture(scope="module", name="lone")
def with_one_version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    with staged(tmp_path_factory.mktemp("lone"), HELD, {1: "1"}) as one:
        yield one


def test_without_rollout_the_newest_serves(tmp_path: Path) -> None:
    with staged(tmp_path, None, {1: "1", 2: "2"}) as one:
        assert one.version() == "2"
        found = one.status()
        assert (found["state"], found["stable"], found["candidate"], found["share"]) == (
            "none",
            "2",
            None,
            0.0,
        )
        assert "X-Carpool-Version" not in one.infer()[2]


def test_without_rollouts_the_first_request_for_a_side_and_the_first_start_load_them(tmp_path: Path) -> None:
    given = {"allow_rollouts": False, "model_control_mode": "explicit", "load_models": ("*",)}
    with staged(tmp_path, None, **given) as one:
        assert "rollout" not in one.server.host.parts._parts
        assert one.infer(headers={"X-Carpool-Rollout": "stable"})[0] == 200
        status, answer, _ = one.infer(headers={"X-Carpool-Rollout": "candidate"})
        assert (status, answer["reason"]) == (404, "no-rollout")
        assert "rollout" not in one.server.host.parts._parts, "front ends alone have loaded them"
        weights(one.home, "m", 3, "1")
        status, answer = one.act("start", version=3, plan={"shadow": 0, "canary": [0.5], "least": 10**6})
        assert status == 200
        one.until("canary")
        assert one.infer(headers={"X-Carpool-Rollout": "candidate"})[2]["X-Carpool-Version"] == "3"


def test_two_versions_at_the_first_start(held: Staged) -> None:
    found = held.until("canary")
    assert (found["stable"], found["candidate"], found["share"]) == ("1", "2", 0.5)
    chosen = {source: held.version(source) for source in SOURCES}
    assert set(chosen.values()) == {"1", "2"}
    assert {source: held.version(source) for source in SOURCES} == chosen
    assert held.infer(SOURCES[0])[2]["X-Carpool-Version"] == chosen[SOURCES[0]]


def test_a_version_that_is_named_is_never_another(held: Staged) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [5.0]}]}
    for version in ("1", "2"):
        for _ in range(4):
            answer = held.ask("POST", f"/v2/models/m/versions/{version}/infer", body)[1]
            assert answer["model_version"] == version


def test_a_side_can_be_asked_for(held: Staged) -> None:
    for side, version in (("stable", "1"), ("candidate", "2")):
        for _ in range(4):
            assert held.version(headers={"X-Carpool-Rollout": side}) == version
    status, answer, _ = held.infer(headers={"X-Carpool-Rollout": "newest"})
    assert (status, answer["field"]) == (400, "X-Carpool-Rollout")


def test_a_source_in_the_parameters_keeps_to_its_side(held: Staged) -> None:
    body: dict[str, Any] = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [5.0]}],
    }
    for source in SOURCES[:12]:
        expected = held.version(source)
        body["parameters"] = {"source": source}
        assert held.ask("POST", "/v2/models/m/infer", body)[1]["model_version"] == expected


def test_sticky_by_header(tmp_path: Path) -> None:
    with staged(tmp_path, f'{HELD}sticky = "header:X-Tenant"') as one:
        one.until("canary")
        tenants = [f"tenant-{number}" for number in range(30)]
        chosen = [one.version(headers={"X-Tenant": tenant}) for tenant in tenants]
        assert set(chosen) == {"1", "2"}
        assert [one.version(headers={"X-Tenant": tenant}) for tenant in tenants] == chosen


def test_it_goes_all_the_way(tmp_path: Path) -> None:
    plan = QUICK.replace("standby_h = 24", "standby_h = 0")
    plan += "guards = { disagreement = false, late = false, errors = false }\n"  # a few answers prove nothing
    with staged(tmp_path, plan.replace("least = 20", "least = 5")) as one:
        found = one.until("done", work=one.infer)
        assert (found["stable"], found["share"]) == ("2", 0.0)
        assert [line["to"] for line in found["history"]] == [
            *("loading", "checked", "canary", "full", "standby", "retired", "done"),
        ]
        assert one.version() == "2"


@pytest.mark.parametrize("value", ["raise", pytest.param("sleep 3", marks=pytest.mark.conformance)])
def test_a_bad_candidate_goes_back_and_nobody_notices(tmp_path: Path, value: str) -> None:
    with staged(tmp_path, HELD, {1: "1", 2: value}, head="slo_ms = 1000") as one:
        one.until("canary")
        failures = []

        def ask() -> None:
            for source in SOURCES:
                status, answer, _ = one.infer(source)
                if status != 200:
                    failures.append(answer)

        found = one.until("rolled-back", work=ask)
        assert failures == []
        assert found["rollbacks"] == {"errors" if value == "raise" else "late": 1}
        assert found["counts"]["fallbacks"] > 0
        assert {one.version(source) for source in SOURCES} == {"1"}


def test_one_that_answers_nonsense_goes_back(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1", 2: "7"}) as one:
        one.until("canary")
        found = one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
        assert found["rollbacks"] == {"disagreement": 1}
        assert "differ" in found["why"]


def test_metrics_of_a_rollback_outlive_the_candidate(tmp_path: Path) -> None:
    """Alerts read them at the next scrape, when the candidate is unloaded; the next rollout ends them."""

    def pages() -> tuple[str, str]:
        with one.server.connect() as connection:
            page, index = (connection.get(path) for path in ("/metrics", "/v2/repository/index"))
            return page.body.decode(), index.body.decode()

    with staged(tmp_path, HELD, {1: "1", 2: "7"}, model_control_mode="poll", poll_s=3600) as one:
        one.until("canary")
        one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
        until(lambda: "UNLOADING" not in pages()[1] and '"version":"2","state":"READY"' not in pages()[1])
        page = pages()[0]
        assert 'carpool_rollout_rollbacks_total{model="m",version="2",guard="disagreement"} 1' in page
        assert 'carpool_rollout_state{model="m",version="2",state="rolled-back"} 1' in page
        one.add(3, "1")
        one.look()
        one.until("canary")
        assert 'version="2"' not in "".join(line for line in pages()[0].splitlines() if "rollout" in line)


def test_a_shadow_is_compared_and_never_answers(tmp_path: Path) -> None:
    plan = "shadow = 1.0\nshadow_h = 24\nleast = 20\n"
    with staged(tmp_path, plan, {1: "1", 2: "7"}) as one:
        found = one.until("shadow")
        assert (found["share"], found["shadow"]) == (0.0, 1.0)
        answered = []
        found = one.until("rolled-back", work=lambda: answered.extend(one.version() for _ in range(5)))
        assert set(answered) == {"1"}
        assert found["rollbacks"] == {"disagreement": 1}


def test_one_that_raises_in_the_shadow_goes_back(tmp_path: Path) -> None:
    plan = "shadow = 1.0\nshadow_h = 24\nleast = 20\n"
    with staged(tmp_path, plan, {1: "1", 2: "raise"}) as one:
        one.until("shadow")
        found = one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
        assert found["rollbacks"] == {"errors": 1}


def test_one_that_does_not_load_leaves_stable(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1", 2: "broken"}) as one:
        found = one.until("failed")
        assert "does not load" in found["why"]
        assert one.version() == "1"


def test_one_that_takes_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is pretended: what other tests of this process give back would hide what it took."""
    monkeypatch.setattr(rollouts, "resident_gb", lambda: Behaving.loaded_gb)
    with staged(tmp_path, f"{HELD}guards = {{ memory_gb = 1.5 }}\n", {1: "1", 2: "large"}) as one:
        assert "loading it took 2.00 GB, more than memory_gb = 1.5" in one.until("failed")["why"]
        assert one.version() == "1"


def test_a_new_version_starts_one_instead_of_a_swap(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1"}, model_control_mode="poll", poll_s=3600) as one:
        assert one.status()["state"] == "none"
        one.add(2, "1")
        one.look()
        found = one.until("canary")
        assert (found["stable"], found["candidate"]) == ("1", "2")
        one.act("abort")
        one.look()
        assert one.status()["state"] == "rolled-back"
        assert one.version() == "1"
        one.add(3, "1")
        one.look()
        found = one.until("canary")
        assert (found["stable"], found["candidate"]) == ("1", "3")


def test_after_one_by_hand_a_new_version_is_rolled_out_as_well(tmp_path: Path) -> None:
    """And not swapped in, unguarded, while the status says that another answers."""
    with staged(tmp_path, HELD, {1: "1"}, model_control_mode="poll", poll_s=3600) as one:
        one.add(2, "1")
        one.look()
        one.until("canary")
        one.act("abort")
        status, found = one.act("start", version=2, plan={"shadow": 0, "canary": [0.25]})
        assert status == 200, found
        one.until("canary")
        one.act("abort")
        one.add(3, "1")
        one.look()
        found = one.until("canary")
        assert (found["stable"], found["candidate"], found["share"]) == ("1", "3", 0.5)
        assert {one.version(source) for source in SOURCES} == {"1", "3"}
        one.act("abort")
        assert {one.version(source) for source in SOURCES} == {"1"}
        one.add(4, "1")
        status, found = one.act("start", plan={"canary": [0.25]})
        assert status == 200, found
        one.until("canary")
        one.act("abort")
    with staged(tmp_path) as one:
        assert (one.status()["state"], one.status()["stable"]) == ("rolled-back", "1")
        assert {one.version(source) for source in SOURCES} == {"1"}


def test_versions_that_come_while_it_is_down_are_not_who_was_there(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1"}) as one:
        assert one.status()["state"] == "none"
    weights(tmp_path / "models", "m", 2, "1")
    weights(tmp_path / "models", "m", 3, "1")
    with staged(tmp_path) as one:
        found = one.until("canary")
        assert (found["stable"], found["candidate"]) == ("1", "3")


def test_the_counts_at_its_end_are_those_that_it_was_judged_by(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1", 2: "7"}) as one:
        one.until("canary")
        before = one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
    with staged(tmp_path) as one:
        for found in (before, one.status()):
            counts, sentence = found["counts"], found["guards"]["disagreement"]["sentence"]
            assert counts["differ"] > 0
            assert f"{counts['differ']} of {counts['compared']} differ" in sentence


def test_a_candidate_that_fails_when_it_has_taken_over_goes_back(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, {1: "1", 2: "raise"}) as one:
        one.until("canary")
        one.act("promote")
        one.until("standby")
        found = one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
        assert found["rollbacks"] == {"errors": 1}
        assert one.version() == "1"


def test_a_table_of_the_plan_that_a_request_names_in_part(tmp_path: Path) -> None:
    with staged(tmp_path, f'{HELD}guards = {{ on_breach = "pause", late = 9 }}\n') as one:
        one.until("canary")
        one.act("abort")
        guards = one.act("start", plan={"guards": {"slower": 1.5}})[1]["plan"]["guards"]
        assert (guards["slower"], guards["on_breach"], guards["late"]) == (1.5, "pause", 9.0)


def test_files_that_change_end_it(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, model_control_mode="poll", poll_s=3600) as one:
        one.until("canary")
        one.add(2, "9")
        one.look()
        found = one.until("failed")
        assert "changed" in found["why"]
        assert {one.version(source) for source in SOURCES} == {"1"}
        one.look()
        assert one.status()["state"] == "failed"


def test_actions(tmp_path: Path) -> None:
    with staged(tmp_path, HELD) as one:
        one.until("canary")
        assert one.act("pause")[1]["state"] == "paused"
        assert one.act("pause")[0] == 200
        assert one.status()["share"] == 0.5
        status, answer = one.act("start", version=1)
        assert (status, answer["reason"]) == (409, "wrong-state")
        assert one.act("resume")[1]["state"] == "canary"
        assert one.act("promote", reason="it is good")[1]["state"] == "standby"
        assert one.version() == "2"
        found = one.act("abort", reason="it is not")[1]
        assert (found["state"], found["why"]) == ("rolled-back", "by hand: it is not")
        assert one.version() == one.version(headers={"X-Carpool-Rollout": "stable"}) == "1"
        status, answer, _ = one.infer(headers={"X-Carpool-Rollout": "candidate"})
        assert (status, answer["reason"]) == (404, "no-rollout")
        assert one.act("abort")[0] == 200
        status, answer = one.act("promote")
        assert status == 409
        assert "start or abort" in answer["error"]
        assert one.act("start")[0] == 200
        one.until("canary")


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "action"),
        ({"action": "abrt"}, 400, "action"),
        ({"action": 3}, 400, "action"),
        ({"action": "abort", "verion": 2}, 400, "verion"),
        ({"action": "start", "version": "two"}, 400, "version"),
        ({"action": "start", "version": 99}, 404, None),
        ({"action": "start", "version": 1}, 409, "version"),
        ({"action": "start", "plan": {"canary": [2]}}, 400, "plan"),
        ({"action": "start", "plan": {"cannary": [0.5]}}, 400, "plan"),
        ({"action": "start", "plan": 7}, 400, "plan"),
        ({"action": "start", "plan": {"keep": {"folder": "/etc/cron.d"}}}, 400, "plan"),
        ({"action": "abort", "reason": "x" * 501}, 400, "reason"),
        ({"action": "abort", "reason": "a\nb"}, 400, "reason"),
    ],
)
def test_bad_requests_name_the_field(
    lone: Staged, body: dict[str, Any], status: int, field: str | None
) -> None:
    found, answer, _ = lone.ask("POST", "/v2/models/m/rollout", body)
    assert found == status, answer
    assert answer.get("field") == field


def test_an_unknown_model(lone: Staged) -> None:
    assert lone.ask("GET", "/v2/models/nobody/rollout")[0] == 404
    assert lone.ask("POST", "/v2/models/m/rollout", {"action": "promote"})[0] == 404


def test_by_hand_with_a_plan_of_its_own(tmp_path: Path) -> None:
    with staged(tmp_path, None, {1: "1"}) as one:
        one.add(2, "1")
        status, found = one.act("start", version=2, plan={"shadow": 0, "canary": [0.25]})
        assert status == 200, found
        found = one.until("canary")
        assert (found["share"], found["plan"]["canary"]) == (0.25, [0.25])
        one.act("abort")
        assert one.version() == "1"


def test_starting_needs_permission_and_abort_does_not(tmp_path: Path) -> None:
    with staged(tmp_path, HELD, allow_rollouts=False) as one:
        one.until("canary")
        for action in ("start", "promote", "resume"):
            status, answer = one.act(action)
            assert status == 403
            assert "--allow-rollouts" in answer["error"]
        assert one.act("abort")[1]["state"] == "rolled-back"


def test_feedback_finds_who_answered(held: Staged) -> None:
    ids = {f"request-{number}": held.version(identity=f"request-{number}") for number in range(12)}
    path = "/v2/models/m/feedback"

    def told() -> None:
        status, answer, _ = held.ask("POST", path, {"id": "request-0", "verdict": "right"})
        seen.append((status, answer))

    seen: list[tuple[int, Any]] = []
    held.until("canary", work=told)
    while not seen or seen[-1][0] == 404:
        told()
    assert seen[-1][1] == {"counted": True, "version": ids["request-0"]}
    assert not held.ask("POST", path, {"id": "request-0", "verdict": "right"})[1]["counted"]
    held.ask("POST", path, {"id": "request-1", "verdict": "missed"})
    counts = held.status()["counts"]
    assert counts["stable"]["complaints"] + counts["candidate"]["complaints"] == 1
    assert held.ask("POST", path, {"id": "2-0123456789abcdef", "verdict": "missed"})[1]["version"] == "2"
    for wrong in ({"id": "x", "verdict": "bad"}, {"verdict": "right"}, {"id": "", "verdict": "right"}):
        assert held.ask("POST", path, wrong)[0] == 400


@pytest.mark.parametrize("state", ["canary", "standby"])
def test_the_same_cameras_after_a_restart(tmp_path: Path, state: str) -> None:
    """`test_killed` has all states."""
    with staged(tmp_path, HELD) as one:
        one.until("canary")
        if state == "standby":
            one.act("promote")
        before = one.until(state)
        chosen = {source: one.version(source) for source in SOURCES}
    with staged(tmp_path) as one:
        one.until(state)
        until(lambda: one.status()["share"] == before["share"])  # it answers nothing before it is loaded
        after = one.status()
        for key in ("state", "stable", "candidate", "step", "digests"):
            assert after[key] == before[key]
        assert abs(after["elapsed_s"] - before["elapsed_s"]) < 10.0
        assert {source: one.version(source) for source in SOURCES} == chosen


def test_other_files_after_a_restart_fail(tmp_path: Path) -> None:
    with staged(tmp_path, HELD) as one:
        one.until("canary")
    (tmp_path / "models" / "m" / "2" / "weights").write_text("5")
    with staged(tmp_path) as one:
        found = one.until("failed")
        assert "changed" in found["why"]
        assert one.version() == "1"


def test_after_a_state_file_that_cannot_be_read_a_person_is_waited_for(tmp_path: Path) -> None:
    """What was aborted is not begun again because its end was forgotten."""
    with staged(tmp_path, HELD) as one:
        one.until("canary")
        one.act("abort")
    (file,) = (tmp_path / "state" / "rollouts").glob("*.json")
    cut = file.read_bytes()[:-20]
    file.write_bytes(cut)
    for _ in range(2):  # also after another restart
        with staged(tmp_path) as one:
            found = one.until("none")
            assert "cannot be parsed" in found["trouble"]
            assert "started by hand" in found["trouble"]
            assert (found["actions"], one.version()) == (["start"], "1")
        assert file.read_bytes() == cut
    with staged(tmp_path) as one:
        one.until("none")
        one.act("start")
        assert one.until("canary")["stable"] == "1"
    (aside,) = file.parent.glob("*.unreadable-*")
    assert aside.read_bytes() == cut


def test_of_two_servers_with_one_state_folder_one_moves_a_rollout(tmp_path: Path) -> None:
    """The second names the first, serves what that had decided, and goes on with it when it is gone."""
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        one = first.enter_context(staged(tmp_path, HELD))
        one.until("canary")
        other = second.enter_context(staged(tmp_path))
        found = other.until("none")
        assert f"belongs to another server (process {os.getpid()}," in found["trouble"]
        assert (found["actions"], other.version()) == ([], "1")
        assert "belongs to another server" in other.act("start")[1]["error"]
        one.act("abort")
        first.close()
        assert other.until("rolled-back")["stable"] == "1"
        assert other.version() == "1"


def test_a_state_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with staged(tmp_path, HELD) as one:
        one.until("canary")
        end = one.status()
        while not end["trouble"]:
            end = one.status()
        assert "cannot be stored" in end["trouble"]


def test_disagreements_are_not_kept_without_a_folder(held: Staged) -> None:
    status, found, _ = held.ask("GET", "/v2/models/m/rollout/disagreements")
    assert (status, found["kept"]) == (200, False)
    assert held.ask("GET", "/v2/models/m/rollout/disagreements/1")[0] == 404
    assert held.ask("GET", "/v2/models/m/rollout/disagreements?limit=x")[0] == 400


def test_disagreements_are_kept_where_one_is_named(tmp_path: Path) -> None:
    plan = f"{HELD}keep = {{ folder = {json.dumps(str(tmp_path / 'kept'))} }}\n"
    with staged(tmp_path, plan, {1: "1", 2: "7"}) as one:
        one.until("canary")
        one.until("rolled-back", work=lambda: [one.infer() for _ in range(5)])
        path = "/v2/models/m/rollout/disagreements"
        found = one.ask("GET", path)[1]
        while not found["disagreements"]:
            found = one.ask("GET", path)[1]
        assert found["disagreements"][0]["versions"] == ["1", "2"]


def test_what_is_measured_is_on_the_page(held: Staged) -> None:
    connection = held.server.connect()
    with connection:
        page = connection.get("/metrics").body.decode()
    assert 'carpool_rollout_state{model="m",version="2",state="canary"} 1' in page
    assert 'carpool_rollout_share{model="m",version="2",kind="answers"} 0.5' in page
    assert 'carpool_rollout_bound{model="m",version="2",guard="errors",end="high"} -1' in page


def test_the_index_and_metadata_follow_who_serves(held: Staged) -> None:
    assert held.ask("GET", "/v2/models/m")[1]["versions"] == ["1", "2"]
    lines = held.ask("POST", "/v2/repository/index", {})[1]
    assert {(line["version"], line["state"]) for line in lines} == {("1", "READY"), ("2", "READY")}


@needs("sequences")
def test_one_that_takes_sequences_after_a_restart_goes_back(tmp_path: Path) -> None:
    with staged(tmp_path, HELD) as one:
        one.until("canary")
    settings(tmp_path / "models", None, "[sequences]")
    with staged(tmp_path) as one:
        found = one.until("failed")
        assert "sequences" in found["why"]
        assert (found["stable"], found["share"]) == ("1", 0.0)
