"""The connections and exchanges of every engine with an HTTP server."""
