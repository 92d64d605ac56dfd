"""Compare the epsilon that runs claim with the bound that follows from their canaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.privacy.bound import lower_bound, share_right


@dataclass(frozen=True)
class PrivacyClaim:
    """Epsilon and delta that a method's runs claim, and the canaries of these runs, pooled.

    A canary is a unit that takes part by a coin flip; an audit guesses the coins.
    """

    epsilon: float
    """Largest epsilon that a run claims for a unit, against viewers who know the cohorts; may be
    infinite."""
    delta: float
    canaries: int = 0
    guesses: int = 0
    """Number of canaries whose coin was guessed."""
    right: int = 0
    """Number of right guesses."""
    unit: str = "client"
    """Whose participation is protected."""

    @property
    def bound(self) -> float | None:
        """Lower bound of epsilon that follows from the guesses; None without guesses."""
        if not self.guesses:
            return None
        return lower_bound(
            self.canaries,
            self.guesses,
            self.right,
            self.delta,
        )

    @property
    def broken(self) -> bool:
        """Whether the bound exceeds the claimed epsilon."""
        return self.bound is not None and self.bound > self.epsilon

    def sentence(self, method: str) -> str:
        """State the claim of `method` and the bound, for the page and the terminal."""
        size = f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"
        text = f"{method} claims {size} for a {self.unit}"
        if not self.guesses:
            return f"{text}; no canary tests it"
        low, high = share_right(self.guesses, self.right)
        share = f"{self.right} of {self.guesses} guesses right ({low:.1%} to {high:.1%})"
        refuted = f"{self.canaries} canaries, {share}, refute every epsilon below {self.bound:.3g}"
        return f"{text}; {refuted}{': THE CLAIM IS FALSE' if self.broken else ''}"

    def as_json(self) -> dict[str, Any]:
        """Claim, canaries and bound by name; an infinite epsilon is None."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "canaries": self.canaries,
            "guesses": self.guesses,
            "right": self.right,
            "bound": self.bound,
            "broken": self.broken,
        }


def pooled_claim(summaries: Sequence[Mapping[str, Any]]) -> PrivacyClaim | None:
    """Pool the claims of a method's runs: largest epsilon and delta, sums over canaries.

    Args:
        summaries: privacy keys of each run's summary.json.

    Returns:
        The claim; None if no run claims an epsilon for a unit (such as a client).
    """
    claiming = [s for s in summaries if "privacy_unit" in s and "privacy_epsilon" in s]
    if not claiming:
        return None
    sizes = [s.get("privacy_epsilon_known_cohorts", s["privacy_epsilon"]) for s in claiming]
    largest = max(math.inf if size is None else float(size) for size in sizes)
    delta = max(float(s["privacy_delta"]) for s in claiming)
    keys = ("privacy_canaries", "privacy_canary_guesses", "privacy_canary_right")
    canaries, guesses, right = (sum(int(s.get(key, 0)) for s in claiming) for key in keys)
    unit = str(claiming[0]["privacy_unit"])
    return PrivacyClaim(largest, delta, canaries, guesses, right, unit)
