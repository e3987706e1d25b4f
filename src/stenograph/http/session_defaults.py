"""The options of a session whose creator leaves them out, as the server's settings have them."""

from dataclasses import dataclass

from stenograph.core.errors import StartupError
from stenograph.core.history_kinds import AfterLength, Compat, HistoryKind
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.settings import Switch
from stenograph.http.rule_files import sampling_of
from stenograph.http.settings import Settings
from stenograph.trajectory.canonical import Canonical
from stenograph.trajectory.matching import Matcher, load_matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefaults:
    """The options of a session whose creator leaves them out."""

    history: HistoryKind
    after_length: AfterLength
    matcher: Matcher
    matcher_name: str
    ttl_s: float | None
    max_nodes: int
    sampling: SamplingRules | None
    canonical: Canonical
    support: bool
    compat: Compat | None


def session_defaults(settings: Settings, canonical: Canonical) -> SessionDefaults:
    """The settings' own. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a history
    that is against the contract to keep to."""
    is_miles = settings.compat is Compat.MILES
    if is_miles and settings.history is HistoryKind.TREE:
        raise StartupError("compat miles makes sessions linear: leave history tree out, or compat")
    return SessionDefaults(
        history=HistoryKind.LINEAR if is_miles else settings.history,
        after_length=AfterLength.REFUSE if is_miles else settings.after_length,
        matcher=load_matcher(settings.matcher),
        matcher_name=settings.matcher,
        ttl_s=settings.session_ttl_s,
        max_nodes=settings.max_nodes,
        sampling=sampling_of(settings),
        canonical=canonical,
        support=settings.support is Switch.ON,
        compat=settings.compat,
    )
