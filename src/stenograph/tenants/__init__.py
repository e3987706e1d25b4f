"""The part of tenants: named keys with scopes and quotas, a fair share of the turns in flight, and an audit log."""
