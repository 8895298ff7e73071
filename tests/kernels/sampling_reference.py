"""Sampling written the slow way, one row at a time in float64 and with sorting, as a reference for
the engine's.

`margin` says how clear a decision was: how far away, in probability or in logits, the nearest other
outcome was. Where it is tiny, float32 rounding may decide differently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.params import ResolvedSampling

Floats = npt.NDArray[np.float64]
_MASK = (1 << 64) - 1


def splitmix64(state: int, count: int) -> int:
    """Output number `count` (from 1) of the SplitMix64 generator that starts at `state`, in
    unbounded integers.
    """
    z = (state + count * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    return (splitmix64(splitmix64(seed, 1), position + 1) >> 2) / 2**62


def adjust(
    logits: Floats, sampling: ResolvedSampling, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Penalties, then bias, then the mask of `min_tokens`."""
    out = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        out[token] = (
            out[token] / sampling.repetition_penalty
            if out[token] > 0
            else out[token] * sampling.repetition_penalty
        )
    for token, count in Counter(output).items():
        out[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if len(output) < sampling.min_tokens:
        out[list(sampling.stop_token_ids)] = -math.inf
    return out


def distribution(logits: Floats, sampling: ResolvedSampling) -> tuple[Floats, float]:
    """(probabilities after temperature, top-k, top-p and min-p; margin). `logits` are adjusted
    already.
    """
    scaled = (logits - logits.max()) / sampling.temperature
    weights = np.exp(scaled)
    order = np.argsort(-scaled, kind="stable")
    margin = math.inf
    kept = np.ones(len(logits), bool)
    if 0 < sampling.top_k < len(logits):
        limit = scaled[order[sampling.top_k - 1]]
        kept &= scaled >= limit
        margin = min(margin, _distance(scaled[~kept], limit))
    if sampling.top_p < 1:
        masses = np.where(kept, weights, 0)[order].cumsum()
        limits = scaled[order]
        # places where a run of equal values ends
        whole = np.append(limits[:-1] != limits[1:], True)
        target = sampling.top_p * masses[-1]
        last = int(np.searchsorted(masses, target))
        margin = min(margin, float(np.abs(masses[whole] / masses[-1] - sampling.top_p).min()))
        kept &= scaled >= limits[min(last, len(limits) - 1)]
    if sampling.min_p > 0:
        limit = math.log(sampling.min_p)
        margin = min(margin, _distance(scaled[scaled < 0], limit))
        kept &= scaled >= limit
    weights = np.where(kept, weights, 0)
    return weights / weights.sum(), margin


def sample(logits: Floats, sampling: ResolvedSampling, position: int) -> tuple[int, float]:
    """(token, margin). `logits` are adjusted already."""
    if sampling.temperature == 0:
        best = int(logits.argmax())
        return best, _distance(np.delete(logits, best), logits[best])
    probabilities, margin = distribution(logits, sampling)
    cumulative = probabilities.cumsum()
    place = uniform(sampling.seed, position) * cumulative[-1]
    token = int(np.searchsorted(cumulative, place, side="right"))
    return token, min(margin, float(np.abs(cumulative - place).min()))


def chi_square(counts: Floats, probabilities: Floats) -> float:
    """Pearson's statistic; every expected count should be 5 or more."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square test"
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int, z: float = 3.72) -> float:
    """The value exceeded with probability 1e-4, by the approximation of Wilson and Hilferty
    (1931).
    """
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def _distance(values: Floats, limit: float) -> float:
    return float(np.abs(values - limit).min()) if len(values) else math.inf
