"""What shows that the promises about speed hold: load, an engine that costs nothing, a probe, and figures."""
