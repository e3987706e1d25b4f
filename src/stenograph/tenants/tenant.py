"""The tenants of a file: their keys' hashes, scopes and quotas. Pure.

A key is a random token of 256 bits, so its SHA-256 is enough: nobody can try so many.
"""

import enum
import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from stenograph.core.stated_options import tag_of

KEY_BEGIN = "stk-"
NAME = re.compile("[A-Za-z0-9_-]{1,64}")
"""Names of tenants: bare keys of TOML."""

_Count = Annotated[int, Meta(ge=1, lt=2**53)]
_Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TenantScope(enum.StrEnum):
    """Rights of a tenant's key. Each includes the reading of the tenant's own sessions."""

    ROLLOUT = "rollout"
    """Open sessions and run turns, say outcomes, delete sessions."""
    TRAIN = "train"
    """Samples, scores, claims, receipts, abandonments, deletions."""
    WEIGHTS = "weights"
    """New weights and pauses, for all tenants."""
    ADMIN = "admin"
    """Everything, and the sessions of all tenants."""


Scopes = list[TenantScope]


def _default_scopes() -> Scopes:
    return [TenantScope.ROLLOUT, TenantScope.TRAIN]


class NamedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a tenant with a name of its own, for the audit log, and scopes of its own."""

    sha256: Annotated[list[_Hash], Meta(min_length=1)]
    scopes: Scopes = msgspec.field(default_factory=_default_scopes)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file. `share` is its part of the turns in flight, in proportion to others'; a quota None is
    none. `waiting`: the most requests of it that wait for a place. `scopes` are those of `key_sha256`."""

    key_sha256: list[_Hash] = []
    scopes: Scopes = msgspec.field(default_factory=_default_scopes)
    keys: dict[str, NamedKey] = {}
    share: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    in_flight: _Count | None = None
    tokens_a_minute: _Count | None = None
    stored_tokens: _Count | None = None
    sessions: _Count | None = None
    waiting: _Count = 1000

    def all_keys(self, name: str) -> "list[TenantKey]":
        """The keys of this tenant with its name."""
        unnamed = [TenantKey(hash=one, tenant=name, shown=name, scopes=self.scopes) for one in self.key_sha256]
        named = [
            TenantKey(hash=one, tenant=name, shown=f"{name}/{key}", scopes=its.scopes)
            for key, its in self.keys.items()
            for one in its.sha256
        ]
        return unnamed + named


class TenantKey(NamedTuple):
    """A key by its hash: its tenant, its name as it is shown, and what it may do."""

    hash: str
    tenant: str
    shown: str
    scopes: Scopes


class Tenants:
    """The tenants of one reading of the file."""

    def __init__(self, by_name: Mapping[str, Tenant]) -> None:
        self.by_name = by_name
        self.name_by_tag = {tag_of(name): name for name in by_name}
        self._by_hash = {key.hash: key for name, one in by_name.items() for key in one.all_keys(name)}

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self.by_name)}>"

    def key_among(self, credentials: Sequence[bytes]) -> TenantKey | None:
        """The first key of a tenant among these. It is found by its hash: timing tells nothing of it."""
        for one in credentials:
            if (key := self._by_hash.get(hash_of(one))) is not None:
                return key
        return None


class BadTenants(ValueError):
    """A file with a mistake, and where."""


def read_tenants(text: str) -> Tenants:
    """The tenants of a file's text. Raises BadTenants."""
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadTenants(f"it is not TOML: {error}") from error
    found: dict[str, Tenant] = {}
    shown_by_hash: dict[str, str] = {}
    for name, table in tables.items():
        if not NAME.fullmatch(name):
            raise BadTenants(f"[{name[:80]}]: a name has 1 to 64 letters, digits, - and _")
        try:
            found[name] = msgspec.convert(table, Tenant)
        except msgspec.ValidationError as error:
            raise BadTenants(f"[{name}]: {error}") from error
        for key in found[name].keys:
            if not NAME.fullmatch(key):
                raise BadTenants(f"[{name}.keys]: a name has 1 to 64 letters, digits, - and _, got {key[:80]!r}")
        if not (keys := found[name].all_keys(name)):
            raise BadTenants(f"[{name}]: it has no key: give key_sha256, or a table [{name}.keys.NAME] with sha256")
        for one in keys:
            if shown_by_hash.setdefault(one.hash, one.shown) != one.shown:
                raise BadTenants(f"{one.shown} has the key of {shown_by_hash[one.hash]}")
    if len({tag_of(name) for name in found}) < len(found):  # one in 10^12 for two names
        raise BadTenants("two names have the same tag: change one of them")
    return Tenants(found)


def new_key() -> str:
    """A new key."""
    return KEY_BEGIN + secrets.token_hex(32)


def hash_of(key: bytes) -> str:
    """A key as the file has it."""
    return hashlib.sha256(key).hexdigest()


_ADMINS = re.compile(r"/metrics|/backup|/engines(/.*)?|/console/api/now")
_WEIGHTS = re.compile(
    "/update_weights_from_disk|/pause_generation|/continue_generation|/flush_cache|/update_weight_version"
)
_TRAIN = re.compile(r"/samples(/claim|/receipt)?|/abandon|/scores|/sessions/[^/]+/(samples|scores)")


_DELETED = re.compile(r"/sessions(/[^/]+)?")


def scopes_of(method: str, path: str, *, is_admins: bool) -> Sequence[TenantScope]:
    """The scopes that each allow a request; none: any does. `is_admins`: without tenants it takes --admin-key."""
    path = path.rstrip("/")
    if _WEIGHTS.fullmatch(path):
        return (TenantScope.WEIGHTS,)
    if is_admins or _ADMINS.fullmatch(path):
        return (TenantScope.ADMIN,)
    if method in ("GET", "HEAD"):
        return ()
    if method == "DELETE" and _DELETED.fullmatch(path):
        return (TenantScope.ROLLOUT, TenantScope.TRAIN)
    return (TenantScope.TRAIN,) if _TRAIN.fullmatch(path) else (TenantScope.ROLLOUT,)
