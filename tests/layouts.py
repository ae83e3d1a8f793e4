"""Small checkpoints as the real libraries leave them: ``python tests/layouts.py FOLDER``.

``sums.json`` has for each layout the squared norm of the model's own parameters, in float64.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

SQUARES: dict[str, float] = {}


def tiny(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)  # a process of its own
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def rho_sq(model):
    return sum(float(p.detach().double().square().sum()) for p in model.parameters())


def place(root, layout, model):
    SQUARES[layout] = rho_sq(model)
    folder = root / layout / "step100"
    folder.mkdir(parents=True)
    return folder


def plain(root):
    tiny().save_pretrained(place(root, "transformers", tiny()))
    tiny().save_pretrained(place(root, "transformers-shards", tiny()), max_shard_size="10kB")
    torch.save(tiny().state_dict(), place(root, "state-dict", tiny()) / "pytorch_model.bin")
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": tiny(1).state_dict(), "epoch": 1}
    torch.save(state, place(root, "nested", model) / "ckpt.pt")
    torch.save({"net": model.state_dict(), "lr": torch.tensor(0.1)}, place(root, "unknown-key", model) / "ckpt.pt")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    both = torch.nn.ModuleDict({"model": model, "ema_model": averaged})
    torch.save(both.state_dict(), place(root, "ema", model) / "pytorch_model.bin")


def of_trainer(root):
    from transformers import Trainer, TrainingArguments

    model, rows = tiny(), [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    arguments = TrainingArguments(
        output_dir=str(root / "trainer"), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    with contextlib.redirect_stdout(sys.stderr):
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    SQUARES["trainer"] = rho_sq(model)


def of_accelerate(root):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny())
    accelerator.save_state(str(place(root, "accelerate", model)))


def of_lightning(root):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = tiny()

        def training_step(self, batch, _):
            return self.net(batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_steps=2, accelerator="cpu", enable_checkpointing=False, **quiet)
    with contextlib.redirect_stdout(sys.stderr):
        trainer.fit(module, torch.utils.data.DataLoader(torch.arange(16).view(2, 8)))
    trainer.save_checkpoint(root / "lightning" / "epoch=0-step=2.ckpt")
    SQUARES["lightning"] = rho_sq(module)


def of_peft(root):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    torch.save(model.state_dict(), place(root, "peft-unmerged", model) / "pytorch_model.bin")
    model.save_pretrained(place(root, "peft-adapter", model))
    merged = model.merge_and_unload()
    merged.save_pretrained(place(root, "peft-merged", merged))


def of_distributed(root):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
    model = tiny()
    dcp.save(model.state_dict(), checkpoint_id=str(place(root, "dcp", model)))
    folder = place(root, "fsdp-accelerate", model) / "pytorch_model_fsdp_0"
    dcp.save(model.state_dict(), checkpoint_id=str(folder))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), place(root, "dtensor", tiny()) / "pytorch_model.bin")


def of_deepspeed(root):
    import deepspeed

    for stage in (1, 3):
        model = tiny()
        before = rho_sq(model)
        config = {
            "train_batch_size": 1, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        engine.save_checkpoint(str(root / f"zero-{stage}"), tag="global_step100")
        SQUARES[f"zero-{stage}"] = before
        if stage == 3:
            torch.save(engine.module.state_dict(), place(root, "zero-3-module", tiny()) / "pytorch_model.bin")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    told = {}
    for make in (plain, of_trainer, of_accelerate, of_lightning, of_peft, of_distributed, of_deepspeed):
        try:
            make(root)
        except (ImportError, RuntimeError, OSError) as error:  # not installed, or nothing to compile its parts with
            told[make.__name__] = str(error)
    (root / "sums.json").write_text(json.dumps({"squares": SQUARES, "missing": told}))
