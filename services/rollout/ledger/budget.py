"""How many tokens a turn may still sample."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Bounds of an episode in tokens: `max_context_tokens` is the smaller of model's and run's limit."""

    max_context_tokens: int

    def num_new_tokens_allowed(self, context_len: int, per_turn_max: int) -> int:
        """Tokens to ask the engine for, from 0.

        0 means: send no request; the episode is over by length and is graded on the state it reached.
        """
        return max(0, min(per_turn_max, self.max_context_tokens - context_len))
