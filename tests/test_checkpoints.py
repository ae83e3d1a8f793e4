"""Series of checkpoints against plain sums in memory; broken, mixed and mislabelled series; a hub in a folder."""

import contextlib
import json
import math
import types

import numpy as np
import pytest
import torch
from checkpoint_files import alone, assert_is, cut, flat, make, model, save, shard

from nbutils import checkpoints, norms
from nbutils.checkpoints import Series, comparisons, series, tensors, weights


def test_series_is_what_vectors_in_memory_say(tmp_path):
    states = make(tmp_path)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert list(result.table.columns) == ["step", "layer", "norm", "cos_similarity", "displacement_sq", "inner"]
    assert result.parameters == len(flat(states[0])) and not result.skipped and not result.duplicates


def test_rows_agree_with_the_norm_budget(tmp_path):
    make(tmp_path, steps=range(0, 60, 10))
    table = series(tmp_path).table
    budget = norms.norm_budget(table.norm, table.cos_similarity[1:])
    np.testing.assert_allclose(table.displacement_sq[1:], budget.displacement_sq, rtol=1e-9)
    np.testing.assert_allclose(table.inner[1:], budget.inner, rtol=1e-9)
    grown = np.diff(table.norm**2)
    np.testing.assert_allclose(table.displacement_sq[1:] + table.inner[1:], grown, rtol=1e-9)


def test_layers_add_up_to_the_whole(tmp_path):
    make(tmp_path, layers=12)
    table = series(tmp_path, by="layer").table
    for _, rows in table.groupby("step"):
        total, parts = rows[rows.layer == "total"].iloc[0], rows[rows.layer != "total"]
        assert list(parts.layer) == ["embeddings", *(f"block {i}" for i in range(12)), "rest"]
        assert (parts.norm**2).sum() == pytest.approx(total.norm**2, rel=1e-12)
        assert parts.displacement_sq.sum() == pytest.approx(np.nan_to_num(total.displacement_sq), rel=1e-12)
        assert parts.inner.sum() == pytest.approx(np.nan_to_num(total.inner), rel=1e-9, abs=1e-12)


def test_steps_are_sorted_however_they_are_written(tmp_path):
    states = {step: model(step) for step in (5, 900, 1000, 20_000, 1_500_000)}
    names = ("iter_0000005", "checkpoint-900", "step1000-tokens4B", "step_20k", "step-1.5M")
    for name, state in zip(names, states.values(), strict=True):
        save(state, tmp_path / name)
    assert_is(series(tmp_path).table, states)


def test_a_step_that_changes_almost_nothing_keeps_its_digits(tmp_path):
    """‖Δ‖² is 10⁻¹⁶ of ρ²: from norms and cosine nothing would be left of it."""
    one = {"h.0.w": torch.ones(1000, dtype=torch.float64)}
    save(one, tmp_path / "step1")
    save({"h.0.w": one["h.0.w"] + 2.0**-26 * torch.tensor([1.0, -1.0]).double().repeat(500)}, tmp_path / "step2")
    row = series(tmp_path).table.iloc[1]
    assert row.displacement_sq == pytest.approx(1000 * 2.0**-52, rel=1e-12) and row.inner == 0.0
    assert row.cos_similarity == pytest.approx(1 - 2.0**-53, abs=1e-16) and row.cos_similarity <= 1


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 4.7e-6), (torch.float16, 7.3e-8)])
def test_rounding_of_two_checkpoints_adds_to_their_distance(tmp_path, dtype, share):
    """‖Δ‖² gains 2·(ulp²/12) / E m² of ρ², E m² = 3 / (2 ln 2) for a mantissa m that is log-uniform in [1, 2)."""
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    assert share == pytest.approx(2 * 2.0 ** (-2 * bits) / 12 / (1.5 / math.log(2)), rel=0.01)
    rng = torch.Generator().manual_seed(0)
    one = 2 ** (4 * torch.rand(10**6, generator=rng, dtype=torch.float64))
    two = one * 2 ** (0.01 * torch.rand(10**6, generator=rng, dtype=torch.float64))
    for kind in (torch.float64, dtype):
        for step, values in ((1, one), (2, two)):
            save({"w": values.to(kind)}, tmp_path / str(kind) / f"step{step}")
    exact, rounded = (series(tmp_path / str(kind)).table.iloc[1] for kind in (torch.float64, dtype))
    gained = (rounded.displacement_sq - exact.displacement_sq) / exact.norm**2
    assert gained == pytest.approx(share, rel=0.1)


def test_tied_weights_count_once_and_equal_layer_norms_are_not_tied(tmp_path):
    states = make(tmp_path)
    for step, state in states.items():
        state |= {f"transformer.h.{i}.ln_1.weight": torch.ones(8) for i in range(2)}
        tied = {"lm_head.weight": state["transformer.wte.weight"]} if step != 10 else {}
        save({**state, **tied}, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert result.left_out == {"lm_head.weight": "tied to transformer.wte.weight"} and not result.skipped


def test_t5_shares_one_matrix_four_times_however_it_is_saved(tmp_path):
    states = {
        step: {"shared.weight": torch.ones(5, 4) * step, "encoder.block.0.w": torch.ones(3)} for step in (1, 2, 3)
    }
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    more = {step: states[step] | dict.fromkeys(names, states[step]["shared.weight"]) for step in states}
    save(states[1], tmp_path / "step1")
    save(more[2], tmp_path / "step2")
    (tmp_path / "step3").mkdir()
    torch.save(more[3], tmp_path / "step3" / "pytorch_model.bin")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert result.left_out == dict.fromkeys(names, "tied to shared.weight") and not result.skipped


def test_a_head_that_only_starts_as_the_embedding_is_not_tied(tmp_path):
    states = make(tmp_path)
    for step, state in states.items():
        state["lm_head.weight"] = state["transformer.wte.weight"] * (1 + step)
        save(state, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert not result.left_out and not result.skipped


def test_a_head_that_is_tied_only_at_the_end_is_told(tmp_path):
    for step, state in make(tmp_path).items():
        state["lm_head.weight"] = state["transformer.wte.weight"] * (1 + (step == 0))
        save(state, tmp_path / f"step{step}")
    (skip,) = series(tmp_path).skipped
    assert "step0: lm_head.weight differs from transformer.wte.weight" in skip.why


def test_biases_that_are_all_zero_at_the_start_are_not_tied(tmp_path):
    """Of vectors only a known pair may be: a bias of the head, and that of its decoder."""
    zero = torch.zeros(8)
    state = {"w": torch.ones(3), "embeddings.LayerNorm.bias": zero, "lm_head.bias": zero, "lm_head.decoder.bias": zero}
    save(state, tmp_path / "step1")
    assert series(tmp_path).left_out == {"lm_head.decoder.bias": "tied to lm_head.bias"}


def test_another_model_in_the_folder_is_listed(tmp_path):
    states = make(tmp_path, steps=(1, 2, 3))
    save(model(0, width=4), tmp_path / "step0")
    save(model(0, layers=3), tmp_path / "step9")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert ["step0" in s.label or "step9" in s.label for s in result.skipped] == [True, True]


def test_nothing_to_read_is_an_error_that_says_why(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint with a step in its name"):
        series(tmp_path)
    save(model(0), tmp_path / "final")
    with pytest.raises(ValueError, match="final: its name tells no step"):
        series(tmp_path)
    save(model(0), tmp_path / "step1")
    cut(tmp_path / "step1" / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"(?s)no checkpoint could be read:\n.*step1.*cut short"):
        series(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        series(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="choose total, layer, type, tensor"):
        series(tmp_path, by="block")


def test_one_checkpoint_has_no_neighbours(tmp_path):
    make(tmp_path, steps=(7,))
    for source in (tmp_path, tmp_path / "step7"):
        assert series(source).table.iloc[0, 3:].isna().all()


def test_equal_weights_are_reported_and_not_counted(tmp_path):
    states = make(tmp_path)
    shard(tmp_path / "step25", states[20])  # written otherwise, equal in content
    result = series(tmp_path)
    assert_is(result.table, states)
    assert [(d.label, d.why) for d in result.duplicates] == [
        (str(tmp_path / "step25"), f"its weights are those of {tmp_path / 'step20'}")
    ]


@pytest.mark.parametrize(("wrong", "holds"), [(5, 30), (25, 0), (40, 10), (15, 30)])
def test_a_revision_with_the_weights_of_a_far_one_is_the_copy(tmp_path, wrong, holds):
    """The copy is the one far from its neighbours, whichever comes first; its neighbours are measured without it."""
    states = make(tmp_path)
    save(states[holds], tmp_path / f"step{wrong}")
    result = series(tmp_path)
    assert [d.label for d in result.duplicates] == [str(tmp_path / f"step{wrong}")]
    assert_is(result.table, states)


def test_nearly_equal_weights_count(tmp_path):
    states = make(tmp_path, steps=(1, 2))
    states[3] = {name: -value for name, value in states[2].items()}  # the same norm in every tensor
    save(states[3], tmp_path / "step3")
    assert_is(series(tmp_path).table, states)


def test_a_tied_pair_of_which_only_the_copy_is_stored(tmp_path):
    """As ``safetensors.torch.save_model`` writes it: that checkpoint is skipped, and the others are read."""
    for step in (0, 10, 20):
        state = model(step)
        tied = {"lm_head.weight": state["transformer.wte.weight"]}
        if step == 10:
            del state["transformer.wte.weight"]
        save({**state, **tied}, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert sorted(set(result.table["step"])) == [0, 20]
    (skip,) = result.skipped
    assert "no transformer.wte.weight" in skip.why


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Two files of 200 MB in tensors of 20 MB: less than a third of one file above what importing takes."""
    for step in (1, 2):
        save({f"h.{i}.w": torch.full((5_000_000,), float(step)) for i in range(10)}, tmp_path / f"step{step}")
    code = "before = peak(); rows = len(checkpoints.series(sys.argv[1]).table); print(rows, peak() - before)"
    rows, grown = alone(code, tmp_path)
    assert rows == 2 and grown * 1024 < 60e6


@pytest.mark.slow
def test_ten_gigabytes_under_one_resident(tmp_path):
    """Twenty-one tensors, the largest of 4 GB, in a file with holes; the peak of a process of its own."""
    values = [10**9, *[75 * 10**6] * 20]  # float32
    ends = np.cumsum(values) * 4
    header = {
        f"h.{i}.w": {"dtype": "F32", "shape": [n], "data_offsets": [int(end) - 4 * n, int(end)]}
        for i, (n, end) in enumerate(zip(values, ends, strict=True))
    }
    text = json.dumps(header).encode()
    (tmp_path / "step1").mkdir()
    file = tmp_path / "step1" / "model.safetensors"
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + int(ends[-1]))
        for end in (int(ends[0]), int(ends[-1])):  # the last value of the largest tensor and of the last one
            out.seek(8 + len(text) + end - 4)
            out.write(np.float32(3).tobytes())
    if file.stat().st_blocks * 512 > 10**9:
        pytest.skip("this file system has no holes: ten gigabytes would be written")
    code = "table = checkpoints.series(sys.argv[1]).table; print(table.norm[0] ** 2, peak() / 1024)"
    square, megabytes = alone(code, tmp_path)
    assert file.stat().st_size > 10**10 and square == pytest.approx(18, rel=1e-12) and megabytes < 1000


def stored(values):
    return tensors.Tensor("F64", values.shape, lambda start, out: np.copyto(out, values[start : start + len(out)]))


@pytest.mark.parametrize("size", [1, tensors.BLOCK, tensors.BLOCK + 1, 2 * tensors.BLOCK + 7])
def test_two_tensors_are_the_same_to_the_last_value(size):
    values = np.arange(size, dtype=np.float64)

    def holding(**named):
        return types.SimpleNamespace(parameters=named)

    for place in {0, size // 2, tensors.BLOCK - 1, tensors.BLOCK, size - 1} & {*range(size)}:
        other = values.copy()
        other[place] += 1
        both = holding(a=stored(values), b=stored(other), c=stored(values.copy()))
        assert comparisons.same(both, "a", both, "c") and not comparisons.same(both, "a", both, "b"), place
    both = holding(a=stored(values), b=stored(values.reshape(1, -1)))
    assert not comparisons.same(both, "a", both, "b"), "another shape"


def test_sums_of_tensors_of_several_blocks():
    """The predecessor is read at the same place as the tensor: shifted by a constant, the step is that constant."""
    rng = np.random.default_rng(0)
    theta = rng.normal(size=2 * tensors.BLOCK + 7)
    found = comparisons.sums(stored(theta + 2.0), stored(theta))
    assert found.displacement_sq == pytest.approx(4 * len(theta), rel=1e-12)
    assert found.dot == pytest.approx(2 * theta.sum(), rel=1e-9)
    assert found.square == pytest.approx(((theta + 2) ** 2).sum(), rel=1e-12)


def test_a_tensor_without_a_predecessor_has_no_displacement():
    x = np.array([3.0, 4.0])
    single = tensors.Tensor("F64", x.shape, lambda start, out: np.copyto(out, x[start : start + len(out)]))
    assert comparisons.sums(single, None) == (25.0, 0.0, 0.0)


def test_a_series_of_nothing_is_empty():
    nothing = Series()
    assert nothing.table.empty and nothing.parameters == nothing.resumed == 0
    assert not nothing.skipped and not nothing.left_out and not nothing.duplicates


@pytest.mark.parametrize("commits", [("a", "b"), ("b", "a"), (None, None)])
def test_other_commits_are_equal_by_their_values_alone(tmp_path, commits):
    one, two = (model(seed) for seed in (1, 2))
    for step, state in enumerate((one, two, one)):
        save(state, tmp_path / str(step))
    places = [tmp_path / str(step) for step in range(3)]
    first, *others = (types.SimpleNamespace(commit=commit, place=place)
                      for commit, place in zip((*commits, commits[1]), places, strict=True))  # fmt: skip
    reference = types.SimpleNamespace(shapes=one)
    with contextlib.ExitStack() as opened:
        opener = lambda which: opened.enter_context(weights.Weights(which.place))  # noqa: E731
        assert [checkpoints._equal(first, other, reference, opener) for other in others] == [False, True]


@pytest.mark.parametrize(
    ("there", "said"), [(1, "none of its 1 checkpoint matches"), (2, "of its 2 checkpoints match")]
)
def test_a_pattern_that_matches_nothing_says_how_many_there_are(tmp_path, there, said):
    make(tmp_path, steps=range(there))
    with pytest.raises(ValueError, match=said):
        series(tmp_path, match="stage*")


@pytest.mark.parametrize(("there", "more"), [(1, None), (2, 1), (6, 5)])
def test_what_is_no_series_is_told_in_one_line(tmp_path, there, more):
    for i in range(there):
        save(model(i), tmp_path / f"run{'abcdef'[i]}-x")
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    named = [letter for letter in "abcdef" if f"run{letter}-x" in str(error.value)]
    assert named == (["a", "abcdef"[there - 1]] if more else ["a"])
    assert f"and {more} more like it" in str(error.value) if more else "more" not in str(error.value)


def test_a_checkpoint_of_zeros_has_a_distance_and_no_direction(tmp_path):
    for step, value in enumerate((0.0, 2.0, -3.0, 0.0)):
        save({"h.0.w": torch.full((4,), value), "ln_f.weight": torch.full((2,), float(step))}, tmp_path / f"step{step}")
    table = series(tmp_path, by="layer").table
    block = table[table.layer == "block 0"]
    assert block.norm.tolist() == [0, 4, 6, 0]
    np.testing.assert_array_equal(block.cos_similarity, [np.nan, np.nan, -1, np.nan])
    np.testing.assert_array_equal(block.displacement_sq, [np.nan, 16, 100, 36])
    np.testing.assert_array_equal(block.inner, [np.nan, 0, -80, -72])
    rest = table[table.layer == "rest"]
    np.testing.assert_allclose(rest.cos_similarity, [np.nan, np.nan, 1, 1])
    np.testing.assert_allclose(rest.inner, [np.nan, 0, 4, 8])


def test_values_too_large_to_square_are_told_and_the_series_goes_on(tmp_path):
    for step, value in ((1, 1.0), (2, 1e200), (3, 2.0)):
        save({"w": torch.full((3,), value, dtype=torch.float64)}, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert result.table.step.tolist() == [1, 3] and "too large to square" in result.skipped[0].why


def test_of_two_kinds_that_are_as_many_the_last_decides(tmp_path):
    states = {step: model(step, width=8 if step < 3 else 4) for step in (1, 2, 3, 4)}
    for step, state in states.items():
        save(state, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert result.table.step.tolist() == [3, 4] and len(result.skipped) == 2
    assert result.parameters == sum(value.numel() for value in states[4].values())


def test_a_head_of_its_own_makes_no_kind_of_its_own(tmp_path):
    """The last checkpoint of a kind decides whether its output layer counts."""
    states = make(tmp_path, steps=(1, 2, 3))
    states[2]["lm_head.weight"] = states[3]["lm_head.weight"] = torch.randn(
        11, 8, generator=torch.Generator().manual_seed(5)
    )
    for step in (2, 3):
        save(states[step], tmp_path / f"step{step}")
    save(model(7, width=4), tmp_path / "step7")
    save(model(8, width=4), tmp_path / "step8")
    result = series(tmp_path, by="layer")
    assert sorted(set(result.table.step)) == [2, 3] and "head" in set(result.table.layer)
    assert [skip.why.split(":")[-1].strip() for skip in result.skipped][:1] == ["no lm_head.weight"]


def test_measuring_by_layer_is_asked_for(tmp_path):
    make(tmp_path, steps=(1, 2))
    assert set(series(tmp_path).table.layer) == {"total"} and series(tmp_path).resumed == 0
    assert len(set(series(tmp_path, by="layer").table.layer)) == 5


@pytest.mark.parametrize(
    ("state", "aliases"),
    [
        ({"wte.weight": 1, "lm_head.weight": 1}, {"lm_head.weight": "wte.weight"}),
        ({"wte.weight": 1, "lm_head.weight": 2}, {}),
        ({"wte.weight": 1, "wpe.weight": 2, "lm_head.weight": 2}, {"lm_head.weight": "wpe.weight"}),
        ({"h.0.w": 1, "h.1.w": 1}, {}),
    ],
)
def test_which_stored_tensors_are_tied(tmp_path, state, aliases):
    save({name: torch.full((3, 2), float(value)) for name, value in state.items()}, tmp_path / "step1")
    with weights.Weights(tmp_path / "step1") as found:
        assert comparisons.tied(found) == aliases


def test_what_there_is_to_measure_is_counted(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "step1")
    save({"w": torch.ones(2)}, tmp_path / "step2")
    with pytest.raises(ValueError, match=r"none of its 2 checkpoints matches 'nothing'"):
        series(tmp_path, match="nothing")


@pytest.mark.parametrize(("count", "more"), [(3, None), (5, " and 2 more")])
def test_of_many_folders_below_three_are_named(tmp_path, count, more):
    for i in range(count):
        save({"w": torch.ones(2)}, tmp_path / f"run{i}" / "step1")
        save({"w": torch.ones(2)}, tmp_path / f"run{i}" / "step2")
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    said = str(error.value)
    assert said.count("run") >= 3 and ((more in said) if more else (" more" not in said))


@pytest.mark.parametrize("by", ["layer", "type", "tensor", lambda name: name.split(".")[0]])
def test_rows_add_up_to_the_total_whatever_they_are(tmp_path, by):
    states = make(tmp_path)
    table = series(tmp_path, by=by).table
    assert_is(table, states)
    for _, rows in table.groupby("step"):
        parts, total = rows[rows.layer != "total"], rows[rows.layer == "total"].iloc[0]
        assert (parts.norm**2).sum() == pytest.approx(total.norm**2, rel=1e-12)
        assert (
            parts.displacement_sq.sum() == pytest.approx(total.displacement_sq or 0, rel=1e-12)
            or rows.step.iloc[0] == 0
        )


def test_threads_change_no_number(tmp_path):
    make(tmp_path, layers=6)
    one, two = (series(tmp_path, by="tensor", jobs=jobs).table for jobs in (1, 2))
    assert one.equals(two)


def test_a_row_named_total_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="no row may be named 'total'"):
        series(tmp_path, by=lambda name: "total")


def test_a_pattern_tells_the_step(tmp_path):
    states = make(tmp_path, steps=(1, 2), label="phase2_{}k-best")
    result = series(tmp_path, step=r"phase2_(\d+k)", out=tmp_path / "n.csv")
    assert list(result.table.step) == [1000, 2000]
    assert_is(result.table, {1000 * step: state for step, state in states.items()})
    with pytest.raises(ValueError, match="was made with --step"):
        series(tmp_path, step=r"_(\d+)k", out=tmp_path / "n.csv")
    with pytest.raises(ValueError, match="no name in which"):
        series(tmp_path, step=r"stage(\d+)")
    with pytest.raises(ValueError, match="has 0 groups"):
        series(tmp_path, step="phase2")
    with pytest.raises(ValueError, match="no regular expression"):
        series(tmp_path, step="(")
