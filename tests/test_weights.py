"""Reading stored weights: formats, broken files, buffers, and what is no parameter."""

import json
import math
import re

import numpy as np
import pytest
import torch
from checkpoint_files import assert_is, cut, make, measured_alone, model, save, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from normgrowth.checkpoints import comparisons, files, series, tensors
from normgrowth.checkpoints.layouts import ReadError
from normgrowth.checkpoints.tensors import of_torch

pytestmark = pytest.mark.filterwarnings("ignore")
ONE = torch.arange(9.0).reshape(3, 3)
SIZES = [1, 7, *(n * tensors.BLOCK + d for n in (1, 2) for d in (-1, 0, 9))]  # about one and two blocks


def same(x, y):
    return comparisons.same(of_torch(x), of_torch(y))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from(tensors.FLOATS), st.data())
def test_sums_are_those_of_float64_and_one_other_value_is_no_copy(size, dtype, data):
    rng = torch.Generator().manual_seed(size)
    dtype = getattr(torch, dtype)
    before, after = (torch.randn(size, generator=rng, dtype=torch.float64).to(dtype) for _ in range(2))
    x, y = before.double().numpy(), after.double().numpy()
    sums = comparisons.sums(of_torch(after), of_torch(before))
    exact = [math.fsum(part) for part in (y * y, (y - x) ** 2, x * (y - x))]
    np.testing.assert_allclose(sums, exact, rtol=1e-12, atol=1e-12 * exact[0])
    assert comparisons.sums(of_torch(after)) == (sums.square, 0, 0)
    other = before.clone()
    assert same(before, other.double()) and not same(before, other[None])
    other[data.draw(st.integers(0, size - 1))] = 77
    assert not same(before, other)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Two files of 200 MB: what is not the files' own pages stays below a tenth of one."""
    for step in (1, 2):
        save({f"h.{i}.w": torch.full((5_000_000,), float(step)) for i in range(10)}, tmp_path / f"step{step}")
    grown, *norms = measured_alone(tmp_path)
    assert norms == pytest.approx([math.sqrt(5e7), 2 * math.sqrt(5e7)], rel=1e-12) and grown < 20


def test_shards_single_files_and_pickles_of_all_ages_are_one_series(tmp_path):
    states = {step: model(step) for step in range(1, 7)}
    save(states[1], tmp_path / "step1")
    shard(tmp_path / "step2", states[2])
    shard(tmp_path / "step3", states[3], 3)
    save(states[4] | {"lm_head.weight": states[4]["transformer.wte.weight"]}, tmp_path / "step4", "pytorch_model.bin")
    save({"step": 5}, tmp_path / "step4", "optimizer.pt")
    save({"model": {f"module.{k}": v for k, v in states[5].items()}, "step": 5}, tmp_path, "step5.pt")
    torch.save(states[6], tmp_path / "step6.pt", _use_new_zipfile_serialization=False)  # as before torch 1.6
    result = series(tmp_path, by="tensor")
    assert not result.skipped and result.left_out == {"lm_head.weight": "tied to transformer.wte.weight"}
    assert_is(result.table, states)


def test_storage_is_shared_within_one_file_only(tmp_path):
    """A file may lie in memory where an earlier one, of which nothing counts, lay before."""
    names = ("a.inv_freq", "b.inv_freq", "some_weight")
    shard(tmp_path / "step1", {name: torch.full((5000,), 2.0) for name in names}, parts=3)
    assert series(tmp_path).parameters == 5000


def sinusoids(length, width):
    angles = torch.arange(length)[:, None] / 10_000 ** (2 * torch.arange(width // 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


LOWER, HIDDEN = torch.ones(5, 5).tril(), torch.ones(5, 5).triu(1)
ROW = torch.full((2, 5), 9.0)
# What is stored beside weights, by the reason for which it is left out.
MASKS = {
    "h.0.attn.mask": LOWER.clone()[None, None], "sa.heads.0.tril": LOWER, "h.0.sees": torch.ones(2, 5, 5).tril(),
    "h.0.added": torch.full((5, 5), -torch.inf).triu(1), "h.0.far": -1000 * HIDDEN, "h.0.hidden": HIDDEN,
    "window.mask": LOWER - torch.ones(5, 5).tril(-2), "h.0.attn.bias": torch.ones(1, 1, 5, 5),
    "b.mask": torch.ones(3, 3).bfloat16(), "two.mask": torch.ones(2, 4, 4).half(),
}  # fmt: skip
TABLES = {
    "pos_encoder.pe": sinusoids(7, 8)[:, None], "a.positional_encoding": sinusoids(7, 8)[None],
    "b.pe": sinusoids(7, 8).view(7, 4, 2).mT.flatten(1), "odd.pe": torch.stack([torch.arange(5) % 2, ROW[0]]),
    "later.pe": torch.stack([(torch.arange(5) > 2).float(), ROW[0]]),
}  # fmt: skip
WHOLE = {f"seen.{kind}": torch.ones(7, dtype=getattr(torch, kind)) for kind in
         ("int64", "int32", "int16", "int8", "uint8", "bool")}  # fmt: skip
BUFFERS = {name: torch.full((3, 4), 2.0) for name in (  # those of transformers' models: test_layouts
    "rope.cos", "rope.sin", "rotary_emb.cos_cached", "freqs_sin", "rope.cos_sin_cache", "attn.masked_bias",
    "rotary_emb.inv_freq", "bn.running_mean", "mlp.expert_bias",
)}  # fmt: skip
LEFT_OUT = {
    **dict.fromkeys(MASKS, "attention mask"), **dict.fromkeys(TABLES, "position sinusoids"),
    **dict.fromkeys(WHOLE, "not floating point"), **dict.fromkeys(BUFFERS, "buffer"),
}  # fmt: skip
SHAPES = {
    "attn.bias": (1, 5, 5), "b.attn.bias": (2, 1, 5, 5), "c.attn.bias": (1, 1, 1, 5, 5), "d.attn.bias": (1, 1, 5, 4),
    "e.attn.weight": (1, 1, 5, 5), "a.mask": (3, 4), "mask": (3,), "mask.weight": (5, 5), "mask_token": (1, 1, 8),
    "pos_embed": (1, 7, 8), "c.pe": (7, 8), "position_embeddings.weight": (7, 8), "one": (1, 1), "act.beta": (2,),
    "lm_head.bias": (2,), "mlp.gate.bias": (2,), "model.latent_scaling_factor": (2,), "codebook.weight": (2,),
    "shift.weight": (2,), "cosine.weight": (3,),
}  # fmt: skip
TRAINED = {name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
           for seed, (name, shape) in enumerate(SHAPES.items())} | {
    "h.0.pos_encoding.weight": sinusoids(7, 8), "d.pe": torch.zeros(1, 7, 8), "rnn.weight_hh": torch.eye(5),
    "lower": torch.randn(5, 5).tril(), "near": -999.9 * HIDDEN, "both": LOWER - 1e4 * HIDDEN, "flipped": LOWER.T,
    "wide": torch.ones(3, 4).tril(), "ones": torch.ones(3, 3), "zeros": torch.zeros(3, 3), "pair": torch.eye(2)[0],
    "none": torch.empty(0, 2, 2), "x": torch.stack([torch.arange(5) % 2, ROW[0]]), "flat.pe": torch.arange(4.0) % 2,
    "three.pe": torch.tensor([[0.0, 1, 1, 1], [9] * 4]), "first.pe": torch.tensor([[1.0, 0, 1, 0], [9] * 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_buffers_do_not_count_and_what_is_trained_under_such_a_name_does(tmp_path, name):
    states = {step: {key: value + 2.5 * step for key, value in TRAINED.items()} for step in (0, 1)}
    for step, state in states.items():
        save({**state, **MASKS, **TABLES, **WHOLE, **BUFFERS}, tmp_path / f"step{step}", name)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert result.left_out == LEFT_OUT


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["odd.safetensors", "pytorch_model.bin"], ["odd.safetensors"]), (["any.bin", "other.pt"], ["any.bin"]),
        (["any.pth", "x.txt"], ["any.pth"]), (["any.ckpt", "rng_state.pth"], ["any.ckpt"]),
        (["model.safetensors", "pytorch_model.bin", "README.md"], ["model.safetensors"]),
        (["model.safetensors", "model-00001-of-00009.safetensors"], ["model.safetensors"]),
        (["a-1-of-2.safetensors", "model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin"],
         ["model.safetensors.index.json"]),
        (["sub/model.safetensors", "w.bin", "scheduler.bin", "training_args.bin", "rng_state.bin"], ["w.bin"]),
        (["m-1-of-2.pt", "m-2-of-2.pt"], "2 weight files and no index: m-1-of-2.pt, m-2-of-2.pt"),
        (["m-1-of-1.pt"], "1 weight files and no index: m-1-of-1.pt"), (["epoch=1.ckpt/"], "no .safetensors"),
        (["d.pt", "c.pt", "b.pt", "a.pt"], "4 weight files and no index: a.pt, b.pt, c.pt"),
        (["norms.pt", "model.pt"], ["model.pt"]), (["adapter.safetensors", "norms.pt"], ["adapter.safetensors"]),
        (["optimizer.pt"], "no .safetensors, .bin, .pt, .pth or .ckpt file in it"),
    ],
)  # fmt: skip
def test_which_files_of_a_folder_or_repository_hold_the_weights(names, expected):
    if isinstance(expected, list):
        assert files.weight_files(names) == expected
    else:
        with pytest.raises(ReadError, match=re.escape(expected)):
            files.weight_files(names)


def index(weight_map):
    return json.dumps({"weight_map": weight_map}).encode()


def alone(name, content):
    """The only file of a checkpoint: bytes, or what is saved."""

    def broken(folder):
        (folder / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            save(content, folder, name)

    return broken


def holding(**more):
    return lambda folder: save({**model(1), **more}, folder)


def pickled(value, **options):
    return alone("w.pt", {"v": torch.ones(3), "w": value})


def cut_to(size):
    return lambda folder: cut(folder / "model.safetensors", size)


def without_a_shard(folder):
    shard(folder, model(1))
    for name in ("model.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).unlink()


INDEX = "model.safetensors.index.json"
BROKEN = [
    ("cut short, damaged, or no safetensors file (incomplete metadata, file not fully covered)", cut_to(-10)),
    ("no safetensors file (invalid header length)", cut_to(40)),
    ("a Git LFS pointer", alone("w.safetensors", b"version https://git-lfs.github.com/spec/v1\n")),
    ("no .safetensors", lambda f: (f / "model.safetensors").unlink()),
    ("odd.safetensors: No such file", lambda f: (f / "model.safetensors").rename(f / "x") and
     (f / "odd.safetensors").symlink_to("gone")),
    ("h.1.mlp.bias holds values that are not finite", holding(**{"transformer.h.1.mlp.bias": torch.ones(32) / 0 * 0})),
    ("or too large to square", holding(**{"transformer.h.0.mlp.bias": torch.full((32,), 1e200, dtype=torch.double)})),
    ("h.1.mlp.weight has shape (8, 33); in", holding(**{"transformer.h.1.mlp.weight": torch.ones(8, 33)})),
    (": no transformer.h.1.mlp.bias, x more", lambda f: save(
        {k: v for k, v in model(1).items() if "1.mlp.bias" not in k} | {"x": torch.ones(2)}, f)),
    (": x more, y more, z more", holding(**dict.fromkeys("xyz", torch.ones(2)))),
    ("a.weight has dtype torch.float8_e4m3fn; known", holding(**{"a.weight": torch.ones(2).to(torch.float8_e4m3fn)})),
    ("a has dtype torch.complex64; known are torch.float64", holding(a=torch.ones(2, dtype=torch.complex64))),
    ("qweight is torch.int32: a quantised model; its norm", holding(qweight=torch.ones(2, dtype=torch.int32))),
    ("weight is torch.uint8: a quantised model", alone("w.bin", {"h.weight": torch.ones(9, dtype=torch.uint8)})),
    ("holds no parameters", lambda f: save({"ids": torch.arange(3)}, f)),
    ("the list holds tensors, and which are the weights is unclear", alone("w.pt", [ONE])),
    ("holds one tensor without a name", alone("w.pt", ONE)),
    ("model in state_dict holds tensors, beside w, and", alone("w.pt", {"state_dict": {"w": ONE, "model": [ONE]}})),
    ("tensor w is there twice", alone("w.pt", {"w": ONE, "module.w": ONE + 1})),
    ("w is sparse or nested (torch.sparse_coo); save it dense", pickled(torch.eye(3).to_sparse())),
    ("torch.qint8: a quantised model", pickled(torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8))),
    ("w has no values: it is on the device meta", pickled(torch.empty(3, device="meta"))),
    ("refused: damaged, or not from torch.save (invalid load key", alone("w.pt", b"x" * 100)),
    ("refused: damaged", alone("w.pt", b"")), ("names model-00002-of-00002.safetensors, which is", without_a_shard),
    *[("corrupt: its weight_map does not name files of the same folder", alone(INDEX, text)) for text in (
        b"{", b"[]", index({"a": 1}), index({}), index({"w": "../step10/model.safetensors"}))],
    ("names x, which is not there (2 of 2 missing)", alone(INDEX, index({"a": "x", "b": "y", "c": "y"}))),
]  # fmt: skip


@pytest.mark.parametrize(("why", "breaks"), BROKEN, ids=[f"{i}-{why[:40]}" for i, (why, _) in enumerate(BROKEN)])
def test_a_broken_checkpoint_is_named_and_the_rest_is_read(tmp_path, why, breaks):
    states = make(tmp_path)
    breaks(tmp_path / "step20")
    result = series(tmp_path)
    (skip,) = result.skipped
    assert str(tmp_path / "step20") in skip.why + skip.label and why in skip.why, skip.why
    del states[20]
    assert_is(result.table, states)


@pytest.mark.parametrize(
    ("saved", "norm", "left_out"),
    [
        ({"model": ONE, "module": ONE + 1}, [ONE, ONE + 1], {}),  # tensors under a wrapper's names
        ({"model_state_dict": {"module.w": ONE}, "epoch": 3}, [ONE], {}), ({"module": {"w": ONE}}, [ONE], {}),
        ({"a": ONE, "b": ONE[:2], "c": ONE.T, "d": ONE[1:]}, [ONE], dict.fromkeys("bcd", "tied to a")),  # one storage
        ({"a": ONE.T, "b": ONE.T, "c": ONE + 1}, [ONE, ONE + 1], {"b": "tied to a"}),
        ({"a": ONE[:0], "b": ONE[:0], "c": ONE}, [ONE], {}),
        ({"block.ema_gate.weight": ONE, "block.ema.weight": ONE + 1}, [ONE, ONE + 1], {}),
        ({"model": {"w": ONE}, "data_norm": {"a.weight": ONE}, "optimizer": {"x": ONE}, "lr": ONE[0, 1]}, [ONE],
         {"data_norm": "stored beside model", "lr": "stored beside model"}),
        ({"state_dict": {"w": ONE}, "ema_state_dict": {"w": ONE + 1}}, [ONE],
         {"ema_state_dict": "an average of the weights, beside state_dict"}),
        *[({"a.w": ONE, prefix + name: ONE + 1, f"{prefix}decay": torch.tensor(0.9)}, [ONE],
           dict.fromkeys((prefix.removeprefix("module.") + x for x in (name, "decay")), "an average of the weights"))
          for prefix, name in (("ema.", "a.w"), ("ema_model.module.", "a.w"), ("module.ema.", "a.w"),
                               ("model_ema.", "aw"))],
        ({"params": {"w": ONE}, "step": torch.tensor(1.0)}, [ONE], {"step": "stored beside params"}),
        ({"net": {"w": ONE}, "opt": {"state": {0: {"exp_avg": ONE}}, "param_groups": []}}, [ONE], {}),
        ({"state": {"model": {"w": ONE}, "optimizers": {"AdamW": {"state": {0: {"exp_avg": ONE}}, "param_groups": []}},
                    "callbacks": [{}]}, "rng": [{"torch": ONE}]}, [ONE], {}),  # Composer's
        ({"cfg": None, "model": {"w": ONE}, "extra_state": {"x": ONE}, "task_state": {},
          "last_optimizer_state": {"state": {0: {"exp_avg": ONE}}, "param_groups": []}}, [ONE], {}),  # fairseq's
        ({"module.w": ONE, "n_averaged": torch.tensor(3)}, [ONE],
         {"n_averaged": "counts averages: the weights beside it are averages (AveragedModel)"}),
    ],
)  # fmt: skip
def test_which_tensors_of_a_pickle_are_parameters(tmp_path, saved, norm, left_out):
    torch.save(saved, tmp_path / "step1.pt")
    result = series(tmp_path)
    assert result.table.norm[0] ** 2 == pytest.approx(sum(float((x.double() ** 2).sum()) for x in norm), rel=1e-12)
    assert result.left_out == left_out and result.parameters == sum(x.numel() for x in norm)
