"""Layouts rebuilt from public code, which no test names elsewhere; each beside the norm that numpy gives its weights.

Each function writes two steps or more as the library named in it does, and returns ``{step: norm}`` of what its own
loader takes for the model; or it says why it is refused.
"""

import collections
import json
import pickle

import numpy as np
import pytest
import torch
from kinds import Net, Objects, matrices, norm, own_optimizer, tensor

from normgrowth.checkpoints import series

pytestmark = pytest.mark.filterwarnings("ignore")


def run(steps, write, optimizer=torch.optim.AdamW, **options):
    """A small net and its optimizer, written after each number of steps; the norms of its parameters."""
    net, norms, done = Net(), {}, 0
    trained = optimizer(net.parameters(), **options)
    for step in steps:
        for _ in range(step - done):
            trained.zero_grad()
            net(tensor(3, 5)).square().sum().backward()
            trained.step()
        done = step
        write(step, net, trained)
        norms[step] = norm(*net.parameters())
    return norms


def half(net):
    """An average: other values under the same names."""
    return {name: value * 0.5 for name, value in net.state_dict().items()}


def guided_diffusion(folder):
    def write(step, net, optimizer):
        torch.save(net.state_dict(), folder / f"model{step:06d}.pt")
        torch.save(half(net), folder / f"ema_0.9999_{step:06d}.pt")
        torch.save(optimizer.state_dict(), folder / f"opt{step:06d}.pt")

    return run((2, 5), write)


def timm(folder):
    def write(step, net, optimizer):
        epoch = step // 3
        state = {"epoch": epoch, "arch": "net", "optimizer": optimizer.state_dict(), "version": 2,
                 "args": Objects(lr=0.1), "amp_scaler": {"scale": 2.0}, "state_dict": net.state_dict(),
                 "state_dict_ema": half(net), "metric": 0.3}  # fmt: skip
        torch.save(state, folder / f"checkpoint-{epoch}.pth.tar")

    return run((3, 6, 9), write)


def k_diffusion(folder):
    def write(step, net, optimizer):
        state = {"config": {"model": {"sigma_data": 0.5}}, "model": net.state_dict(), "model_ema": half(net),
                 "opt": optimizer.state_dict(), "sched": {"last_epoch": step}, "ema_sched": {"last_epoch": 1},
                 "epoch": 1, "step": step, "gns_stats": None}  # fmt: skip
        torch.save(state, folder / f"mnist_{step:08}.pth")

    return run((2, 4), write)


def hifi_gan(folder):
    def write(step, net, optimizer):
        torch.save({"generator": net.state_dict()}, folder / f"g_{step:08d}")
        state = {"mpd": matrices(1), "msd": matrices(2), "optim_g": optimizer.state_dict(), "steps": step, "epoch": 1}
        torch.save(state | {"optim_d": optimizer.state_dict()}, folder / f"do_{step:08d}")

    return run((2, 4), write)


def detectron2(folder):
    def write(step, net, optimizer):
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": {"last_epoch": step}}
        torch.save(state | {"iteration": step}, folder / f"model_{step:07d}.pth")
        (folder / "last_checkpoint").write_text(f"model_{step:07d}.pth")

    return run((2, 4), write, torch.optim.SGD, lr=0.01, momentum=0.9)


def nnunet(folder):
    def write(step, net, optimizer):
        state = {"network_weights": net.state_dict(), "optimizer_state": optimizer.state_dict(),
                 "grad_scaler_state": {"scale": 65536.0}, "logging": {"ema_fg_dice": [np.float64(0.2)]},
                 "_best_ema": np.float64(0.2), "current_epoch": 1, "init_args": {"plans": {"x": [1]}},
                 "trainer_name": "nnUNetTrainer", "inference_allowed_mirroring_axes": (0, 1)}  # fmt: skip
        torch.save(state, folder / "checkpoint_final.pth")

    (rho,) = run((2,), write, torch.optim.SGD, lr=0.01, momentum=0.99, nesterov=True).values()
    return {0: rho}  # it counts epochs alone


class HistoryBuffer:
    def __init__(self):
        self._log_history, self._statistics_methods = np.arange(3.0), collections.OrderedDict()


def mmengine(folder):
    def write(step, net, optimizer):
        meta = {"epoch": 1, "iter": step, "cfg": "model = dict()", "seed": 3}
        hub = {"log_scalars": {"train/loss": HistoryBuffer()}, "runtime_info": {"iter": step, "max_iters": 90}}
        state = {"meta": meta, "state_dict": net.state_dict(), "message_hub": hub, "optimizer": optimizer.state_dict(),
                 "param_schedulers": [{"last_step": step}], "ema_state_dict": half(net)}  # fmt: skip
        torch.save(state, folder / f"epoch_{step}.pth")

    return run((2, 4), write)


def torchtitan(folder):
    import io

    import torch.distributed.checkpoint as dcp

    def write(step, net, optimizer):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        flat = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        losses = io.BytesIO()
        torch.save([0.1], losses)
        train = {"step": torch.tensor(step, dtype=torch.int32), "global_avg_losses": losses}
        dcp.save({"model": net.state_dict(), "optimizer": flat, "train_state": train, "dataloader": {"dp_rank_0": b"x"},
                  "lr_scheduler": {"last_epoch": step}}, checkpoint_id=folder / f"step-{step}")  # fmt: skip

    return run((2, 4), write)


def speechbrain(folder):
    def write(step, net, optimizer):
        place = folder / f"CKPT+2024-05-0{step}+10-00-0{step}+00"
        place.mkdir()
        torch.save(net.state_dict(), place / "model.ckpt")
        torch.save(optimizer.state_dict(), place / "optimizer.ckpt")
        (place / "counter.ckpt").write_text("1")
        (place / "brain.ckpt").write_text("avg_train_loss: 0.1\noptimizer_step: 2\n")
        (place / "CKPT.yaml").write_text("end-of-epoch: true\nunixtime: 1.0\n")

    return run((2, 4), write)


def vits(folder):
    def write(step, net, optimizer):
        for name, state in (("G", net.state_dict()), ("D", matrices(step))):
            torch.save({"model": state, "iteration": step, "optimizer": optimizer.state_dict(), "learning_rate": 0.1},
                       folder / f"{name}_{step}.pth")  # fmt: skip

    return run((2, 4), write)


def audiocraft(folder):
    def write(step, net, optimizer):
        state = {"best_state": {"model": half(net)}, "model": net.state_dict(), "optimizer": optimizer.state_dict(),
                 "history": [{"train": {"loss": 0.1}}], "xp.cfg": Objects(), "xp.sig": "a1b2"}  # fmt: skip
        torch.save(state, folder / f"checkpoint_{step // 2}.th")

    return run((2, 4), write)


def coqui(folder):
    def write(step, net, optimizer):
        state = {"config": {"lr": 0.1}, "model": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None,
                 "step": step, "epoch": 1, "date": "May 01, 2024", "model_loss": {"train_loss": 0.3}}  # fmt: skip
        torch.save(state, folder / f"checkpoint_{step}.pth")

    return run((2, 4), write)


def denoising_diffusion(folder):
    def write(step, net, optimizer):
        ema = {f"online_model.{name}": value for name, value in net.state_dict().items()}
        ema |= {f"ema_model.{name}": value for name, value in half(net).items()}
        ema |= {"initted": torch.tensor(True), "step": torch.tensor(step)}
        state = {"step": step, "model": net.state_dict(), "opt": optimizer.state_dict(), "ema": ema, "scaler": None}
        torch.save(state | {"version": "2.1"}, folder / f"model-{step // 2}.pt")

    return run((2, 4), write)


def tacotron(folder):
    def write(step, net, optimizer):
        torch.save({"iteration": step, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict(),
                    "learning_rate": 0.1}, folder / f"checkpoint_{step}")  # fmt: skip

    return run((2, 4), write)


def yolo(folder):
    def write(step, net, optimizer):
        state = {"epoch": 1, "best_fitness": np.float64(0.1), "model": net, "ema": None, "updates": step,
                 "optimizer": None, "opt": {"lr": 0.1}, "date": "2024-05-01"}  # fmt: skip
        torch.save(state, folder / f"epoch{step}.pt")

    return run((2, 4), write)


def plain_pickle(folder):
    """As scripts do that know pickle and not torch.save."""

    def write(step, net, optimizer):
        (folder / f"net_step{step}.pkl").write_bytes(pickle.dumps({"net": net.state_dict(), "seed": 3}))

    return run((2, 4), write)


def diffusers(folder):
    def write(step, net, optimizer):
        place = folder / f"checkpoint-{step}"
        for part, state in (("unet", net.state_dict()), ("unet_ema", half(net))):
            (place / part).mkdir(parents=True)
            torch.save(state, place / part / "diffusion_pytorch_model.bin")
        torch.save(optimizer.state_dict(), place / "optimizer.bin")
        torch.save({"scale": 1.0}, place / "scaler.pt")

    return run((2, 4), write)


def litgpt(folder):
    def write(step, net, optimizer):
        place = folder / f"step-{step:08d}"
        place.mkdir()
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 4 * step,
                 "step_count": step, "train_dataloader": {"state": 1}, "hparams": {"lr": 0.1}}  # fmt: skip
        torch.save(state, place / "lit_model.pth")
        (place / "model_config.yaml").write_text("n_layer: 2\n")
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))

    return run((2, 4), write)


LAYOUTS = [
    guided_diffusion, timm, k_diffusion, hifi_gan, detectron2, nnunet, mmengine, torchtitan, speechbrain, vits,
    audiocraft, coqui, denoising_diffusion, tacotron, yolo, plain_pickle, diffusers, litgpt,
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_public_layout_has_the_norm_of_its_model(tmp_path, layout):
    wanted = layout(tmp_path)
    result = series(tmp_path)
    assert dict(zip(result.table.step, result.table.norm, strict=True)) == pytest.approx(wanted, rel=1e-12)


def dino(folder):
    net = Net()
    state = {"student": net.state_dict(), "teacher": half(net), "optimizer": own_optimizer(net).state_dict(),
             "epoch": 1, "args": Objects(), "dino_loss": {"center": torch.zeros(1, 9)}}  # fmt: skip
    torch.save(state, folder / "checkpoint0001.pth")


REFUSED = {"two networks, of DINO": (dino, "student, teacher")}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_public_layout_that_is_refused_says_why(tmp_path, kind):
    write, why = REFUSED[kind]
    write(tmp_path)
    with pytest.raises(ValueError, match=why):
        series(tmp_path)
