"""Series of checkpoints against plain sums in memory; broken, mixed and mislabelled series; a hub in a folder."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nbutils import checkpoints, norms
from nbutils.checkpoints import comparisons, series, sources, tensors, weights
from nbutils.checkpoints.sources import step_of
from nbutils.checkpoints.weights import Weights


def model(seed, width=8, layers=2, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"transformer.wte.weight": (11, width), "transformer.ln_f.weight": (width,)}
    for i in range(layers):
        shapes |= {f"transformer.h.{i}.mlp.weight": (width, 4 * width), f"transformer.h.{i}.mlp.bias": (4 * width,)}
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


def save(state, folder, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.clone().contiguous() for key, value in state.items()}, folder / name)


def make(root, steps=(0, 10, 20, 30), label="step{}", **options):
    """A random walk of a small model: states by step, saved below ``root``."""
    states, state = {}, model(0, **options)
    for step in steps:
        states[step] = state
        save(state, root / label.format(step))
        state = {name: value + 0.1 * other for (name, value), other in zip(
            state.items(), model(step + 1, **options).values(), strict=True)}  # fmt: skip
    return states


def flat(state):
    return np.concatenate([value.double().numpy().ravel() for value in state.values()])


def assert_is(table, states):
    """The rows of the whole network are what vectors in memory say."""
    total = table[table.layer == "total"].reset_index(drop=True)
    vectors = [flat(states[step]) for step in sorted(states)]
    assert list(total.step) == sorted(states)
    np.testing.assert_allclose(total.norm, [np.linalg.norm(v) for v in vectors], rtol=1e-13)
    assert total.iloc[0, 3:].isna().all()
    for row, (before, after) in zip(total[1:].itertuples(), itertools.pairwise(vectors), strict=True):
        delta = after - before
        assert row.displacement_sq == pytest.approx(delta @ delta, rel=1e-12)
        assert row.inner == pytest.approx(2 * before @ delta, rel=1e-9)
        cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
        assert row.cos_similarity == pytest.approx(cosine, rel=1e-13)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000), ("checkpoint-300000", 300_000), ("step1000-tokens4B", 1000), ("step_20k", 20_000),
        ("step-1.5M", 1_500_000), ("global_step500", 500), ("iter_0001000", 1000), ("000250", 250), ("20k", 20_000),
        ("stage1-step1000-tokens3B", 1000), ("multiberts-seed_3-step_1700k", 1_700_000), ("epoch=3-step=1200", 1200),
        ("TinyLlama-1.1B-intermediate-step-50K-105b", 50_000), ("ckpt_007", 7), ("step0", 0), ("Step5", None),
        ("step1000tokens4B", 1000), ("checkpoint-3-step-10", 10), ("steps_40", 40), ("checkpoint-5.safetensors", 5),
        ("step1.5", None), ("step1-step2", None), ("seed_3", None), ("main", None), ("model-00001-of-00003", None),
        ("gpt2-small-x21", None), ("footstep3", None), ("step20kb", None), ("2024-05-01", None), ("", None),
        ("step1_000_seed2", 1000), ("step5_12", 5), ("ckpt_007_500", 7), ("step7_224px", 7), ("1,500.5k", 1_500_500),
    ],
)  # fmt: skip
def test_step_of(name, step):
    assert step_of(name) == step


@given(
    st.integers(0, 10**12),
    st.sampled_from(["step{}", "checkpoint-{}", "global_step{}", "iter_{:010d}", "{}", "step={}"]),
)
def test_every_step_is_read_back(step, form):
    assert step_of(form.format(step)) == step


@given(
    st.integers(0, 10**12),
    st.sampled_from("_,"),
    st.sampled_from(
        ["step{}", "checkpoint-{}", "global_step{}", "{}", "step={}", "step_{}-tokens4B", "epoch=1-step={}"]
    ),
)
def test_every_step_in_groups_of_three_is_read_back(step, mark, form):
    assert step_of(form.format(f"{step:,}".replace(",", mark))) == step


@given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("M", 6), ("b", 9)]), st.integers(0, 3))
def test_a_step_in_thousands_millions_and_billions_is_read_back(digits, unit, places):
    """digits/10^places of the unit: 1.25M is 1,250,000."""
    letter, zeros = unit
    written = f"{digits // 10**places}.{digits % 10**places:0{places}}" if places else str(digits)
    assert step_of(f"step{written}{letter}") == digits * 10 ** (zeros - places)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_read_exactly(tmp_path, dtype):
    states = make(tmp_path, dtype=dtype)
    assert_is(series(tmp_path).table, states)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50), st.sampled_from(["BF16", "F16"]))
def test_every_half_precision_number_is_exact(bits, dtype):
    raw, out = np.array(bits, dtype="<u2"), np.empty(len(bits))
    weights.decode(raw.view(np.uint8), dtype, out)
    kind = {"BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    np.testing.assert_array_equal(out, torch.from_numpy(raw.view(np.int16)).view(kind).double().numpy())


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


def test_ten_million_float32_are_summed_in_float64(tmp_path):
    """A float32 sum of squares of this tensor is off by more than 10⁻⁶ in one running sum; ours by less than 10⁻¹²."""
    value = torch.randn(10**7, generator=torch.Generator().manual_seed(0)) + 100
    save({"w": value}, tmp_path / "step1")
    exact = math.sqrt(float((value.double() ** 2).sum()))
    assert series(tmp_path).table.norm[0] == pytest.approx(exact, rel=1e-13)
    running = np.cumsum(value.numpy() ** 2, dtype=np.float32)[-1]
    assert abs(math.sqrt(running) / exact - 1) > 1e-6


def shard(folder, state, parts=2):
    names, files = list(state), {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[i::parts]
        save({name: state[name] for name in mine}, folder, file)
        files |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_shards_single_files_and_pickles_are_one_series(tmp_path):
    states = {step: model(step) for step in (1, 2, 3, 4, 5)}
    save(states[1], tmp_path / "step1")
    shard(tmp_path / "step2", states[2])
    shard(tmp_path / "step3", states[3], 3)
    (tmp_path / "step3" / "model.safetensors.index.json").unlink()
    (tmp_path / "step4").mkdir()
    torch.save(states[4], tmp_path / "step4" / "pytorch_model.bin")
    torch.save({"step": 5}, tmp_path / "step4" / "optimizer.pt")
    torch.save({"model": {f"module.{k}": v for k, v in states[5].items()}, "step": 5}, tmp_path / "step5.pt")
    result = series(tmp_path)
    assert not result.skipped
    assert_is(result.table, states)


def test_a_pickle_before_torch_1_6_and_one_with_shared_storage(tmp_path):
    states = {step: model(step) for step in (1, 2)}
    for step, state in states.items():
        (tmp_path / f"step{step}").mkdir()
        tied = {**state, "lm_head.weight": state["transformer.wte.weight"]}
        torch.save(tied, tmp_path / f"step{step}" / "pytorch_model.bin", _use_new_zipfile_serialization=step == 1)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert result.left_out == {"lm_head.weight": "tied to transformer.wte.weight"}


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of the file ran')",))


def test_no_code_of_a_pickle_runs(tmp_path):
    make(tmp_path, steps=(1, 2))
    (tmp_path / "step3").mkdir()
    torch.save({"w": Evil()}, tmp_path / "step3" / "pytorch_model.bin")
    (tmp_path / "step4.pt").write_bytes(b"x" * 100)
    objects, damaged = series(tmp_path).skipped
    said = r"bin: holds Python objects, (builtins\.)?exec \(weights_only refuses them\); save the state_dict alone$"
    assert re.search(said, objects.why)
    assert damaged.why == f"{tmp_path / 'step4.pt'}: damaged, or not from torch.save (UnpicklingError)"


def test_checkpoints_of_lightning(tmp_path):
    states = {step: model(step) for step in (100, 200, 300)}
    for epoch, (step, state) in enumerate(states.items()):
        saved = {"epoch": epoch, "global_step": step, "state_dict": state, "optimizer_states": [{"state": {}}]}
        torch.save(saved, tmp_path / f"epoch={epoch}-step={step}.ckpt")
    assert_is(series(tmp_path).table, states)
    assert_is(series(tmp_path / "epoch=1-step=200.ckpt").table, {200: states[200]})


@pytest.mark.parametrize("name", ["epoch_{}", "epoch={}.ckpt"])
def test_epochs_are_not_steps(tmp_path, name):
    for epoch in (1, 2):
        place = tmp_path / name.format(epoch)
        save(model(epoch), place) if place.suffix != ".ckpt" else torch.save(model(epoch), place)
    with pytest.raises(ValueError, match=r"no step \(epochs are not steps; rename, such as step500\)"):
        series(tmp_path)


def test_a_folder_above_a_series_is_told_which_it_is(tmp_path):
    make(tmp_path / "mine")
    make(tmp_path / "one", steps=(7,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert str(error.value).endswith(f"step_20k; it has folders that hold series: {tmp_path}/mine, {tmp_path}/one")


def test_buffers_are_left_out(tmp_path):
    states = make(tmp_path)
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 5, 5), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4), "bn.running_mean": torch.ones(3),
        "bn.running_var": torch.ones(3), "bn.num_batches_tracked": torch.tensor(3),
        "embeddings.position_ids": torch.arange(9), "some.counter": torch.arange(3),
        "mask": torch.ones(3, dtype=torch.bool),
    }  # fmt: skip
    for step, state in states.items():
        save({**state, **buffers}, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert set(result.left_out) == set(buffers)


def sinusoids(length, width):
    angles = torch.arange(length)[:, None] / 10_000 ** (2 * torch.arange(width // 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


BUFFERS = {
    "h.0.attn.mask": torch.ones(5, 5).tril()[None, None], "sa.heads.0.tril": torch.ones(5, 5).tril(),
    "h.0.sees": torch.ones(2, 5, 5).tril(), "h.0.added": torch.full((5, 5), -torch.inf).triu(1),
    "h.0.hidden": torch.ones(5, 5).triu(1), "window.mask": torch.ones(5, 5).tril() - torch.ones(5, 5).tril(-2),
    "pos_encoder.pe": sinusoids(7, 8)[:, None], "a.positional_encoding": sinusoids(7, 8)[None],
    "b.pe": sinusoids(7, 8).view(7, 4, 2).mT.flatten(1), "rope.cos": torch.ones(3, 4), "rope.sin": torch.zeros(3, 4),
    "rotary_emb.cos_cached": torch.ones(3, 4), "freqs_sin": torch.zeros(3, 4), "rope.cos_sin_cache": torch.ones(3, 4),
}  # fmt: skip
TRAINED = {
    "mask_token": torch.randn(1, 1, 8), "pos_embed": torch.randn(1, 7, 8), "c.pe": torch.randn(7, 8),
    "position_embeddings.weight": torch.randn(7, 8), "h.0.pos_encoding.weight": sinusoids(7, 8),
    "d.pe": torch.zeros(1, 7, 8), "rnn.weight_hh": torch.eye(5), "lower": torch.randn(5, 5).tril(),
    "mask.weight": torch.randn(5, 5), "one": torch.ones(1, 1), "cosine.weight": torch.ones(3), "mask": torch.ones(3),
}  # fmt: skip


def test_masks_and_tables_do_not_count_and_what_is_trained_under_such_a_name_does(tmp_path):
    states = {step: {key: value * 1.5**step for key, value in TRAINED.items()} for step in (0, 1)}
    for step, state in states.items():
        save({**state, **BUFFERS}, tmp_path / f"step{step}")
    result = series(tmp_path)
    assert_is(result.table, states)
    masks = {name for name, value in BUFFERS.items() if value.shape[-1] == 5}
    reasons = {name: "attention mask" if name in masks else "buffer" for name in BUFFERS}
    reasons |= dict.fromkeys(("pos_encoder.pe", "a.positional_encoding", "b.pe"), "position sinusoids")
    assert result.left_out == reasons


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 200),
    st.sampled_from([(), (1, 1), (3,)]),
    st.sampled_from([(1, 0), (0, 1), (0, -1e4), (0, -math.inf)]),
    st.data(),
)
def test_a_causal_mask_is_known_by_its_values_and_one_other_value_makes_it_a_weight(n, before, values, data):
    """Above n = 181 it is longer than a block."""
    seen, unseen = values
    mask = np.where(np.tri(n, dtype=bool), float(seen), float(unseen)) * np.ones((*before, 1, 1))
    flat = mask.ravel()

    def why():
        stored = tensors.Tensor("F64", mask.shape, lambda start, out: np.copyto(out, flat[start : start + len(out)]))
        return tensors.why_constant("any.name", stored)

    assert why() == "attention mask"
    flat[data.draw(st.integers(0, len(flat) - 1))] = 0.5
    assert why() is None


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


def cut(path, to):
    path.write_bytes(path.read_bytes()[:to])


def only_adapter(folder):
    """What a trainer of LoRA leaves."""
    (folder / "model.safetensors").unlink()
    save({"base_model.h.0.lora_A.weight": torch.ones(2, 8)}, folder, "adapter_model.safetensors")
    torch.save({"step": 20}, folder / "optimizer.pt")


def quantised(folder):
    eight = {
        "transformer.h.0.mlp.weight": torch.ones(8, 32, dtype=torch.int8),
        "transformer.h.0.mlp.SCB": torch.ones(8),
    }
    save(model(1) | eight, folder)


def quantised_pickle(folder):
    (folder / "model.safetensors").unlink()
    four = {"transformer.h.0.mlp.weight": torch.ones(128, 1, dtype=torch.uint8)}
    torch.save(model(1) | four, folder / "pytorch_model.bin")


def without_second_shard(folder):
    shard(folder, model(1))
    for name in ("model.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).unlink()


BROKEN = {
    "not fully covered": lambda f: cut(f / "model.safetensors", -10),
    "cut short, damaged, or no safetensors file \\(invalid header length": lambda f: cut(f / "model.safetensors", 40),
    "header too small": lambda f: cut(f / "model.safetensors", 0),
    "Git LFS pointer": lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
    "header too large": lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 500),
    "invalid JSON in header": lambda f: (f / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 500),
    "empty folder": lambda f: (f / "model.safetensors").unlink(),
    "not finite": lambda f: save({**model(1), "transformer.h.1.mlp.bias": torch.full((32,), torch.nan)}, f),
    "h.0.mlp.bias holds .* not finite": lambda f: save({**model(1), "transformer.h.0.mlp.bias": torch.ones(32) / 0}, f),
    "has shape \\(8, 33\\)": lambda f: save({**model(1), "transformer.h.1.mlp.weight": torch.ones(8, 33)}, f),
    "no transformer.h.1.mlp.bias": lambda f: save({k: v for k, v in model(1).items() if k[-10:] != "1.mlp.bias"}, f),
    "extra.weight more": lambda f: save({**model(1), "extra.weight": torch.ones(2)}, f),
    "dtype F8_E4M3": lambda f: save({**model(1), "a.weight": torch.ones(2).to(torch.float8_e4m3fn)}, f),
    "only an adapter: merge it .*merge_and_unload": only_adapter,
    "h.0.mlp.weight is I8: a quantised model; its norm cannot be read from the file": quantised,
    "h.0.mlp.weight is torch.uint8: a quantised model": quantised_pickle,
    "h.0.q_proj.qweight is I32: a quantised model": lambda f: save(
        model(1) | {"h.0.q_proj.qweight": torch.ones(2, 2, dtype=torch.int32)}, f
    ),
    "holds no parameters": lambda f: save({"ids": torch.arange(3)}, f),
    "which is not there": without_second_shard,
    "1 of 2 shards; missing 2": lambda f: ((f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors")),
}  # fmt: skip


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_checkpoint_is_named_and_the_rest_is_read(tmp_path, why):
    states = make(tmp_path)
    BROKEN[why](tmp_path / "step20")
    result = series(tmp_path)
    (skip,) = result.skipped
    assert "step20" in skip.why
    assert re.search(why, skip.why), skip.why
    del states[20]
    assert_is(result.table, states)


def test_an_index_may_not_point_out_of_its_folder(tmp_path):
    make(tmp_path, steps=(1, 2))
    shard(tmp_path / "step3", model(3))
    (tmp_path / "step3" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../step1/model.safetensors"}}'
    )
    (skip,) = series(tmp_path).skipped
    assert "files of the same folder" in skip.why


def test_header_with_wrong_sizes_is_corrupt(tmp_path):
    entry = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}
    text = json.dumps(entry).encode()
    (tmp_path / "step1.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match="invalid shape, data type, or offset"):
        series(tmp_path)


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
    with pytest.raises(ValueError, match="choose total or layer"):
        series(tmp_path, by="block")


def test_one_checkpoint_has_no_neighbours(tmp_path):
    make(tmp_path, steps=(7,))
    for source in (tmp_path, tmp_path / "step7"):
        assert series(source).table.iloc[0, 3:].isna().all()


def test_several_folders_are_one_series(tmp_path):
    states = make(tmp_path)
    assert_is(series([tmp_path / f"step{step}" for step in (30, 0, 20, 10)]).table, states)


def test_weights_one_folder_deeper_and_a_final_copy_without_step(tmp_path):
    states = make(tmp_path, label="checkpoint-{}/hf")
    save(states[30], tmp_path)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert [s.label for s in result.skipped] == [str(tmp_path)]


def test_match_chooses(tmp_path):
    states = make(tmp_path, label="stage1-step{}")
    save(model(5), tmp_path / "stage2-step10")
    assert_is(series(tmp_path, match="stage1-*").table, states)
    (skip,) = series(tmp_path).skipped
    assert "step 10 is" in skip.why and "other weights" in skip.why


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


# Going on where a run stopped


@pytest.fixture
def measured(monkeypatch):
    """Labels of the checkpoints that are read in full."""
    seen, plain = [], checkpoints._measure
    monkeypatch.setattr(checkpoints, "_measure", lambda c, *rest: seen.append(c.step) or plain(c, *rest))
    return seen


def test_a_second_run_reads_only_what_is_new(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    first = series(tmp_path / "run", out=out, by="layer")
    assert measured == [0, 10, 20, 30] and first.resumed == 0
    again = series(tmp_path / "run", out=out, by="layer")
    assert measured == [0, 10, 20, 30] and again.resumed == 4
    assert again.table.equals(first.table)
    states[40] = model(40)
    save(states[40], tmp_path / "run" / "step40")
    states[15] = model(15)
    save(states[15], tmp_path / "run" / "step15")
    later = series(tmp_path / "run", out=out, by="layer")
    assert measured[4:] == [15, 20, 40]  # 20 has a new neighbour
    assert_is(later.table, states)
    assert later.table.equals(series(tmp_path / "run", by="layer").table)
    assert not list(tmp_path.glob("*.part"))


def test_a_path_may_be_spelled_otherwise(tmp_path, measured, monkeypatch):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step5")
    first = series(tmp_path / "run", out=out)
    measured.clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    for spelled in ("run", "./run/", "../" + tmp_path.name + "/run", "link"):
        again = series(spelled, out=out)
        assert measured == [] and again.resumed == 4 and again.table.equals(first.table), spelled
    assert [d.label for d in again.duplicates] == ["link/step5"], "told as it is spelled now"
    make(tmp_path / "other")
    with pytest.raises(ValueError, match=f"norms.csv: was made with source {tmp_path}/run; give the same"):
        series("other", out=out)


def test_duplicates_are_remembered(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    save(states[30], tmp_path / "run" / "step5")
    first = series(tmp_path / "run", out=out)
    assert len(out.read_text().splitlines()) == 5
    measured.clear()
    again = series(tmp_path / "run", out=out)
    assert measured == [] and again.duplicates == first.duplicates and again.table.equals(first.table)


def test_a_torn_table_is_mended(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    first = series(tmp_path / "run", out=out, by="layer")
    for keep in (-3, -30, -200):
        measured.clear()
        cut(out, keep)
        again = series(tmp_path / "run", out=out, by="layer")
        assert measured and 0 not in measured and again.table.equals(first.table)
    out.unlink()
    assert_is(series(tmp_path / "run", out=out, by="layer").table, states)


def test_killed_between_table_and_state(tmp_path, measured, monkeypatch):
    """The state knows the new neighbour of a step; the table still has the row beside the old one."""
    make(tmp_path / "run")
    (tmp_path / "run" / "step10").rename(tmp_path / "later")
    out, plain = tmp_path / "norms.csv", os.replace
    series(tmp_path / "run", out=out)
    (tmp_path / "later").rename(tmp_path / "run" / "step10")

    def killed(source, target):
        if Path(target) == out:
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        series(tmp_path / "run", out=out)
    monkeypatch.setattr(os, "replace", plain)
    whole = series(tmp_path / "run").table
    assert series(tmp_path / "run", out=out).table.equals(whole)


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


def test_a_changed_checkpoint_and_its_neighbour_are_read_again(tmp_path, measured):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    series(tmp_path / "run", out=out)
    measured.clear()
    states[10] = model(77)
    save({**states[10], "pad.position_ids": torch.arange(3)}, tmp_path / "run" / "step10")
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [10, 20]


def test_a_killed_run_goes_on(tmp_path, measured, monkeypatch):
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    plain = checkpoints._measure

    def killed(checkpoint, *rest):
        if checkpoint.step == 20:
            raise KeyboardInterrupt
        return plain(checkpoint, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "_measure", killed)
        series(tmp_path / "run", out=out)
    assert len(out.read_text().splitlines()) == 3
    measured.clear()
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [20, 30]


def test_a_run_killed_without_warning_leaves_whole_files(tmp_path, measured):
    """SIGKILL at the third checkpoint; the clock runs a minute a look, so that each row is saved."""
    states, out = make(tmp_path / "run"), tmp_path / "norms.csv"
    code = (
        "import itertools, os, signal, sys; from nbutils import checkpoints; plain = checkpoints._measure\n"
        "checkpoints.time.monotonic = itertools.count(0, 60).__next__\n"
        "def measure(c, *rest): return plain(c, *rest) if c.step < 20 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoints._measure = measure; checkpoints.series(sys.argv[1], out=sys.argv[2])"
    )
    words = [str(tmp_path / "run"), str(out)]
    assert subprocess.run([sys.executable, "-c", code, *words]).returncode == -9
    assert len(out.read_text().splitlines()) == 3
    assert_is(series(tmp_path / "run", out=out).table, states)
    assert measured == [20, 30]


def test_the_network_going_away_loses_nothing(hub, tmp_path, monkeypatch):
    states, out = make(tmp_path / "plain"), tmp_path / "norms.csv"
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    plain = huggingface_hub.hf_hub_download

    def down(repo, name, revision, local_dir=None):
        if revision == "step20-commit":
            raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")
        return plain(repo, name, revision, local_dir)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConnectionError, match="lab/model@step20: cannot get its weights"),
    ):
        patch.setattr(huggingface_hub, "hf_hub_download", down)
        series("lab/model", out=out)
    assert len(out.read_text().splitlines()) == 3
    hub.fetched.clear()
    assert_is(series("lab/model", out=out).table, states)
    assert "step0-commit" not in [revision for revision, _ in hub.fetched]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_header_breaks_the_reader(tmp_path_factory, data):
    """Whatever the header says, the file is read or named in a ReadError."""
    anything = st.one_of(
        st.none(), st.integers(-5, 40), st.text(max_size=3), st.floats(), st.lists(st.integers(-2, 9), max_size=3)
    )
    entry = st.fixed_dictionaries({
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "C64"]), anything),
        "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), anything),
        "data_offsets": st.one_of(st.tuples(st.integers(0, 12), st.integers(0, 40)), anything),
    })  # fmt: skip
    header = data.draw(
        st.one_of(st.dictionaries(st.text(max_size=3), st.one_of(entry, anything), max_size=3), anything)
    )
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("fuzz") / "step1.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data.draw(st.integers(0, 40))))
    try:
        assert len(series(path).table) == 1
    except ValueError as error:
        assert "step1.safetensors" in str(error)


def test_a_table_of_something_else_is_not_overwritten(tmp_path):
    make(tmp_path / "run")
    out = tmp_path / "norms.csv"
    out.write_text("my,own,data\n")
    with pytest.raises(ValueError, match="not from this command"):
        series(tmp_path / "run", out=out)
    assert out.read_text() == "my,own,data\n"
    series(tmp_path / "run", out=out, overwrite=True)
    before = out.read_text()
    with pytest.raises(ValueError, match="was made with --by total; give the same, another --out, or --overwrite"):
        series(tmp_path / "run", out=out, by="layer")
    (tmp_path / "norms.csv.state.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        series(tmp_path / "run", out=out)
    assert out.read_text() == before


# A hub in a folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``hub.add(repo, revision, state)``; ``hub.fetched`` lists the downloads."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    root, repos, fetched = tmp_path / "hub", {}, []

    def add(repo, revision, state, commit=None, name="model.safetensors"):
        commit = commit or f"{revision}-commit"
        repos.setdefault(repo, {})[revision] = commit
        if name.endswith(".bin"):
            (root / repo / commit).mkdir(parents=True)
            torch.save(state, root / repo / commit / name)
        elif state is not None:
            save(state, root / repo / commit, name)

    class Api:
        def list_repo_refs(self, repo):
            if repo not in repos:
                raise RepositoryNotFoundError(
                    "404", response=SimpleNamespace(headers={}, request=None, status_code=404)
                )
            refs = [SimpleNamespace(name=name, target_commit=commit) for name, commit in repos[repo].items()]
            return SimpleNamespace(branches=refs, tags=[])

        def list_repo_files(self, repo, revision):
            folder = root / repo / revision
            return [f.name for f in folder.iterdir()] if folder.exists() else ["README.md"]

    def download(repo, name, revision, local_dir=None):
        source = root / repo / revision / name
        if not source.exists():
            raise EntryNotFoundError("404")
        fetched.append((revision, name))
        if local_dir is None:
            return str(source)
        (local_dir / name).write_bytes(source.read_bytes())
        return str(local_dir / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return SimpleNamespace(add=add, fetched=fetched, root=root)


@pytest.mark.parametrize("keep", [True, False])
def test_revisions_of_a_repository(hub, tmp_path, keep, monkeypatch):
    monkeypatch.setattr(sources.tempfile, "tempdir", str(tmp_path))
    states = make(tmp_path / "plain", steps=(0, 512, 1000, 20_000))
    hub.add("lab/model", "main", states[20_000])
    for step, state in reversed(states.items()):
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step4000", None)
    result = series("lab/model", keep=keep)
    assert_is(result.table, states)
    assert sorted(s.label for s in result.skipped) == ["lab/model@main", "lab/model@step4000"]
    assert not list(tmp_path.glob("nbutils-*")), "downloads are deleted"
    counts = [sum(revision == f"step{step}-commit" for revision, _ in hub.fetched) for step in states]
    assert counts == [1, 1, 1, 1], "each revision is fetched once"


def test_an_adapter_on_the_hub_is_told(hub, tmp_path):
    states = make(tmp_path / "plain", steps=(0, 10))
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step20", {"lora_A.weight": torch.ones(2, 8)}, name="adapter_model.safetensors")
    result = series("lab/model")
    assert_is(result.table, states)
    (skip,) = result.skipped
    assert skip.label == "lab/model@step20" and "only an adapter: merge it" in skip.why


def test_a_hub_series_goes_on_without_downloads(hub, tmp_path):
    states, out = make(tmp_path / "plain"), tmp_path / "norms.csv"
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    first = series("lab/model", out=out)
    hub.fetched.clear()
    assert series("lab/model", out=out).table.equals(first.table) and not hub.fetched
    states[40] = model(40)
    hub.add("lab/model", "step40", states[40])
    assert_is(series("lab/model", out=out).table, states)
    assert {revision for revision, _ in hub.fetched} == {"step30-commit", "step40-commit"}


def test_several_repositories_and_pinned_revisions(hub, tmp_path):
    states = make(tmp_path / "plain", steps=(0, 20_000, 40_000))
    for step, state in states.items():
        hub.add(f"lab/bert-seed_0-step_{step // 1000}k", "main", state, name="pytorch_model.bin")
    assert_is(series([f"lab/bert-seed_0-step_{k}k" for k in (20, 0, 40)]).table, states)
    hub.add("lab/model", "step7", states[0])
    assert list(series("lab/model@step7").table.step) == [7]


def test_branches_with_equal_weights_or_commits_are_reported(hub, tmp_path):
    states = make(tmp_path / "plain")
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step35", states[30])
    hub.add("lab/model", "step37", None, commit="step30-commit")
    result = series("lab/model")
    assert_is(result.table, states)
    assert sorted(d.label for d in result.duplicates) == ["lab/model@step35", "lab/model@step37"]


def test_cache_of_the_hub_is_a_source(tmp_path):
    root, states = tmp_path / "models--lab--model", make(tmp_path / "plain")
    for step, state in states.items():
        save(state, root / "snapshots" / f"hash{step}")
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / f"step{step}").write_text(f"hash{step}")
    assert_is(series(root).table, states)


def test_no_such_repository_and_no_network(hub, monkeypatch):
    with pytest.raises(FileNotFoundError, match="lab/none: no such folder; and as a repository: not on the Hub"):
        series("lab/none")
    import huggingface_hub

    class Down:
        def list_repo_refs(self, repo):
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "HfApi", Down)
    with pytest.raises(
        ConnectionError,
        match=r"no such folder; and as a repository: cannot get .*service not known.*cache",
    ):
        series("lab/model")


# Cost


PEAK = "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]);"  # kB
# not ru_maxrss: a forked child begins with its parent's peak


def alone(code, folder):
    """What a Python process of its own prints about a folder: numbers."""
    code = f"import sys; from nbutils import checkpoints; import tqdm.auto; {PEAK} {code}"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return map(float, done.stdout.split())


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


def test_values_are_read_without_torch(tmp_path):
    make(tmp_path)
    code = "import sys; from nbutils import checkpoints; checkpoints.series(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_files_are_closed(tmp_path):
    make(tmp_path)
    with Weights(tmp_path / "step0") as opened:
        assert opened._open
    assert not opened._open


def test_sums_of_tensors_of_several_blocks():
    """The predecessor is read at the same place as the tensor: shifted by a constant, the step is that constant."""
    rng = np.random.default_rng(0)
    theta = rng.normal(size=2 * tensors.BLOCK + 7)

    def stored(values):
        return tensors.Tensor("F64", values.shape, lambda start, out: np.copyto(out, values[start : start + len(out)]))

    found = comparisons.sums(stored(theta + 2.0), stored(theta))
    assert found.displacement_sq == pytest.approx(4 * len(theta), rel=1e-12)
    assert found.dot == pytest.approx(2 * theta.sum(), rel=1e-9)
    assert found.square == pytest.approx(((theta + 2) ** 2).sum(), rel=1e-12)
