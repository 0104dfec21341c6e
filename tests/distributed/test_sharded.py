# SPDX-License-Identifier: Apache-2.0
"""Models whose weights are shards: the norm is that of all of them together."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from models import Recorder, Watch, quiet
from ranks import SaveOnce, learnable, rada
from torch.utils.data import DataLoader


def test_norm_of_all_shards(both, tmp_path):
    """C66: loss and norm of two shards on gloo, decisions and LR are those of one process with the same batches."""
    first, second = (result["whole"] for result in both("resume_sharded"))
    assert first["observations"] == second["observations"]
    assert first["weights"] == second["weights"]
    pairs = list(zip(first["batches"], second["batches"], strict=True))
    order = [[i for batch in pair for i in batch["indices"]] for pair in pairs if pair[0]["epoch"] == 0]
    data = torch.utils.data.Subset(learnable(64), [i for ids in order for i in ids])
    ours, module = rada(max_batch_size=8, multiple_of=2), Recorder(lr=0.1, momentum=0.9)
    watch = Watch(ours)
    quiet([ours, watch], epochs=1, root=tmp_path).fit(module, DataLoader(data, 8))
    assert [batch.indices for batch in module.batches] == order
    assert watch.sizes == first["decisions"][: len(order)]
    assert min(batch.lr for batch in module.batches) < 0.1
    assert [b.lr for b in module.batches] == pytest.approx([b["lr"] for b in first["batches"]][: len(order)], rel=1e-5)
    for mine, theirs in zip(watch.observations, first["observations"], strict=False):
        assert (mine.loss, mine.grad_norm_sq) == pytest.approx((theirs["loss"], theirs["grad_norm_sq"]), rel=1e-4)


def test_resume_of_shards(both):
    """FSDP2 goes on in mid-epoch from a checkpoint in shards: bitwise the run that was not cut."""
    for result in both("resume_sharded"):
        whole, rest = result["whole"], result["rest"]
        assert rest["batches"] == whole["batches"][5:]
        for same in ("counts", "weights"):
            assert rest[same] == whole[same]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs CUDA")
def test_fsdp(tmp_path):
    """C66: FSDP, on one GPU or more, has the norm and the LR of a plain run, and goes on from a checkpoint."""

    def train(strategy, ckpt=None, extra=()):
        ours, module = rada(max_batch_size=8), Recorder(lr=0.1)
        watch = Watch(ours)
        settings = {"accelerator": "gpu", "devices": 1, "strategy": strategy, "epochs": 1, "root": tmp_path}
        quiet([ours, watch, *extra], **settings).fit(module, DataLoader(learnable(64), 8), ckpt_path=ckpt)
        return module, watch

    path = tmp_path / "mid.ckpt"
    (plain, expected), (whole, seen) = train("auto"), train(FSDPStrategy(), extra=[SaveOnce(path, 3)])
    for one, other in zip(expected.observations, seen.observations, strict=True):
        assert (one.loss, one.grad_norm_sq) == pytest.approx((other.loss, other.grad_norm_sq), rel=1e-3)
    assert [b.lr for b in plain.batches] == pytest.approx([b.lr for b in whole.batches], rel=1e-3)
    assert whole.batches[-1].lr < 0.1
    rest, _ = train(FSDPStrategy(), ckpt=path)
    assert [(b.indices, b.lr) for b in rest.batches] == [(b.indices, b.lr) for b in whole.batches[3:]]
