"""The metrics of weights: updates, whether turns wait, turns of mixed versions."""

from stenograph.http.metric_table import COUNTER, GAUGE, row
from stenograph.session.weight_sync import UpdateOutcome, WeightSync

WEIGHT_METRICS = (
    row(
        "stenograph_weight_updates_total",
        COUNTER,
        "Updates of weights, by outcome: taken by all engines, by some (partial), or by none (refused).",
        WeightSync,
        lambda sync: {outcome: sync.outcomes[outcome] for outcome in UpdateOutcome},
        label=("outcome", UpdateOutcome),
    ),
    row(
        "stenograph_generation_paused",
        GAUGE,
        "1 while new turns wait, because generation is paused or new weights come.",
        WeightSync,
        lambda sync: sync.weights.is_held,
    ),
    row(
        "stenograph_mixed_version_turns_total",
        COUNTER,
        "Turns over a change of weights whose engine does not say which weights sampled which token.",
        WeightSync,
        lambda sync: sync.weights.num_mixed_turns,
    ),
)
