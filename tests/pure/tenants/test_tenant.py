"""The file of tenants: what it says is checked, and a mistake is named."""

import pytest

from stenograph.tenants.tenant import BadTenants, TenantScope, hash_of, new_key, read_tenants, scope_of


def test_a_key_names_its_tenant_and_the_file_has_its_hash_alone() -> None:
    key = new_key()
    text = f'[team-a]\nkey_sha256 = ["{hash_of(key.encode())}"]\nin_flight = 4\n'
    tenants = read_tenants(text)
    assert key not in text
    assert tenants.named_by([b"something", key.encode()]) == "team-a"
    assert tenants.named_by([key.upper().encode()]) is None
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
        (f'[a]\nkey_sha256 = ["{HASH}"]\n[b]\nkey_sha256 = ["{HASH}"]\n', "has the key of [a]"),
    ],
)
def test_a_mistake_is_named(text: str, problem: str) -> None:
    with pytest.raises(BadTenants) as caught:
        read_tenants(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "is_admins", "scope"),
    [
        ("POST", "/sessions", False, "rollout"),
        ("POST", "/sessions/0123/v1/chat/completions", False, "rollout"),
        ("PUT", "/sessions/0123/outcome", False, "rollout"),
        ("GET", "/sessions/0123", False, None),
        ("GET", "/accounts", False, None),
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
def test_each_request_needs_one_scope(method: str, path: str, is_admins: bool, scope: str | None) -> None:
    assert scope_of(method, path, is_admins=is_admins) == scope
