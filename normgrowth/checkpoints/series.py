"""Norm, direction and norm budget along a series of checkpoints in folders, on the Hub, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from normgrowth.checkpoints import find, parameters, table
from normgrowth.checkpoints.comparisons import Sums, is_infinite_constant, same, sums
from normgrowth.checkpoints.find import grouped
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.places import Checkpoint, Skip
from normgrowth.checkpoints.steps import step_of
from normgrowth.checkpoints.store import Reference, Store
from normgrowth.checkpoints.table import Grouping
from normgrowth.checkpoints.tensors import Tensor
from normgrowth.checkpoints.weights import Weights

OpenWeights = Callable[[Checkpoint], Weights]


class MeasuredSeries(NamedTuple):
    """A measured series of checkpoints.

    ``table`` has one row a step and layer, in the order of steps: ``norm`` ρ, and against the step before it
    ``cos_similarity``, ``displacement_sq`` = ‖Δ‖² and ``inner`` = 2θ·Δ (θ the earlier parameters, as in
    ``norms.norm_budget``), so that ρ'² = ρ² + ``displacement_sq`` + ``inner``. The first step has no neighbour.
    """

    table: pd.DataFrame
    duplicates: list[Skip]
    skipped: list[Skip]
    left_out: dict[str, str]  # tensors that are not counted, and why
    parameters: int
    last: str = ""  # the last checkpoint that counts: its folder or file, or org/name@revision of the Hub
    constant: Mapping[str, float] = {}  # tensors that count and are the same in all checkpoints: their share of ρ²
    notes: Sequence[str] = ()  # what else is to be known of the norm


class Counted(NamedTuple):
    """A checkpoint that counts, with its sums by tensor against the one that counts before it."""

    checkpoint: Checkpoint
    sums: Mapping[str, Sums]


def series(
    source: str | Path | Iterable[str | Path],
    *,
    by: Grouping = "total",
    out: str | Path | None = None,
    match: str = "*",
    step: str | None = None,
    keep: bool = True,
    trained: bool = False,
) -> MeasuredSeries:
    """Measure the parameter norm, direction and norm budget along a series of checkpoints.

    Weights are mapped tensor by tensor, read in blocks and summed in float64. Buffers are left out, tied weights
    counted once. Checkpoints that cannot be read are listed in ``skipped``, with the file and the reason.

    Args:
        source, match, step: as in ``find.checkpoints``.
        by: ``total``, or ``layer`` for rows of each block, the embeddings, the output layer and the rest as well;
            ``type`` for attention, mlp, norm and so on; ``tensor``; or a function from a tensor's name to its row.
        out: CSV for the table; a run with the same arguments goes on where the last one stopped.
        keep: leave downloads in the Hub's cache; otherwise each is deleted after use.
        trained: leave out the tensors that are the same in all checkpoints, which ``constant`` names otherwise.

    Raises:
        ValueError: no checkpoint is readable, ``out`` belongs to another series, or one checkpoint alone cannot say
            what was trained.
        FileNotFoundError, ConnectionError: as in ``find.checkpoints``.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (0, 1):
    ...         Path(folder, f"step{step}").mkdir()
    ...         save_file({"w": torch.tensor([3.0, 4.0 * step])}, Path(folder, f"step{step}", "model.safetensors"))
    ...     series(folder).table.iloc[1, 2:].tolist()  # ρ' = 5, cos = 3/5, ‖Δ‖² = 4², 2θ·Δ = 0
    [5.0, 0.6, 16.0, 0.0]
    """
    table.check(by)
    sources = [source] if isinstance(source, str | Path) else list(source)
    store = Store(Path(out) if out is not None else None, _origin(sources, by, match, step, trained))
    checkpoints, skipped = find.checkpoints(sources, match, step)
    if not checkpoints:
        raise ValueError(f"{', '.join(map(str, sources))}: {_why_empty(skipped, match, step)}")
    measured = _measure_all(checkpoints, skipped, store, find.opener(keep), by, trained)
    if store.out:
        measured.table.to_csv(store.out, index=False, lineterminator="\n")
    return measured


def _origin(sources: Sequence[str | Path], by: Grouping, match: str, step: str | None, trained: bool) -> str:
    """Sources and options of a series in words: a later run goes on only with the same ones."""
    places = [str(Path(source).resolve()) if Path(source).exists() else str(source) for source in sources]
    grouping = by if isinstance(by, str) else f"{by.__module__}.{by.__qualname__}"
    pattern = f" --step {step!r}" if step else ""
    only = " --trained" if trained else ""
    return f"{' '.join(places)} --by {grouping} --match {match!r}{pattern}{only}"


def _why_empty(skipped: Sequence[Skip], match: str, step: str | None) -> str:
    """Why there is no checkpoint in the sources."""
    if step:
        reasons = [f"no name in which {step!r} finds a step"]
    elif any(step_of(Path(skip.label).name) is not None for skip in skipped):
        reasons = ["no checkpoint that can be read"]
    else:
        reasons = ["no checkpoint with a step in its name, such as step1000, checkpoint-1000 or step_20k"]
    reasons += grouped(skipped)
    if match != "*":
        reasons.append(f"only names that match {match!r} count")
    return "; ".join(reasons)


def _measure_all(
    checkpoints: Sequence[Checkpoint],
    skipped: list[Skip],
    store: Store,
    open_weights: OpenWeights,
    by: Grouping,
    trained: bool,
) -> MeasuredSeries:
    """Measure the checkpoints in the order of steps; of several with equal weights the first counts."""
    reference = _update_reference(store, checkpoints, open_weights)
    table.row_names(reference.shapes, by)  # a name that may not be is refused before anything is read
    skipped += _no_longer_there(store, checkpoints)
    duplicates: list[Skip] = []
    counted: dict[str, Counted] = {}
    try:
        _measure_each(checkpoints, store, reference, open_weights, counted, duplicates, skipped)
    finally:
        store.save()  # also of a run that is stopped
    if not counted:
        raise ValueError("no checkpoint could be read:\n" + "\n".join(f"  {line}" for line in grouped(skipped)))
    verdict = verdict_on(list(counted.values()), reference, checkpoints, open_weights)
    store.save()
    return _result(list(counted.values()), duplicates, skipped, reference, verdict, by, trained)


def _measure_each(
    checkpoints: Sequence[Checkpoint],
    store: Store,
    reference: Reference,
    open_weights: OpenWeights,
    counted: dict[str, Counted],
    duplicates: list[Skip],
    skipped: list[Skip],
) -> None:
    """Measure each checkpoint against the one that counts before it: fills ``counted``, and says what does not."""
    from tqdm import tqdm

    before: Counted | None = None
    for checkpoint in tqdm(checkpoints, desc="checkpoints", unit="", disable=None):
        pair = (checkpoint.key, before.checkpoint.key if before else None)
        original = store.duplicates.get(checkpoint.key)
        try:
            if original not in counted:
                stored = store.sums.get(pair)
                current = Counted(checkpoint, stored or sums_by_tensor(checkpoint, before, reference, open_weights))
                original = _original(current, counted, reference.shapes, open_weights)
            if not original:
                _refuse_same_step(checkpoint, before)
        except ReadError as error:
            skipped.append(Skip(checkpoint.label, str(error)))
            continue
        if original:
            store.duplicates[checkpoint.key] = original
            original_label = counted[original].checkpoint.label
            duplicates.append(Skip(checkpoint.label, f"its weights are those of {original_label}"))
            continue
        store.sums[pair] = dict(current.sums)
        store.steps[checkpoint.key] = checkpoint.step
        store.save_now_and_then()
        counted[checkpoint.key] = current
        before = current


def _update_reference(store: Store, checkpoints: Sequence[Checkpoint], open_weights: OpenWeights) -> Reference:
    """Make the last readable checkpoint the store's reference, with which all others are compared.

    If its tensors differ from those of the reference of an earlier run, the sums of that run are dropped.
    """
    stored = store.reference
    if stored and stored.key == checkpoints[-1].key:
        return stored  # without another download
    reference = _last_readable(checkpoints, open_weights)
    if reference is None:
        reference = Reference("", "", {}, {})  # why each cannot be read is reported when it is measured
    elif stored and reference.shapes != stored.shapes:
        store.sums = {}
        store.duplicates = {}
    store.reference = reference
    return reference


def _last_readable(checkpoints: Sequence[Checkpoint], open_weights: OpenWeights) -> Reference | None:
    """The last checkpoint that can be read; among models an adapter is none of the series."""
    adapter: tuple[Checkpoint, Weights] | None = None
    is_alone = len(checkpoints) == 1
    for checkpoint in reversed(checkpoints):
        with suppress(ReadError):
            weights = open_weights(checkpoint)
            if not weights.is_adapter:
                return parameters.reference_of(checkpoint.key, checkpoint.label, weights, is_alone)
            adapter = adapter or (checkpoint, weights)
    if adapter is None:
        return None
    return parameters.reference_of(adapter[0].key, adapter[0].label, adapter[1], is_alone)


def _no_longer_there(store: Store, checkpoints: Sequence[Checkpoint]) -> list[Skip]:
    """Steps that an earlier run has measured, and that no checkpoint has any more."""
    gone = {store.steps[key] for key, _ in store.sums if key in store.steps}
    gone -= {checkpoint.step for checkpoint in checkpoints}
    return [Skip(f"step {step}", "measured before, and no longer there: not in the table") for step in sorted(gone)]


def _refuse_same_step(checkpoint: Checkpoint, before: Counted | None) -> None:
    """Raise ReadError if the checkpoint that counts before this one has the same step."""
    if before and before.checkpoint.step == checkpoint.step:
        other = before.checkpoint.label
        raise ReadError(f"{checkpoint.label}: step {checkpoint.step} is {other} too, other weights")


def _original(
    current: Counted, counted: Mapping[str, Counted], names: Iterable[str], open_weights: OpenWeights
) -> str | None:
    """The key of the checkpoint that counts already and has the same weights, if there is one."""
    norm = table.norm(current.sums.values())
    for key, earlier in counted.items():
        if math.isclose(table.norm(earlier.sums.values()), norm, rel_tol=1e-12):
            earlier_tensors = _all_tensors(open_weights(earlier.checkpoint))
            tensors = _all_tensors(open_weights(current.checkpoint))
            if all(same(earlier_tensors[name], tensors[name]) for name in names):
                return key
    return None


def _all_tensors(weights: Weights) -> dict[str, Tensor]:
    """Floating tensors of a checkpoint: the reference decides which of them are parameters."""
    return weights.doubtful | weights.parameters


def sums_by_tensor(
    checkpoint: Checkpoint, before: Counted | None, reference: Reference, open_weights: OpenWeights
) -> dict[str, Sums]:
    """Sums by tensor of one checkpoint against the one that counts before it."""
    # The earlier checkpoint is opened first: it is still at hand, and opening another one may close it.
    previous = _all_tensors(open_weights(before.checkpoint)) if before else None
    weights = open_weights(checkpoint)
    for name, why in weights.left_out.items():
        if name not in reference.shapes:
            reference.left_out.setdefault(name, why)
    reference.check(checkpoint.label, weights)
    tensors = _all_tensors(weights)
    by_tensor = {}
    for name in list(reference.shapes):
        measured = sums(tensors[name], previous[name] if previous else None)
        if not all(map(math.isfinite, measured)):
            if not is_infinite_constant(tensors[name], previous[name] if previous else None):
                raise ReadError(f"{checkpoint.label}: {name} holds values that are not finite, or too large to square")
            reference.left_out[name] = "holds ∞, as masks do and no weight does"
            del reference.shapes[name]
            continue
        by_tensor[name] = measured
    return by_tensor


def verdict_on(
    counted: Sequence[Counted], reference: Reference, checkpoints: Sequence[Checkpoint], open_weights: OpenWeights
) -> parameters.Verdict:
    """What the measured series says of its tensors. The class is asked now if something in the series is in doubt."""
    by_tensor = [current.sums for current in counted]
    of_reference = next((cp for cp in checkpoints if cp.key == reference.key), None)
    weights: Weights | None = None
    never_moved = [name for name in reference.shapes if not any(s[name].displacement_sq for s in by_tensor[1:])]
    if of_reference and reference.model_class is None and never_moved:
        weights = open_weights(of_reference)
        parameters.ask_class(reference, weights)
    if of_reference and parameters.candidates_for_ties(reference, by_tensor):
        weights = weights or open_weights(of_reference)
    return parameters.judge(reference, by_tensor, weights)


def _result(
    counted: Sequence[Counted],
    duplicates: list[Skip],
    skipped: list[Skip],
    reference: Reference,
    verdict: parameters.Verdict,
    by: Grouping,
    trained: bool,
) -> MeasuredSeries:
    left_out = reference.left_out | verdict.left_out
    constant = verdict.constant
    if trained:
        if len(counted) < 2:
            raise ValueError("--trained: one checkpoint alone does not say what was trained; give two or more")
        left_out = left_out | {name: "the same in all checkpoints" for name in constant}
        constant = {}
    names = [name for name in reference.shapes if name not in left_out]
    if not names:
        raise ValueError("--trained: all tensors are the same in all checkpoints")
    size = sum(math.prod(reference.shapes[name]) for name in names)
    steps = [(current.checkpoint.step, current.sums) for current in counted]
    notes = [*reference.notes, *verdict.notes, *(current.checkpoint.note for current in counted)]
    last = counted[-1].checkpoint
    return MeasuredSeries(
        table.of_series(steps, names, by),
        duplicates,
        skipped,
        left_out,
        size,
        last=str(last.place or last.label),
        constant=constant,
        notes=[note for note in notes if note],
    )
