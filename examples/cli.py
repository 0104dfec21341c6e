# SPDX-License-Identifier: Apache-2.0
"""Train from YAML: ``python examples/cli.py fit --config examples/configs/radadamp.yaml``."""

from fashion import FashionData, PaperNet
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(PaperNet, FashionData)
