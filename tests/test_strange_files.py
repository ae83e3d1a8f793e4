"""Files that public code writes and that are told apart by what they hold: memory that tensors share, an index beside
its shards, dictionaries that one optimizer trains, ranks by their names; and the true reason where they are refused."""

import io
import json
import math
import pickle

import numpy as np
import pytest
import torch
from kinds import Net, matrices, norm, own_optimizer, tensor, write

from normgrowth.checkpoints import series

pytestmark = pytest.mark.filterwarnings("ignore")


def norms_of(result):
    return dict(zip(result.table.step, result.table.norm, strict=True))


def tied_transposed(seed):
    table = tensor(7, 4, seed=seed)
    return {"embed.weight": table, "head.kernel": table.T}, [table], {"head.kernel"}


def flat_buffer(seed):
    buffer = tensor(42, seed=seed)
    return {"a": buffer[:30].view(6, 5), "b": buffer[30:].view(3, 4), "flat": buffer}, [buffer], {"a", "b"}


def parts_of_a_matrix(seed):
    whole = tensor(12, 4, seed=seed)
    return {"q": whole[:4], "qkv": whole, "v": whole[8:], "o": whole + 1}, [whole, whole + 1], {"q", "v"}


def columns(seed):
    whole = tensor(5, 8, seed=seed)
    return {"left": whole[:, :4], "right": whole[:, 4:]}, [whole], set()


def repeated(seed):
    row = tensor(1, 4, seed=seed)
    state = {"rows": row.expand(3, 4), "again": row.expand(3, 4), "other": row + 1}
    return state, [row.repeat(3, 1), row + 1], {"rows"}


def imaginary(seed):
    """Torch stores such a view with a sign that is still to be changed."""
    half = torch.complex(tensor(4, 3, seed=seed), tensor(4, 3, seed=seed + 9)).conj().imag
    return {"a": half, "b": half.clone() + 1}, [half, half + 1], set()


SHARED = [tied_transposed, flat_buffer, parts_of_a_matrix, columns, repeated, imaginary]


class OnFlatBuffer(torch.nn.Module):
    """Its parameters, but for one layer, are parts of a buffer."""

    def __init__(self, seed):
        super().__init__()
        flat = tensor(40, seed=seed)
        self.register_buffer("flat", flat)
        self.a = torch.nn.Parameter(flat[:16].view(4, 4))
        self.b = torch.nn.Parameter(flat[16:32].view(4, 4))
        self.c = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.c(x[:, :3]).sum() + (self.a + self.b).sum()


def pickled_with_flat_buffer(seed):
    module = OnFlatBuffer(seed)
    return module, [*module.parameters()], {"flat": "buffer"}


def buffer_by_convention(seed):
    big = tensor(9, 4, seed=seed)
    state = {"pos.inv_freq": big.reshape(-1), "pos.weight": big[:4], "a.weight": big[4:] + 1}
    return state, [big[:4], big[4:] + 1], {"pos.inv_freq": "buffer"}


def optimized_parts(seed):
    """The optimizer trains the parts; the buffer is longer, as it is where it is padded."""
    module = OnFlatBuffer(seed)
    saved = {"model": module.state_dict(), "optimizer": own_optimizer(module).state_dict()}
    return saved, [*module.parameters()], {"flat": "not in the state of the optimizer"}


def optimized_tie(seed):
    """Beside them two names of one matrix, which the optimizer knows once."""
    module = OnFlatBuffer(seed)
    module.d = torch.nn.Linear(3, 3, bias=False)
    module.d.weight = module.c.weight
    saved = {"model": module.state_dict(), "optimizer": own_optimizer(module).state_dict()}
    left_out = {"flat": "not in the state of the optimizer", "d.weight": "tied to c.weight"}
    return saved, [*module.parameters()], left_out


PARTS_OF_NONE = [pickled_with_flat_buffer, buffer_by_convention, optimized_parts, optimized_tie]


@pytest.mark.parametrize("kind", [*SHARED, *PARTS_OF_NONE], ids=lambda kind: kind.__name__)
def test_values_in_one_memory_count_once_and_parts_of_what_is_no_parameter_count(tmp_path, kind):
    wanted = {}
    for step in (1, 2):
        saved, values, reasons = kind(step)
        torch.save(saved, tmp_path / f"step{step}.pt")
        wanted[step] = norm(*values)
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx(wanted, rel=1e-12)
    reasons = reasons if isinstance(reasons, dict) else dict.fromkeys(reasons, "tied to")
    assert result.left_out.keys() == reasons.keys()
    assert all(result.left_out[name].startswith(why) for name, why in reasons.items())


def test_values_of_which_two_tensors_share_some_are_refused(tmp_path):
    buffer = tensor(20)
    torch.save({"a": buffer[:12], "b": buffer[8:]}, tmp_path / "step1.pt")
    with pytest.raises(ValueError, match="share a part of their memory: save clones, each parameter once"):
        series(tmp_path)


def beside(extra, suffix="pt"):
    """A net that grows, with what else its state dict holds."""

    def make(folder):
        wanted = {}
        for step in (1, 2):
            state = {name: value * step for name, value in matrices().items()}
            write({**state, **extra}, folder / f"step{step}.{suffix}")
            wanted[step] = norm(*state.values())
        return wanted

    return make


def two_dictionaries(*keys):
    """One optimizer on the tensors of several dictionaries, as OpenNMT-py and rsl_rl keep them."""

    def make(folder):
        net, wanted = Net(), {}
        for step in (1, 2):
            optimizer = own_optimizer(net)
            state = net.state_dict()
            parts = [{k: v for k, v in state.items() if k.startswith(side)} for side in "ab"]
            saved = {**dict(zip(keys, parts, strict=True)), "optim": {"optimizer": optimizer.state_dict()}}
            torch.save(saved, folder / f"model_step_{step}.pt")
            wanted[step] = norm(*net.parameters())
        return wanted

    return make


class Translator(torch.nn.Module):
    """The model of OpenNMT-py in small: a table of positions, and a generator tied to the embedding."""

    def __init__(self, seed):
        super().__init__()
        positions = torch.arange(12)[:, None] * torch.exp(-torch.arange(0, 8, 2) / 3)
        self.model, self.generator = torch.nn.Module(), torch.nn.Sequential(torch.nn.Linear(8, 9))
        self.model.pe = torch.nn.Module()
        table = torch.stack([positions.sin(), positions.cos()], -1).view(12, 1, 8)
        self.model.pe.register_buffer("pe", table)
        self.model.embeddings = torch.nn.Embedding(9, 8)
        self.model.embeddings.weight.data = tensor(9, 8, seed=seed)
        self.generator[0].weight = self.model.embeddings.weight

    def forward(self, x):
        return self.generator(self.model.embeddings.weight + x.mean())


def opennmt(folder):
    """As it saves them, the model and its generator apart."""
    wanted = {}
    for step in (1, 2):
        net = Translator(step)
        parts = {key: getattr(net, key).state_dict() for key in ("model", "generator")}
        optim = {"training_step": step, "optimizer": own_optimizer(net).state_dict()}
        torch.save({**parts, "optim": optim}, folder / f"model_step_{step}.pt")
        wanted[step] = norm(*net.parameters())
    return wanted


def olmo_core(folder):
    """Beside the weights a folder with what each rank needs to go on."""
    import torch.distributed.checkpoint as dcp

    wanted = {}
    for step in (1, 2):
        place = folder / f"step{step}"
        dcp.save({"model": matrices(step)}, checkpoint_id=place / "model_and_optim")
        for rank in (0, 1):
            write({"global_step": step, "rng": torch.arange(9), "data_loader": {}}, place / "train" / f"rank{rank}.pt")
        wanted[step] = norm(*matrices(step).values())
    return wanted


def megatron_buckets(folder):
    """Flat buffers of several optimizers, in the same distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    wanted = {}
    for step in (1, 2):
        state = matrices(step)
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float.bucket_idx_0"
        flat = torch.cat([value.flatten() for value in state.values()])
        buckets = {f"{chain}{bucket}.param": flat for chain in ("", "chained_0.", "chained_1.")}
        dcp.save({**state, **buckets}, checkpoint_id=folder / f"iter_{step:07d}")
        wanted[step] = norm(*state.values())
    return wanted


def mlx(folder):
    wanted = {}
    for step in (100, 200):
        shapes = {"a": (6, 2), "b": (2, 6)}
        state = {f"layers.0.q_proj.lora_{side}": tensor(*shape, seed=step) for side, shape in shapes.items()}
        write(state, folder / f"{step:07d}_adapters.safetensors")
        write(state, folder / "adapters.safetensors")
        wanted[step] = norm(*state.values())
    (folder / "adapter_config.json").write_text("{}")
    return wanted


def links(folder):
    """Other names of files in the same folder, as Composer and ESPnet leave them."""
    wanted = beside({})(folder)
    (folder / "latest-rank0.pt").symlink_to("step2.pt")
    return wanted


def a_tuple(folder):
    net = Net()
    torch.save((net.state_dict(), own_optimizer(net).state_dict(), 100), folder / "step1.pt")
    return {1: norm(*net.parameters())}


def converted(folder):
    """A converter's index names the output layer, which is tied and which the shards have dropped."""
    state = {"model.embed_tokens.weight": tensor(9, 4), "model.norm.weight": tensor(4, seed=1)}
    write(state, folder / "step1" / "model-00001-of-00001.safetensors")
    names = dict.fromkeys([*state, "lm_head.weight"], "model-00001-of-00001.safetensors")
    (folder / "step1" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return {1: norm(*state.values())}


def indexed(folder, shards, names):
    """Shards, and an index that says of tensors in which of them they are."""
    for file, state in shards.items():
        write(state, folder / "step1" / file)
    (folder / "step1" / f"{names.pop('index')}.index.json").write_text(json.dumps({"weight_map": names}))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def embedding_in_another_shard(folder):
    state = {"model.embed_tokens.weight": tensor(9, 4), "model.norm.weight": tensor(4, seed=1)}
    names = {"index": "model.safetensors", "model.embed_tokens.weight": FIRST, "model.norm.weight": FIRST}
    indexed(
        folder,
        {FIRST: {"model.norm.weight": tensor(4, seed=1)}, SECOND: {"model.embed_tokens.weight": tensor(9, 4)}},
        {**names, "lm_head.weight": SECOND},
    )
    return {1: norm(*state.values())}


def extra_state_in_an_index(folder):
    """Of a module that pickles its own; the names in the shard have a wrapper's prefix."""
    shard = {f"module.{name}": value for name, value in matrices().items()}
    shard["module.l.0._extra_state"] = io.BytesIO(b"state")
    file = "pytorch_model-00001-of-00001.bin"
    names = dict.fromkeys([*matrices(), "l.0._extra_state"], file)
    indexed(folder, {file: shard}, {"index": "pytorch_model.bin", **names})
    return {1: norm(*matrices().values())}


def merged(folder):
    """A whole file, whose name says from how many ranks it was joined, and one of a run on several."""
    write(matrices(5), folder / "llama_tp2_merged_step5.pt")
    write(matrices(6), folder / "world_size=8_step6.pt")
    return {5: norm(*matrices(5).values()), 6: norm(*matrices(6).values())}


def adapter_twice(folder):
    """PEFT's adapter in both formats, of which safetensors count."""
    for suffix, seed in (("bin", 0), ("safetensors", 1)):
        state = {"q.lora_A.weight": tensor(2, 3, seed=seed), "q.lora_B.weight": tensor(3, 2, seed=seed)}
        write(state, folder / "step1" / f"adapter_model.{suffix}")
    return {1: norm(tensor(2, 3, seed=1), tensor(3, 2, seed=1))}


def gguf_with_tables(folder):
    """Its tables of rotary embeddings are none of the model's weights."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "step1.gguf", "llama")
    for name, value in (("rope_freqs.weight", tensor(32)), ("blk.0.attn_q.weight", tensor(4, 32))):
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {1: norm(tensor(4, 32))}


STATE = torch.from_numpy(np.random.default_rng(0).integers(0, 255, 900, np.uint8))
READ = {
    "the state of Transformer Engine": beside({"a._extra_state": STATE}, "safetensors"),
    "an extra state of numbers": beside({"a._extra_state": tensor(7, 7)}),
    "integers younger than typed storages": beside({"table": torch.arange(9).to(torch.uint16)}),
    "OpenNMT-py": two_dictionaries("model", "generator"),
    "rsl_rl": two_dictionaries("actor_state_dict", "critic_state_dict"),
    "OLMo-core": olmo_core, "Megatron-Core, buckets": megatron_buckets, "MLX": mlx, "links": links,
    "OpenNMT-py as saved": opennmt, "an embedding in another shard": embedding_in_another_shard,
    "extra state in an index": extra_state_in_an_index, "merged": merged, "an adapter twice": adapter_twice,
    "a tuple": a_tuple, "an index of a converter": converted, "GGUF": gguf_with_tables,
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_a_strange_file_has_the_norm_of_its_model(tmp_path, kind):
    wanted = READ[kind](tmp_path)
    assert norms_of(series(tmp_path)) == pytest.approx(wanted, rel=1e-12)


def saved(name, state):
    return lambda folder: write(state, folder / name)


def dumped(tree, protocol):
    return lambda folder: (folder / "step1.pkl").write_bytes(pickle.dumps(tree, protocol=protocol))


def shard_without_a_tensor(folder):
    write(matrices(), folder / "step1" / "model-00001-of-00001.safetensors")
    names = dict.fromkeys([*matrices(), "c.weight"], "model-00001-of-00001.safetensors")
    (folder / "step1" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def index_without_tables(folder):
    names = dict.fromkeys([*matrices(), "model.embed_tokens.weight", "lm_head.weight"], FIRST)
    indexed(folder, {FIRST: matrices()}, {"index": "model.safetensors", **names})


def beside_together(folder):
    """A vector in the state of none of the dictionaries that one optimizer trains."""
    net = Net()
    state = net.state_dict()
    parts = {
        "policy": {k: v for k, v in state.items() if k[0] == "a"},
        "value": {k: v for k, v in state.items() if k[0] == "b"},
    }
    saved = {**parts, "ema": state, "log_std": torch.ones(7), "optimizer": own_optimizer(net).state_dict()}
    torch.save(saved, folder / "step1.pt")


def several_adapters(folder):
    state = {"q.lora_A.weight": tensor(2, 3), "q.lora_B.weight": tensor(3, 2)}
    for name in ("lora_one", "lora_two"):
        write(state, folder / "step1" / f"{name}.safetensors")


def flax(folder):
    """With another folder beside, of logs."""
    (folder / "checkpoint_10").write_bytes(MSGPACK)
    (folder / "logs").mkdir()


ARRAYS = {"mlp": {"w": np.ones((3, 4)), "b": np.ones(4)}}
MSGPACK = b"\x82\xa6params\x81\xa1w\xc7\x20\x01" + bytes(40)
ONE_RANK = "the file of one rank of several, by its name"
NO_ARRAYS = "holds arrays of numpy or JAX, no tensors"
UNKNOWN = "of no format that is read here"
REFUSED = {
    "a tensor that its shard has not": (shard_without_a_tensor, "the index says that c.weight is in it, and it is not"),
    "an index of which no table is there": (
        index_without_tables, "the index says that model.embed_tokens.weight is in it, and it is not"),
    "a vector beside what is trained together": (
        beside_together, "log_std lies beside policy, value, which one optimizer trains: whether it is a weight"),
    "several adapters": (several_adapters, "2 weight files and no index: lora_one"),
    "float8 in a pickle": (saved("step1.pt", {"a": torch.ones(4).to(torch.float8_e4m3fn)}), "a has dtype torch.float8"),
    "a list of tensors": (saved("step1.pt", [torch.ones(3)]), "the list holds tensors, and which are the weights is"),
    "one tensor": (saved("step1.pt", torch.ones(3)), "holds one tensor without a name"),
    "arrays, protocol 4": (dumped(ARRAYS, 4), NO_ARRAYS),
    "arrays, protocol 5": (dumped({"params": ARRAYS, "opt": (1, ARRAYS)}, 5), NO_ARRAYS),
    "an optimizer beside counts": (
        saved("step1.pt", {"optimizers": [own_optimizer(Net()).state_dict()], "iter": 5}),
        "optimizers: what a trainer needs to go on, and no weights"),
    "InternLM": (saved("10/model_tp1_pp0.pt", matrices()), ONE_RANK),
    "picotron": (saved("10/weights_tp_rank_world_size=0_2_pp_rank_world_size=0_1.pth", matrices()), ONE_RANK),
    "Flax": (flax, f"checkpoint_10: {UNKNOWN}"),
    "TensorFlow": (lambda folder: (folder / "model.ckpt-10.index").write_bytes(MSGPACK), f"ckpt-10.index: {UNKNOWN}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_strange_file_is_refused_with_the_true_reason(tmp_path, kind):
    make, why = REFUSED[kind]
    make(tmp_path)
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert why in str(error.value)
    assert "step in its name" not in str(error.value)  # all have one


def test_averages_beside_dictionaries_that_are_trained_together_are_named(tmp_path):
    net = Net()
    state = net.state_dict()
    parts = {
        "policy": {k: v for k, v in state.items() if k[0] == "a"},
        "value": {k: v for k, v in state.items() if k[0] == "b"},
    }
    saved = {**parts, "ema": state, "optimizer": own_optimizer(net).state_dict()}
    torch.save(saved, tmp_path / "step1.pt")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx({1: norm(*net.parameters())}, rel=1e-12)
    assert result.left_out == {"ema": "an average of the weights, beside policy, value"}


LINKS = {  # names of files, of links with their targets, what is to match, and the files that count
    "a link alone matches": (["step-100.pt", "step-200.pt"], {"last.pt": "step-200.pt"}, "last*", ["step-200.pt"]),
    "both match": (["step-100.pt", "step-200.pt"], {"last.pt": "step-200.pt"}, "*", ["step-100.pt", "step-200.pt"]),
    "its target is hidden": (
        ["step-100.pt", ".model-abc.pt"],
        {"final.pt": ".model-abc.pt"},
        "*",
        ["step-100.pt", ".model-abc.pt"],
    ),
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_counts_where_its_target_does_not(tmp_path, kind):
    stored, targets, match, wanted = LINKS[kind]
    states = {name: matrices(seed) for seed, name in enumerate(stored)}
    for seed, name in enumerate(stored):
        write({"model": states[name], "global_step": 100 * (seed + 1)}, tmp_path / name)
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    result = series(tmp_path, match=match)
    assert [*norms_of(result).values()] == pytest.approx([norm(*states[name].values()) for name in wanted], rel=1e-12)
    assert not result.skipped


def test_weights_whose_names_do_not_match_are_of_a_known_format(tmp_path):
    write(matrices(), tmp_path / "step1.pt")
    with pytest.raises(ValueError, match="only names that match 'stpe") as error:
        series(tmp_path, match="stpe*")
    assert "step1.pt" not in str(error.value)


def test_one_rank_of_one_is_the_whole(tmp_path):
    write({"model": matrices()}, tmp_path / "10" / "weights_tp_rank_world_size=0_1_pp_rank_world_size=0_1.pth")
    write(matrices(5), tmp_path / "20" / "model_tp0_pp0.pt")
    wanted = {10: norm(*matrices().values()), 20: norm(*matrices(5).values())}
    assert norms_of(series(tmp_path)) == pytest.approx(wanted, rel=1e-12)


def test_buffers_that_move_are_named_where_nothing_tells_them_from_parameters(tmp_path):
    for step in (1, 2):
        write({**matrices(step), "vq.embed_avg": tensor(8, 5, seed=step)}, tmp_path / f"step{step}.safetensors")
    assert any("parameters or buffers that move, and count: vq.embed_avg" in note for note in series(tmp_path).notes)


def test_modules_that_share_a_part_are_no_copies_of_each_other(tmp_path):
    """As an actor and a critic on one encoder: their own heads were drawn apart."""
    encoder = tensor(30, 5)
    heads = {"actor.head.weight": tensor(4, 30, seed=1), "critic.head.weight": tensor(4, 30, seed=2)}
    torch.save({"actor.enc.weight": encoder, "critic.enc.weight": encoder, **heads}, tmp_path / "step1.pt")
    result = series(tmp_path)
    assert norms_of(result) == pytest.approx({1: norm(encoder, *heads.values())}, rel=1e-12)
    assert not any("nearly the same values" in note for note in result.notes)


@pytest.mark.parametrize("mode", [True, False])
def test_weights_that_a_schedule_free_optimizer_extrapolates_are_named(tmp_path, mode):
    optimizer = own_optimizer(Net()).state_dict()
    optimizer["param_groups"][0]["train_mode"] = mode
    torch.save({"model": Net().state_dict(), "optimizer": optimizer}, tmp_path / "step1.pt")
    assert any("the averages that are evaluated" in note for note in series(tmp_path).notes) == mode


def test_flat_buffers_of_an_optimizer_train_all_values(tmp_path):
    """As in half precision, where one vector stands for all parameters: no doubt is left."""
    size = sum(math.prod(value.shape) for value in matrices().values())
    optimizer = {"state": {0: {"exp_avg": torch.zeros(size)}}, "param_groups": [{"params": [0]}]}
    for step in (1, 2):
        write({"model": matrices(step), "last_optimizer_state": optimizer}, tmp_path / f"step{step}.pt")
    assert not series(tmp_path).notes
