"""`stenograph bench`: loads, an engine stand-in that costs nothing, a probe, and figures."""
