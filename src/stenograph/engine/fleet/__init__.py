"""Several engines behind the one interface of an engine."""
