"""The figures: names, units, which way each gets better, and goals. Pure."""

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Figures = dict[str, float]
"""The figures of one repeat, by name."""


class Better(enum.StrEnum):
    """The direction in which a figure gets better."""

    HIGHER = "higher"
    LOWER = "lower"


HIGHER_ENDINGS = ("_per_s", "_per_cpu_s")
HIGHER_IS_BETTER = frozenset(
    (
        *("share_of_direct", "given_back_share", "cached_share", "satisfied_share", "satisfied_ended_share"),
        *("prompt_tokens", "completion_tokens", "cached_last_turn_tokens", "num_turns", "answered"),
        *("decode_over_llamacpp", "prefill_over_llamacpp", "rerender_over_turn"),
    )
)
"""These, and figures with such an ending: the rates. Of all others less is better."""


def better(figure: str) -> Better:
    """The direction in which a figure gets better."""
    is_higher = figure in HIGHER_IS_BETTER or figure.endswith(HIGHER_ENDINGS)
    return Better.HIGHER if is_higher else Better.LOWER


def _latencies(name: str, label: str, of: str) -> dict[str, str]:
    return {f"{name}_{quantile}_ms": f"{label} {quantile}, ms" for quantile in of.split()}


def _ttft_part(part: str) -> dict[str, str]:
    mean = {f"ttft_{part}_ms": f"of TTFT: {part}, mean ms"}
    return mean | _latencies(f"ttft_{part}", f"of TTFT: {part}", "p50 p95 p99")


LABELS: Mapping[str, str] = {
    "chats_per_s": "chats/s",
    "share_of_direct": "chats/s, share of direct",
    "cpu_ms_per_chat": "server CPU, ms per chat",
    "cpu_over_alone": "server CPU per chat, beside idle sessions / without",
    "standin_cpu_ms_per_chat": "stand-in CPU, ms per chat",
    "load_cpu_ms_per_chat": "load CPU, ms per chat",
    "chat_p50_ms": "chat p50, ms",
    "chat_p99_ms": "chat p99, ms",
    "chat_p99_over_p50": "chat p99 / p50",
    "chat_p50_over_alone": "chat p50, beside idle sessions / without",
    "early_turn_ms": "turn 10, ms",
    "last_turn_ms": "last turn, ms",
    "last_over_early_turn": "last turn / turn 10",
    **_latencies("health", "/health", "p50 p95 p99 max"),
    "idle_health_p50_ms": "/health p50 without a load, ms",
    "idle_health_p99_ms": "/health p99 without a load, ms",
    "health_p99_over_idle": "/health p99, with the load / without",
    "health_p99_over_alone": "/health p99, beside idle sessions / without",
    "probe_late_p99_ms": "the probe's own lateness p99, ms",
    "health_failures": "/health failures",
    "errors": "errors",
    "decode_tokens_per_cpu_s": "decode tokens per CPU-second",
    "decode_tokens_per_s": "decode tokens/s",
    "decode_over_llamacpp": "decode tokens per CPU-second, over llama.cpp's",
    "prefill_tokens_per_cpu_s": "prefill tokens per CPU-second",
    "prefill_tokens_per_s": "prefill tokens/s",
    "prefill_over_llamacpp": "prefill tokens per CPU-second, over llama.cpp's",
    "ttft_first_turn_ms": "TTFT of the first turn, ms",
    "ttft_middle_turn_ms": "TTFT of the turn in the middle, ms",
    "ttft_last_turn_ms": "TTFT of the last turn, ms",
    "ttft_last_turn_over_cold": "TTFT of the last turn, reuse on / off",
    "cached_last_turn_tokens": "tokens cached at the last turn",
    "session_cpu_s": "engine CPU of the session, s",
    "session_cpu_over_cold": "engine CPU of the session, reuse on / off",
    "session_s": "the session, s",
    "line_tokens": "tokens of the conversation",
    "bridged_tokens": "tokens of the bridge",
    "reply_tokens": "tokens of the reply",
    "bridge_ms": "bridge to the new message, CPU ms",
    "parse_ms": "parse of the reply before it, CPU ms",
    "rerender_ms": "render of all messages, CPU ms",
    "rerender_over_turn": "render of all messages, over bridge and parse",
    "num_turns": "turns",
    "unexpected": "outcomes that were not expected",
    "unseen_kinds": "kinds of outcome that were not seen",
    "log_tracebacks": "tracebacks in the server's log",
    "turns_per_s": "turns/s",
    "ready_s": "the server is ready after, s",
    "first_turn_after_start_s": "its first turn is answered after, s",
    "first_turn_ms": "that turn, ms",
    **_latencies("cold_turn", "turn of a session that is on disk alone", "p50 p99"),
    **_latencies("warm_turn", "the next turn of it", "p50 p99"),
    "touch_p50_ms": "the first p50 over the next p50, ms more",
    "cpu_ms_per_turn": "server CPU, ms per turn",
    **_latencies("loop_lag", "event loop late", "p50 p99 max"),
    "rss_early_mib": "RSS, first quarter, MiB",
    "rss_late_mib": "RSS, last quarter, MiB",
    "rss_growth_mib": "RSS, last quarter − first, MiB",
    "rss_slope_kib_per_1000_turns": "RSS slope, KiB per 1,000 turns",
    "rss_most_mib": "most RSS, MiB",
    "data_mib": "data folder, MiB",
    "rss_end_mib": "RSS at the end, MiB",
    "fds_early": "open files, first quarter",
    "fds_late": "open files, last quarter",
    "fds_growth": "open files, last quarter − first",
    "fds_left": "open files at the end − before the load",
    "sessions_left": "sessions at the end",
    "in_flight_left": "turns in flight at the end",
    "engine_left": "generations at the engine at the end",
    "rss_before_mib": "RSS before, MiB",
    "rss_loaded_mib": "RSS after the load, MiB",
    "rss_deleted_mib": "RSS after delete, MiB",
    "kept_kib_per_turn": "kept per turn, KiB",
    "given_back_share": "given back after delete, share",
    "regrown_kib_per_turn": "second round's growth, KiB per turn",
    "client_cpu_ms_per_rollout": "client CPU, ms per rollout",
    "rollouts_per_s": "rollouts/s",
    "elapsed_s": "elapsed, s",
    "requests_per_s": "requests/s",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "prompt_tokens_per_s": "prompt tokens/s",
    "completion_tokens_per_s": "completion tokens/s",
    "completion_tokens_per_cpu_s": "completion tokens per CPU-second",
    "computed_tokens_per_cpu_s": "tokens computed per CPU-second, prompts included",
    "cached_share": "prompt tokens cached, share",
    "cut_share": "replies cut by max_tokens, share",
    "submit_wall_ms": "submitting all, ms",
    **_latencies("add", "add_request", "p50 p95 p99 max"),
    "late_p99_ms": "submitted after it was due p99, ms",
    **_latencies("ttft", "TTFT", "p50 p90 p99 mean"),
    "ttft_wait_ms": "of TTFT: until sent, mean ms",
    "ttft_read_ms": "of TTFT: receive, admit, decode, mean ms",
    "ttft_render_ms": "of TTFT: tokenize (render), mean ms",
    **_ttft_part("tokenize"),
    **_ttft_part("queue"),
    **_ttft_part("prefill"),
    "ttft_engine_ms": "of TTFT: the engine's whole reply, mean ms",
    "ttft_rest_ms": "of TTFT: the rest, mean ms",
    "ttft_outside_ms": "of TTFT: all that is not the engine's, mean ms",
    **_latencies("tpot", "TPOT", "p50 p90 p99 mean"),
    **_latencies("itl", "ITL", "p50 p90 p99 mean"),
    **_latencies("e2e", "end to end", "p50 p90 p99 mean"),
    "answered": "requests answered",
    "tokens_per_reply": "tokens of a reply, mean",
    "satisfied_share": "replies that satisfy the grammar, share",
    "satisfied_ended_share": "the same of those that ended by themselves, share",
    "engine_cpu_ms_per_token": "engine CPU, ms per token",
    "tpot_p50_over_free": "TPOT p50, guided / free",
    "tpot_mean_over_free": "TPOT mean, guided / free",
    "itl_p50_over_free": "ITL p50, guided / free",
    "itl_p99_over_free": "ITL p99, guided / free",
    "engine_cpu_over_free": "engine CPU per token, guided / free",
}
"""All figures, in the order in which they are shown."""


NO_WORSE = 1.0
"""As a goal that is a ratio: the figure is not worse, as far as the repeats can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The bound of a figure: at most `value`, or at least, by which way it gets better."""

    figure: str
    value: float

    @property
    def shown(self) -> str:
        """As a table shows it."""
        return f"{'≥' if better(self.figure) is Better.HIGHER else '≤'} {self.value:,g}"

    def is_reached(self, value: float) -> bool:
        """Whether `value` is as good as was asked."""
        return value >= self.value if better(self.figure) is Better.HIGHER else value <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over all repeats."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most. Raises ValueError if there are no values."""
    return Spread(median=statistics.median(values), least=min(values), most=max(values))


def ratios_between(names: Mapping[str, str], mine: Figures, other: Figures) -> Figures:
    """Mine / other of the figures that `names` has by the name of their ratio, where both have them."""
    return {
        name: mine[figure] / other[figure] for name, figure in names.items() if figure in mine and other.get(figure)
    }


def values_of(repeats: Sequence[Figures], figure: str) -> list[float]:
    """A figure in all repeats that have it."""
    return [repeat[figure] for repeat in repeats if figure in repeat]
