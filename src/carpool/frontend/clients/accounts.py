"""Counts what each client makes a front end hold and do: one account, which every route of both protocols
charges.

A client is the holder of an API key, or an address where no key is known. Its account has the bytes that are
held for it (bodies, messages, decoded heads, answers that it has not read), its connections and calls, and
the CPU time of what it makes us decode. All of it is asked for before anything is stored or decoded.

The rule of every bound is the same (dynamic thresholds): a client may have as much as is left for the others,
or some times that. Of bytes, one client alone gets half; of n greedy ones, each gets a part in n + 1, and one
part stays free for the next client. No client can take all, and the one that has most is refused first. Of a
client that has its part, the connection or call that was silent for longest ends in favour of a new one.

Times are arguments. Bytes may be counted in any thread; everything else belongs to the loop's.

`Shares` is the rule of the bounds, and `FairQueue` says whose work is done next, of what waits for a thread
(`FairThreads`) or a turn of the loop (`Turns`, `StreamTurns`).
"""

from __future__ import annotations

import threading
from ipaddress import IPv6Address, IPv6Network
from typing import Protocol

from carpool.core.bucket import Bucket

MOST_BYTES = 512 << 20
"""Held for all clients of a server, whose front ends have equal parts; one client alone gets half of each."""
PATIENCE_S = 10.0
"""A client must take `PROGRESS_BYTES` of an answer within this."""
PROGRESS_BYTES = 4096
QUIET_S = (5.0, 1.0)
"""A connection, or a call, that was silent for less does not yield to a new one."""
TIMES_THE_REST = 8
"""A client may have so many times the connections and calls that are left: alone, eight in nine."""
DECODING_SHARE, DECODING_BURST_S = 0.4, 0.1
"""Of the loop: what a client may make us decode beside others, per second and saved up."""

CONNECTION, CALL = range(2)
_NETWORK_BITS = 64
_MORE_ROOM = 1 / 32  # of all bytes, made at once


class Shares:
    """Divides something of which there is a bounded amount among those who have some of it, by their names:
    dynamic thresholds."""

    __slots__ = ("_of", "_times", "most", "total")

    def __init__(self, most: int, times: int = 1) -> None:
        """One may have so many `times` what is left for the others."""
        self.most = most
        self._times = times
        self.total = 0
        self._of: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self._of.get(name, 0)

    def free(self, name: str) -> int:
        """Returns how much more it may take."""
        return self._times * (self.most - self.total) - self._of.get(name, 0)

    def take(self, name: str, amount: int) -> bool:
        """Takes an amount; False, and nothing taken, if that is more than is left for the others."""
        mine = self._of.get(name, 0) + amount
        if mine > self._times * (self.most - self.total) and (self.total or not self.most):
            return False
        self.total += amount
        self._of[name] = mine
        return True

    def give(self, name: str, amount: int) -> None:
        if not amount:
            return
        left = self._of[name] - amount
        self.total -= amount
        if left:
            self._of[name] = left
        else:
            del self._of[name]


class Holder(Protocol):
    """Defines a connection or a call, whose client may be asked to yield."""

    @property
    def taken(self) -> int:
        """Returns bytes that went out to it, ever."""

    @property
    def silent(self) -> bool:
        """We wait for its client, and owe it nothing."""

    def give_up(self) -> None:
        """End it and free what is held for it: its stake is closed when this returns."""


class Account:
    """Represents the account of one client. Its stakes are in the order in which their clients were heard of
    last."""

    __slots__ = ("bucket", "name", "stakes", "turn", "turn_left")

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.turn = 0  # of the loop, in which it was read last
        self.turn_left = 0.0  # seconds that it may still be read in that
        self.bucket = Bucket(DECODING_SHARE, DECODING_BURST_S, now)  # seconds that may be decoded for it
        self.stakes: tuple[dict[Stake, None], ...] = ({}, {})


class Stake:
    """Represents one connection, call or body of a client, and the bytes that are held for it."""

    __slots__ = ("account", "bytes", "holder", "kind", "since", "taken", "unread")

    def __init__(self, account: Account, kind: int, holder: Holder | None, now: float) -> None:
        self.account: Account | None = account  # None: it is closed
        self.kind = kind
        self.holder = holder
        self.bytes = 0
        self.unread = 0  # of them: answers that wait for their client
        self.since = now  # its client said or took something
        self.taken = 0  # then


class Accounts:
    """Holds the accounts of one front end."""

    def __init__(self, most_connections: int, most_calls: int = 0, most_bytes: int = MOST_BYTES) -> None:
        self._accounts: dict[str, Account] = {}
        self.alone = True  # there is no more than one account
        self._counts = (Shares(most_connections, TIMES_THE_REST), Shares(most_calls, TIMES_THE_REST))
        self._bytes = Shares(most_bytes)
        self._waiting: dict[Stake, None] = {}  # those with answers that are not read
        # A body may be freed, and so give its bytes back, at any point of any thread: it is taken twice then.
        self._lock = threading.RLock()
        self._freed = 0
        self.patience_s = PATIENCE_S

    @property
    def bytes(self) -> int:
        return self._bytes.total

    @property
    def most_bytes(self) -> int:
        return self._bytes.most

    @most_bytes.setter
    def most_bytes(self, most: int) -> None:
        self._bytes.most = most

    @property
    def calls(self) -> int:
        return self._counts[CALL].total

    @property
    def unread(self) -> int:
        return sum(stake.unread for stake in self._waiting)

    def bytes_of(self, name: str) -> int:
        return self._bytes.of(name)

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, name: str, now: float) -> Account:
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = Account(name, now)
            self.alone = len(self._accounts) == 1
        return found

    # ── connections and calls ──

    def open(
        self, name: str, kind: int, holder: Holder | None, now: float, *, spared: bool = False
    ) -> Stake | None:
        """Count one more; None if its client has its part of them, and none of those is silent. `spared` is
        what is never refused: for it a silent one ends that was so for a moment only."""
        account = self._accounts.get(name) or self.account(name, now)
        counts = self._counts[kind]
        while not counts.take(name, 1):
            quiet_s = 0.0 if spared else QUIET_S[kind]
            largest = max(self._accounts.values(), key=lambda one: len(one.stakes[kind]))
            if self._one_yields(largest, kind, now, quiet_s):
                continue
            if largest is not account and self._one_yields(account, kind, now, quiet_s):
                continue
            if not spared:
                return None
            return Stake(account, kind, holder, now)  # not counted, and so never found to be silent
        stake = Stake(account, kind, holder, now)
        account.stakes[kind][stake] = None
        return stake

    def body(self, name: str, now: float, holder: Holder | None = None) -> Stake:
        """Returns a stake for bytes that belong to no connection or call of their own."""
        account = self._accounts.get(name)
        return Stake(self.account(name, now) if account is None else account, CALL, holder, now)

    def _one_yields(self, account: Account, kind: int, now: float, quiet_s: float) -> bool:
        stakes = account.stakes[kind]
        for _ in range(len(stakes)):  # never as a list: a client may have thousands
            stake = next(iter(stakes))
            if now - stake.since < quiet_s:
                return False
            holder = stake.holder
            if holder is not None and holder.silent:
                holder.give_up()
                return True
            self.heard(stake, now)  # it waits for us: the next look begins behind it
        return False

    def heard(self, stake: Stake, now: float) -> None:
        """Its client has said something."""
        stake.since = now
        account = stake.account
        if account is not None:
            stakes = account.stakes[stake.kind]
            if stakes.pop(stake, 0) is None:
                stakes[stake] = None

    def close(self, stake: Stake | None) -> None:
        """It is over, and nothing is held for it any more."""
        if stake is None:
            return
        with self._lock:
            account, stake.account = stake.account, None
            if account is None:
                return
            if stake.bytes:
                self._bytes.give(account.name, stake.bytes)
                self._freed += stake.bytes
                stake.bytes = stake.unread = 0
        stake.holder = None
        self._waiting.pop(stake, None)
        if account.stakes[stake.kind].pop(stake, 0) is None:
            self._counts[stake.kind].give(account.name, 1)

    # ── bytes ──

    def take(self, stake: Stake, size: int) -> bool:
        """Hold so many bytes more, before they are there. In any thread."""
        with self._lock:
            account = stake.account
            if account is None or not self._bytes.take(account.name, size):
                return False
            stake.bytes += size
            return True

    def give(self, stake: Stake, size: int) -> None:
        with self._lock:
            account = stake.account
            if account is not None and size:
                self._bytes.give(account.name, size)
                stake.bytes -= size
                self._freed += size

    def freed(self) -> int:
        """Bytes that were given back since this was asked last."""
        with self._lock:
            freed, self._freed = self._freed, 0
            return freed

    # ── answers that are not read ──

    def wait(self, stake: Stake, size: int, now: float) -> bool:
        """An answer of so many bytes has to wait for its client. Where there is no room, the one of this
        client's that has taken nothing for longest is given up; False if that is this one."""
        account = stake.account
        if account is None:
            return False
        if stake not in self._waiting:
            self._waiting[stake] = None
            self._mark(stake, now)
        if not self.take(stake, size) and not (self._make_room(stake, size, now) and self.take(stake, size)):
            return False
        stake.unread += size
        return True

    def _make_room(self, stake: Stake, size: int, now: float) -> bool:
        """Give up the stalest answers of the client that has most, until there is room for this and some
        more: the next one is not to look for itself."""
        account = stake.account
        assert account is not None
        self._look(now)
        largest = max((one.account for one in self._waiting if one.account), key=self._held_by)
        mine = account is largest
        listed = [one for one in self._waiting if one.account is largest]
        enough = _MORE_ROOM * self._bytes.most + size
        for one in sorted(listed, key=lambda one: (one.since, -one.unread)):
            if (one is stake and mine) or self._bytes.free(account.name) >= enough:
                break
            if one.holder is not None:
                one.holder.give_up()
        return stake.account is not None and self._bytes.free(account.name) >= size

    def _held_by(self, account: Account) -> int:
        return self._bytes.of(account.name)

    def read(self, stake: Stake, size: int) -> None:
        """The client has taken so much of what waited."""
        size = min(size, stake.unread)
        stake.unread -= size
        self.give(stake, size)
        if not stake.unread:
            self._waiting.pop(stake, None)

    def _mark(self, stake: Stake, now: float) -> None:
        stake.since = now
        stake.taken = 0 if stake.holder is None else stake.holder.taken

    def _look(self, now: float) -> None:
        for stake in self._waiting:
            if stake.holder is not None and stake.holder.taken - stake.taken >= PROGRESS_BYTES:
                self._mark(stake, now)

    def sweep(self, now: float) -> None:
        """Now and then: give up answers of which too little is taken, and forget clients who are gone."""
        self._look(now)
        for stake in [one for one in self._waiting if now - one.since >= self.patience_s]:
            if stake.holder is not None:
                stake.holder.give_up()
        for account in list(self._accounts.values()):
            held = any(account.stakes) or self._bytes.of(account.name)
            if not held and account.bucket.is_full(now):
                del self._accounts[account.name]
        self.alone = len(self._accounts) <= 1

    # ── time ──

    def spend(self, account: Account, seconds: float, now: float) -> float:
        """So much was decoded for a client; returns for how long it is to rest, if there are others."""
        account.bucket.left(now)
        account.bucket.spend(seconds)
        return 0.0 if self.alone else account.bucket.rest_s(now)

    def rest_s(self, name: str, now: float) -> float:
        """Returns for how long a client is to rest."""
        account = self._accounts.get(name)
        return 0.0 if account is None else self.spend(account, 0.0, now)


def client_of(address: object) -> str:
    """Returns the client of a socket's peer. A network of IPv6 is one client: the owner of one address has
    the whole network."""
    name = str(address[0]) if isinstance(address, tuple) and address else ""
    if ":" not in name:
        return name
    parsed = IPv6Address(name.partition("%")[0])
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Network((parsed, _NETWORK_BITS), strict=False))
