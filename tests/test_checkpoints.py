"""Series of checkpoints against plain sums in memory; tied, equal, mixed and mislabelled ones."""

import numpy as np
import pytest
import torch
from checkpoint_files import assert_is, flat, make, model, save, shard

from normgrowth.checkpoints import series


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_series_is_what_vectors_in_memory_say(tmp_path, dtype):
    states = make(tmp_path, dtype=dtype)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert list(result.table.columns) == ["step", "layer", "norm", "cos_similarity", "displacement_sq", "inner"]
    assert result.parameters == len(flat(states[0])) and not result.skipped and not result.duplicates
    assert set(result.table.layer) == {"total"}
    with pytest.raises(ValueError, match="no row may be named 'total'"):
        series(tmp_path, by=lambda name: "total")


@pytest.mark.parametrize("by", ["layer", "type", "tensor", lambda name: name.split(".")[0]])
def test_rows_add_up_to_the_total_whatever_they_are(tmp_path, by):
    states = make(tmp_path, layers=12)
    table = series(tmp_path, by=by).table
    assert_is(table, states)
    for _, rows in table.groupby("step"):
        parts, total = rows[rows.layer != "total"], rows[rows.layer == "total"].iloc[0]
        assert (parts.norm**2).sum() == pytest.approx(total.norm**2, rel=1e-12)
        assert parts.displacement_sq.sum() == pytest.approx(np.nan_to_num(total.displacement_sq), rel=1e-12)
        assert parts.inner.sum() == pytest.approx(np.nan_to_num(total.inner), rel=1e-9, abs=1e-12)
        if by == "layer":
            assert list(parts.layer) == ["embeddings", *(f"block {i}" for i in range(12)), "rest"]


def test_a_step_that_changes_almost_nothing_keeps_its_digits(tmp_path):
    """‖Δ‖² is 10⁻¹⁶ of ρ²: from norms and cosine nothing would be left of it."""
    one = {"h.0.w": torch.ones(1000, dtype=torch.float64)}
    save(one, tmp_path / "step1")
    save({"h.0.w": one["h.0.w"] + 2.0**-26 * torch.tensor([1.0, -1.0]).double().repeat(500)}, tmp_path / "step2")
    row = series(tmp_path).table.iloc[1]
    assert row.displacement_sq == pytest.approx(1000 * 2.0**-52, rel=1e-12) and row.inner == 0.0
    assert row.cos_similarity == pytest.approx(1 - 2.0**-53, abs=1e-16) and row.cos_similarity <= 1


def test_a_checkpoint_of_zeros_has_a_distance_and_no_direction(tmp_path):
    for step, value in enumerate((0.0, 2.0, -3.0, 0.0)):
        save({"h.0.w": torch.full((4,), value), "ln_f.weight": torch.full((2,), float(step))}, tmp_path / f"step{step}")
    table = series(tmp_path, by="layer").table
    block = table[table.layer == "block 0"]
    assert block.norm.tolist() == [0, 4, 6, 0]
    np.testing.assert_array_equal(block.cos_similarity, [np.nan, np.nan, -1, np.nan])
    np.testing.assert_array_equal(block.displacement_sq, [np.nan, 16, 100, 36])
    np.testing.assert_array_equal(block.inner, [np.nan, 0, -80, -72])


HEAD, WTE, WPE = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
BIASES = ("a.LayerNorm.bias", "lm_head.bias", "lm_head.decoder.bias")
# What is stored at a step beside a walk of a model: then what is left out, and why steps are skipped.
TIED = {
    "tied, and once not stored": (lambda step, wte: {HEAD: wte} if step != 10 else {}, {HEAD: f"tied to {WTE}"}, {}),
    "never tied": (lambda step, wte: {HEAD: wte * (1 + step)}, {}, {}),
    "tied only at the end": (lambda step, wte: {HEAD: wte * (1 + (step == 0))}, {HEAD: f"tied to {WTE}"},
                             {0: f": {HEAD} more"}),
    "only the copy stored": (lambda step, wte: {HEAD: wte} | ({WTE: None} if step == 10 else {}),
                             {HEAD: f"tied to {WTE}"}, {10: f"no {WTE}"}),
    "equal layer norms": (lambda step, wte: {f"transformer.h.{i}.ln_1.weight": torch.ones(8) for i in (0, 1)}, {}, {}),
    "zero biases": (lambda step, wte: dict.fromkeys(BIASES, torch.zeros(8)), {BIASES[2]: f"tied to {BIASES[1]}"}, {}),
    "a wpe": (lambda step, wte: {WPE: wte + 1, HEAD: wte + 1}, {HEAD: f"tied to {WPE}"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("what", TIED)
def test_tied_weights_count_once(tmp_path, what, name):
    more, left_out, skipped = TIED[what]
    states = make(tmp_path / "walk")
    for step, state in states.items():
        stored = {key: value for key, value in (state | more(step, state[WTE])).items() if value is not None}
        save({key: value.clone() for key, value in stored.items()}, tmp_path / "run" / f"step{step}", name)
        states[step] = {key: value for key, value in stored.items() if key not in left_out}
    result = series(tmp_path / "run")
    assert result.left_out == left_out and len(result.skipped) == len(skipped)
    for skip, (step, why) in zip(result.skipped, skipped.items(), strict=True):
        assert f"step{step}" in skip.label and why in skip.why
        del states[step]
    assert_is(result.table, states)


@pytest.mark.parametrize(("copy", "of", "kept"), [(25, 20, 20), (5, 30, 5), (25, 0, 0), (40, 10, 10), (15, 30, 15)])
def test_of_equal_weights_the_first_counts(tmp_path, copy, of, kept):
    """The others are measured as if the later one were not there, however it is written."""
    states = make(tmp_path)
    shard(tmp_path / f"step{copy}", states[of])
    states[copy] = states[of]
    states[60] = {name: -value for name, value in states[30].items()}  # of the same norm, and not equal
    save(states[60], tmp_path / "step60")
    result = series(tmp_path)
    dropped = ({copy, of} - {kept}).pop()
    del states[dropped]
    assert_is(result.table, states)
    why = f"its weights are those of {tmp_path / f'step{kept}'}"
    assert result.duplicates == [(str(tmp_path / f"step{dropped}"), why)]


@pytest.mark.parametrize(("widths", "counted"), [((8, 8, 4), (2,)), ((4, 8, 4, 8), (1, 3))])
def test_what_is_another_model_than_the_last_does_not_count(tmp_path, widths, counted):
    states = {step: model(step, width=width) for step, width in enumerate(widths)}
    for step, state in states.items():
        save(state, tmp_path / f"step{step}")
    (tmp_path / "step9").mkdir()  # not the last: it cannot be read
    result = series(tmp_path)
    assert_is(result.table, {step: states[step] for step in counted})
    assert len(result.skipped) == len(widths) + 1 - len(counted)
    assert result.parameters == len(flat(states[counted[0]]))
