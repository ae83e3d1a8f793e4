"""PyTorch's distributed checkpoints: read as torch's own reader reads them, whatever wrote them."""

import json
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import cut
from kinds import Net, matrices, norm, own_optimizer, tensor
from layouts import of_ranks
from safetensors.torch import save_file

from normgrowth.checkpoints import chunks, distributed, series

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(net, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return get_state_dict(net, optimizer)


def trained():
    net = Net()
    net.register_buffer("fixed", tensor(9, 9))
    return (net, *state_of(net, own_optimizer(net)))


def nested(weights, optimizer):
    return {"model": weights, "optim": optimizer, "train": {"step": torch.tensor(7)}}


def flat(weights, optimizer):
    """torchtitan's: the model's names at the top, the rest under names with dots."""
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in weights.items() if name != "fixed"}
    return {**weights, **moments, "train_state": {"step": torch.tensor(7)},
            "dataloader": {"x": 1}, "lr_scheduler": {"last_epoch": 3}}  # fmt: skip


def lightning(weights, optimizer):
    return {"state_dict": weights, "optimizer_0": optimizer}


LAYOUTS = {  # where it lies below the step, and what is saved
    "FSDP2": ("", nested), "OLMo-core": ("model_and_optim", nested), "torchtitan": ("", flat),
    "Lightning": ("", lightning), "accelerate": ("pytorch_model_fsdp_0", lambda weights, _: {"model": weights}),
    "NeMo": ("weights", lambda weights, optimizer: {"state_dict": weights, "optimizer": optimizer}),
    "weights alone": ("", lambda weights, _: weights),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_a_library_is_read(tmp_path, layout):
    folder, content = LAYOUTS[layout]
    wanted = []
    for step in (1, 2):
        net, weights, optimizer = trained()
        scaled = {name: value * step for name, value in weights.items()}
        dcp.save(content(scaled, optimizer), checkpoint_id=tmp_path / f"step-{step}" / folder)
        wanted.append(norm(*(parameter * step for parameter in net.parameters())))
    result = series(tmp_path)
    fixed = norm(tensor(9, 9))
    if "optim" in str(content(weights, optimizer).keys()):  # it says what is trained
        assert result.left_out["fixed"].startswith("not in the state of the optimizer that is stored with it (")
    else:
        wanted = [np.hypot(rho, fixed * step) for step, rho in zip((1, 2), wanted, strict=True)]
    assert list(result.table.norm) == pytest.approx(wanted, rel=1e-12) and not result.skipped


def test_parts_of_two_ranks_and_two_dimensions(tmp_path):
    """Rows, uneven rows and columns of two ranks, in every dtype: numpy on the whole tensors."""
    wanted = of_ranks(tmp_path)
    result = series(tmp_path)
    assert list(result.table.step) == [1, 2]
    assert list(result.table.norm) == pytest.approx(wanted, rel=1e-12)


def test_parts_in_safetensors(tmp_path):
    """Two shards, each with the place of its parts in its header."""
    whole = {"a.weight": tensor(7, 5), "b.weight": tensor(3, 4)}
    for step in (1, 2):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
            parts = {"a.weight": (whole["a.weight"] * step)[rows].contiguous()}
            if rank == 1:
                parts["b.weight"] = whole["b.weight"] * step
            places = {"a.weight": {"saved_offsets": [4 * rank, 0]}, "b.weight": {"saved_offsets": [0, 0]}}
            save_file(parts, folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors",
                      {"DCP_SHARDING_INFO": json.dumps(places)})  # fmt: skip
    result = series(tmp_path, by="tensor")
    total = result.table[result.table.layer == "total"].norm
    assert list(total) == pytest.approx([norm(*whole.values()), 2 * norm(*whole.values())], rel=1e-12)
    assert result.parameters == 35 + 12


def test_what_torchs_own_writer_of_safetensors_leaves(tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    whole = matrices()
    writer = HuggingFaceStorageWriter(str(tmp_path / "step1"), save_distributed=True)
    dcp.save(whole, storage_writer=writer)
    assert series(tmp_path).table.norm[0] == pytest.approx(norm(*whole.values()), rel=1e-12)


def test_it_is_torchs_reader_that_reads_what_is_not_plain(tmp_path, monkeypatch):
    whole = {"a.weight": tensor(7, 5), "a.bias": tensor(7), "t.weight": tensor(5, 7).T, "scale": torch.tensor(3.0)}
    dcp.save(whole, checkpoint_id=tmp_path / "step1")
    mapped = series(tmp_path, by="tensor").table
    monkeypatch.setattr(chunks, "mapped", lambda *_: None)
    by_torch = series(tmp_path, by="tensor").table
    assert by_torch.equals(mapped)
    assert mapped.norm[0] == pytest.approx(norm(*whole.values()), rel=1e-12)


BROKEN = {
    "no metadata": (lambda f: (f / ".metadata").unlink(), "a distributed checkpoint without its .metadata"),
    "damaged metadata": (lambda f: (f / ".metadata").write_bytes(b"\x80\x04x"), ".metadata is damaged"),
    "a missing part": (lambda f: (f / "__0_0.distcp").unlink(), "names __0_0.distcp, which is not there (1 of 1"),
    "a cut part": (lambda f: cut(f / "__0_0.distcp", 900), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_named(tmp_path, kind):
    breaks, why = BROKEN[kind]
    dcp.save(matrices(), checkpoint_id=tmp_path / "step1")
    breaks(tmp_path / "step1")
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert why in str(error.value) and len(str(error.value).splitlines()) == 2


def test_parts_outside_the_folder_are_refused(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    dcp.save(matrices(), checkpoint_id=tmp_path / "step1")
    metadata = FileSystemReader(tmp_path / "step1").read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (tmp_path / "step1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names \.\./secret, which is not a file of the same folder"):
        series(tmp_path)


def test_an_average_beside_the_model_in_parts(tmp_path):
    dcp.save({"model": matrices(0), "ema": matrices(5)}, checkpoint_id=tmp_path / "step1")
    result = series(tmp_path)
    assert result.table.norm[0] == pytest.approx(norm(*matrices(0).values()), rel=1e-12)
    assert result.left_out == {"ema": "an average of the weights, beside model"}


def test_metadata_is_what_torch_reads(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    dcp.save({"model": matrices()}, checkpoint_id=tmp_path)
    theirs = FileSystemReader(tmp_path).read_metadata()
    mine = distributed.read_metadata(tmp_path / ".metadata")
    assert {name: tuple(entry.size) for name, entry in theirs.state_dict_metadata.items()} == {
        name: entry.shape for name, entry in mine.items()
    }


def test_gguf_is_dequantised_and_says_so(tmp_path):
    gguf = pytest.importorskip("gguf")
    whole = {"blk.0.ffn_up.weight": tensor(8, 64), "output_norm.weight": tensor(64)}
    wanted = {}
    for step, kind in ((1, gguf.GGMLQuantizationType.Q8_0), (2, gguf.GGMLQuantizationType.F16)):
        writer = gguf.GGUFWriter(tmp_path / f"step{step}.gguf", "llama")
        values = []
        for name, value in whole.items():
            kind_here = kind if value.dim() > 1 else gguf.GGMLQuantizationType.F32
            packed = gguf.quants.quantize(value.numpy(), kind_here)
            writer.add_tensor(name, packed, raw_dtype=kind_here)
            values.append(torch.from_numpy(gguf.quants.dequantize(packed, kind_here)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        wanted[step] = norm(*values)
    result = series(tmp_path)
    assert dict(zip(result.table.step, result.table.norm, strict=True)) == pytest.approx(wanted, rel=1e-12)
    assert any("dequantised from GGUF" in note for note in result.notes)
    assert result.parameters == 8 * 64 + 64
