# SPDX-License-Identifier: Apache-2.0
"""Two real processes decide, step and end alike, and see what one process sees on the same batches."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from gradients import gradients_of_samples, variance_of_two
from launching import RANKS, TORCHRUN, launch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, XLAStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Indexed, Recorder, Watch, loader, quiet
from ranks import Budgets, learnable, rada
from settings_of_policies import IN_PARTS, SETTINGS
from torch.utils.data import DataLoader

from lightning_adabatch import AdaptiveBatchSize, RadaDamp, guards

ALL = [
    *("rank_dependent", "plain_sampler", "own_batch_sampler", "uneven", "uneven_dropped", "grow_and_shrink"),
    *("same_dwell_1", "same_dwell_5", "same_capped", "device_sizes", "own_data", "logs", "not_a_number", "from_one"),
    *(f"policy_{name}" for name in SETTINGS),
]
STATED = ["stated_epochs", "stated_cap", "stated_points"]


def sizes(result) -> list[int]:
    return [len(batch["indices"]) for batch in result["batches"]]


def indices(result, epoch: int | None = None) -> list[int]:
    return [i for batch in result["batches"] if epoch in (None, batch["epoch"]) for i in batch["indices"]]


@pytest.mark.parametrize(
    "name", [*ALL, "same_in_parts", "accumulated", "stream", "stream_with_workers", "two_loaders", *STATED]
)
def test_ranks_agree(name, both):
    """C07, C68: the same sizes, decisions, learning rates, counts, weights and validations on every rank, always."""
    first, second = both(name)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert sizes(first) == sizes(second)
    assert len(sizes(first)) > 4
    for same in ("decisions", "observations", "counts", "weights", "validations"):
        assert first[same] == second[same], same
    for one, other in zip(first["batches"], second["batches"], strict=True):
        assert {**one, "indices": None} == {**other, "indices": None}  # epoch, LR, planned batches, last or not


@pytest.mark.parametrize("name", ALL)
def test_batches_have_the_size_decided(name, both):
    """Over both ranks a batch has the size decided, which both can share, but for the ends of epochs."""
    first, _ = both(name)
    assert all(size % 2 == 0 for size in first["decisions"])
    if name.removeprefix("policy_") in IN_PARTS:
        assert len(first["batches"]) == 2 * first["updates"][-1]
        parts = iter(first["batches"])
        first["batches"] = [{**b, "indices": a["indices"] + b["indices"]} for a, b in zip(parts, parts, strict=True)]
        first["decisions"] = first["decisions"][1::2]
    for decided, (batch, after) in zip(first["decisions"], pairwise([*first["batches"][1:], None]), strict=False):
        if after is not None and batch["epoch"] == after["epoch"] and not batch["last"]:
            assert 2 * len(batch["indices"]) == decided


def test_decisions_do_not_follow_one_rank(both):
    """C07: ranks whose own losses differ by far take the decisions of their mean."""
    first, second = both("rank_dependent")
    assert len(set(first["decisions"])) > 2
    assert indices(first) != indices(second)


@pytest.mark.parametrize("name", ["plain_sampler", "own_batch_sampler"])
def test_sampler_that_lightning_made(name, both):
    """C08: the sampler is the distributed one with its rank, sizes change on both ranks, and all data is seen."""
    for rank, result in enumerate(both(name)):
        assert result["sampler"] == ["DistributedSampler", rank, 2]
        assert sizes(result)[:3] == [4, 4, 8]
    for epoch in range(2):
        assert Counter(i for result in both(name) for i in indices(result, epoch)) == Counter(range(64))


def test_uneven_data(both):
    """C09: 67 samples on two ranks are 34 on each; only what fills the last batch is seen twice."""
    results = both("uneven")
    for epoch in range(2):
        assert [len(indices(result, epoch)) for result in results] == [34, 34]
        assert set(range(67)) == {i for result in results for i in indices(result, epoch)}


def test_uneven_data_with_dropped_tails(both):
    """C09: with drop_last both ranks drop the same number, fewer than one batch."""
    for result in both("uneven_dropped"):
        for epoch in range(2):
            batches = [len(b["indices"]) for b in result["batches"] if b["epoch"] == epoch]
            assert 0 <= 33 - sum(batches) < max(batches)  # Lightning's sampler drops the odd sample then
            assert len(set(indices(result, epoch))) == sum(batches)


def test_order_changes_each_epoch(both):
    """C10: every epoch has its own order, the sampler knows the epoch, and the ranks share nothing."""
    first, second = both("rank_dependent")
    assert indices(first, 0) != indices(first, 1)
    assert first["sampler_epoch"] == second["sampler_epoch"] == 1
    for epoch in range(2):
        assert set(indices(first, epoch)).isdisjoint(indices(second, epoch))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("same_dwell_1", {}), ("same_dwell_5", {"dwell": 5}), ("same_capped", {"max_batch_size": 8})],
)
def test_one_process_with_the_same_batches(name, settings, both, tmp_path):
    """C67: loss, norm, decisions, LR and weights are those of one process that trains on both ranks' samples."""
    first, second = both(name)
    pairs = list(zip(first["batches"], second["batches"], strict=True))
    order = [[i for batch in pair for i in batch["indices"]] for pair in pairs]

    class Orders(torch.utils.data.Sampler):
        def __init__(self):
            self.epochs = [[i for pair, ids in zip(pairs, order, strict=True) if pair[0]["epoch"] == e for i in ids]
                           for e in range(2)]  # fmt: skip

        def __len__(self):
            return 64

        def __iter__(self):
            return iter(self.epochs.pop(0))

    ours, module = rada(multiple_of=2, **settings), Recorder(lr=0.5)
    watch = Watch(ours)
    quiet([ours, watch], root=tmp_path).fit(module, DataLoader(Indexed(64), 8, sampler=Orders()))
    assert [batch.indices for batch in module.batches] == order
    assert watch.sizes == first["decisions"]
    assert len(set(watch.sizes)) > 1 or name == "same_capped"
    assert [b.lr for b in module.batches] == pytest.approx([b["lr"] for b in first["batches"]], rel=1e-5)
    assert min(b.lr for b in module.batches) < 0.5 or name != "same_capped"
    for mine, theirs in zip(watch.observations, first["observations"], strict=True):
        if mine is None or theirs is None:
            assert mine is theirs is None
            continue
        assert (mine.loss, mine.grad_norm_sq) == pytest.approx((theirs["loss"], theirs["grad_norm_sq"]), rel=1e-5)
        assert mine.batch_size == theirs["batch_size"]
    assert torch.allclose(module.net.weight, torch.tensor(first["weights"]), atol=1e-5)


def test_parts_on_several_ranks(both):
    """C67: in parts of at most three per rank, counts, decisions and weights are those of whole batches."""
    first, _ = both("same_in_parts")
    whole, _ = both("same_dwell_1")
    assert max(sizes(first)) == 3
    assert len(sizes(first)) > len(sizes(whole))
    assert first["counts"] == whole["counts"]
    assert torch.allclose(torch.tensor(first["weights"]), torch.tensor(whole["weights"]), atol=1e-6)


def test_accumulated_on_several_ranks(both):
    """C82: B0 is batch size × ranks × accumulate_grad_batches; each of 68 samples is trained once per epoch."""
    first, second = both("accumulated")
    assert sizes(first)[:6] == [4, 4, 4, 4, 4, 4]
    assert sizes(first)[6:8] == [3, 3]  # 28 over two ranks, in four parts: 4, 4, 3, 3
    assert first["decisions"][:4] == [16, 16, 16, 28]
    for epoch in range(2):
        assert Counter(indices(first, epoch) + indices(second, epoch)) == Counter(range(68))


@pytest.mark.parametrize("name", ["variance", "variance_lr"])
def test_variance_on_several_ranks(name, both):
    """Tr Σ is from the first parts of both ranks, each with its own gradient, and from the whole update."""
    results = both(name)
    gradients = gradients_of_samples(Recorder(), learnable(64))
    updates = [[], []]
    for found, result in zip(updates, results, strict=True):
        parts = []
        for batch, (before, after) in zip(result["batches"], pairwise([0, *result["updates"]]), strict=True):
            parts.append(batch["indices"])
            if after > before:
                found.extend([tuple(parts)] * (len(parts) == 2))  # two samples that are left are one part
                parts = []
    assert len(updates[0]) == len(results[0]["rows"]) >= 8
    for row, *ranks in zip(results[0]["rows"], *updates, strict=True):
        expected = variance_of_two(
            gradients, [first for first, _ in ranks], [i for pair in ranks for p in pair for i in p]
        )
        assert row["grad_variance"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["evaluated", "evaluated_together"])
def test_training_set_evaluated_on_several_ranks(name, both):
    """Loss and gradient diversity are those of one process over all 51 samples, each counted once.

    One rank has 26 of them and one 25: where ranks speak to each other in a step, both take as many.
    """
    gradients = gradients_of_samples(Recorder(), learnable(51))
    data = learnable(51)
    loss = Recorder().loss(data.x, data.y).item()
    diversity = gradients.square().sum(1).mean() / gradients.mean(0).square().sum()
    for result in both(name):
        assert len(result["measured"]) == result["updates"][-1] + 1
        assert result["evaluated"] == 2 * 51 * len(result["measured"])
        for found in result["measured"]:
            assert found["full_loss"] == pytest.approx(loss, rel=1e-6)
            assert found["gradient_diversity"] == pytest.approx(diversity.item(), rel=1e-5)


def test_grows_and_shrinks(both):
    """C68: sizes that grow and shrink, tails included, train each of 68 samples once per epoch."""
    first, second = both("grow_and_shrink")
    assert sizes(first)[:6] == [2, 8, 8, 3, 2, 8]
    for epoch in range(2):
        assert Counter(indices(first, epoch) + indices(second, epoch)) == Counter(range(68))
    assert len(first["validations"]) == 2


def test_sizes_of_all_and_of_each(both):
    """C69: the size over all ranks and that of each are logged; sizes are rounded up to what all can share."""
    first, second = both("device_sizes")
    assert second["logged"] == []
    rows = [row for _, row in first["logged"]]
    assert [row["adabatch/batch_size"] for row in rows][:4] == [8, 10, 12, 4]
    for row in rows:
        assert row["adabatch/device_batch_size"] == row["adabatch/batch_size"] / 2
    assert rows[-1]["adabatch/samples"] == 64
    assert rows[-1]["adabatch/epochs"] == 1


def test_cap_below_the_number_of_ranks(both):
    """C69: a largest size that the ranks cannot share is refused before the first batch."""
    for result in both("too_small"):
        assert "max_batch_size=1" in result["message"]
        assert "2 ranks" in result["message"]


@pytest.mark.parametrize("name", ["stream", "stream_with_workers"])
def test_streams(name, both):
    """C46: streams that the user divides over the ranks: exact sizes, every sample once, all validations."""
    first, second = both(name)
    for epoch in range(2):
        assert sorted(indices(first, epoch) + indices(second, epoch)) == list(range(64))
    assert sizes(first)[:6] == [4, 4, 10, 6, 2, 6]
    ends = [sum(batch["epoch"] <= epoch for batch in first["batches"]) for epoch in range(2)]
    assert first["validations"] == ends
    assert [number for number, batch in enumerate(first["batches"], 1) if batch["last"]] == ends


def test_several_loaders(both):
    """C49: on every rank the second loader follows the first one's size, and both have samplers of Lightning's."""
    first, second = both("two_loaders")
    assert sizes(first)[:5] == [4, 4, 8, 3, 3]
    assert first["seconds"][:4] == [3, 3, 6, 3]  # ceil(3 * 6 / 8) = 3
    assert first["seconds"] == second["seconds"]
    assert first["sampler"][0] == "DistributedSampler"
    for epoch in range(2):
        assert sorted(indices(first, epoch) + indices(second, epoch)) == list(range(64))


def test_stated_lengths_that_differ(both):
    """Streams that say 41 and 40 samples count epochs by the smaller number, and have the smaller one as their cap."""
    first, second = both("stated_epochs")
    assert first["counts"] == second["counts"]
    assert first["counts"][3:5] == [80 + 80 + 2 * 32, 2.8]  # in batches of 8, 16, 32
    assert both("stated_cap")[0]["counts"][0] == 80
    assert set(both("stated_points")[1]["decisions"]) == {8, 12, 16}


def test_fewer_samples_on_one_rank(both):
    """With ``adapt="lr"`` all ranks count what they have together: 40 and 37 samples, in ten batches."""
    first, second = both("fewer")
    assert (sizes(first)[9], sizes(second)[9]) == (4, 1)  # nobody takes samples away
    for same in ("decisions", "counts", "weights"):
        assert first[same] == second[same], same
    assert [batch["lr"] for batch in first["batches"]] == [batch["lr"] for batch in second["batches"]]
    assert first["counts"][3:5] == [2 * 77, 2.0]
    assert len({batch["lr"] for batch in first["batches"]}) > 4


def test_one_device_in_a_process_group(both):
    """A Trainer of one device asks nothing of processes that happen to be there."""
    assert both("on_its_own") == [{"updates": both("on_its_own")[0]["updates"], "samples": 128}, {"updates": None}]


def test_batches_of_other_sizes_on_each_rank(both):
    """With ``adapt="lr"`` batches of which only they say how large they are count with all of their samples."""
    first, second = both("own_sizes")
    together = [mine + theirs for mine, theirs in zip(*Budgets.SIZES, strict=True)]
    for same in ("decisions", "counts", "weights"):
        assert first[same] == second[same], same
    assert [batch["lr"] for batch in first["batches"]] == [batch["lr"] for batch in second["batches"]]
    assert first["counts"][3:5] == [128, 2.0]
    rows = [row for _, row in first["logged"] if "adabatch/samples" in row]
    assert [row["adabatch/batch_size"] for row in rows] == together * 2
    assert [row["adabatch/samples"] for row in rows] == list(accumulate(together * 2))
    expected = [0.5 * 0.5 ** (before / 64 // 0.31) for before in accumulate(together * 2, initial=0)]
    assert [batch["lr"] for batch in first["batches"]] == pytest.approx(expected[:-1])


def test_loss_over_batches_of_other_sizes(both):
    """The loss of an update is the mean over the samples of both ranks, not the mean of their means."""
    results = both("own_sizes_observed")
    first, second = results
    assert first["observations"] == second["observations"]
    module, data = Recorder(lr=0.5), learnable(64)
    optimizer = module.configure_optimizers()
    steps = zip(first["batches"], second["batches"], first["observations"], strict=True)
    for number, (mine, theirs, row) in enumerate(steps, start=1):
        means = [module.loss(data.x[one["indices"]], data.y[one["indices"]]) for one in (mine, theirs)]
        everything = mine["indices"] + theirs["indices"]
        optimizer.param_groups[0]["lr"] = mine["lr"]
        if number % 3 == 0:  # a decision
            assert row["batch_size"] == len(everything)
            assert row["loss"] == pytest.approx(module.loss(data.x[everything], data.y[everything]).item(), rel=1e-5)
        optimizer.zero_grad()
        (sum(means) / 2).backward()  # as DDP has it
        optimizer.step()


def test_variance_of_batches_of_other_sizes(both):
    """Tr Σ is from batches that weigh alike, whatever their sizes: their noise is that of the harmonic means."""
    results = both("variance_own_sizes")
    gradients, data = gradients_of_samples(Recorder(), learnable(64)), learnable(64)
    steps = list(zip(results[0]["batches"], results[1]["batches"], strict=True))
    windows = list(zip(steps[::2], steps[1::2], strict=True))
    assert len(windows) == len(results[0]["rows"]) == 8
    for row, window in zip(results[0]["rows"], windows, strict=True):
        parts = [[part["indices"] for part in step] for step in window]
        small = sum(gradients[one].mean(0).square().sum().item() for one in parts[0]) / 2
        large = (sum(gradients[one].mean(0) for step in parts for one in step) / 4).square().sum().item()
        noise_small = sum(1 / len(one) for one in parts[0]) / 2
        noise_large = sum(1 / len(one) for step in parts for one in step) / 16
        assert row["grad_variance"] == pytest.approx((small - large) / (noise_small - noise_large), rel=1e-3, abs=1e-4)
        everything = [index for step in parts for one in step for index in one]
        assert row["batch_size"] == len(everything)
        loss = Recorder().loss(data.x[everything], data.y[everything]).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-5)


def test_share_of_uneven_data(both):
    """Of own samplers of 31 and 25 samples half an epoch is half of the smaller one: 3 of 7 batches of 4."""
    first, second = both("uneven_share")
    assert sizes(first) == sizes(second) == [4, 4, 4, 6, 6]
    assert first["counts"] == second["counts"]


def test_loaders_that_differ(both):
    """What must be alike on all ranks, for they decide alike, is refused by name on all of them."""
    first, second = both("unlike")
    assert first == second
    assert "whose batch size is another one on each rank (4, 6)" in first["size"]
    assert "give the loaders of all ranks the same batch size" in first["size"]
    assert "whose drop_last is another one on each rank (False, True)" in first["tail"]
    assert "whose batch size is another one on each rank (4, 6)" in first["size, lr"]


def test_own_samplers(both):
    """Without a distributed sampler ranks with 50 and 46 samples take 46 each, in the same steps."""
    first, second = both("own_data")
    assert first["sampler"][0] == "SequentialSampler"
    for result in (first, second):
        for epoch in range(2):
            assert indices(result, epoch) == list(range(46))
    assert first["counts"][3] == 2 * 2 * 46
    assert first["counts"][4] == 2.0  # epochs


def test_loss_that_is_not_a_number_on_one_rank(both):
    """C07, C21: what one rank could not observe none has observed."""
    first, _ = both("not_a_number")
    assert first["observations"][1] == first["observations"][2]
    assert len(set(first["decisions"])) > 1


@pytest.mark.parametrize(("name", "cut"), [("resume", 5), ("resume_carry", 5), ("resume_weighted", 9)])
def test_resume(name, cut, both):
    """Every rank goes on in mid-epoch with its own samples and its own generators: bitwise the run not cut."""
    for result in both(name):
        whole, rest = result["whole"], result["rest"]
        assert rest["warnings"] == []
        assert rest["batches"] == whole["batches"][cut:]
        for same in ("counts", "weights", "sampler"):
            assert rest[same] == whole[same]
        assert rest["decisions"] == whole["decisions"][cut:]
        assert rest["batches"][0]["epoch"] == cut // 8
    first, second = both(name)
    assert first["whole"]["weights"] == second["whole"]["weights"]


def test_one_process_goes_on_as_two(both):
    """C70: the size over all ranks stays, rounded up to what two can share, and what is said is what happens."""
    first, second = both("from_one")
    assert first["counts"][2] > 4
    assert "the epoch begins again" in first["warnings"][0]
    assert "on 2 rank(s), where there were 1" in first["warnings"][0]
    seen = Counter(indices(first, 0) + indices(second, 0))
    assert set(seen) == set(range(53))  # all samples again
    assert sizes(first)[0] == -(-torch_batch_size(first) // 2)


def test_half_of_the_data_on_another_number_of_ranks(both):
    """The points of the epoch that goes on are those of its new division: after 6 and 12 of 12 batches, 3 ended."""
    for result in both("halves"):
        assert result["warnings"] == []
        assert [len(result["batches"]), result["counts"][3]] == [9 + 12, 2 * 96]
        assert result["validations"] == [6 - 3, 12 - 3, 18 - 3, 24 - 3]


def torch_batch_size(result) -> int:
    """Return the size over all ranks that the single process had decided for its fifth update."""
    return 2 * len(result["batches"][0]["indices"])


def test_two_processes_go_on_as_one(both, folder, tmp_path):
    """C70: one process goes on with the size that two had decided together."""
    first, _ = both("save_two")
    ours, module = rada(), Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet([ours], root=tmp_path).fit(module, loader(53, 4, shuffle=True), ckpt_path=folder / "two.ckpt")
    assert any("the epoch begins again" in str(w.message) for w in caught)
    assert module.batches[0].size == first["decisions"][3] == 2 * sizes(first)[4]
    assert module.seen_in(0) == Counter(range(53))


def test_an_epoch_that_two_processes_ended_is_not_begun_again(both, folder, tmp_path):
    """A checkpoint that is written at an epoch's last batch goes on with the next epoch."""
    both("save_two")
    ours, module = rada(), Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet([ours], root=tmp_path).fit(
            module, loader(53, 4, shuffle=True), loader(8, 8), ckpt_path=folder / "last.ckpt"
        )
    assert not any("begins again" in str(w.message) for w in caught)
    assert {batch.epoch for batch in module.batches} == {1}
    assert module.seen_in(1) == Counter(range(53))


@pytest.mark.parametrize("name", ["fails", "skips"])
def test_failure_of_one_rank_ends_all(name, tmp_path):
    """C07: when one rank raises, or skips a batch (which Lightning refuses), the run ends with an error, at once."""
    done = launch(*TORCHRUN, str(RANKS), str(tmp_path), name, cwd=tmp_path)
    assert done.returncode != 0
    assert {"fails": "boom on one rank", "skips": "Skipping the `training_step`"}[name] in done.output


def test_out_of_memory_on_one_rank_ends_all(tmp_path):
    """C61: both ranks end, and the error names the size that was tried, what had fitted, and what to set."""
    done = launch(*TORCHRUN, str(RANKS), str(tmp_path), "full", cwd=tmp_path)
    assert done.returncode != 0
    assert "Tried to allocate 20.00 MiB" in done.output
    tried = "8 samples in one forward and backward pass on one device do not fit into memory"
    assert f"{tried}; the most that fitted is 4" in done.output
    assert "Set max_device_batch_size=4, and resume from the last checkpoint" in done.output


def test_started_by_lightning(tmp_path):
    """Lightning starts the second process itself, and the two do what those of torchrun do."""
    done = launch(str(RANKS), str(tmp_path), "plain_sampler", cwd=tmp_path)
    assert done.returncode == 0, done.output[-4000:]
    first, second = (json.loads((tmp_path / f"plain_sampler.{rank}.json").read_text()) for rank in range(2))
    assert sizes(first) == sizes(second) == [4, 4, 8, 8, 8] + [8] * 4
    assert first["weights"] == second["weights"]


def test_spawned(tmp_path):
    """``ddp_spawn`` pickles the callback into new processes, which train alike."""
    done = launch(str(RANKS), str(tmp_path), "spawn", cwd=tmp_path)
    assert done.returncode == 0, done.output[-4000:]
    assert [json.loads((tmp_path / f"spawned.{rank}.json").read_text()) for rank in range(2)] == [[4, 4, 8, 8, 8]] * 2


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, XLAStrategy])
def test_refused_strategies(kind, tmp_path):
    """C71: DeepSpeed and XLA are refused by name; without their packages none can be made, so it is done by hand."""
    trainer = quiet([AdaptiveBatchSize(RadaDamp())], root=tmp_path)
    trainer._accelerator_connector.strategy = object.__new__(kind)
    assert isinstance(trainer.strategy, DDPStrategy)
    with pytest.raises(MisconfigurationException, match=rf"does not support {kind.__name__}\. What to do: .*ddp"):
        guards.check_trainer(trainer, AdaptiveBatchSize)
