"""The options of a session if its creator leaves them out, as the server's settings have them."""

from dataclasses import dataclass

from stenograph.core.errors import InvalidRequest, StartupError
from stenograph.core.kinds import AfterLength, Compat, HistoryKind, SaltPolicy
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.settings import Switch
from stenograph.core.weights import CacheSalt
from stenograph.dialects.common.json_bodies import nearest
from stenograph.engine.base import Capabilities
from stenograph.http.rule_files import sampling_of
from stenograph.http.settings import Settings
from stenograph.session.rewrite_rules import RewriteRules, UnknownRewrite
from stenograph.trajectory.canonical import Canonical
from stenograph.trajectory.matching import Matcher, load_matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefaults:
    """The options of a session if its creator leaves them out."""

    history: HistoryKind
    after_length: AfterLength
    matcher: Matcher
    matcher_name: str
    ttl_s: float | None
    max_nodes: int
    sampling: SamplingRules | None
    canonical: Canonical
    support: bool
    cache_salt: SaltPolicy
    compat: Compat | None

    def support_of(self, asked: bool | None, engine: Capabilities) -> bool:
        """Whether supports are recorded. Raises InvalidRequest if the engine does not report them."""
        if asked and not engine.reports_support:
            raise InvalidRequest(
                f"support: the engine {engine.engine} does not report which ids could be sampled.", param="/support"
            )
        return self.support if asked is None else asked

    def canonical_of(self, choice: str | None, rules: RewriteRules) -> Canonical:
        """The rules to rewrite its requests. Raises InvalidRequest for unknown ones."""
        try:
            return self.canonical if choice is None else rules.chosen(choice)
        except UnknownRewrite as error:
            hint = nearest(error.name, error.known)
            raise InvalidRequest(f"canonical: {error}.{hint}", param="/canonical") from error

    def salt_of(self, asked: str | None, engine: Capabilities, version: str | None) -> CacheSalt:
        """The salt of a session begun under weights `version`. Raises InvalidRequest if the engine cannot keep to
        it."""
        policy = SaltPolicy(asked or self.cache_salt)
        if policy is SaltPolicy.PIN and policy not in engine.salt_policies:
            raise InvalidRequest(
                f"cache_salt 'pin': the engine {engine.engine} cannot keep a cache of the weights that a session began"
                " with; leave it out.",
                param="/cache_salt",
            )
        return CacheSalt.at(policy, version)


def session_defaults(settings: Settings, canonical: Canonical) -> SessionDefaults:
    """The settings' own. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a history
    against the contract."""
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
        cache_salt=settings.cache_salt,
        compat=settings.compat,
    )
