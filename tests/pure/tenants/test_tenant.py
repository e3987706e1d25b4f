"""The file of tenants: what it says is checked, and a mistake is named."""

import pytest

from stenograph.tenants.tenant import BadTenants, TenantScope, hash_of, new_key, read_tenants, scopes_of


def test_a_key_names_its_tenant_and_the_file_has_its_hash_alone() -> None:
    key = new_key()
    text = f'[team-a]\nkey_sha256 = ["{hash_of(key.encode())}"]\nin_flight = 4\n'
    tenants = read_tenants(text)
    assert key not in text
    found = tenants.key_among([b"something", key.encode()])
    assert found is not None
    assert (found.tenant, found.shown) == ("team-a", "team-a")
    assert tenants.key_among([key.upper().encode()]) is None
    assert tenants.by_name["team-a"].scopes == [TenantScope.ROLLOUT, TenantScope.TRAIN]
    assert len({new_key() for _ in range(100)}) == 100


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a", "not TOML"),
        ("[a]\n", "key_sha256"),
        (f'[a]\nkey_sha256 = ["{HASH}"]\nquota = 1\n', "quota"),
        (f'[a]\nkey_sha256 = ["{HASH}"]\nin_flight = 0\n', "in_flight"),
        (f'[a]\nkey_sha256 = ["{HASH}"]\nscopes = ["all"]\n', "scopes"),
        ('[a]\nkey_sha256 = ["abc"]\n', "key_sha256"),
        (f'["a b"]\nkey_sha256 = ["{HASH}"]\n', "a b"),
        (f'[a]\nkey_sha256 = ["{HASH}"]\n[b]\nkey_sha256 = ["{HASH}"]\n', "b has the key of a"),
        (f'[a]\nkey_sha256 = ["{HASH}"]\n[a.keys.x]\nsha256 = ["{HASH}"]\n', "a/x has the key of a"),
        (f'[a.keys."x y"]\nsha256 = ["{HASH}"]\n', "x y"),
        ("[a.keys.x]\nsha256 = []\n", "sha256"),
        ("[a]\nshare = 2\n", "has no key"),
    ],
)
def test_a_mistake_is_named(text: str, problem: str) -> None:
    with pytest.raises(BadTenants) as caught:
        read_tenants(text)
    assert problem in str(caught.value)


def test_a_key_with_a_name_has_scopes_of_its_own() -> None:
    text = (
        f'[a]\nshare = 2.0\n[a.keys.agent]\nsha256 = ["{hash_of(b"one")}", "{hash_of(b"two")}"]\nscopes = ["rollout"]\n'
    )
    tenants = read_tenants(f'{text}[a.keys.trainer]\nsha256 = ["{hash_of(b"three")}"]\n')
    found = [tenants.key_among([key]) for key in (b"one", b"two", b"three")]
    assert [(one.tenant, one.shown, [*map(str, one.scopes)]) for one in found if one is not None] == [
        ("a", "a/agent", ["rollout"]),
        ("a", "a/agent", ["rollout"]),
        ("a", "a/trainer", ["rollout", "train"]),
    ]


@pytest.mark.parametrize(
    ("method", "path", "is_admins", "scope"),
    [
        ("POST", "/sessions", False, "rollout"),
        ("POST", "/sessions/0123/v1/chat/completions", False, "rollout"),
        ("PUT", "/sessions/0123/outcome", False, "rollout"),
        ("GET", "/sessions/0123", False, ""),
        ("GET", "/accounts", False, ""),
        ("DELETE", "/sessions", False, "rollout or train"),
        ("DELETE", "/sessions/0123", False, "rollout or train"),
        ("POST", "/samples/claim", False, "train"),
        ("POST", "/sessions/0123/samples", False, "train"),
        ("POST", "/abandon/", False, "train"),
        ("POST", "/update_weights_from_disk", True, "weights"),
        ("POST", "/engines", True, "admin"),
        ("DELETE", "/engines/http://a:1", True, "admin"),
        ("POST", "/any-new-route-of-an-administrator", True, "admin"),
        ("GET", "/metrics", False, "admin"),
        ("GET", "/console/api/now", False, "admin"),
    ],
)
def test_each_request_needs_a_scope(method: str, path: str, is_admins: bool, scope: str) -> None:
    assert " or ".join(scopes_of(method, path, is_admins=is_admins)) == scope
