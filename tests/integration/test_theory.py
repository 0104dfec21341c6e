# SPDX-License-Identifier: Apache-2.0
"""The measurement of the paper's rates: its parts against known answers, and a short run of all of it."""

from __future__ import annotations

import csv
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LEVELS = np.logspace(-1, -4, 13)


@pytest.fixture
def theory(monkeypatch):
    """The script as a module; it is importable from its folder only."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("theory")


@pytest.mark.parametrize("power", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("log_power", [0.0, 1.0])
def test_exponent_of_a_power_law(theory, power, log_power):
    """The exponent is the power, with the factor of log(1/ε) taken out; levels that were not reached do not count."""
    counts = 7.0 * LEVELS**-power * np.log(1 / LEVELS) ** log_power
    assert theory.exponent(LEVELS, counts, log_power) == pytest.approx(power)
    counts[-3:] = math.nan
    assert theory.exponent(LEVELS, counts, log_power) == pytest.approx(power)
    assert math.isnan(theory.exponent(LEVELS[:2], counts[:2]))


def test_updates_per_e_fold(theory):
    """N = 5 + 3 log(1/ε) has the slope 3 and is straight; a power law is not."""
    counts = 5 + 3 * np.log(1 / LEVELS)
    assert theory.per_e_fold(LEVELS, counts) == pytest.approx(3)
    assert theory.straightness(LEVELS, counts) == pytest.approx(1)
    assert theory.straightness(LEVELS, 1 / LEVELS) < 0.7


def test_crossings_interpolate_on_log_scales(theory):
    """Of the errors 8 / k² at k = 1, 10, 100 every level between is found, others are NaN; weights pick repetitions."""
    updates = np.array([1.0, 10.0, 100.0])
    errors = np.stack([8 / updates**2, np.full(3, 100.0)], axis=1)
    curves = theory.Curves(updates, errors, np.stack([3 * updates] * 2, axis=1))
    found, spent = theory.crossings(curves, np.array([9.0, 8 / 5**2, 8 / 50**2, 1e-9]), np.array([1.0, 0.0]))
    np.testing.assert_allclose(found, [math.nan, 5, 50, math.nan])
    np.testing.assert_allclose(spent, [math.nan, 15, 150, math.nan])
    assert np.isnan(theory.crossings(curves, np.array([1.0]), np.array([0.5, 0.5]))).all()


@pytest.mark.parametrize("name", ["strongly_convex", "convex", "smooth"])
def test_problems_are_what_they_say(theory, name):
    """The noise has mean 0, the gradient belongs to F, Eq. 3 or 4 gives the sizes, and β and α bound the gradient."""
    problem = getattr(theory, name)()
    np.testing.assert_allclose(problem.noise.mean(axis=0), 0, atol=1e-12)
    w = np.random.default_rng(0).standard_normal((50, len(problem.start)))

    def loss(w):
        tail = (1 + w[:, 0] ** 2) ** (-problem.tail / 2) / problem.tail if problem.tail else 0.0
        curvatures = problem.curvatures.copy()
        curvatures[0] *= not problem.tail
        return tail + 0.5 * w**2 @ curvatures

    for column in (0, 1, len(problem.start) - 1):
        shift = np.zeros_like(w)
        shift[:, column] = 1e-5
        numeric = (loss(w + shift) - loss(w - shift)) / 2e-5
        np.testing.assert_allclose(problem.gradient(w)[:, column], numeric, atol=1e-8)
    norm = np.linalg.norm(problem.gradient(w), axis=1)
    moved = np.linalg.norm(np.diff(w, axis=0), axis=1)
    assert (np.linalg.norm(np.diff(problem.gradient(w), axis=0), axis=1) <= problem.beta * moved).all()
    error = problem.error(w)
    if problem.tail:
        np.testing.assert_allclose(error, norm)
        denominator = error**2
    else:
        np.testing.assert_allclose(error, loss(w))
        assert (norm**2 / 2 >= problem.alpha * error - 1e-12).all()
        denominator = error
    assert problem.sizes(error).tolist() == [math.ceil(round(problem.c / value, 6)) for value in denominator]


def test_steps_are_those_of_the_theorems(theory):
    """Each by its formula, with c' = c / M²."""
    pl, convex, smooth = theory.strongly_convex(), theory.convex(), theory.smooth()
    assert theory.steps(pl, "adaptive", 1)(9) == pytest.approx(0.1 / (1 * (0.1 + pl.m_sq / (2 * pl.c))))
    assert theory.steps(convex, "adaptive", 1)(9) == pytest.approx(1 / (1 + convex.m_sq / convex.c))
    assert theory.steps(smooth, "adaptive", 1)(9) == pytest.approx(smooth.c / (smooth.c + 0.1))
    assert theory.steps(pl, "SGD", 1)(99) == pytest.approx(199 / (2 * 0.1 * 100**2))
    assert theory.steps(convex, "SGD", 800)(9) == pytest.approx(1 / (1 + 2 / math.sqrt(33) * math.sqrt(800 / 2)))
    assert theory.steps(smooth, "SGD", 1)(4) == pytest.approx(1 / (1 + math.sqrt(2 * 0.1 * 5)))
    for problem in (pl, convex, smooth):
        assert theory.steps(problem, "gradient descent", 1)(9) == 1


def test_gradient_descent_has_no_noise(theory):
    """On a quadratic it is (1 - λ)^k in each coordinate, and takes all samples at each update."""
    problem = theory.strongly_convex()
    curves = theory.simulate(problem, "gradient descent", 1, 10, 0.0, 0)
    k = curves.updates[:, None]
    np.testing.assert_allclose(
        curves.errors[:, 0], 0.5 * ((1 - problem.curvatures) ** (2 * k) * problem.curvatures).sum(axis=1)
    )
    np.testing.assert_array_equal(curves.gradients[:, 0], theory.SAMPLES * curves.updates)


def test_quick_run(tmp_path):
    """It prints a row for each cell of Table 1 and the shares of the bounds, and writes figure and counts."""
    command = [sys.executable, str(BENCHMARKS / "theory.py"), "--quick", "--out", "rates"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    cells = {}
    for line in done.stdout.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0] in {"PL", "convex", "smooth"}:
            cells[tuple(row[:3])] = row[3:]
    assert len(cells) == 3 * 2 * 3
    for (problem, count, method), low, high in (
        (("PL", "model updates", "SGD"), 0.7, 1.3),
        (("convex", "model updates", "adaptive"), 0.9, 1.1),
        (("convex", "gradient computations", "adaptive"), 1.9, 2.2),
        (("smooth", "model updates", "adaptive"), 1.8, 2.0),
    ):
        assert low < float(cells[problem, count, method][1].split()[0]) < high
    bound, measured, _, _, verdict = cells["PL", "model updates", "adaptive"]
    assert bound == "log(1/ε)"
    assert 8 < float(measured.split()[0]) < 10
    assert "a line in log(1/ε)" in verdict
    allowed = re.findall(r"(\d\.\d+) of the updates that theorem (\d) allows", done.stdout)
    assert [number for _, number in allowed] == ["1", "2", "3"]
    assert all(0 < float(share) < 1 for share, _ in allowed)
    assert (tmp_path / "rates" / "rates.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "rates" / "rates.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {(line["class"], line["count"], line["method"]) for line in lines} == set(cells)


def test_the_documented_table_is_the_committed_run():
    """Each exponent and interval of docs/theory.md is that of docs/theory/rates.csv."""
    docs = BENCHMARKS.parent / "docs"
    with (docs / "theory" / "rates.csv").open(encoding="utf-8") as file:
        fits = {(line["class"], line["count"], line["method"]): line for line in csv.DictReader(file)}
    text = (docs / "theory.md").read_text(encoding="utf-8")
    for cell, line in fits.items():
        row = r" +\| ".join(cell)
        (measured,) = re.findall(rf"^\| {row} +\| [^|]+\| ([^|]+?) *\|", text, re.MULTILINE)
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", measured)]
        digits = 1 if "e-fold" in measured else 2
        expected = [round(float(line[name]), digits) for name in ("fit", "low", "high")]
        assert numbers == pytest.approx(expected[: len(numbers)], abs=0.6 * 10**-digits)
        assert len(numbers) == (1 if cell[2] == "gradient descent" else 3)
