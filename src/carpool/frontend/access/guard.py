"""Decides whether a request may pass, for both protocols: by its key, and by two more things.

What a browser says. It sends requests to this machine on behalf of any page that it shows, and says so:
`Sec-Fetch-Site` and `Origin` name the page's site, and programs such as curl and tritonclient send neither. A
page whose own name was made to point to this machine (DNS rebinding) counts as the same site, but calls the
server by that name.

Triton's restricted APIs: groups of routes that take a header of the operator's choice, spelled as there:
`--http-restricted-api=model-repository,logging:admin-key=SECRET`. Over gRPC the header is called
`triton-grpc-protocol-admin-key`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import NamedTuple

from carpool.config.rules import nearest, shown
from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError, ConfigError, Forbidden, Unauthenticated
from carpool.frontend.access.keys import Keys, Principal
from carpool.frontend.access.route_rules import RULES, Kind, Rule
from carpool.observe.logs import logger

APIS = tuple(dict.fromkeys(rule.api for rule in RULES.values() if rule.api))
GRPC_PREFIX = "triton-grpc-protocol-"

_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_VALUE = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]*))?")
_PORTS = {"http": "80", "https": "443"}
_OWN = (b"same-origin", b"none")
_LONGEST_SHOWN = 80
log = logger("access")
AUTHORIZATION, API_KEY = "authorization", "x-api-key"

_OPEN = (Kind.HEALTH, Kind.PAGE)
_BEARER = b"bearer "
_READS = "GET "
_LOG_EVERY_S = 1.0


class Wanted(NamedTuple):
    header: str  # in lower case
    value: bytes


Restrictions = dict[str, Wanted]
"""By the name of the API."""


def read_restrictions(given: Sequence[str], option: str, prefix: str = "") -> Restrictions:
    """`given` may have been split at the commas between APIs; raises `ConfigError` without the value."""
    found: Restrictions = {}
    apis: list[str] = []
    for part in ",".join(given).split(","):
        api, colon, rest = part.partition(":")
        if not part:
            continue
        if api not in APIS:
            raise ConfigError(f"{option}: unknown API {shown(api)}; {nearest(api, APIS)}", field=option)
        if api in found or api in apis:
            raise ConfigError(f"{option}: {api} is restricted twice", field=option)
        apis.append(api)
        if not colon:
            continue
        header, equals, value = rest.partition("=")
        if not equals or not _HEADER.fullmatch(header) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{option} must be like model-repository,logging:header=value", field=option)
        found |= dict.fromkeys(apis, Wanted((prefix + header).lower(), value.encode()))
        apis = []
    if apis:
        raise ConfigError(f"{option}: {', '.join(apis)} must be followed by :header=value", field=option)
    return found


class Names:
    """Holds the names by which a server may be called. `loopback`: it listens on this machine's own addresses
    only."""

    def __init__(self, *, loopback: bool = False, allowed: Collection[str] = ()) -> None:
        self._loopback = loopback
        self._allowed = frozenset(_plain(name) for name in allowed)

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` for a name that is not this server's. Without a field, it is no browser."""
        host = headers.get(b"host")
        if host is None or not (self._loopback or self._allowed):
            return
        name = _split(host.decode("ascii", "replace"))[0]
        if name in self._allowed or name == "localhost" or self._is_address(name):
            return
        raise Forbidden(
            f"this server is not called '{name[:_LONGEST_SHOWN]}': it accepts localhost, and other names "
            "given with --allowed-host NAME"
        )

    def check_site(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` when a browser says that another site's page sends this."""
        site, origin = headers.get(b"sec-fetch-site", _OWN[0]), headers.get(b"origin")
        if site not in _OWN or (origin is not None and not self._is_own(origin, headers.get(b"host", b""))):
            raise Forbidden(
                "a browser sent this for a page of another site, which may not use or change this server"
            )

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        scheme, _, authority = origin.decode("ascii", "replace").partition("://")
        if scheme not in _PORTS:
            return False
        name, port = _split(authority)
        own_name, own_port = _split(host.decode("ascii", "replace"))
        default = _PORTS[scheme]
        return name in self._allowed or (name, port or default) == (own_name, own_port or default)

    def _is_address(self, name: str) -> bool:
        """A page has to have a name before that can be made to point elsewhere; and what only listens here is
        only called by addresses of this machine."""
        try:
            address = ip_address(name)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or not self._loopback


def _split(authority: str) -> tuple[str, str]:
    """Returns name and port; ("", "") for anything else, which is no server's name."""
    found = _HOST.fullmatch(authority)
    return (_plain(found[1]), found[2] or "") if found else ("", "")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".").removeprefix("[").removesuffix("]")


class Guard:
    """Guards one front end, and is used in its loop's thread only.

    `generation` changes with the keys: what was decided under another one has to be decided again.
    """

    def __init__(
        self,
        names: Names | None = None,
        *,
        api_key_file: str = "",
        admin_key_file: str = "",
        metrics_key: bool = False,
        restricted: Restrictions | None = None,
    ) -> None:
        """Raises `ConfigError` for a key file that will not do."""
        self._restricted = restricted or {}
        self._names = names or Names()
        self._files = api_key_file, admin_key_file
        self._metrics_key = metrics_key
        self.has_keys = bool(api_key_file or admin_key_file)
        self.looks_at_fields = self.has_keys or bool(self._restricted)
        """Whether what a call says beside its message decides whether it may pass."""
        self.generation = 0
        self._listeners: list[Callable[[], None]] = []
        self._keys = self._read_keys() if self.has_keys else Keys()
        self._log_at = 0.0
        self._unlogged = 0

    @property
    def proofs(self) -> frozenset[str]:
        """Returns the names of the headers that it authenticates clients by. No model needs to see them."""
        restricted = (wanted.header for wanted in self._restricted.values())
        return frozenset((*restricted, *(("authorization", "x-api-key") if self.has_keys else ())))

    @property
    def asks_for_keys(self) -> bool:
        """Returns whether keys are needed for inference."""
        return bool(self._files[0])

    def listen(self, changed: Callable[[], None]) -> None:
        """Calls `changed` whenever other keys are in force."""
        self._listeners.append(changed)

    def _read_keys(self) -> Keys:
        from carpool.frontend.access.key_files import read_keys

        return read_keys(*self._files)

    def reload(self) -> None:
        """The files have changed. Those that will not do leave the previous keys."""
        try:
            keys = self._read_keys()
        except ConfigError as error:
            log.error("keys-not-read", error=error.message, keeps="the previous keys")
            return
        before, self._keys = self._keys, keys
        self.generation += 1
        keys.succeed(before)
        for changed in self._listeners:
            changed()
        log.info("keys-read", keys=len(keys))

    # ---- HTTP -------------------------------------------------------------------------------------------

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Forbidden` for a foreign host, on any route: the page that sends it reads the answer."""
        try:
            self._names.check_host(headers)
        except Forbidden as error:
            self._tell_refused(error, "")
            raise

    def check_http(
        self, rule: Rule, headers: Mapping[bytes, bytes], what: str, model: str = "", key: bytes | None = None
    ) -> Principal | None:
        """Whose key it is, if it takes one; raises `Unauthenticated` or `Forbidden`. `key` was found in
        another place, and counts if the fields have none."""
        if rule.changes or not what.startswith(_READS):
            self.check_site(headers, what)
        in_fields = key_in_fields(headers)
        who = self.check(rule, key if in_fields is None else in_fields, what, model)
        self.check_restricted(rule, lambda name: headers.get(name.encode()), what)
        if rule.changes:
            tell_change(what, model, who)
        return who

    def check_site(self, headers: Mapping[bytes, bytes], what: str) -> None:
        """Raise `Forbidden` for a page of another site. It cannot read the answer, but a request has effects:
        it takes a model's time, and may write to clients' memory, continue a sequence or load a model."""
        try:
            self._names.check_site(headers)
        except Forbidden as error:
            self._tell_refused(error, what)
            raise

    def check_restricted(self, rule: Rule, field: Callable[[str], bytes | None], what: str) -> None:
        """Raise `Forbidden`, in Triton's words, unless the header is there; `field` finds one by its name."""
        wanted = self._restricted.get(rule.api)
        value = None if wanted is None else field(wanted.header)
        if wanted is not None and not hmac.compare_digest(value or b"", wanted.value):
            kind = "protocol" if wanted.header.startswith(GRPC_PREFIX) else "API"
            error = Forbidden(f"This {kind} is restricted, expecting header '{wanted.header}'")
            self._tell_refused(error, what)
            raise error

    # ---- both protocols ---------------------------------------------------------------------------------

    def check(self, rule: Rule, key: bytes | None, what: str, model: str | None = "") -> Principal | None:
        """Returns the key's holder, if any. `model` is None where only the message will name it: see
        `check_model`."""
        try:
            who = self._holder(rule, key)
            if model is not None:
                check_model(who, model, whole_server=rule.kind is Kind.CONTROL)
        except CarpoolError as error:
            self._tell_refused(error, what)
            raise
        return who

    def _holder(self, rule: Rule, key: bytes | None) -> Principal | None:
        if not self.has_keys:
            return None
        who = None if key is None else self._keys.find(key)
        if rule.kind in _OPEN:
            return who
        if who is None:
            # Keys for inference alone close control to all; keys for control alone leave inference open.
            needed = rule.kind is Kind.CONTROL or self.asks_for_keys
            if not (self._metrics_key if rule.kind is Kind.METRICS else needed):
                return None
            sentence = "a key is needed: " if key is None else "this key is not known: "
            raise Unauthenticated(f"{sentence}send one as 'Authorization: Bearer …' or 'X-API-Key: …'")
        if rule.kind is Kind.CONTROL and not who.admin:
            raise Forbidden(f"the key of {who.name} is for inference: this needs a key of --admin-key-file")
        return who

    def _tell_refused(self, error: CarpoolError, what: str) -> None:
        """Logs rejections at intervals, so that a client that guesses keys cannot fill the disk."""
        self._unlogged += 1
        now = monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            count, self._unlogged = self._unlogged, 0
            log.warning("refused", what=what, reason=error.reason, why=error.message, count=count)


def tell_change(what: str, model: str, who: Principal | None) -> None:
    fields = {"model": model} if model else {}
    log.info("control", what=what, **fields, by="anybody" if who is None else who.name)


def check_model(who: Principal | None, model: str, *, whole_server: bool = False) -> None:
    """Raise `Forbidden` for a model that a key is not for, and with `whole_server` for what is none's own."""
    if who is None or not who.models:
        return
    if not model and whole_server:
        raise Forbidden(
            f"the key of {who.name} is for some models, but this request concerns the whole server"
        )
    if model and not who.may_use(model):
        raise Forbidden(f"the key of {who.name} is not for model '{model[:80]}'")


def presented(authorization: bytes | None, api_key: bytes | None) -> bytes | None:
    """Returns the key in one of the two fields. Another scheme is not ours: a proxy in front may have its
    own."""
    if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip(b" ")
    return api_key


def key_in_fields(headers: Mapping[bytes, bytes]) -> bytes | None:
    return presented(headers.get(b"authorization"), headers.get(b"x-api-key"))


def restrictions_of(settings: ServerSettings, *, over_grpc: bool) -> Restrictions:
    if over_grpc:
        given = settings.grpc_restricted_protocol
        return read_restrictions(given, "grpc_restricted_protocol", GRPC_PREFIX)
    return read_restrictions(settings.http_restricted_api, "http_restricted_api")
