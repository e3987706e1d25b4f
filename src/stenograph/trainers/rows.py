"""Parts of every trainer's rows: arrays over the whole sample, the shift, advantages, checks of classes. Pure.

"Own" alignment: the value at index t is about token t. "Next": index t is about token t + 1, as a model's logits are.
A decoded sample is own and over its last R tokens; `whole` and `shifted` are all the difference between trainers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.batch import Rollout, RolloutBatch, RolloutGroup
from stenograph.client.samples import DecodedSample, DecodedSupport, ReplayRows, Reward

T = TypeVar("T")
Made = TypeVar("Made")
Scalar = TypeVar("Scalar", bound=np.generic)
Whole = TypeVar("Whole", np.int16, np.int32)

NO_VERSION = -1
"""The version of a token without a known version: prompts, and where the engine did not report one."""

VersionNumber = Callable[[str], int]


class WrongRows(ValueError):
    """Rows cannot be made of a sample; the message says what to change."""


class WrongTrainer(TypeError):
    """A trainer's class has other fields than the version that its rows were written against."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeRows:
    """Arrays over all T tokens, own: `mask` bool, `log_probs` float64 (0.0 where the mask is not set), `temperatures`
    float64 (a prompt's tokens have the following turn's)."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    log_probs: NDArray[np.float64]
    temperatures: NDArray[np.float64]


def whole(sample: DecodedSample, *, shows_images: bool = False, places_rewards: bool = False) -> WholeRows:
    """The sample's arrays over all of its tokens. Raises as `check_trainable`."""
    check_trainable(sample, shows_images=shows_images, places_rewards=places_rewards)
    num_tokens, start = len(sample.tokens), sample.prompt_length
    mask = np.zeros(num_tokens, np.bool_)
    mask[start:] = sample.loss_mask != 0
    log_probs = np.zeros(num_tokens)
    log_probs[start:] = sample.log_probs
    temperatures = np.ones(num_tokens)
    for turn in sample.turns:
        first, last = cast("int", turn["prompt_start"]), cast("int", turn["end"])
        temperatures[first:last] = cast("float", turn["temperature"])
    return WholeRows(tokens=sample.tokens, mask=mask, log_probs=log_probs, temperatures=temperatures)


def versions(sample: DecodedSample, version: VersionNumber | None = None) -> NDArray[np.int64]:
    """The version of each trained token [T], NO_VERSION elsewhere. Raises WrongRows if one is no number, and `version`
    does not make it one."""
    found = np.full(len(sample.tokens), NO_VERSION, np.int64)
    for span in sample.weight_spans:
        found[span.start : span.end] = _number(span.version, version)
    found[: sample.prompt_length] = NO_VERSION
    found[sample.prompt_length :][sample.loss_mask == 0] = NO_VERSION
    return found


def route_versions(sample: DecodedSample, version: VersionNumber | None = None) -> NDArray[np.int64]:
    """The version of the weights whose pass reported each replay row [T - 1]; NO_VERSION where it is not known.

    Row i is of the weights that sampled token i + 1. A prompt's rows are of those that sampled its first answer, if
    what the engine found in its cache was computed by them too, by `cached_from`, or nothing was found.
    """
    found = np.full(len(sample.tokens), NO_VERSION, np.int64)
    for span in sample.weight_spans:
        found[span.start : span.end] = _number(span.version, version)
    for turn in sample.turns:
        first, start, end = (cast("int", turn[place]) for place in ("prompt_start", "start", "end"))
        cached_from = cast("str | None", turn.get("cached_from"))
        answered_by = NO_VERSION if start == end else int(found[start])
        is_known = not sample.num_cached_tokens
        if cached_from is not None:
            is_known = _number(cached_from, version) == answered_by
        found[first:start] = answered_by if is_known else NO_VERSION
    return found[1:]


def shifted(row: NDArray[Scalar]) -> NDArray[Scalar]:
    """An own row as a next one, one shorter: index t is about token t + 1."""
    return row[1:]


def check_trainable(sample: DecodedSample, *, shows_images: bool = False, places_rewards: bool = False) -> None:
    """Raise WrongRows if the sample's log-probabilities are of another distribution than a trainer recomputes, or if it
    has images, or rewards of turns or tokens, without a place in these rows."""
    if sample.media and not shows_images:
        raise WrongRows(
            f"a sample has {len(sample.media)} images, and this trainer's rows have no place for them: it would train"
            " on their tokens without their pixels. verl's, prime-rl's and SkyRL's have one (docs/trainers.md, Images)."
        )
    if sample.token_rewards is not None and not places_rewards:
        raise WrongRows(
            "a sample has rewards of turns or tokens, and this trainer's rows have one reward for a rollout: verl's"
            " padded_batch and SkyRL have a place for them. To leave them out, pass dataclasses.replace(sample,"
            " token_rewards=None)."
        )
    if sample.logprobs_kind is not None:
        raise WrongRows(
            f"a sample has {sample.logprobs_kind!r} log-probabilities, and a trainer recomputes tempered ones: sample"
            " at temperature 1, or see --engine-logprobs (docs/samples.md, Log-probabilities). To train on them all the"
            " same, pass dataclasses.replace(sample, logprobs_kind=None)."
        )


def of_images(sample: DecodedSample, given: Mapping[str, T]) -> list[T]:
    """Values of a sample's images in their order, of those `given` by SHA-256. Raises WrongRows if one is missing."""
    for one in sample.media:
        if one.sha256 not in given:
            raise WrongRows(
                f"a sample has the image {one.sha256}, and images has not: load it with session.media(sha256)"
            )
    return [given[one.sha256] for one in sample.media]


def image_tensors(
    sample: DecodedSample, processed: Mapping[str, Mapping[str, NDArray[np.generic]]]
) -> dict[str, NDArray[np.generic]]:
    """The tensors of a sample's images, joined in their order: of each what the model's image processor gives for it
    alone, such as `pixel_values` [patches, d] and `image_grid_thw` [1, 3].

    Raises WrongRows where an image is missing, or where its patches are not as many for a token as another's: then the
    processor has other settings than the engine's.
    """
    found = of_images(sample, processed)
    names = {tuple(sorted(one)) for one in found}
    if len(names) > 1:
        raise WrongRows(f"images have tensors of different names: {sorted(names)}")
    patches = [int(one["image_grid_thw"].prod()) for one in found if "image_grid_thw" in one]
    each = {divmod(num, media.length) for num, media in zip(patches, sample.media, strict=False)}
    if len(each) > 1 or any(rest for _, rest in each):
        raise WrongRows(
            f"images have {patches} patches, and the engine ran {[one.length for one in sample.media]} tokens for them:"
            " the image processor has other settings than the engine's"
        )
    return {name: np.concatenate([one[name] for one in found]) for name in (found[0] if found else ())}


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open spans of the set tokens, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def version_range(sample: DecodedSample, version: VersionNumber | None = None) -> tuple[int | None, int | None]:
    """The oldest and the newest version of a trained token; None where none is known."""
    known = versions(sample, version)
    known = known[known != NO_VERSION]
    return (int(known.min()), int(known.max())) if len(known) else (None, None)


def replay_as(dtype: type[Whole], replay: ReplayRows | None, *, num_zero_rows: int = 0) -> NDArray[Whole] | None:
    """A writable copy of a replay array [T - 1, …] in a trainer's type, the only copy made of it. `num_zero_rows` 1: as
    [T, …]; the last token was never fed to the engine. Raises WrongRows where an id does not fit."""
    if replay is None:
        return None
    limits, (num_rows, *size) = np.iinfo(dtype), replay.shape
    if replay.size and not limits.min <= replay.min() <= replay.max() <= limits.max:
        raise WrongRows(f"a replayed id is {replay.max()}, and this trainer's {limits.dtype} ends at {limits.max}")
    rows: NDArray[Whole] = np.zeros((num_rows + num_zero_rows, *size), dtype)
    rows[:num_rows] = replay
    return rows


def first_routes(layers: int, top_k: int) -> NDArray[np.int32]:
    """Routes of one untrained token: in each layer the first ids, a possible choice of a router."""
    return np.tile(np.arange(top_k, dtype=np.int32), (1, layers, 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedSupport:
    """The ids open to sampling beside each of the last R tokens: those of token i are `ids[offsets[i] : offsets[i +
    1]]`, both int32; none for an untrained token. `log_probs` [R] are normalized over them."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    log_probs: NDArray[np.float64]


def support_rows(sample: DecodedSample) -> TrainedSupport:
    """The support of every trained token, for a trainer normalizing over it.

    Raises WrongRows where truncation cut a turn's distribution and its support is not known, or where the
    log-probabilities under the sampling distribution are not.
    """
    if sample.sampling_log_probs is None and sample.num_trained:
        raise WrongRows(
            "this trainer normalizes over the ids that could be sampled, and a sample has no log-probabilities of that"
            " distribution (sampling_log_probs): see docs/engines.md, Log-probabilities"
        )
    support, start = sample.support(), sample.prompt_length
    spans: list[NDArray[np.integer[Any]]] = [_NONE] * sample.response_length
    for turn in sample.turns:
        first, last = cast("int", turn["start"]) - start, cast("int", turn["end"]) - start
        for place in np.flatnonzero(sample.loss_mask[first:last]) + first:
            known = None if support is None or "support" not in turn else support[int(place)]
            spans[place] = _unlisted(turn, sample, int(place), support) if known is None else known
    counts = np.fromiter(map(len, spans), np.int64, len(spans))
    return TrainedSupport(
        ids=np.concatenate([_NONE, *spans]).astype(np.int32),
        offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        log_probs=np.zeros(0) if sample.sampling_log_probs is None else sample.sampling_log_probs,
    )


_NONE = np.zeros(0, np.int32)
_CUTS = ("top_p", "top_k", "min_p", "grammar", "min_tokens")
"""Fields of a turn's row that tell of ids ruled out."""


def _unlisted(
    turn: Mapping[str, object], sample: DecodedSample, place: int, support: DecodedSupport | None
) -> NDArray[np.integer[Any]]:
    """The support of a trained token whose row lists none: the token alone if it was greedy, else every id."""
    if turn["temperature"] == 0:
        return sample.tokens[sample.prompt_length + place :][:1]
    cuts = [name for name in _CUTS if name in turn]
    if "support" not in turn and cuts:
        raise WrongRows(
            f"the turn {turn['node_id']} was sampled with {', '.join(cuts)}, and which ids could be sampled is not"
            " known, over which this trainer normalizes: open sessions with support=True, on an engine that reports"
            " them (docs/engines.md, Supports), or sample without truncation"
        )
    if support is None:
        raise WrongRows(
            f"the turn {turn['node_id']} was sampled from every id, and the sample does not say how many these are:"
            " this trainer is for samples of truncated turns; sample without truncation, and tell it so"
        )
    return np.arange(support.vocab_size)


def number_of(reward: Reward | None) -> float | None:
    """A reward as one number. Raises WrongRows for several without a name `reward`, as nobody can choose for you."""
    if not isinstance(reward, Mapping):
        return reward
    if len(reward) == 1 or "reward" in reward:
        return float(reward.get("reward", next(iter(reward.values()))))
    raise WrongRows(f"a rollout has the rewards {', '.join(reward)}: give one number, or name one 'reward'")


def advantages(groups: Iterable[RolloutGroup[T]], *, scaled: bool = True) -> Iterator[tuple[Rollout[T], float]]:
    """Each counted rollout, with its reward less its group's mean, `scaled` by the group's standard deviation.

    A rollout counts once, however many samples it has: give all of them its advantage. A rollout without a reward is
    left out, and so is its place in the mean. Groups of equal rewards have advantages of 0.
    """
    for group in groups:
        rewarded = [(one, number) for one in group.rollouts if (number := number_of(one.reward)) is not None]
        if not rewarded:
            continue
        numbers = np.array([number for _, number in rewarded])
        centred = numbers - numbers.mean()
        spread = float(numbers.std())
        if scaled and spread > 0:
            centred = centred / spread
        for (rollout, _), advantage in zip(rewarded, centred, strict=True):
            yield rollout, float(advantage)


def only_rollout(batch: RolloutBatch[T]) -> Rollout[T]:
    """The rollout of a batch of one task, however it ended. Raises WrongRows if there are several, or none."""
    groups = (*batch.groups, *batch.others)
    rollouts = [rollout for group in groups for rollout in (*group.rollouts, *group.others)]
    if len(rollouts) != 1:
        raise WrongRows(f"a batch of one task has one rollout, got {len(rollouts)}: make rows of each")
    return rollouts[0]


def built(make: Callable[..., Made], fields: Mapping[str, object], *, written_against: str) -> Made:
    """An instance of a trainer's class. Raises WrongTrainer if the class declares fields, and lacks one of these."""
    declared = _declared(make)
    unknown = sorted(set(fields) - declared) if declared else []
    if unknown:
        name = getattr(make, "__qualname__", repr(make))
        raise WrongTrainer(f"{name} has no {', '.join(unknown)}: these rows are written against {written_against}.")
    try:
        return make(**fields)
    except TypeError as error:
        raise WrongTrainer(f"these rows are written against {written_against}: {error}") from error


def _declared(make: object) -> set[str]:
    """The names declared by a dataclass, a pydantic model, a msgspec struct or a typed dict; none of others."""
    if dataclasses.is_dataclass(make):
        return {one.name for one in dataclasses.fields(make)}
    for attribute in ("model_fields", "__struct_fields__", "__annotations__"):
        found = getattr(make, attribute, None) if isinstance(make, type) else None
        if found:
            return set(cast("Sequence[str]", found))
    return set()


def _number(text: str, version: VersionNumber | None) -> int:
    try:
        return int(text) if version is None else version(text)
    except ValueError as error:
        raise WrongRows(
            f"the version {text!r} is no number, which this trainer wants: start the server with --weight-version 0 and"
            " send numbers with each update, or pass version=…, which makes a number of it"
        ) from error
