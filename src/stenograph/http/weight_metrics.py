"""The metrics of weights: updates, whether turns wait, turns of mixed versions."""

from stenograph.http.metric_table import COUNTER, GAUGE, row
from stenograph.session.weights import UpdateOutcome, Weights

WEIGHT_METRICS = (
    row(
        "stenograph_weight_updates_total",
        COUNTER,
        "Updates of weights, by outcome: taken by all engines, by some (partial), or by none (refused).",
        Weights,
        lambda weights: {outcome: weights.outcomes[outcome] for outcome in UpdateOutcome},
        label=("outcome", UpdateOutcome),
    ),
    row(
        "stenograph_generation_paused",
        GAUGE,
        "1 while new turns wait, because generation is paused or new weights come.",
        Weights,
        lambda weights: weights.is_held,
    ),
    row(
        "stenograph_mixed_version_turns_total",
        COUNTER,
        "Turns over a change of weights whose engine does not say which weights sampled which token.",
        Weights,
        lambda weights: weights.num_mixed_turns,
    ),
)
