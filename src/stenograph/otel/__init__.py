"""Traces of requests as OpenTelemetry has them: made of what a turn knows anyway, when it is over."""
