"""One account per client: nobody takes all, the silent yield first, and everything comes back."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.frontend.clients.accounts import (
    CALL,
    CONNECTION,
    DECODING_BURST_S,
    DECODING_SHARE,
    PATIENCE_S,
    PROGRESS_BYTES,
    Accounts,
    Shares,
    Stake,
    client_of,
)


class Held:
    """What a client holds."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.stake: Stake | None = None
        self.taken = 0
        self.silent = True
        self.over = False

    def give_up(self) -> None:
        self.over = True
        self._accounts.close(self.stake)


def opened(
    accounts: Accounts, name: str, now: float, kind: int = CALL, *, spared: bool = False
) -> Held | None:
    held = Held(accounts)
    held.stake = accounts.open(name, kind, held, now, spared=spared)
    return None if held.stake is None else held


def must(held: Held | None) -> tuple[Held, Stake]:
    assert held is not None
    assert held.stake is not None
    return held, held.stake


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400)), max_size=60))
def test_however_much_the_others_want_there_is_room_for_one_more(asked: list[tuple[str, int]]) -> None:
    shares = Shares(1000)
    for name, amount in asked:
        shares.take(name, amount)
    left = 1000 - shares.total
    assert left >= 0
    assert shares.take("newcomer", left)
    if len({name for name, _ in asked}) == 1:
        assert left >= 1000 - (500 + 400 // 2)  # half, and the last piece that still had room


def test_one_client_alone_gets_half_of_the_bytes_and_others_theirs() -> None:
    accounts = Accounts(10, 10, most_bytes=1000)
    _, greedy = must(opened(accounts, "greedy", 0.0))
    assert accounts.take(greedy, 500)
    assert not accounts.take(greedy, 1)
    _, honest = must(opened(accounts, "honest", 0.0))
    assert accounts.take(honest, 250)
    accounts.close(greedy)
    accounts.close(honest)
    assert (accounts.bytes, accounts.calls, accounts.freed()) == (0, 0, 750)


class Counted(dict[Stake, None]):
    """Stakes, and how many of them were looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Stake]:
        for stake in super().__iter__():
            self.looked += 1
            yield stake


def test_to_refuse_one_of_thousands_looks_at_few_of_them() -> None:
    accounts = Accounts(10, 4096)
    while opened(accounts, "mallory", 0.0) is not None:
        pass
    account = accounts.account("mallory", 0.0)
    stakes = Counted(account.stakes[CALL])
    account.stakes = (account.stakes[CONNECTION], stakes)
    for _ in range(10):
        assert opened(accounts, "mallory", 0.1) is None
    for _ in range(10):
        assert opened(accounts, "mallory", 5.0) is not None  # in the place of the oldest
    assert stakes.looked <= 40


def test_silent_calls_of_one_client_leave_room_for_others() -> None:
    accounts = Accounts(10, 4096)
    silent = [one for _ in range(5000) if (one := opened(accounts, "mallory", 0.0)) is not None]
    assert len(silent) < 4096
    assert opened(accounts, "honest", 0.1) is not None
    assert not any(one.over for one in silent)


def test_of_a_client_that_has_its_part_the_call_silent_for_longest_ends() -> None:
    accounts = Accounts(10, 4)
    first, second, third, fourth = (must(opened(accounts, "one", float(at))) for at in range(4))
    first[0].silent = False  # it waits for us
    accounts.heard(second[1], 4.0)
    assert opened(accounts, "one", 10.0) is not None
    assert [one[0].over for one in (first, second, third, fourth)] == [False, False, True, False]


def test_of_many_greedy_clients_the_one_that_has_most_yields() -> None:
    accounts = Accounts(10, 4096)
    held: dict[str, list[Held]] = {}
    for name in ("a", "b", "c", "d", "e"):
        held[name] = [one for _ in range(4096) if (one := opened(accounts, name, 0.0)) is not None]
    assert opened(accounts, "honest", 0.5) is None or accounts.calls <= 4096
    made = [opened(accounts, "honest", 10.0 + number) for number in range(50)]
    assert all(one is not None for one in made)
    assert sum(one.over for one in held["a"]) >= 40
    assert not any(one.over for one in held["e"])


def test_calls_that_were_silent_for_a_moment_stay_and_health_is_never_refused() -> None:
    accounts = Accounts(10, 3)
    held = [must(opened(accounts, "one", 0.0))[0] for _ in range(3)]
    assert opened(accounts, "one", 0.5) is None
    for one in held:
        one.silent = False
    probe = must(opened(accounts, "one", 0.6, spared=True))
    assert not any(one.over for one in held)
    accounts.close(probe[1])
    held[1].silent = True
    assert opened(accounts, "one", 0.7, spared=True) is not None
    assert held[1].over
    assert accounts.calls == 3


def test_an_answer_of_which_nothing_is_taken_is_given_up_and_one_that_is_read_is_not() -> None:
    accounts = Accounts(10, 10)
    idle, trickles, reads = (must(opened(accounts, "one", 0.0)) for _ in range(3))
    for _, stake in (idle, trickles, reads):
        assert accounts.wait(stake, 50_000, 100.0)
    for second in range(1, 10):
        trickles[0].taken += 1
        reads[0].taken += PROGRESS_BYTES // 4
        accounts.sweep(100.0 + second)
    assert not any(one[0].over for one in (idle, trickles, reads))
    accounts.sweep(100.0 + PATIENCE_S)
    assert [one[0].over for one in (idle, trickles, reads)] == [True, True, False]
    assert accounts.unread == accounts.bytes == 50_000
    accounts.read(reads[1], 50_000)
    assert accounts.bytes == 0


def test_where_answers_have_no_room_the_stalest_of_that_client_goes_first() -> None:
    accounts = Accounts(10, 10, most_bytes=180_000)
    stale, fresh, late = (must(opened(accounts, "one", 0.0)) for _ in range(3))
    other = must(opened(accounts, "two", 0.0))
    assert accounts.wait(other[1], 10_000, 0.0)
    assert accounts.wait(stale[1], 40_000, 1.0)
    assert accounts.wait(fresh[1], 40_000, 2.0)
    stale[0].taken, fresh[0].taken = 0, PROGRESS_BYTES  # it reads
    assert accounts.wait(late[1], 30_000, 3.0)
    assert [one[0].over for one in (stale, fresh, late, other)] == [True, False, False, False]
    assert not accounts.wait(late[1], 300_000, 4.0)  # never, whoever yields
    assert not other[0].over


def test_who_makes_us_decode_too_much_rests_while_there_are_others() -> None:
    accounts = Accounts(10, 10)
    busy = accounts.account("busy", 0.0)
    assert accounts.spend(busy, 10 * DECODING_BURST_S, 0.0) == 0.0  # alone, nobody minds
    must(opened(accounts, "other", 0.0))
    rest = accounts.rest_s("busy", 0.0)
    assert rest == 9 * DECODING_BURST_S / DECODING_SHARE
    assert accounts.rest_s("busy", rest) == 0.0
    assert accounts.rest_s("other", 0.0) == 0.0


def test_an_account_is_forgotten_with_the_last_that_it_holds() -> None:
    accounts = Accounts(10, 10)
    _, stake = must(opened(accounts, "one", 0.0, CONNECTION))
    body = accounts.body("one", 0.0)
    assert accounts.take(body, 10)
    accounts.close(stake)
    accounts.sweep(100.0)
    assert len(accounts) == 1
    accounts.close(body)
    accounts.close(body)  # twice is once
    accounts.sweep(200.0)
    assert (len(accounts), accounts.bytes) == (0, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("open", "take", "give", "wait", "read", "close", "heard", "sweep")),
        st.integers(0, 7),
        st.sampled_from("abc"),
        st.integers(1, 5000),
    ),
    max_size=80,
)


def stepped(accounts: Accounts, one: Held, what: str, size: int, now: float) -> None:
    stake = one.stake
    assert stake is not None
    if what == "take":
        accounts.take(stake, size)
    elif what == "give":
        accounts.give(stake, min(size, stake.bytes - stake.unread))
    elif what == "read":
        one.taken += size
        accounts.read(stake, size)
    elif what == "heard":
        accounts.heard(stake, now)
    elif what == "close" or (what == "wait" and not accounts.wait(stake, size, now)):
        one.give_up()


@settings(max_examples=200)
@given(STEPS)
def test_whatever_happens_the_sums_are_right(steps: list[tuple[str, int, str, int]]) -> None:
    accounts, held, now = Accounts(4, 6, most_bytes=20_000), list[Held](), 0.0
    for what, number, name, size in steps:
        now += 0.7
        if what == "open":
            made = opened(accounts, name, now)
            held += [] if made is None else [made]
        elif what == "sweep":
            accounts.sweep(now)
        elif held:
            stepped(accounts, held[number % len(held)], what, size, now)
        stakes = [one.stake for one in held if one.stake is not None and one.stake.account is not None]
        assert accounts.bytes == sum(stake.bytes for stake in stakes) <= 20_000
        assert accounts.unread == sum(stake.unread for stake in stakes)
        assert accounts.calls == len(stakes) <= 6
    for one in held:
        one.give_up()
    assert (accounts.bytes, accounts.unread, accounts.calls) == (0, 0, 0)


def test_a_client_is_an_address_or_a_network_of_ipv6() -> None:
    assert client_of(("10.0.0.7", 4711)) == "10.0.0.7"
    assert client_of(("::ffff:10.0.0.7", 4711, 0, 0)) == "10.0.0.7"
    assert client_of(("2001:db8::1", 1, 0, 0)) == client_of(("2001:db8::ffff:1", 2, 0, 0)) == "2001:db8::/64"
    assert client_of(("2001:db8:0:1::1", 1, 0, 0)) == "2001:db8:0:1::/64"
    assert client_of(("fe80::1%eth0", 1, 0, 2)) == "fe80::/64"
    assert client_of("/run/socket") == client_of(None) == ""
