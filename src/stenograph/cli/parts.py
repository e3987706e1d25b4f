"""The table of a server's possible parts."""

from stenograph.http.part import Part

PARTS = (
    Part(
        name="embedded",
        engine="stenograph.embedded.part:make_embedded",
        shared_engine="stenograph.embedded.shared_process:SharedEngineProcess",
    ),
    Part(
        name="weights",
        routes=(
            "stenograph.weights.routes:WeightRoutes",
            "stenograph.weights.engine_routes:EngineRoutes",
            "stenograph.weights.routes:ModelInfoRoute",
        ),
        groups="stenograph.weights.groups:weight_groups",
    ),
    Part(
        name="scores",
        routes=("stenograph.scores.routes:ScoreRoutes",),
        groups="stenograph.scores.routes:score_groups",
    ),
    Part(
        name="fork",
        routes=("stenograph.fork.routes:ForkRoute",),
        groups="stenograph.fork.routes:fork_groups",
    ),
    Part(
        name="accounts",
        routes=("stenograph.accounts.routes:AccountRoutes", "stenograph.accounts.claims:ClaimRoutes"),
        groups="stenograph.accounts.routes:account_groups",
    ),
    Part(
        name="backup",
        routes=("stenograph.backup.routes:BackupRoute",),
        groups="stenograph.backup.routes:backup_groups",
    ),
    Part(
        name="console",
        routes=("stenograph.console.routes:ConsoleRoutes",),
        below="/console",
        groups="stenograph.console.routes:console_groups",
    ),
    Part(
        name="otel",
        by="otlp_endpoint",
        metrics="stenograph.otel.tracing:TRACE_METRICS",
        tracing="stenograph.otel.tracing:opened_tracing",
    ),
    Part(
        name="tenants",
        by="tenants",
        authenticator="stenograph.tenants.authenticator:tenant_authenticator",
    ),
    Part(
        name="replay",
        by="play",
        processes="stenograph.replay.part:ReplayProcesses",
        engine="stenograph.replay.part:make_replay",
    ),
    Part(
        name="cluster",
        by="store",
        metrics="stenograph.cluster.shared_store:OWNER_METRICS",
        processes="stenograph.cluster.shared_store:Cluster",
    ),
)
"""The parts. Those with routes are in the order of /openapi.json."""
