"""Reading stored weights: formats, broken files, buffers, and what is no parameter."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint_files import assert_is, cut, make, model, save, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from nbutils.checkpoints import series, tensors, weights
from nbutils.checkpoints.weights import Weights


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


def test_ten_million_float32_are_summed_in_float64(tmp_path):
    """A float32 sum of squares of this tensor is off by more than 10⁻⁶ in one running sum; ours by less than 10⁻¹²."""
    value = torch.randn(10**7, generator=torch.Generator().manual_seed(0)) + 100
    save({"w": value}, tmp_path / "step1")
    exact = math.sqrt(float((value.double() ** 2).sum()))
    assert series(tmp_path).table.norm[0] == pytest.approx(exact, rel=1e-13)
    running = np.cumsum(value.numpy() ** 2, dtype=np.float32)[-1]
    assert abs(math.sqrt(running) / exact - 1) > 1e-6


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
    said = r"bin: unsafe, refused: holds Python objects, (builtins\.)?exec, which may run code .* alone: torch\.save"
    assert re.search(said, objects.why)
    assert damaged.why == f"{tmp_path / 'step4.pt'}: damaged, or not from torch.save (UnpicklingError)"


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


@pytest.mark.parametrize("name", ["int64", "int32", "int16", "int8", "uint8", "bool"])
def test_whole_numbers_are_left_out_and_what_follows_is_read(tmp_path, name):
    values = {"a.w": torch.tensor([3.0, 4.0]), "b.seen": torch.ones(7, dtype=getattr(torch, name))}
    save({**values, "c.w": torch.tensor([12.0])}, tmp_path / "step1")
    result = series(tmp_path)
    assert result.table.norm[0] == 13 and set(result.left_out) == {"b.seen"} and not result.skipped


def test_many_files_without_an_index_are_named(tmp_path):
    for name in "abcd":
        save({f"{name}.w": torch.ones(2)}, tmp_path / "step1", f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"4 weight files and no index: a\.\w+, b\.\w+, c\.\w+$"):
        series(tmp_path)


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
    "dtype F8_E5M2": lambda f: save({**model(1), "a.weight": torch.ones(2).to(torch.float8_e5m2)}, f),
    "only an adapter: merge it .*merge_and_unload": only_adapter,
    "h.0.mlp.weight is I8: a quantised model; its norm cannot be read from the file": quantised,
    "h.0.mlp.weight is torch.uint8: a quantised model": quantised_pickle,
    "h.0.q_proj.qweight is I32: a quantised model": lambda f: save(
        model(1) | {"h.0.q_proj.qweight": torch.ones(2, 2, dtype=torch.int32)}, f
    ),
    "holds no parameters": lambda f: save({"ids": torch.arange(3)}, f),
    "which is not there": without_second_shard,
    "corrupt: no weight_map": lambda f: (
        (f / "model.safetensors").rename(f / "model-00001-of-00001.safetensors"),
        (f / "model.safetensors.index.json").write_text("{}"),
    ),
    "and 1 other differences": lambda f: save({**model(1), **dict.fromkeys("xyz", torch.ones(2))}, f),
    "tensor transformer.ln_f.weight is there twice": lambda f: [
        ((f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors")),
        save({"transformer.ln_f.weight": torch.ones(8)}, f, "model-00002-of-00002.safetensors"),
    ],
    "2 of 2 shards; missing 2": lambda f: [
        (f / "model.safetensors").rename(f / "a-00001-of-00002.safetensors"),
        save({"other.weight": torch.ones(8)}, f, "b-00001-of-00002.safetensors"),
    ],
    "2 of 1 shards": lambda f: [
        (f / "model.safetensors").rename(f / "a-00001-of-00001.safetensors"),
        save({"other.weight": torch.ones(8)}, f, "b-00001-of-00001.safetensors"),
    ],
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


INDICES = {
    "{": "corrupt: no weight_map", "{}": "corrupt: no weight_map", "[]": "corrupt: no weight_map",
    '{"weight_map": []}': "corrupt: no weight_map", '{"weight_map": {"a": 1}}': "corrupt: no weight_map",
    '{"weight_map": {"a": ["b"]}}': "corrupt: no weight_map",
    '{"weight_map": {}}': "shards must be files of the same folder",
    '{"weight_map": {"a": "x", "b": "y", "c": "here"}}': r"names x, which is not there \(2 of 3 missing\)",
    '{"weight_map": {"a": "here", "b": "y", "c": "here"}}': r"names y, which is not there \(1 of 2 missing\)",
}  # fmt: skip


@pytest.mark.parametrize("text", INDICES)
def test_an_index_that_names_no_shards_is_told(tmp_path, text):
    (tmp_path / "here").touch()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(weights.ReadError, match=INDICES[text]):
        weights.weight_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["odd.safetensors", "pytorch_model.bin"], ["odd.safetensors"]),
        (["any.bin", "other.pt"], ["any.bin"]), (["any.pt"], ["any.pt"]), (["any.pth", "x.txt"], ["any.pth"]),
        (["any.ckpt", "rng_state.pth"], ["any.ckpt"]), (["a.bin", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.safetensors", "model-00001-of-00009.safetensors"], ["model.safetensors"]),
        (["m-1-of-2.pt", "m-2-of-2.pt"], ["m-1-of-2.pt", "m-2-of-2.pt"]),
        (["m-1-of-1.pt"], ["m-1-of-1.pt"]),
        (["m-2-of-4.pt", "m-4-of-4.pt"], "2 of 4 shards; missing 1, 3$"),
        (["m-1-of-3.pt"], "1 of 3 shards; missing 2, 3$"),
        (["m-1-of-2.pt", "m.pt"], r"2 weight files and no index: m-1-of-2\.pt, m\.pt$"),
        (["notes.txt"], r"no \.safetensors, \.bin, \.pt, \.pth or \.ckpt file in it"), ([], "empty folder"),
        (["adapter_model.bin"], "only an adapter"), (["optimizer.pt"], r"no \.safetensors"),
    ],
)  # fmt: skip
def test_which_files_of_a_folder_hold_the_weights(tmp_path, names, found):
    for name in names:
        (tmp_path / name).touch()
    if isinstance(found, list):
        assert [file.name for file in weights.weight_files(tmp_path)] == found
    else:
        with pytest.raises(weights.ReadError, match=found):
            weights.weight_files(tmp_path)


ONE = torch.arange(9.0).reshape(3, 3)
PICKLES = {
    "a tensor named as a wrapper": ({"model": ONE, "module": ONE + 1}, {"model", "module"}, {}),
    "model_state_dict": ({"model_state_dict": {"module.w": ONE}, "epoch": 3}, {"w"}, {}),
    "module": ({"module": {"w": ONE}}, {"w"}, {}),
    "other views of one storage": ({"a": ONE, "b": ONE[:2], "c": ONE.T, "d": ONE[1:]}, {"a", "b", "c", "d"}, {}),
    "the same view": ({"a": ONE.T, "b": ONE.T, "c": ONE + 1}, {"a", "c"}, {"b": "tied to a"}),
    "nothing in two of them": ({"a": ONE[:0], "b": ONE[:0], "c": ONE}, {"a", "b", "c"}, {}),
}


@pytest.mark.parametrize("what", PICKLES)
def test_which_tensors_of_a_pickle_are_parameters(tmp_path, what):
    saved, names, left_out = PICKLES[what]
    torch.save(saved, tmp_path / "step1.pt")
    with Weights(tmp_path / "step1.pt") as found:
        assert set(found.parameters) == names and found.left_out == left_out
        for name in names & {"a", "b", "c", "d"} & set(saved):
            values = np.empty(saved[name].numel())
            found.parameters[name].read(0, values)
            np.testing.assert_array_equal(values, saved[name].flatten().numpy())


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"state_dict": {"w": ONE, "model": {"v": ONE}}}, "model in state_dict holds tensors, beside w, and which are"),
        ([ONE], "holds no parameters"), (ONE, "holds no parameters"), ({"step": 1}, "holds no parameters"),
        ({"w": ONE.to(torch.float8_e4m3fn)}, r"tensor w has dtype F\?; known are F64, F32, F16, BF16"),
    ],
)  # fmt: skip
def test_a_pickle_without_readable_parameters_is_told(tmp_path, saved, said):
    torch.save(saved, tmp_path / "step1.pt")
    with pytest.raises(weights.ReadError, match=said):
        Weights(tmp_path / "step1.pt")


def test_a_file_that_goes_or_shrinks_is_named(tmp_path):
    with pytest.raises(weights.ReadError, match="gone: No such file"):
        Weights(tmp_path / "gone")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "odd.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(weights.ReadError, match=r"odd\.safetensors: No such file"):
        Weights(tmp_path / "linked")
    save({"w": torch.ones(4)}, tmp_path / "step1")
    with Weights(tmp_path / "step1") as found:
        cut(tmp_path / "step1" / "model.safetensors", -1)
        with pytest.raises(weights.ReadError, match="ends within tensor w"):
            found.parameters["w"].read(0, np.empty(4))
        found.parameters["w"].read(0, values := np.empty(3))
        assert values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "why"),
    [
        ("attn.bias", "F32", (1, 1, 5, 5), "attention mask"), ("attn.bias", "F32", (5, 5), None),
        ("attn.bias", "F32", (1, 5, 5), None), ("attn.bias", "F32", (2, 1, 5, 5), None),
        ("attn.bias", "F32", (1, 2, 5, 5), None), ("attn.bias", "F32", (1, 1, 1, 5, 5), None),
        ("attn.bias", "F32", (1, 1, 5, 4), None), ("attn.bias", "F32", (1, 1, 4, 5), None),
        ("attn.weight", "F32", (1, 1, 5, 5), None), ("a.mask", "BF16", (3, 3), "attention mask"),
        ("a.mask", "F16", (3, 4), None), ("a.mask", "F16", (4, 3), None), ("a.mask", "F16", (4, 4, 3), None),
        ("a.mask", "F16", (2, 4, 4), "attention mask"), ("a.mask", "F16", (3,), None), ("a.mask", "F64", (), None),
        ("w", "I64", (3,), "not floating point"), ("w", "BOOL", (3,), "not floating point"),
        ("w", "F8_E4M3", (3,), None), ("w", "BF16", (3,), None), ("a.inv_freq", "F32", (3,), "buffer"),
    ],
)  # fmt: skip
def test_what_name_type_and_shape_tell_of_a_tensor(name, dtype, shape, why):
    assert tensors.why_left_out(name, dtype, shape) == why


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("x", np.where(np.tri(3) > 0, 0.0, -1000.0), "attention mask"), ("x", np.where(np.tri(3) > 0, 0, -999.9), None),
        ("x", np.where(np.tri(3) > 0, 1.0, -1e4), None), ("x", np.tri(3).T.copy(), None), ("x", np.tri(3, 4), None),
        ("x", np.tri(4, 3), None), ("x", np.ones((1, 1)), None), ("x", np.ones((3, 3)), None),
        ("x", np.zeros((3, 3)), None), ("x", np.array([1.0, 0.0]), None), ("x", np.empty((0, 2, 2)), None),
        ("pe", np.array([[0.0, 1, 0, 1, 0], [9] * 5]), "position sinusoids"), ("x", np.array([[0.0, 1], [9, 9]]), None),
        ("pe", np.array([[0.0, 0, 0, 1, 1], [9] * 5]), "position sinusoids"),
        ("pe", np.array([[0.0, 0, 1, 1], [9] * 4]), "position sinusoids"),
        ("pe", np.array([[0.0, 1, 1, 1], [9] * 4]), None), ("pe", np.array([[1.0, 0, 1, 0], [9] * 4]), None),
        ("pe", np.array([0.0, 1, 0, 1]), None), ("pe", np.empty((0, 4)), None),
    ],
)  # fmt: skip
def test_what_values_tell_of_a_tensor(name, values, why):
    flat = values.astype(float).ravel()
    stored = tensors.Tensor("F64", values.shape, lambda start, out: np.copyto(out, flat[start : start + len(out)]))
    assert tensors.why_constant(name, stored) == why
