"""The connections and exchanges of every engine that is an HTTP server."""
