"""Files as they are met: the norm is that of the parameters, or the file is refused with the true reason."""

import json
import subprocess
import sys
import warnings

import kinds
import numpy as np
import pytest
import torch
from kinds import BUFFERS, CONSTANT, MODULES, OPTIMIZERS, QUANTISED, TABLES, Net, matrices, norm, tensor, walk, write

from normgrowth.checkpoints import series

pytestmark = pytest.mark.filterwarnings("ignore")


def norms_of(result):
    return list(result.table[result.table.layer == "total"].norm)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_weight_is_refused_whatever_its_name(tmp_path, kind):
    QUANTISED[kind](tmp_path)
    with pytest.raises(ValueError, match="a quantised model; its norm cannot be read from the file"):
        series(tmp_path)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_integers_is_no_weight(tmp_path, kind):
    state = matrices()
    write({**state, "h.0.table": TABLES[kind]}, tmp_path / "step1.safetensors")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*state.values())], rel=1e-12)
    assert result.left_out == {"h.0.table": "not floating point"}


@pytest.mark.parametrize("window", [2, 3, 7])
def test_an_index_into_a_table_of_biases_is_no_weight(tmp_path, window):
    """As in Swin and BEiT: the index of each pair of places in a window, by their distance in rows and in columns."""
    rows, columns = np.indices((window, window)).reshape(2, -1)
    distance = [axis[:, None] - axis + window - 1 for axis in (rows, columns)]
    index = torch.from_numpy(distance[0] * (2 * window - 1) + distance[1])
    state = {**matrices(), "attn.relative_bias": tensor((2 * window - 1) ** 2, 2)}
    write({**state, "attn.relative_position_index": index}, tmp_path / "step1.safetensors")
    assert norms_of(series(tmp_path)) == pytest.approx([norm(*state.values())], rel=1e-12)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("kind", MODULES)
def test_parameters_of_a_module_of_torch_are_its_norm(tmp_path, kind, suffix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = MODULES[kind]()
    state = {name: value for name, value in net.state_dict().items() if torch.is_tensor(value)}
    write(state, tmp_path / f"step1.{suffix}")
    assert norms_of(series(tmp_path)) == pytest.approx([norm(*net.parameters())], rel=1e-12)


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_shows_itself_does_not_count(tmp_path, kind):
    wanted = walk(tmp_path, lambda step: BUFFERS[kind])
    assert norms_of(series(tmp_path)) == pytest.approx(wanted, rel=1e-12)
    alone = series(tmp_path / "step2.pt")
    assert norms_of(alone) == pytest.approx([wanted[1]], rel=1e-12)
    assert set(alone.left_out) == set(BUFFERS[kind])


@pytest.mark.parametrize("kind", CONSTANT)
def test_what_never_changes_is_named_with_its_share_and_can_be_left_out(tmp_path, kind):
    wanted = walk(tmp_path, lambda step: CONSTANT[kind])
    with_all = series(tmp_path)
    squares = {name: norm(value) ** 2 for name, value in CONSTANT[kind].items()}
    all_norms = [np.sqrt(rho**2 + sum(squares.values())) for rho in wanted]
    assert norms_of(with_all) == pytest.approx(all_norms, rel=1e-12)
    assert with_all.constant == pytest.approx({name: s / all_norms[-1] ** 2 for name, s in squares.items()})
    trained = series(tmp_path, trained=True)
    assert norms_of(trained) == pytest.approx(wanted, rel=1e-12)
    assert set(trained.left_out) == set(CONSTANT[kind]) and not trained.constant
    alone = series(tmp_path / "step1.pt")
    assert any("one checkpoint alone does not say which tensors were trained" in note for note in alone.notes)
    with pytest.raises(ValueError, match="one checkpoint alone does not say what was trained"):
        series(tmp_path / "step1.pt", trained=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_in_the_file_says_what_is_trained(tmp_path, kind):
    wanted = OPTIMIZERS[kind](tmp_path)
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([wanted], rel=1e-12)
    assert list(result.table.step) == [2]
    assert all(why.startswith(UNTRAINED) for why in result.left_out.values()) and result.left_out


@pytest.mark.parametrize("kind", kinds.FOLLOWERS)
def test_a_module_that_follows_another_one_is_no_second_set_of_parameters(tmp_path, kind):
    wanted = []
    for step in (1, 2, 3):
        state, copy = kinds.FOLLOWERS[kind](step)
        write({**state, **copy}, tmp_path / f"step{step}.safetensors")
        wanted.append(norm(*state.values()))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert set(result.left_out) == set(copy) and all("an average" in why for why in result.left_out.values())
    assert norms_of(series(tmp_path / "step1.safetensors")) == pytest.approx(wanted[:1], rel=1e-12)


@pytest.mark.parametrize("kind", kinds.NO_FOLLOWERS)
def test_two_modules_with_values_of_their_own_both_count(tmp_path, kind):
    state = kinds.NO_FOLLOWERS[kind](1)
    write(state, tmp_path / "step1.safetensors")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*state.values())], rel=1e-12) and not result.left_out


def test_two_modules_with_nearly_the_same_values_are_named(tmp_path):
    state = kinds.under("question", 1)
    write({**state, **kinds.near(state, "question", "context")}, tmp_path / "step1.safetensors")
    result = series(tmp_path)
    (note,) = [note for note in result.notes if "nearly" in note]
    assert note.startswith("context and question hold nearly the same values") and not result.left_out


@pytest.mark.parametrize("is_first", [True, False])
def test_the_optimizer_has_no_state_for_a_module_that_follows(tmp_path, is_first):
    wanted = []
    for step in (1, 2):
        state = kinds.under("encoder_q", step)
        copy = kinds.near(state, "_q", "_k")
        shapes = [None] * 3 + [*state.values()] if is_first else [*state.values()] + [None] * 3
        moments = {i: {"momentum_buffer": value} for i, value in enumerate(shapes) if value is not None}
        optimizer = {"state": moments, "param_groups": [{"params": list(range(6))}]}
        both = {**copy, **state} if is_first else {**state, **copy}
        saved = {"state_dict": {**both, "queue": tensor(8, 9, seed=step)}, "optimizer": optimizer}
        write(saved, tmp_path / f"step{step}.pt")
        wanted.append(norm(*state.values()))
    assert norms_of(series(tmp_path)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", kinds.TOLD)
def test_what_the_file_or_the_series_tells_of_a_tensor(tmp_path, kind):
    wanted = []
    for step in (1, 2, 3):
        state, saved = kinds.TOLD[kind](step)
        write(saved, tmp_path / f"step{step}.pt")
        wanted.append(norm(*state.values()))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert set(result.left_out) == set(saved.get("module", saved)) - set(state)


def test_a_trained_number_is_no_count(tmp_path):
    scales = (2.0, 2.5, 4.0)
    for step, scale in enumerate(scales):
        write({**matrices(), "logit_scale": torch.tensor(scale)}, tmp_path / f"step{step}.pt")
    wanted = [norm(*matrices().values(), torch.tensor(scale)) for scale in scales]
    assert norms_of(series(tmp_path)) == pytest.approx(wanted, rel=1e-12)


def test_of_two_vectors_of_one_shape_the_series_says_which_is_trained(tmp_path):
    net, wanted = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in (1, 2):
        optimizer.zero_grad()
        net(tensor(3, 5)).square().sum().backward()
        optimizer.step()
        state = {**net.state_dict(), "criterion.weight": torch.tensor([1.0, 5.0, 20.0, 1.0])}
        saved = {"state_dict": state, "optimizer_states": [optimizer.state_dict()], "global_step": step}
        torch.save(saved, tmp_path / f"epoch={step}.ckpt")
        wanted.append(norm(*net.parameters()))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert [*result.left_out] == ["criterion.weight"] and result.left_out["criterion.weight"].startswith(UNTRAINED)


@pytest.mark.parametrize("copy", ["out_head.weight", "decoder.proj", "generator.linear.kernel"])
def test_matrices_that_are_equal_in_every_checkpoint_are_one(tmp_path, copy):
    wanted = []
    for step in (1, 2, 3):
        state = {"tok_emb.weight": tensor(7, 4, seed=step), **matrices(step)}
        write({**state, copy: state["tok_emb.weight"].clone()}, tmp_path / f"step{step}.safetensors")
        wanted.append(norm(*state.values()))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert len(result.left_out) == 1 and "tied to " in next(iter(result.left_out.values()))
    assert norms_of(series(tmp_path / "step1.safetensors")) == pytest.approx(wanted[:1], rel=1e-12)


def test_three_names_of_one_matrix(tmp_path):
    table = tensor(7, 4)
    names = ("tok_emb.weight", "source.table", "out.projection.weight")
    write({**matrices(), **{name: table.clone() for name in names}}, tmp_path / "step1.safetensors")
    assert norms_of(series(tmp_path)) == pytest.approx([norm(table, *matrices().values())], rel=1e-12)


def test_matrices_that_only_start_from_the_same_values_are_two(tmp_path):
    same = {f"layers.{i}.mixer.A_log": torch.log(torch.arange(1.0, 5)).repeat(6, 1) for i in range(3)}
    write({**matrices(), **same}, tmp_path / "step0.safetensors")
    assert norms_of(series(tmp_path)) == pytest.approx([norm(*matrices().values(), *same.values())], rel=1e-12)


def harmless():
    net, pickles = kinds.harmless()
    return [(kind, norm(*net.parameters()), state) for kind, state in pickles.items()]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(("wanted", "state"), [case[1:] for case in harmless()], ids=[case[0] for case in harmless()])
def test_harmless_objects_beside_weights_do_not_matter(tmp_path, wanted, state, is_zip):
    torch.save(state, tmp_path / "step1.pt", _use_new_zipfile_serialization=is_zip)
    assert norms_of(series(tmp_path)) == pytest.approx([wanted], rel=1e-12)


UNTRAINED = "not in the state of the optimizer that is stored with it ("

STEPS = {  # what is saved, under which name; the step that it records
    "Lightning": ("last.ckpt", {"state_dict": matrices(), "global_step": 700, "epoch": 3}, 700),
    "Lightning, by epoch": ("epoch=3.ckpt", {"state_dict": matrices(), "global_step": 700, "epoch": 3}, 700),
    "nanoGPT": ("ckpt.pt", {"model": matrices(), "iter_num": 250, "model_args": {}, "config": {"max_iters": 9}}, 250),
    "fairseq": ("checkpoint_last.pt", {"model": matrices(), "optimizer_history": [{"num_updates": 40}]}, 40),
    "Composer": ("latest-rank.pt", {"state": {"model": matrices(), "timestamp": {"iteration": 3}}}, 3),
    "a tensor": ("best.pth", {"model": matrices(), "step": torch.tensor(12)}, 12),
    "in its name, and in the file": ("step5.pt", {"model": matrices(), "global_step": 6}, 5),
    "none": ("final.pt", matrices(), 0),
}


@pytest.mark.parametrize("kind", STEPS)
def test_the_step_is_in_the_name_or_in_the_file(tmp_path, kind):
    name, state, step = STEPS[kind]
    write(state, tmp_path / name)
    for place in (tmp_path, tmp_path / name):
        result = series(place)
        assert list(result.table.step) == [step]
        assert norms_of(result) == pytest.approx([norm(*matrices().values())], rel=1e-12)
        assert any("written as step 0" in note for note in result.notes) == (kind == "none")


def test_the_step_is_in_what_a_trainer_leaves_beside_the_weights(tmp_path):
    for step, name in ((300, "best"), (100, "first"), (200, "checkpoint-200")):
        write(matrices(step), tmp_path / name / "model.safetensors")
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 999}))
    result = series(tmp_path)
    assert list(result.table.step) == [100, 200, 300] and not result.skipped


@pytest.mark.parametrize(
    "suffix", ["pth.tar", "pt.tar", "tar", "pkl", "model", "state", "ckpt.pt", "weights", "pth", ""]
)
def test_suffixes_are_as_people_write_them(tmp_path, suffix):
    """And a step of which the file has another suffix does not vanish."""
    states = {step: matrices(step) for step in (1000, 2000, 3000)}
    for step, state in states.items():
        name = f"checkpoint-{step}.{suffix}" if step == 3000 else f"checkpoint-{step}.pt"
        torch.save({"state_dict": state, "args": object}, tmp_path / name.rstrip("."))
    result = series(tmp_path)
    assert list(result.table.step) == [1000, 2000, 3000] and not result.skipped
    assert norms_of(result) == pytest.approx([norm(*state.values()) for state in states.values()], rel=1e-12)


@pytest.mark.parametrize(
    "beside",
    [{"global_step": 1, "rng": torch.arange(9, dtype=torch.uint8)}, {"epoch": 3}, {"losses": tensor(9), "seen": [1]}],
)
def test_what_a_trainer_needs_beside_the_weights_is_none(tmp_path, beside):
    """As in OLMo's ``step1000-unsharded``: ``model.pt``, ``optim.pt`` and ``train.pt``."""
    wanted = []
    for step in (1000, 2000):
        folder = tmp_path / f"step{step}-unsharded"
        write(matrices(step), folder / "model.pt")
        write(beside, folder / "train.pt")
        write({"state": {}, "param_groups": []}, folder / "optim.pt")
        wanted.append(norm(*matrices(step).values()))
    result = series(tmp_path)
    assert list(result.table.step) == [1000, 2000] and norms_of(result) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "module._orig_mod.", "module.module.", "_orig_mod."])
def test_wrappers_may_change_midway(tmp_path, prefix):
    for step in (1, 2, 3):
        state = {(prefix if step == 2 else "") + name: value * step for name, value in matrices().items()}
        write(state, tmp_path / f"step{step}.pt")
    result = series(tmp_path)
    assert list(result.table.step) == [1, 2, 3] and not result.skipped


def test_a_tensor_without_elements_is_harmless_and_weights_without_elements_are_parts(tmp_path):
    write({**matrices(), "placeholder": torch.empty(0), "none.weight": torch.empty(0)}, tmp_path / "step1.pt")
    assert norms_of(series(tmp_path)) == pytest.approx([norm(*matrices().values())], rel=1e-12)
    without = {name: torch.empty(0) if "weight" in name else value for name, value in matrices().items()}
    for state in ({**matrices(), "a.weight": torch.empty(0), "a.bias": torch.ones(6)}, without):
        write(state, tmp_path / "parts" / "step1.pt")
        with pytest.raises(ValueError, match=r"has no elements, as in parts of ZeRO-3: .*zero_to_fp32"):
            series(tmp_path / "parts")


def test_torchscript_is_called_by_its_name(tmp_path):
    torch.jit.save(torch.jit.script(Net()), tmp_path / "step1.pt")
    with pytest.raises(ValueError, match="a TorchScript archive, which holds code"):
        series(tmp_path)


AVERAGES = [
    "ema_step_{}.pt",
    "step_{}_ema.pt",
    "step_{}.ema.pt",
    "swa-step_{}.pt",
    "averaged_step_{}.pt",
    "step_{}-EMA.pt",
]


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_not_the_series(tmp_path, name):
    wanted = walk(tmp_path, lambda step: {}, "step_{}.pt")
    for step in (1, 2, 3):
        write(matrices(step + 70), tmp_path / name.format(step))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert [skip.label for skip in result.skipped] == [str(tmp_path / name.format(step)) for step in (1, 2, 3)]
    assert all("an average of the weights" in skip.why for skip in result.skipped)
    for step in (1, 2, 3):
        write(matrices(step), tmp_path / "averages" / name.format(step))
    alone = series(tmp_path / "averages")
    assert len(alone.table) == 3 and all("an average" in note for note in alone.notes)


def test_of_one_file_a_vector_of_a_loss_is_told_from_the_bias_of_a_trained_module(tmp_path):
    wanted = kinds.with_state({"criterion.weight": torch.tensor([1.0, 5.0, 20.0, 1.0])})(tmp_path)
    assert norms_of(series(tmp_path)) == pytest.approx([wanted], rel=1e-12)


def test_what_an_optimizer_does_not_settle_is_said(tmp_path):
    """Of a matrix before the first one, of its shape and not in a trained module, either may be the trained one."""
    kinds.with_state({"a.fixed": tensor(6, 5, seed=5)}, first=True)(tmp_path)
    (note,) = series(tmp_path).notes
    assert "the optimizer trains 4 tensors; which of these 5 is not said: all are counted" in note


def test_a_second_model_counts_and_is_named(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    first, second = Net(0), torch.nn.Linear(3, 3)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(first, second)
    accelerator.save_state(str(tmp_path / "step_1"))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*first.parameters(), *second.parameters())], rel=1e-12)
    assert any("model_1.safetensors: a second model" in note for note in result.notes)


def test_a_second_model_like_the_first_is_named_and_does_not_count(tmp_path):
    write(matrices(0), tmp_path / "step_1" / "model.safetensors")
    write(matrices(50), tmp_path / "step_1" / "model_1.safetensors")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*matrices(0).values())], rel=1e-12)
    assert "model_1.safetensors" in result.left_out


def test_modules_beside_the_first(tmp_path):
    """Those that modules.json names count; others are named."""
    place = tmp_path / "step1"
    write(matrices(0), place / "model.safetensors")
    write({"linear.weight": tensor(3, 5)}, place / "2_Dense" / "model.safetensors")
    write({"linear.weight": tensor(3, 6)}, place / "critic" / "pytorch_model.bin")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*matrices(0).values())], rel=1e-12)
    assert set(result.left_out) == {"2_Dense/", "critic/"}
    (place / "modules.json").write_text(json.dumps([{"idx": 0, "path": ""}, {"idx": 2, "path": "2_Dense"}]))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx([norm(*matrices(0).values(), tensor(3, 5))], rel=1e-12)
    assert set(result.left_out) == {"critic/"}


FSDP1 = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def worker(rank, original):
    dist.init_process_group("gloo", init_method="file://%s/store%d" % (sys.argv[1], original), rank=rank, world_size=2)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 4))
    net = FSDP(net, device_id=torch.device("cpu"), use_orig_params=bool(original))
    state = {name: p.detach() for name, p in net.named_parameters()}
    torch.save(state, "%s/%d-step%d.pt" % (sys.argv[1], original, rank))
    dist.destroy_process_group()
if __name__ == "__main__":
    for original in (0, 1):
        mp.start_processes(worker, args=(original,), nprocs=2, start_method="fork")
"""


@pytest.mark.slow
def test_a_rank_of_fsdp_is_refused(tmp_path):
    done = subprocess.run([sys.executable, "-c", FSDP1, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for file in tmp_path.glob("*.pt"):
        with pytest.raises(ValueError, match=r"of FSDP1, a rank's part of weights|as in parts of ZeRO-3"):
            series(file)


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module._flat_param", "flat_param_0", "_fpw_module.flat_param"])
def test_flat_parameters_are_a_ranks_part(tmp_path, name):
    write({name: tensor(40), "x._flat_param": tensor(3)}, tmp_path / "step1.pt")
    with pytest.raises(ValueError, match="of FSDP1, a rank's part of weights"):
        series(tmp_path)


RANKS = {
    "model_rank0.pt": "the file of one rank", "step1-rank_3.pth": "the file of one rank",
    "model_world_size_2_rank_0.pt": "verl.model_merger merge",
    "model-rank-0-part-0.safetensors": "vLLM's sharded state",
    "model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors": "nanotron's, weights in parts",
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_one_rank_alone_is_refused(tmp_path, name):
    write(matrices(), tmp_path / "step1" / name)
    for place in (tmp_path, tmp_path / "step1" / name):
        with pytest.raises(ValueError, match=RANKS[name]):
            series(place)


def test_arguments_of_megatron_say_that_a_file_is_a_part(tmp_path):
    arguments = kinds.Objects(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    write({"args": arguments, "model": matrices()}, tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="a rank's part of weights"):
        series(tmp_path)


@pytest.mark.parametrize("names", [("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")])
def test_an_adapter_alone_has_its_own_norm_and_is_called_one(tmp_path, names):
    wanted = []
    for step in (1, 2):
        state = {f"base_model.model.h.0.q.{name}": tensor(3, 3, seed=i) * step for i, name in enumerate(names)}
        write(state, tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")
        (tmp_path / f"checkpoint-{step}" / "adapter_config.json").write_text("{}")
        torch.save({"layers": ["total"], "steps": 2, "at": [1, 2], "sums": torch.ones(2, 1, 2)},
                   tmp_path / f"checkpoint-{step}" / "norms.pt")  # fmt: skip
        wanted.append(norm(*state.values()))
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    assert any("an adapter alone" in note for note in result.notes)


def test_norms_of_ours_are_no_weights(tmp_path):
    from normgrowth.norms import NormTracker

    net = Net()
    tracker = NormTracker(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracker.attach(optimizer)
    net(tensor(3, 5)).sum().backward()
    optimizer.step()
    torch.save(tracker.state_dict(), tmp_path / "step1.pt")
    with pytest.raises(ValueError, match="holds the history of a NormTracker"):
        series(tmp_path)
