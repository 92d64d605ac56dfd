"""What runs claim of their privacy, and what their canaries refute of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.privacy.bound import lower_bound, share_right


@dataclass(frozen=True)
class PrivacyClaim:
    """Of the runs of one method; canaries of several runs (other seeds, other coins) are counted
    together."""

    epsilon: float
    """The largest that a run claims for a unit, against those who know the cohorts; infinite: none
    that is finite."""
    delta: float
    canaries: int = 0
    guesses: int = 0
    right: int = 0
    unit: str = "client"

    @property
    def bound(self) -> float | None:
        """Below it the canaries refute every epsilon; None: there are none."""
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
        """Whether more leaves the mechanism than is claimed."""
        return self.bound is not None and self.bound > self.epsilon

    def words(self, method: str) -> str:
        """For the page, and for the terminal."""
        size = f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"
        text = f"{method} claims {size} for a {self.unit}"
        if not self.guesses:
            return f"{text}; no canary tests it"
        low, high = share_right(self.guesses, self.right)
        share = f"{self.right} of {self.guesses} guesses right ({low:.1%} to {high:.1%})"
        refuted = f"{self.canaries} canaries, {share}, refute every epsilon below {self.bound:.3g}"
        return f"{text}; {refuted}{': THE CLAIM IS FALSE' if self.broken else ''}"

    def as_json(self) -> dict[str, Any]:
        """All numbers; what is infinite is null."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "canaries": self.canaries,
            "guesses": self.guesses,
            "right": self.right,
            "bound": self.bound,
            "broken": self.broken,
        }


def claimed(summaries: Sequence[Mapping[str, Any]]) -> PrivacyClaim | None:
    """The claim of a method's runs, by their summaries: the largest epsilon and delta, and all
    canaries; None: none claims an epsilon for a unit."""
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
