# SPDX-License-Identifier: Apache-2.0
"""PyTorch Geometric's own ``DataLoader``: ``make test-integrations`` installs it and runs this."""

from __future__ import annotations

import warnings

import pytest
import torch
from libraries import DATA, SAMPLES, SIZES, assert_same_training, check
from models import Recorder, fit

from lightning_adabatch import AdaptiveBatchSize, Constant, RadaDamp

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # of the library's import
    pytest.importorskip("torch_geometric", reason="needs lightning-adabatch[integrations]")
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

pytestmark = pytest.mark.integrations


def graph(index: int) -> Data:  # the library shifts attributes that have "index" in their name
    """A ring of three to seven nodes, whose features are around those of the sample."""
    nodes = 3 + index % 5
    around = torch.arange(nodes)
    edges = torch.stack([around, around.roll(-1)])
    features = DATA.x[index] + torch.linspace(-0.1, 0.1, nodes)[:, None]
    return Data(x=features, edge_index=torch.cat([edges, edges.flip(0)], 1), y=DATA.y[index], number=index)


GRAPHS = [graph(index) for index in range(SAMPLES)]


class GraphNet(Recorder):
    """A graph convolution before the classifier; notes how many graphs each batch has."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.conv = GCNConv(4, 4)
        self.graphs: list[int] = []

    def sample(self, batch):
        """Return what a Recorder takes, and see that the nodes and edges are those of the batch's graphs."""
        picked = [GRAPHS[i] for i in batch.number.tolist()]
        assert torch.equal(batch.x, torch.cat([one.x for one in picked]))
        assert torch.equal(batch.ptr.diff(), torch.tensor([one.num_nodes for one in picked]))
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        pooled = global_mean_pool(self.conv(batch.x, batch.edge_index).relu(), batch.batch)
        return pooled, batch.y, batch.number

    def training_step(self, batch, batch_idx):
        self.graphs.append(batch.num_graphs)
        return super().training_step(self.sample(batch), batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y, _ = self.sample(batch)
        self.validation_sizes.append(batch.num_graphs)
        self.log("val_loss", self.loss(x, y), batch_size=batch.num_graphs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_graphs(workers, shuffle, tmp_path):
    """C45: each batch has as many graphs as were decided, at once, and every graph is trained once per epoch."""
    module = GraphNet()
    check(
        module,
        DataLoader(GRAPHS, 4, shuffle=shuffle, num_workers=workers),
        DataLoader(GRAPHS[:20], 8),
        tmp_path,
    )
    assert module.graphs == module.sizes == SIZES


@pytest.mark.parametrize("workers", [0, 2])
def test_constant_is_the_plain_run(workers, tmp_path):
    """C45: with Constant() batches, order and weights are those of a run without the callback, bit for bit."""
    plain, module = GraphNet(), GraphNet()
    for net, callbacks in ((plain, []), (module, [AdaptiveBatchSize(Constant())])):
        torch.manual_seed(3)
        train = DataLoader(GRAPHS, 8, shuffle=True, num_workers=workers)
        fit(net, train, DataLoader(GRAPHS[:20], 8), callbacks=callbacks, root=tmp_path)
    assert_same_training(module, plain)
    assert module.graphs == ([8] * 7 + [4]) * 2


def test_settings_of_the_loader_arrive(tmp_path):
    """``follow_batch`` and ``exclude_keys`` of the user's loader are obeyed in batches of every size."""

    class Net(GraphNet):
        def training_step(self, batch, batch_idx):
            assert torch.equal(batch.x_batch, batch.batch)
            assert "extra" not in batch
            return super().training_step(batch, batch_idx)

    graphs = [one.clone() for one in GRAPHS]
    for one in graphs:
        one.extra = "left out"
    train = DataLoader(graphs, 4, shuffle=True, follow_batch=["x"], exclude_keys=["extra"], num_workers=2)
    check(Net(), train, DataLoader(GRAPHS[:20], 8), tmp_path)


def test_radadamp(tmp_path):
    """The default rule decides by the loss and gradients of graphs, and each next batch has the size decided."""
    decided: list[int] = []

    class Net(GraphNet):
        def training_step(self, batch, batch_idx):
            decided.append(self.trainer.train_dataloader.batch_size)
            return super().training_step(batch, batch_idx)

    module = Net()
    ours = AdaptiveBatchSize(RadaDamp(rho=0.5), max_batch_size=32)
    fit(module, DataLoader(GRAPHS, 4, shuffle=True), callbacks=[ours], epochs=4, root=tmp_path)
    assert len(set(module.sizes)) > 2
    for batch, wanted in zip(module.batches, decided, strict=True):
        assert batch.size == wanted or batch.last
    for epoch in range(4):
        assert sorted(module.seen_in(epoch).elements()) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_graphs_of_several_kinds_of_nodes(workers, tmp_path):
    """``HeteroData`` is batched by the same loader."""

    def hetero(index: int) -> HeteroData:
        one = HeteroData()
        one["paper"].x = GRAPHS[index].x
        one["author"].x = DATA.x[index][None]
        one["author", "writes", "paper"].edge_index = torch.tensor([[0], [0]])
        one.y, one.number = DATA.y[index], index
        return one

    class Net(GraphNet):
        def sample(self, batch):
            assert torch.equal(batch["author"].x, DATA.x[batch.number])
            pooled = global_mean_pool(batch["paper"].x, batch["paper"].batch)
            return pooled + batch["author"].x, batch.y, batch.number

    graphs = [hetero(index) for index in range(SAMPLES)]
    module = Net()
    check(module, DataLoader(graphs, 4, shuffle=True, num_workers=workers), DataLoader(graphs[:20], 8), tmp_path)
    assert module.graphs == SIZES
