# SPDX-License-Identifier: Apache-2.0
"""The method cards: one for each rule, in one form, with code that runs and says what the text says."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import lightning_adabatch
from lightning_adabatch import AdaptiveBatchSize, GeoDamp, Policy, Progress, Schedule
from lightning_adabatch.limits import Limits

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", TEXT, re.MULTILINE))
CARDS = {title: text for title, text in SECTIONS.items() if title != "What is measured"}
PARTS = [
    "What it does",
    "Equation and source",
    "What it measures and costs",
    "Suggested values",
    "When not to use it",
    "Deviations",
]
RULES = {
    name
    for name in lightning_adabatch.__all__
    if isinstance(value := getattr(lightning_adabatch, name), type)
    and issubclass(value, Policy)
    and value is not Policy
}

every_card = pytest.mark.parametrize("title", CARDS)


def ran(title: str, monkeypatch: pytest.MonkeyPatch) -> list[AdaptiveBatchSize]:
    """Run a card's code, and return the callbacks that it made."""
    made: list[AdaptiveBatchSize] = []
    original = AdaptiveBatchSize.__init__

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(AdaptiveBatchSize, "__init__", keep)
    (code,) = re.findall(r"^```python\n(.*?)^```$", CARDS[title], re.DOTALL | re.MULTILINE)
    exec(code, {})
    return made


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_card_has_its_plot(rule):
    """The plot of a card is there, and is a picture."""
    assert f"](methods/{rule}.png)" in CARDS[rule]
    assert (Path(__file__).parents[2] / "docs" / "methods" / f"{rule}.png").read_bytes().startswith(b"\x89PNG")


def test_every_rule_has_a_card():
    """A new public rule is a new card; the others are recipes."""
    assert {title for title in CARDS if not title.startswith("Recipe: ")} == RULES
    assert len(CARDS) == len(RULES) + 2


@every_card
def test_card_has_the_form(title):
    """All parts, in one order, and each of them says something."""
    parts = re.split(r"^\*\*(.+?)\.\*\*", CARDS[title], flags=re.MULTILINE)
    assert parts[0].strip() == ""
    assert parts[1::2] == PARTS
    assert all(text.strip() for text in parts[2::2])


@every_card
def test_deviations_are_numbered(title):
    """From 1 on, without a gap, or there are none."""
    deviations = CARDS[title].split("**Deviations.**")[1].split("```python")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", deviations, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers or deviations.strip() == "None."


@every_card
def test_code_runs(title, monkeypatch):
    """The one block of code of each card makes callbacks, with the card's rule."""
    rules = {type(callback.settings.policy).__name__ for callback in ran(title, monkeypatch)}
    assert rules == {{"Recipe: AdaBatch": "GeoDamp"}.get(title, title if title in RULES else "Schedule")}


def test_every_link_leads_to_a_card():
    """The table's anchors are those of the headings."""
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    links = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert links <= anchors
    assert len(links) == len(CARDS)


def at(epochs: float, initial: int) -> Progress:
    """Return a progress of which only the epochs matter."""
    return Progress(0, 0, epochs, initial, initial, 16000, learning_rate=0.1)


def test_adabatch_decays_as_its_card_says(monkeypatch):
    """Doublings up to the cap of 2,048, from then on the rate's 0.75 is halved: 0.375 per step."""
    (callback,) = ran("Recipe: AdaBatch", monkeypatch)
    policy, limits = callback.settings.policy, Limits(512, callback.settings.max_batch_size)
    assert isinstance(policy, GeoDamp)
    decisions = [limits.decide(policy.damping(None, at(20 * step, 512))) for step in range(5)]
    assert [decision.batch_size for decision in decisions] == [512, 1024, 2048, 2048, 2048]
    rates = [0.75**step * decision.lr_factor for step, decision in enumerate(decisions)]
    assert [later / sooner for sooner, later in pairwise(rates)] == [0.75, 0.75, 0.375, 0.375]


def test_hybrid_decays_as_its_card_says(monkeypatch):
    """Batch and rate together make each step by 5, wherever the batch stops growing."""
    for callback, sizes in zip(
        ran("Recipe: do not decay the learning rate", monkeypatch),
        ([128, 640, 3200, 16000], [128, 640, 640, 640], [128] * 4),
        strict=True,
    ):
        settings = callback.settings
        assert isinstance(settings.policy, Schedule)
        limits = Limits(128, settings.max_batch_size or 128, adapt=settings.adapt)
        decisions = [limits.decide(settings.policy.damping(None, at(epochs, 128))) for epochs in (0, 60, 120, 160)]
        assert [decision.batch_size for decision in decisions] == sizes
        assert [d.batch_size / d.lr_factor for d in decisions] == pytest.approx([128, 640, 3200, 16000])
