# SPDX-License-Identifier: Apache-2.0
"""Draw the batch size that each rule gives on the images that come with the examples: the plots of docs/methods.md.

python examples/method_cards.py                       # all of them, ten minutes on two cores
python examples/method_cards.py --rules CABS --epochs 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
from fashion import FashionData, PaperNet
from torch import Tensor

from lightning_adabatch import (
    CABS,
    AdaDamp,
    AdaptiveBatchSize,
    Constant,
    Cooldown,
    DiveBatch,
    ExponentialDamp,
    GeoDamp,
    GradNormDamp,
    NoiseScale,
    NormTest,
    Policy,
    PolynomialDamp,
    RadaDamp,
    Schedule,
)

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the backend that needs no screen

START, MOST = 64, 512

#: The rules, with what differs from their card's suggestions so that ten epochs show what they do.
RULES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "RadaDamp": (RadaDamp(rho=0.99, grad_norm_weight=0.05, warmup=50), {"min_batch_size": START}),
    "AdaDamp": (AdaDamp(fraction=0.1), {"dwell": 10}),
    "GradNormDamp": (GradNormDamp(rho=0.99), {"min_batch_size": START}),
    "GeoDamp": (GeoDamp(factor=2, delay=2.5), {}),
    "PolynomialDamp": (PolynomialDamp(rate=0.01), {}),
    "ExponentialDamp": (ExponentialDamp(rate=1.005), {}),
    "Schedule": (Schedule({0: 64, 2.5: 128, 5: 96, 7: 256}, unit="epochs"), {}),
    "Constant": (Constant(), {}),
    "Cooldown": (Cooldown(RadaDamp(rho=0.99, grad_norm_weight=0.05, warmup=50), 8, 10), {"min_batch_size": START}),
    "NoiseScale": (NoiseScale(rho=0.95, warmup=20), {"min_batch_size": 16}),
    "CABS": (CABS(rho=0.95, scale=10.0), {"min_batch_size": 16}),
    "NormTest": (NormTest(theta=0.9), {}),
    "DiveBatch": (DiveBatch(delta=1.0, every=1.0, fraction=0.1), {}),
}


class Sizes(pl.Callback):
    """Notes the size and the LR factor of every update."""

    def __init__(self, adaptive: AdaptiveBatchSize) -> None:
        self.adaptive = adaptive
        self.rows: list[tuple[float, int, float]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: list[Tensor], batch_idx: int
    ) -> None:
        """Add a row where an update begins."""
        del trainer, pl_module, batch, batch_idx
        row = (self.adaptive.epochs, self.adaptive.batch_size or 0, self.adaptive.lr_factor)
        if not self.rows or row[0] != self.rows[-1][0]:
            self.rows.append(row)


def train(name: str, epochs: int) -> list[tuple[float, int, float]]:
    """Train the paper's network with a rule; return epochs, batch size and LR factor of every update."""
    pl.seed_everything(0, verbose=False)
    policy, settings = RULES[name]
    adaptive = AdaptiveBatchSize(policy, max_batch_size=MOST, **settings)
    sizes = Sizes(adaptive)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[adaptive, sizes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(PaperNet(), datamodule=FashionData(START))
    return sizes.rows


def draw(name: str, rows: list[tuple[float, int, float]], path: Path) -> None:
    """Draw batch size and LR factor against epochs."""
    epochs, sizes, factors = zip(*rows, strict=True)
    figure, axis = plt.subplots(figsize=(5.6, 2.4), layout="constrained")
    axis.step(epochs, sizes, where="post", color="C0")
    axis.set(xlabel="epochs", ylim=(0, 1.05 * MOST), title=f"{name}: {len(rows):,} updates")
    axis.set_ylabel("batch size", color="C0")
    other = axis.twinx()
    other.step(epochs, factors, where="post", color="C1", ls="--")
    other.set_ylim(0, 1.05)
    other.set_ylabel("LR factor", color="C1")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/methods"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.rules:
        rows = train(name, args.epochs)
        draw(name, rows, args.out / f"{name}.png")
        print(f"{name}: {len(rows)} updates, batch size {rows[-1][1]}, LR factor {rows[-1][2]:.3f}", flush=True)


if __name__ == "__main__":
    main()
