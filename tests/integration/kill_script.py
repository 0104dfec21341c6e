# SPDX-License-Identifier: Apache-2.0
"""A training that is killed and started again, over and over; run as a process of its own by test_kill.py.

The process imports torch and Lightning once, trains nothing itself, and forks a child for every life of a training.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from models import quiet
from resuming import Learner, Separable, ours_of, seed, train_loader
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, RadaDamp

SAMPLES = 200
EPOCHS = 4


class Events:
    """Tells the parent, by one byte each, that something has happened."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __call__(self) -> None:
        os.write(self.pipe, b".")


class AtomicIO(TorchCheckpointIO):
    """Checkpoints appear whole or not at all."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        self.events()
        part = f"{path}.part"
        super().save_checkpoint(checkpoint, part, storage_options)
        self.events()
        os.replace(part, path)  # noqa: PTH105
        self.events()


class Diary(pl.Callback):
    """Appends a line for every update to a file, and reports moments to be killed at."""

    def __init__(self, path: Path, events: Events) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.events = events

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.events()

    def on_after_backward(self, trainer, pl_module):
        self.events()

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.events()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ours, step = ours_of(trainer), pl_module.steps[-1]
        line = [ours.updates, step.epoch, step.indices, step.lr, step.loss, ours.batch_size, ours.lr_factor]
        os.write(self.file, (json.dumps(line) + "\n").encode())
        self.events()


def train(root: Path, start: int, events: Events) -> None:
    """Train from the last checkpoint, or from the beginning; write the final weights."""
    seed(start)
    module = Learner()
    saved = ModelCheckpoint(
        root, filename="{step}", every_n_train_steps=3, save_last=True, enable_version_counter=False
    )
    ours = AdaptiveBatchSize(RadaDamp(rho=0.9), max_batch_size=12, dwell=2)
    trainer = quiet(
        [ours, Diary(root / "diary.jsonl", events), saved],
        epochs=EPOCHS,
        enable_checkpointing=True,
        val_check_interval=0.5,
        plugins=[AtomicIO(events)],
        root=root,
    )
    last = root / "last.ckpt"
    data, validation = train_loader(data=Separable(SAMPLES)), DataLoader(Separable(12), 4)
    trainer.fit(module, data, validation, ckpt_path=last if last.exists() else None)
    torch.save(module.state_dict(), root / "final.pt")


def live(root: Path, start: int, kill_after: int | None) -> int:
    """Train in a child, kill it after so many events, and return its wait status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            train(root, start, Events(write))
            code = 0
        except BaseException:  # noqa: BLE001  # a fork must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    seen = 0
    while kill_after is None or seen < kill_after:
        if not os.read(read, 1):
            break  # it ended
        seen += 1
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(read)
    return status


def main() -> None:
    """Train once without a kill, then again and again with kills until there were enough of them."""
    root, wanted, first_seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    draw = random.Random(first_seed)
    (root / "uncut").mkdir()
    assert live(root / "uncut", 1, None) == 0
    kills, lives, folders, each = 0, 0, [], []
    while kills < wanted:
        folders.append(f"killed-{len(folders)}")
        each.append(0)
        folder = root / folders[-1]
        folder.mkdir()
        ended = False
        while not ended:
            # Until there is a checkpoint the training begins anew, from its own seed as a script does.
            start = 1000 + lives if (folder / "last.ckpt").exists() else 1
            status = live(folder, start, draw.randrange(1, 40) if kills < wanted else None)
            lives += 1
            ended = os.WIFEXITED(status)
            assert not ended or os.WEXITSTATUS(status) == 0
            kills += not ended
            each[-1] += not ended
    print(json.dumps({"kills": kills, "each": each, "lives": lives, "folders": folders}))  # noqa: T201


if __name__ == "__main__":
    main()
