"""Traces of requests as OpenTelemetry has them: made from a turn's own facts, when it is over."""
