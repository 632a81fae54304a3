"""A policy small enough to read: a table of logits, one row for each thing that was seen.

What a language model would do with a prompt, it does with a word of text. Everything is
a function of its numbers and a seed, so that the same rollouts give the same next policy,
bit for bit.
"""

from __future__ import annotations

import math
import random
from typing import Dict, List, Sequence, Tuple

Turn = Tuple[str, int]  # what was seen, and the action that was taken


class Policy:
    """Logits of actions by what is seen. What was never seen has all actions alike."""

    def __init__(self, logits: Dict[str, List[float]]) -> None:
        self.logits = logits

    def probabilities(self, seen: str, actions: int) -> List[float]:
        """Give how likely each of so many actions is."""
        row = self.logits.get(seen, [0.0] * actions)
        top = max(row)
        weights = [math.exp(x - top) for x in row]
        total = math.fsum(weights)
        return [w / total for w in weights]

    def act(self, seen: str, actions: int, rng: random.Random) -> int:
        """Draw an action."""
        mark = rng.random()
        for action, p in enumerate(self.probabilities(seen, actions)):
            mark -= p
            if mark < 0:
                return action
        return actions - 1

    def update(self, groups: Sequence[Sequence[Tuple[List[Turn], float]]], actions: Sequence[int], rate: float) -> None:
        """Make better rollouts of each group likelier: one step of GRPO.

        groups: for each task its rollouts, as turns and reward. actions: how many each task has. A rollout's advantage is
        its reward, less the mean of its group, in standard deviations; a group in which all fared alike teaches nothing.
        The rollouts are this policy's own, so that the ratio of new to old probability is 1 and nothing is clipped.
        """
        gradient: Dict[str, List[float]] = {}
        for group, n in zip(groups, actions):
            for (turns, _), advantage in zip(group, advantages([reward for _, reward in group])):
                for seen, action in turns:
                    row = gradient.setdefault(seen, [0.0] * n)
                    for other, p in enumerate(self.probabilities(seen, n)):
                        row[other] += advantage / (len(turns) * len(group)) * ((other == action) - p)
        for seen, row in gradient.items():
            old = self.logits.get(seen, [0.0] * len(row))
            self.logits[seen] = [x + rate * g for x, g in zip(old, row)]


def advantages(rewards: Sequence[float]) -> List[float]:
    """Compare each reward with the others of its group."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / deviation if deviation > 0 else 0.0 for r in rewards]
