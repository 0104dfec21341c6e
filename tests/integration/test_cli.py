# SPDX-License-Identifier: Apache-2.0
"""LightningCLI: nested policies from YAML, overrides, and a saved config that runs again (C34, C35, C36)."""

from __future__ import annotations

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from models import Recorder, Sizes, loader

from lightning_adabatch import AdaptiveBatchSize, Cooldown, GeoDamp, RadaDamp, Schedule

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
PRINTED = next(block for block in BLOCKS if "AdaptiveBatchSize" in block)


class Net(Recorder):
    """A module whose constructor the command line can fill."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)


class Data(pl.LightningDataModule):
    """Data with the one batch size that there is."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return loader(32, self.batch_size)


QUIET = [
    "--seed_everything=0",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
]


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """LightningCLI warns when the program that runs it has arguments too; jsonargparse, of how Lightning uses it."""
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def run(tmp_path, *arguments: str) -> LightningCLI:
    where = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=CSVLogger"]
    where.append(f"--trainer.logger.save_dir={tmp_path}")
    return LightningCLI(Net, Data, args=["fit", *where, *QUIET, *arguments])


def ours(cli: LightningCLI) -> AdaptiveBatchSize:
    return next(c for c in cli.trainer.callbacks if isinstance(c, AdaptiveBatchSize))


def written(tmp_path, text: str) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return f"--config={path}"


def test_yaml_of_the_readme_runs_as_printed(tmp_path):
    """C34: the YAML in the README trains, and the policy has the values given."""
    cli = run(tmp_path, written(tmp_path, PRINTED))
    assert ours(cli).settings.policy == RadaDamp(grad_norm_weight=0.05, warmup=50)
    assert ours(cli).settings.max_batch_size == 1024
    assert ours(cli).settings.tail == "carry"
    assert ours(cli).updates >= 7


def test_nested_rules_of_the_readme(tmp_path):
    """The README's second piece of YAML, put under ``init_args``: a rule in a rule, and no cap."""
    (nested,) = [block for block in BLOCKS if block.startswith("policy:")]
    config = yaml.safe_load(PRINTED)
    config["trainer"]["callbacks"][0]["init_args"] = yaml.safe_load(nested)
    cli = run(tmp_path, written(tmp_path, yaml.safe_dump(config)))
    assert ours(cli).settings.policy == Cooldown(RadaDamp(grad_norm_weight=0.05, warmup=50), 160, 200)
    assert ours(cli).settings.max_batch_size == float("inf")


def test_nested_value_on_the_command_line(tmp_path):
    """C34: one nested value is overridden, the others stay."""
    key = "--trainer.callbacks.init_args.policy.init_args.rho=0.5"
    cli = run(tmp_path, written(tmp_path, PRINTED), key, "--trainer.callbacks.init_args.dwell=2")
    assert ours(cli).settings.policy == RadaDamp(rho=0.5, grad_norm_weight=0.05, warmup=50)
    assert ours(cli).settings.dwell == 2


def test_callback_is_appended(tmp_path):
    """C34: the callback and its policy can be appended on the command line alone."""
    cli = run(
        tmp_path,
        "--trainer.callbacks+=lightning_adabatch.AdaptiveBatchSize",
        "--trainer.callbacks.policy=lightning_adabatch.GeoDamp",
        "--trainer.callbacks.policy.factor=2",
        "--trainer.callbacks.policy.delay=0.5",
        "--trainer.callbacks.max_batch_size=.inf",
    )
    assert ours(cli).settings.policy == GeoDamp(2, 0.5)
    assert ours(cli).settings.max_batch_size == float("inf")
    assert cli.model.sizes == [4, 4, 4, 4, 8, 8]


def test_wrong_nested_name_is_named(tmp_path, capsys):
    """C34: a wrong nested name gives an error that names the key."""
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, written(tmp_path, PRINTED.replace("warmup", "wramup")))
    assert "wramup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_batch_size=0", "max_batch_size=0 must be an integer >= 1"),
        ("policy.init_args.rho=7", "rho=7.0 must be"),
    ],
)
def test_value_out_of_range_is_named(given, message, tmp_path):
    """What a constructor says about a value out of its range reaches the user of a command line."""
    with pytest.raises(ValueError, match=message):
        run(tmp_path, written(tmp_path, PRINTED), f"--trainer.callbacks.init_args.{given}")


SCHEDULE = """
trainer:
  callbacks:
    - class_path: lightning_adabatch.AdaptiveBatchSize
      init_args:
        policy: {class_path: lightning_adabatch.Schedule, init_args: {sizes: {0: 4, 2: 8}, unit: updates}}
        max_batch_size: .inf
"""
DEFAULTS = """
trainer:
  callbacks:
    - class_path: lightning_adabatch.AdaptiveBatchSize
"""


@pytest.mark.parametrize("text", [PRINTED, SCHEDULE, DEFAULTS], ids=["RadaDamp", "Schedule", "defaults"])
def test_saved_config_runs_again(text, tmp_path):
    """C35: the saved config.yaml alone starts the same run again, and holds no object's repr."""
    first = run(tmp_path, written(tmp_path, text))
    saved = next(tmp_path.rglob("config.yaml"))
    content = saved.read_text(encoding="utf-8")
    assert " object at 0x" not in content
    assert "unable to serialize" not in content.lower()
    second = LightningCLI(Net, Data, args=["fit", f"--config={saved}"], save_config_kwargs={"overwrite": True})
    assert ours(second).settings == ours(first).settings
    assert second.model.sizes == first.model.sizes


def test_schedule_from_yaml(tmp_path):
    """A mapping from YAML has numbers for its points, and ``.inf`` is no cap."""
    cli = run(tmp_path, written(tmp_path, SCHEDULE))
    assert ours(cli).settings.policy == Schedule({0: 4, 2: 8})
    assert ours(cli).settings.max_batch_size == float("inf")
    assert cli.model.sizes == [4, 4, 8, 8, 8]


def test_own_policy_needs_no_registration(tmp_path):
    """A policy of the user's works by its import path."""
    cli = run(
        tmp_path,
        "--trainer.callbacks+=lightning_adabatch.AdaptiveBatchSize",
        "--trainer.callbacks.policy=models.Sizes",
        "--trainer.callbacks.policy.sizes=[4, 16]",
    )
    assert isinstance(ours(cli).settings.policy, Sizes)
    assert cli.model.sizes == [4, 16, 12]


def test_initial_size_is_given_once(tmp_path):
    """C36: the initial size is the data section's, and the config has no second copy of it."""
    cli = run(tmp_path, written(tmp_path, PRINTED), "--data.batch_size=8")
    assert cli.model.sizes[0] == 8
    config = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text(encoding="utf-8"))
    assert config["data"] == {"batch_size": 8}
    assert "batch_size" not in config["trainer"]["callbacks"][0]["init_args"]


def test_initial_size_linked_into_a_registered_callback(tmp_path):
    """C36: the callback can be registered with the parser, with arguments linked from the data section."""

    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(AdaptiveBatchSize, "adaptive")
            parser.link_arguments("data.batch_size", "adaptive.min_batch_size")

    where = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false"]
    cli = Linked(Net, Data, args=["fit", *where, *QUIET, "--data.batch_size=8"], save_config_callback=None)
    assert ours(cli).settings.min_batch_size == cli.model.sizes[0] == 8


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_configs_of_the_examples(config, tmp_path, monkeypatch):
    """Every config of the examples trains, through the example's own command line."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from fashion import FashionData, PaperNet  # noqa: PLC0415  # importable only now

    more = ["--trainer.fast_dev_run=2", f"--trainer.default_root_dir={tmp_path}"]
    cli = LightningCLI(PaperNet, FashionData, args=["fit", f"--config={config}", *more], save_config_callback=None)
    assert ours(cli).updates == 2
