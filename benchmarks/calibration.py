"""Calibrates the noise model: how often a claim on a speed is judged wrongly, rightly, or left open, noise by noise.

Every row simulates claims one sample at a time and asks ``decide`` after each, as a run would, until it answers or
MOST samples are there. σ is the standard deviation of one rate, 3 % where nothing else is said. The true rate is that
of the undisturbed server, and with a drift that of the middle of the longest run. It must not use the model's own
parts to make the noise.

    python benchmarks/calibration.py [--claims 1000] [--seed 6] [--jobs N]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from pytest_gpuguard.claims.stats import MOST, Standing, decide, ratio_samples

SIGMA = 0.03
#: Endless factors to the true rate, one for each measurement.
Noise = Iterator[float]


@dataclass(frozen=True)
class Case:
    """One kind of claim and one truth: relative bounds, and the true value. ``ratio`` takes two series."""

    claim: str
    low: float | None
    high: float | None
    truth: float
    ratio: bool = False

    @property
    def holds(self) -> bool:
        """Whether the claim is true; on its bound it is."""
        return (self.low is None or self.truth >= self.low) and (self.high is None or self.truth <= self.high)


@dataclass(frozen=True)
class Row:
    """Shares of the claims of one row, and the median number of samples until the end."""

    false_contradicted: float
    false_holds: float
    inconclusive: float
    right: float
    samples: float


def correlated(rng: random.Random, rho: float = 0.0, sigma: float = SIGMA) -> Noise:
    """Stationary AR(1) of standard deviation ``sigma``; white at ``rho`` 0."""
    state = rng.gauss(0, sigma)
    while True:
        yield 1 + state
        state = rho * state + rng.gauss(0, sigma * math.sqrt(1 - rho * rho))


def outliers(rng: random.Random, rho: float = 0.0) -> Noise:
    """Every twentieth sample, by chance, is 20 to 40 % slow."""
    for factor in correlated(rng, rho):
        yield factor * (1 - rng.uniform(0.2, 0.4)) if rng.random() < 0.05 else factor


def bursts(rng: random.Random) -> Noise:
    """A disturbance begins at one sample in fifty, and slows three in a row by 20 to 40 %."""
    left, slow = 0, 0.0
    for factor in correlated(rng):
        if left == 0 and rng.random() < 0.02:
            left, slow = 3, rng.uniform(0.2, 0.4)
        yield factor * (1 - slow) if left else factor
        left = max(left - 1, 0)


def heavy(rng: random.Random) -> Noise:
    """Student's t with three degrees of freedom, scaled to σ."""
    while True:
        chi = sum(rng.gauss(0, 1) ** 2 for _ in range(3))
        yield max(1 + SIGMA * rng.gauss(0, 1) / math.sqrt(chi), 0.05)


NOISES: dict[str, Callable[[random.Random], Noise]] = {
    "white, σ 1 %": partial(correlated, sigma=0.01),
    "white": correlated,
    "AR(1) ρ 0.3": partial(correlated, rho=0.3),
    "AR(1) ρ 0.6": partial(correlated, rho=0.6),
    "AR(1) ρ 0.8": partial(correlated, rho=0.8),
    "5 % outliers": outliers,
    "ρ 0.6 and outliers": partial(outliers, rho=0.6),
    "bursts of 3": bursts,
    "heavy tails (t3)": heavy,
    "drift −3 %": correlated,
    "drift +3 %": correlated,
}
#: Linear change of the rate over the longest run, both servers alike.
DRIFTS = {"drift −3 %": -0.03, "drift +3 %": 0.03}
CASES = [
    *(Case("min", 1.0, None, truth) for truth in (1.0, 0.9, 1.1)),
    *(Case("about ± 5 %", 0.95, 1.05, truth) for truth in (1.0, 0.95, 1.05, 0.9, 1.1)),
    *(Case("ratio > 1.05", 1.05, None, truth, ratio=True) for truth in (1.0, 1.05, 1.1)),
    Case("ratio > 2", 2.0, None, 2.2, ratio=True),
]


def samples_of(case: Case, noise: str, rng: random.Random) -> list[float]:
    """As many samples as can be looked at. Of two servers, interleaved, each has noise of its own."""
    order = "abba" * MOST if case.ratio else "a" * MOST
    factors = {"a": NOISES[noise](rng), "b": NOISES[noise](rng)}
    rates = {"a": 90.0 * case.truth if case.ratio else case.truth, "b": 90.0}
    change = DRIFTS.get(noise, 0.0) / (len(order) - 1)
    series = [
        (side, rates[side] * next(factors[side]) * (1 + change * (index - (len(order) - 1) / 2)))
        for index, side in enumerate(order)
    ]
    return list(ratio_samples(series)) if case.ratio else [rate for _, rate in series]


def claim_once(case: Case, samples: list[float]) -> tuple[Standing, int]:
    """The answer to one claim, asked for after every sample, and how many it took."""
    for n in range(1, len(samples) + 1):
        standing = decide(samples[:n], case.low, case.high).standing
        if standing is not Standing.OPEN:
            return standing, n
    return Standing.OPEN, len(samples)


def simulate(case: Case, noise: str, claims: int, seed: int) -> Row:
    """One row of the table, the same for the same seed whatever else is simulated."""
    rng = random.Random(f"{seed} {case} {noise}")
    answers = [claim_once(case, samples_of(case, noise, rng)) for _ in range(claims)]

    def share(*standings: Standing) -> float:
        return sum(standing in standings for standing, _ in answers) / claims

    inside, outside = share(Standing.INSIDE), share(Standing.BELOW, Standing.ABOVE)
    return Row(
        false_contradicted=outside if case.holds else 0.0,
        false_holds=0.0 if case.holds else inside,
        inconclusive=share(Standing.OPEN),
        right=inside if case.holds else outside,
        samples=statistics.median(n for _, n in answers),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--claims", type=int, default=1000, help="claims simulated for each row")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    rows = [(case, noise) for case in CASES for noise in NOISES]
    print(f"{options.claims} claims a row, seed {options.seed}; σ 3 % unless said; shares in per cent.\n")
    print("| claim | true value | noise | false CONTRADICTED | false HOLDS | INCONCLUSIVE | right | median samples |")
    print("|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs) as pool:
        done = [pool.submit(simulate, case, noise, options.claims, options.seed) for case, noise in rows]
        for (case, noise), future in zip(rows, done, strict=True):
            row = future.result()
            contradicted = f"{row.false_contradicted:.1%}" if case.holds else "–"
            holds = "–" if case.holds else f"{row.false_holds:.1%}"
            truth = f"{case.truth:g}" + (" (on the bound)" if case.truth in (case.low, case.high) else "")
            shares = f"{contradicted} | {holds} | {row.inconclusive:.1%} | {row.right:.1%}".replace("%", "")
            print(f"| {case.claim} | {truth} | {noise} | {shares} | {row.samples:g} |", flush=True)


if __name__ == "__main__":
    main()
