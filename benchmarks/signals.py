# SPDX-License-Identifier: Apache-2.0
"""What a rule could follow, at checkpoints of examples/fashion_mnist.py: loss, gradient norm, variance, noise scale.

python benchmarks/signals.py fashion_mnist/GeoDamp-1000/last.ckpt ... --data DIR

Over the training set, mirrored at random as in training: F, ‖∇F‖², tr Σ of single images' gradients, and the gradient
noise scale tr Σ / ‖∇F‖² (McCandlish et al., An empirical model of large-batch training, appendix A.1). They come from
batches of B images: E‖∇L_B‖² = ‖∇F‖² + tr Σ / B.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fashion_mnist import Net, WholeBatches, WholeData


@dataclass(frozen=True)
class Signals:
    """Means over a training set.

    Attributes:
        loss: F.
        grad_norm_sq: ‖∇F‖², with the part of the noise taken out, so that it may be below 0.
        grad_variance: tr Σ.
    """

    loss: float
    grad_norm_sq: float
    grad_variance: float

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale in samples; infinite where no gradient is left above the noise."""
        return self.grad_variance / self.grad_norm_sq if self.grad_norm_sq > 0 else math.inf


def measure(net: Net, images: WholeBatches, batch_size: int) -> Signals:
    """Go through the training set once, in full batches of at least two.

    Raises:
        ValueError: If the images do not make two batches.
    """
    order = torch.randperm(len(images))
    batches = [part for part in order.split(batch_size) if len(part) == batch_size]
    if len(batches) < 2:
        raise ValueError(f"{len(images)} images make no two batches of {batch_size}. Set a smaller --batch-size.")
    parameters = list(net.parameters())
    total, squares, losses = torch.zeros(()), 0.0, 0.0
    for part in batches:
        pictures, labels = images.__getitems__(part.tolist())
        loss = cross_entropy(net.net(pictures), labels)
        gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])
        total, squares, losses = total + gradient, squares + float(gradient @ gradient), losses + float(loss.detach())
    count = len(batches)
    mean: Tensor = total / count
    # Of the batches' gradients: mean squared distance from their mean, without bias, is tr Σ / B.
    variance = (squares / count - float(mean @ mean)) * count / (count - 1)
    return Signals(losses / count, float(mean @ mean) - variance / count, batch_size * variance)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--data", help="folder with the four original files; default: 6,000 images of the examples")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    data = WholeData(data=args.data, limit=args.limit)
    data.setup("fit")
    print(f"{'checkpoint':40} {'F':>8} {'|grad F|^2':>11} {'tr Sigma':>9} {'noise scale':>12}")
    for path in args.checkpoints:
        torch.manual_seed(0)
        net = Net(None)
        net.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        found = measure(net, data.train_set, args.batch_size)
        print(
            f"{'/'.join(path.parts[-2:]):40} {found.loss:8.4f} {found.grad_norm_sq:11.4f} "
            f"{found.grad_variance:9.1f} {found.noise_scale:12.0f}"
        )


if __name__ == "__main__":
    main()
