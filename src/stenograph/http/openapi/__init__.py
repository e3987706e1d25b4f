"""GET /openapi.json."""
