"""Files as they are met, one recipe a kind: what each holds, beside an independent norm. Nothing of ours is used."""

import argparse
import math
import pathlib
import types

import numpy as np
import torch
from safetensors.torch import save_file

RNG = np.random.default_rng


def tensor(*shape, seed=0, scale=1.0):
    return torch.from_numpy(RNG(seed).standard_normal(shape) * scale).float()


def norm(*tensors):
    """Of all values, each as it is stored, in float64."""
    arrays = [t.detach().double().numpy() for t in tensors]
    return math.sqrt(math.fsum(float((a * a).sum()) for a in arrays))


def matrices(seed=0):
    return {
        "a.weight": tensor(6, 5, seed=seed),
        "b.weight": tensor(4, 6, seed=seed + 1),
        "b.bias": tensor(4, seed=seed + 2),
    }


def write(state, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)


def walk(folder, beside, name="step{}.pt", steps=(1, 2, 3)):
    """A series of matrices that grow, with what stands beside them in each; the norms of the matrices alone."""
    norms = []
    for step in steps:
        state = {key: value * step for key, value in matrices().items()}
        write({**state, **beside(step)}, folder / name.format(step))
        norms.append(norm(*state.values()))
    return norms


# 1. Quantised weights under names of their own: refused.
def packed(dtype, names, shape=(4, 8, 8)):
    def make(folder):
        info = torch.iinfo(dtype)
        values = RNG(1).integers(max(info.min, -(2**31)), min(info.max, 2**31 - 1), size=shape, endpoint=True)
        state = {"embed.weight": tensor(16, 8)}
        state |= {names: torch.from_numpy(values).to(dtype), f"{names}_scales": torch.ones(4, 8, dtype=torch.uint8)}
        write(state, folder / "step1" / "model.safetensors")

    return make


def packed_values(dtype, *shape):
    info = torch.iinfo(dtype)
    return torch.from_numpy(RNG(2).integers(info.min, info.max, shape, np.int64)).to(dtype)


def beside_embeddings(state):
    """Embeddings are large, and often the only matrix that is not quantised; norms and scales are vectors."""
    beside = {"embed.weight": tensor(1000, 16), "norm.weight": tensor(16), "q_proj.scale": tensor(16, 1)}
    return lambda folder: write({**beside, **state}, folder / "step1.safetensors")


QUANTISED = {
    "gpt-oss": packed(torch.uint8, "layers.0.mlp.experts.gate_up_proj_blocks"),
    "quanto": packed(torch.int8, "layers.0.mlp.weight._data", (16, 16)),
    "torchao": packed(torch.int8, "layers.0.mlp._weight_qdata", (16, 16)),
    "HQQ": packed(torch.uint8, "layers.0.q_proj.W_q", (16, 8)),
    "AQLM": packed(torch.int16, "layers.0.q_proj.codes", (16, 8, 1)),
    "codes of 64 bits": lambda folder: write(
        {"embed.weight": tensor(16, 8), "q_proj.codes": torch.from_numpy(RNG(3).integers(0, 256, (64, 64)))},
        folder / "step1.safetensors",
    ),
    "QuIP#": packed(torch.int64, "layers.0.q_proj.Qidxs", (16, 16)),
    "packed, flat": packed(torch.uint8, "layers.0.q_proj.packed", (128,)),
    "AWQ": packed(torch.int32, "layers.0.q_proj.qzeros", (16, 8)),
    "indices of 16 bits": packed(torch.int16, "layers.0.q_proj.Qidxs", (16, 8)),
    "indices of 8 bits": packed(torch.uint8, "layers.0.q_proj.indices", (16, 8)),
    "smaller than the embeddings": beside_embeddings({"q_proj.W_q": packed_values(torch.uint8, 16, 16)}),
    "three bits in 32": beside_embeddings({"q_proj.packed_rows": packed_values(torch.int32, 2, 16)}),
    "flat, 64 bits": beside_embeddings({"q_proj.dense": packed_values(torch.int64, 64)}),
    "layers in dictionaries": lambda folder: write(
        {"norm": {"weight": tensor(16)}, "q_proj": {"W_q": packed_values(torch.uint8, 8, 16), "meta": {"nbits": 4}}},
        folder / "step1.pt",
    ),
    "rows of a codebook": beside_embeddings(
        {"q_proj.centroids": tensor(256, 8), "q_proj.assignments": torch.from_numpy(RNG(3).integers(0, 256, 512))}
    ),
}
# Tables that are integers and no weights: read.
TABLES = {
    "relative positions": (torch.arange(16)[:, None] - torch.arange(16)),
    "positions": torch.arange(64).repeat(4, 1),
    "positions of 16 bits": torch.arange(64, dtype=torch.int16).repeat(4, 1),
    "counts": torch.tensor([10**9] * 64),
    "old mask": torch.ones(1, 1, 12, 12, dtype=torch.uint8).tril(),
    "types": torch.zeros(1, 64, dtype=torch.int64),
    "bool": torch.ones(16, 16, dtype=torch.bool),
    "permutation": torch.from_numpy(RNG(0).permutation(64)),
    "a permutation of 32 bits": torch.from_numpy(RNG(0).permutation(64).astype(np.int32)),
    "windows": (torch.arange(7)[:, None] * 13 + torch.arange(7)).repeat(3, 1),
}


# 2. Buffers: of one file.
class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.a, self.b = torch.nn.Linear(5, 6), torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def pruned():
    from torch.nn.utils import prune

    net = Net()
    prune.l1_unstructured(net.a, "weight", 0.5)
    prune.random_unstructured(net.b, "weight", 0.3)
    return net


def spectral():
    net = Net()
    torch.nn.utils.spectral_norm(net.a)
    torch.nn.utils.parametrizations.spectral_norm(net.b)
    return net


def orthogonal():
    net = Net()
    torch.nn.utils.parametrizations.orthogonal(net.a)
    torch.nn.utils.parametrizations.weight_norm(net.b)
    return net


def prepared_for_quantisation(in_training):
    from torch.ao import quantization

    net = Net().train(in_training)
    qconfig = quantization.get_default_qat_qconfig if in_training else quantization.get_default_qconfig
    net.qconfig = qconfig("fbgemm")
    prepared = quantization.prepare_qat(net) if in_training else quantization.prepare(net)
    prepared(tensor(3, 5))
    return prepared


def fake_quantised():
    return prepared_for_quantisation(in_training=True)


def observed():
    return prepared_for_quantisation(in_training=False)


def normalised():
    net = Net()
    net.norm = torch.nn.BatchNorm1d(4)
    net.norm.running_var += 7
    return net


MODULES = {  # modules of torch, whose parameters say what counts
    "pruning": pruned, "spectral norm, both": spectral, "orthogonal, weight norm": orthogonal,
    "fake quantisation": fake_quantised, "observers": observed, "batch norm": normalised,
}  # fmt: skip


def sinusoids(length, width, halves=False):
    angles = np.arange(length)[:, None] / 10_000 ** (2 * np.arange(width // 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    if not halves:
        table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, -1)
    return torch.from_numpy(table).float()


BUFFERS = {
    "sinusoids in halves": {"encoder.positional_embedding": sinusoids(50, 8, halves=True)},
    "sinusoids in turn": {"pos_table": sinusoids(50, 8)[None]},
    "a version": {"encoder.version": torch.tensor([3.0])},
    "a count": {"quantizer.num_updates": torch.tensor(4000.0)},
    "minus infinity": {"h.0.attn.IGNORE": torch.tensor(-torch.inf)},
    "a mask of minus infinity": {"h.0.attn.added": torch.full((5, 5), -torch.inf).triu(1)},
    "a row of minus infinity": {"h.0.attn.hidden": torch.tensor([0.0, -torch.inf, 0.0])},
}
# The same in every checkpoint of a series, whatever their name.
CONSTANT = {
    "IGNORE": {f"blocks.{i}.attn.IGNORE": torch.tensor(-1e5) for i in range(2)},
    "class weights": {"criterion.weight": torch.tensor([1.0, 5.0, 20.0])},
    "pixels": {"normalize.mean": torch.full((3, 1, 1), 0.48), "normalize.std": torch.full((3, 1, 1), 0.22)},
    "a window": {"stft.window": torch.hann_window(40)},
    "a filter bank": {"mel.fb": tensor(20, 8).abs()},
    "a frozen backbone": {"backbone.weight": tensor(9, 9, seed=9)},
}


def own_optimizer(net, steps=2, kind=torch.optim.AdamW, **options):
    optimizer = kind(net.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        net(tensor(3, 5)).square().sum().backward()
        optimizer.step()
    return optimizer


def with_state(beside, first=False, kind=torch.optim.AdamW, **options):
    """One file with the state of an optimizer, and buffers whose names do not tell."""

    def make(folder):
        net = Net()
        optimizer = own_optimizer(net, kind=kind, **options)
        state = {**beside, **net.state_dict()} if first else {**net.state_dict(), **beside}
        write({"state_dict": state, "optimizer_states": [optimizer.state_dict()], "global_step": 2}, folder / "x.ckpt")
        return norm(*net.parameters())

    return make


OPTIMIZERS = {
    "class weights, another shape": with_state({"criterion.weight": torch.tensor([1.0, 5.0, 20.0])}),
    "a bank before the weights": with_state({"mel.fb": tensor(20, 8)}, first=True),
    "a scalar, of SGD with momentum": with_state(
        {"temperature": torch.tensor(9.0)}, kind=torch.optim.SGD, lr=0.1, momentum=0.9
    ),
    "a matrix, of Adafactor": with_state({"table": tensor(7, 3)}, kind=torch.optim.Adafactor),
    "a matrix of a trained shape, after": with_state({"fixed": tensor(6, 5, seed=5)}),
}  # fmt: skip


# 14. Pickles with harmless objects.
class Objects:
    """What trainers store beside weights."""

    def __init__(self, **values):
        self.__dict__.update(values)


def harmless():
    net = Net()
    optimizer = own_optimizer(net)
    return net, {
        "argparse": {"args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("x")), "model": net.state_dict()},
        "the optimizer itself": {"model": net.state_dict(), "optimizer": optimizer, "epoch": 3},
        "dict as a function": {"model": net.state_dict(), "meta": __import__("collections").defaultdict(dict, a={})},
        "numpy": {"model": net.state_dict(), "best": np.float64(0.3), "rng_state": np.arange(5)},
        "an object": {"state_dict": net.state_dict(), "config": Objects(width=3, inner=Objects())},
        "a namespace": {"model": net.state_dict(), "cfg": types.SimpleNamespace(x=1)},
        "a module, whole": net,
        "a module in a dictionary": {"model": net, "epoch": 1},
        "an own dictionary": {"weights": Own(net.state_dict())},
    }


class Own(dict):
    """A dictionary of a class of one's own."""


# A module and one that follows it in the same state dict.
def near(state, old, new, scale=0.97):
    return {name.replace(old, new, 1): value * scale + 0.01 for name, value in state.items()}


def under(prefix, seed):
    return {f"{prefix}.{name}": value for name, value in matrices(seed).items()}


def two_critics(seed):
    critics = {**under("critic1", seed), **under("critic2", seed + 9)}
    return {**critics, "actor.weight": tensor(3, 3, seed=seed)}, near(critics, ".", "_target.")


def more_in_student(seed):
    student = under("student.backbone", seed)
    return {**student, "student.backbone.mask_token": tensor(1, 1, 5)}, near(student, "student", "teacher")


FOLLOWERS = {  # parameters, and the copies
    "targets of two critics": two_critics,
    "a teacher, with fewer tensors": more_in_student,
    "a target network": lambda seed: (s := under("online_encoder.net", seed), near(s, "online", "target")),
    "an encoder by momentum": lambda seed: (s := under("vision", seed), near(s, "vision", "vision_m")),
}
NO_FOLLOWERS = {
    "another teacher": lambda seed: {**under("student", seed), **under("teacher", 77)},
    "two languages": lambda seed: {**under("source", seed), **under("target", seed + 50)},
}


# What a file says of its tensors beside an optimizer's state.
def listed_buffers(step):
    state = {name: value * step for name, value in matrices().items()}
    saved = {"module": {**state, "a.table": tensor(6, 5, seed=step)}, "buffer_names": ["a.table"], "mp_world_size": 1}
    return state, saved


def flat_state(prefix, *moments):
    def make(step):
        state = {name: value * step for name, value in matrices().items()}
        return state, {**state, **{f"{prefix}{n}.{m}": v * 0.1 for n, v in state.items() for m in moments}}

    return make


def counted(step):
    state = {name: value * step for name, value in matrices().items()}
    return state, {**state, "tokens_seen": torch.tensor(512.0 * step), "passes": torch.tensor([float(step)])}


TOLD = {
    "buffers, listed": listed_buffers,
    "moments beside the weights": flat_state("optimizer.state.", "exp_avg", "exp_avg_sq"),
    "moments under the weights": flat_state("", "momentum_buffer"),
    "counts that grow": counted,
}
