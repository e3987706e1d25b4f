"""The table of parts that a server may have."""

from stenograph.http.part import Part

PARTS = (
    Part(
        name="weights",
        routes=(
            "stenograph.http.weight_routes:WeightRoutes",
            "stenograph.http.engine_routes:EngineRoutes",
            "stenograph.http.weight_routes:ModelInfoRoute",
        ),
        groups="stenograph.http.weight_groups:weight_groups",
    ),
    Part(
        name="backup",
        routes=("stenograph.http.storage:BackupRoute",),
        groups="stenograph.http.storage:backup_groups",
    ),
    Part(
        name="console",
        routes=("stenograph.http.console_routes:ConsoleRoutes",),
        below="/console",
        groups="stenograph.http.console_routes:console_groups",
    ),
    Part(
        name="otel",
        by="otlp_endpoint",
        metrics="stenograph.http.traces.tracing:TRACE_METRICS",
        tracing="stenograph.http.traces.tracing:opened_tracing",
    ),
    Part(
        name="cluster",
        by="store",
        metrics="stenograph.cluster.shared_store:OWNER_METRICS",
        processes="stenograph.cluster.shared_store:Cluster",
    ),
)
"""The parts. Those with routes are in the order of /openapi.json."""
