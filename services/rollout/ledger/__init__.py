"""The token ledger: one episode's rows of ids, mask reasons, logprobs and weight versions.

    ledger = Ledger(vocab_size=chat.tokenizer.vocab_size)
    ledger.open(chat.open(messages, tools))
    ...  # engine call with ledger.prompt_ids()
    ledger.append_sampled(output_ids, logprobs, version_spans)   # spans count from the first output token
    for piece in chat.delta(tool_messages, last_sampled_id=ledger.last_id):
        ledger.append_context(piece.ids, piece.reason)
    ...
    trajectory_rows = ledger.rows()

Invariants
- Tokens are only ever appended; what was sampled is never encoded again.
- `prompt_ids()` is exactly the row so far: the training context equals the context at sampling.
- Each sampled token is trained exactly once: it is MODEL in the row it was sampled in and PROMPT in every
  later row that repeats it.
- A part of a turn that an engine gave back early stays; the next call continues it.
"""

from services.rollout.ledger.budget import TokenBudget
from services.rollout.ledger.ledger import Ledger

__all__ = ["Ledger", "TokenBudget"]
