"""Checkpoints made by the libraries that train, and what each model's own parameters say of them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def net(seed=0):
    """A small model with a buffer that is saved."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model.register_buffer("inv_freq", torch.ones(3))
    return model


def gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=12))


def norm(model):
    """Of all parameters, each once: an independent sum in float64."""
    return math.sqrt(math.fsum(float((p.detach().double() ** 2).sum()) for p in model.parameters()))


def trained(model, steps=2):
    """The model and its AdamW after some steps, so that the optimizer has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(steps, 3, 6, generator=torch.Generator().manual_seed(1))
    for x in data:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model, optimizer


def sharded(folder):
    model = gpt2()
    model.save_pretrained(folder / "step1", max_shard_size="8KB")
    assert len(list((folder / "step1").glob("*.safetensors"))) > 1
    return norm(model)


def trainer(folder):
    from transformers import Trainer, TrainingArguments

    model = gpt2()
    args = TrainingArguments(
        str(folder), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no"
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    Trainer(model=model, args=args, train_dataset=data).train()
    return norm(model)


def accelerate(folder):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained(net()))
    accelerator.save_state(str(folder / "step_1"), safe_serialization=False)
    accelerator.free_memory(optimizer)
    return norm(model)


def lightning(folder, *callbacks):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    run = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[
            *callbacks, lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}-{step}", every_n_train_steps=3)
        ],
    )  # fmt: skip
    run.fit(module, torch.utils.data.DataLoader(torch.randn(4, 6), batch_size=1))
    return norm(module)


def lightning_average(folder):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    state = {}

    class Average(EMAWeightAveraging):
        def on_train_batch_end(self, trainer, module, *rest):
            super().on_train_batch_end(trainer, module, *rest)
            state["norm"] = norm(module)  # at the end of the fit the averages take the model's place

    lightning(folder, Average())
    return state["norm"]


def deepspeed(folder):
    """Its ZeRO-1 and 2: weights whole in one file. Made by hand; ``of_deepspeed`` is DeepSpeed, where it is there."""
    model, optimizer = trained(net())
    (place := folder / "global_step1").mkdir()
    torch.save({"module": model.state_dict(), "global_steps": 1}, place / "mp_rank_00_model_states.pt")
    parts = {"optimizer_state_dict": optimizer.state_dict()}
    torch.save(parts, place / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return norm(model)


READ = {
    "transformers, sharded": sharded, "Trainer": trainer, "accelerate": accelerate, "Lightning": lightning,
    "Lightning, averages": lightning_average, "DeepSpeed": deepspeed,
}  # fmt: skip


def of_deepspeed(stage, root):
    """DeepSpeed itself, in a process of its own: one rank, on the CPU. The norm that it prints."""
    code = f"""
import sys, torch; sys.path.insert(0, {str(HERE)!r})
import deepspeed, layouts
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled here, which takes minutes
deepspeed.init_distributed("gloo")
config = {{"train_batch_size": 2, "optimizer": {{"type": "Adam", "params": {{"torch_adam": True}}}},
          "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0}}}}
engine, *_ = deepspeed.initialize(model=layouts.net(), config=config)
loss = engine(torch.ones(2, 6)).sum(); engine.backward(loss); engine.step()
engine.save_checkpoint({str(root)!r})
with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled={stage == 3}):
    print("norm", layouts.norm(engine.module))
torch.save(engine.module.state_dict(), {str(root / "global_step2.pt")!r})
"""
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    return _printed(code, here | {"MASTER_PORT": str(29500 + os.getpid() % 400 + stage)})


def of_fsdp(root):
    """FSDP2 in two processes over gloo: PyTorch's distributed checkpoint, and a rank's own state dict."""
    code = f"""
import sys, torch; sys.path.insert(0, {str(HERE)!r})
import layouts, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.multiprocessing as mp
def worker(rank):
    dist.init_process_group("gloo", init_method="file://{root}/store", rank=rank, world_size=2)
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    model = layouts.net(); print("norm", layouts.norm(model)) if rank == 0 else None
    model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({{"model": model.state_dict()}}, checkpoint_id="{root}/step1")
    torch.save(model.state_dict(), "{root}/rank%d" % rank)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.start_processes(worker, nprocs=2, start_method="fork")
"""
    return _printed(code, {})


def of_ranks(root):
    """Tensors of two processes, in rows, uneven rows and columns, in several dtypes: two steps, and their norms."""
    code = f"""
import json, math, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
def worker(rank):
    dist.init_process_group("gloo", init_method="file://{root}/store", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        rng = torch.Generator().manual_seed(step)
        whole = {{"rows.weight": torch.randn(6, 4, generator=rng), "uneven.weight": torch.randn(7, 3, generator=rng),
                 "columns.weight": torch.randn(4, 6, generator=rng), "one.bias": torch.randn(5, generator=rng),
                 "half.weight": torch.randn(6, 4, generator=rng).half(), "few.weight": torch.randn(1, 3, generator=rng),
                 "brain.weight": torch.randn(3, 8, 2, generator=rng).bfloat16(),
                 "double.weight": torch.randn(2, 2, generator=rng).double()}}
        ways = [Shard(0), Shard(0), Shard(1), Replicate(), Shard(0), Shard(0), Shard(1), Shard(0)]
        state = {{name: distribute_tensor(value, mesh, [way]) for (name, value), way in zip(whole.items(), ways)}}
        dcp.save({{"model": state}}, checkpoint_id="{root}/step%d" % step)
        if rank == 0:
            print("norm", math.sqrt(math.fsum(float((value.double() ** 2).sum()) for value in whole.values())))
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.start_processes(worker, nprocs=2, start_method="fork")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("norm")]


def _printed(code, environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(next(line for line in done.stdout.splitlines() if line.startswith("norm")).split()[1])


def saved(state, name="step1.pt"):
    """What writes a state under a name in a folder."""

    def write(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / name)

    return write


def weights(prefix=""):
    return {prefix + name: value for name, value in net().state_dict().items()}


def adapter(kind, **options):
    """What writes the state of an adapter of PEFT that is not merged."""

    def write(folder):
        import peft

        config = getattr(peft, kind)(target_modules=["0"], **options)
        torch.save(peft.get_peft_model(net(), config).state_dict(), folder / "step1.pt")

    return write


# Files of a checkpoint that holds its weights in parts or in another format: what the refusal names.
NAMES_REFUSED = {
    "checkpoint-1/global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt": "zero_to_fp32.py",
    "step1/mp_rank_00_model_states.pt step1/mp_rank_01_model_states.pt": "deepspeed_to_transformers.py",
    "step1/layer_00-model_00-model_states.pt": "convert_neox_to_hf.py",
    "step1/pytorch_model_fsdp_0_rank0.bin step1/pytorch_model_fsdp_0_rank1.bin": "accelerate merge-weights",
    "step1/__0_0.distcp step1/__1_0.distcp": "a distributed checkpoint without its .metadata",
    "iter_0000001/mp_rank_00_000/model_optim_rng.pt iter_0000001/mp_rank_00_001/model_optim_rng.pt":
        "tools/checkpoint/convert.py of Megatron-LM",
    "iter_0000001/mp_rank_00/model_optim_rng.pt iter_0000001/mp_rank_01/model_optim_rng.pt":
        "tools/checkpoint/convert.py of Megatron-LM",
    "step1/consolidated.00.pth step1/consolidated.01.pth": "convert_llama_weights_to_hf.py",
    "checkpoint_1_100-shard0.pt checkpoint_1_100-shard1.pt": "consolidate_fsdp_shards.py",
    "step1/model/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors": "convert_nanotron_to_hf.py of nanotron",
    "step1/actor/model_world_size_2_rank_0.pt step1/actor/model_world_size_2_rank_1.pt": "verl.model_merger merge",
    "step1/model-rank-0-part-0.safetensors step1/model-rank-1-part-0.safetensors": "vLLM's sharded state",
}  # fmt: skip
MEGATRON = "iter_0000001/mp_rank_00/model_optim_rng.pt"
CONTENT_REFUSED = {
    "weights of no elements": (saved({name: torch.empty(0) for name in weights()}), "zero_to_fp32.py"),
    "Megatron, one rank, nested": (
        saved({"model": {"language_model": {"embedding": weights(), "encoder": weights()}}}, MEGATRON),
        "tools/checkpoint/convert.py of Megatron-LM"),
    "two networks": (
        saved({"generator": weights(), "discriminator": weights()}), "generator, discriminator hold tensors"),
    "a model and a head": (saved({"model": weights(), "head": weights()}), "model, head hold tensors"),
    "values beside a dictionary": (saved({"net": weights(), "w": torch.ones(3)}), "net holds tensors, beside w"),
    "a list of tensors": (
        saved({"weights": list(weights().values())}), "save the weights alone: torch.save(model.state_dict"),
    "an optimizer alone": (
        saved({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}),
        "the state of an optimizer, and no weights"),
    "two averages alone": (
        saved({"ema": weights(), "swa": weights(), "epoch": 1}), "ema, swa hold tensors, and which are the weights is"),
    "an average of two others": (
        saved({"ema.w": torch.ones(8), "ema.b": torch.ones(4), "x.w": torch.ones(8), "y.b": torch.ones(4)}),
        "may be an average"),
    "an average of other weights": (
        saved({**weights("ema_model."), "other": torch.ones(3)}), "may be an average"),
    "LoRA": (adapter("LoraConfig", r=2), "merge_and_unload"),
    "DoRA": (adapter("LoraConfig", r=2, use_dora=True), "merge_and_unload"),
    "IA3": (adapter("IA3Config", feedforward_modules=[]), "merge_and_unload"),
    "LoHa": (adapter("LoHaConfig", r=2), "merge_and_unload"),
    "OFT": (adapter("OFTConfig", oft_block_size=2), "merge_and_unload"),
}  # fmt: skip
