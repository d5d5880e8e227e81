"""Who sits where: slots of the arena, admission of waiting requests, reuse of keys and values.

Owns: the arena, the prefix cache, and the lists of decoding and prefilling requests. Never samples, computes
or answers. Used by the batcher's thread alone.

Slots 0..d-1 decode, slots d..n-1 still prefill; both ranges have no holes.

Invariant: keys and values of other weights are never given to a new request. `weights_changed` flushes what
is kept, and a request that goes on with keys and values of earlier weights never becomes a donor.
"""

from collections import deque

from engines.cpu.arena import KvArena
from engines.cpu.model import Model
from engines.cpu.prefix_cache import BLOCK, CachedSequence, PrefixCache, PrefixIndex, block_chain
from engines.cpu.request import Request


class Slots:
    """At most `max_running` requests, `max_total_tokens` tokens in slots and kept sequences together."""

    def __init__(self, model: Model, *, max_running: int, max_total_tokens: int) -> None:
        self._model = model
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._cache = PrefixCache()
        self._donors: PrefixIndex[Request] = PrefixIndex()  # decoding requests whose prompt may be copied
        self._arriving: PrefixIndex[Request] = PrefixIndex()  # prefilling requests that will be donors
        self._requests: list[Request] = []
        self._num_decoding = 0
        self.arena = KvArena(model.config, model.dtype)
        self.decoding_changed = True  # who decodes, or where, differs from the last `decoding`

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of kept sequences."""
        return self._cache.num_tokens

    def requests(self) -> list[Request]:
        """Everyone in a slot, in slot order."""
        return list(self._requests)

    def decoding(self) -> list[Request]:
        """The requests that decode, in slot order."""
        return self._requests[: self._num_decoding]

    def prefilling(self) -> list[Request]:
        """The requests that still prefill, in slot order."""
        return self._requests[self._num_decoding :]

    def admit(self, waiting: deque[Request], version: str) -> list[Request]:
        """Give slots to waiting requests in order and return those; `version` is that of the weights.

        A request whose prefix another one is computing just now waits for it, so that a group that shares a
        prompt computes it once.
        """
        admitted: list[Request] = []
        deferred: list[Request] = []
        while waiting and len(self._requests) < self._max_running:
            request = waiting.popleft()
            place = self._place(request)
            if place is None:
                deferred.append(request)
            elif self._make_room(request):
                self._enter(request, *place, version)
                admitted.append(request)
            else:
                waiting.appendleft(request)
                break
        waiting.extendleft(reversed(deferred))
        return admitted

    def _place(self, request: Request) -> tuple[Request | CachedSequence | None, int] | None:
        """Whose keys and values to copy and how many tokens of them; None to wait for more."""
        ids = request.sequence()
        chain = block_chain(ids, request.chain)
        kept, in_cache = self._cache.longest(ids, chain)
        running, in_slots = self._donors.longest(ids, chain)
        _, arriving = self._arriving.longest(ids, chain)
        most = len(ids) - 1  # the last token is always computed: its logits are wanted
        if request.wants_prompt_logprobs and request.logprob_start is not None:
            request.prompt_logprobs.clear()
            most = min(most, request.logprob_start)
        if min(arriving, most) >= max(in_cache, in_slots) + BLOCK:
            return None
        if in_slots >= in_cache:
            return running, min(in_slots, most)
        return kept, min(in_cache, most)

    def _enter(
        self, request: Request, donor: Request | CachedSequence | None, cached: int, version: str
    ) -> None:
        slot = len(self._requests)
        if isinstance(donor, Request):
            self.arena.write(slot, self.arena.read(donor.slot, cached))
        elif donor is not None:
            self.arena.write(slot, donor.kv[:, :, :, :cached])
        request.slot = slot
        request.prefilled = cached
        request.enter_version(version)
        self._requests.append(request)
        if request.num_tokens - cached == 1 and request.max_new_tokens > 0:
            self.start_decoding(request)
        else:
            self._arriving.add(request, request.chain)

    def start_decoding(self, request: Request) -> None:
        """A request has all keys and values but those of its last token."""
        self._arriving.remove(request, request.chain)
        self._exchange(request.slot, self._num_decoding)
        self._num_decoding += 1
        self.decoding_changed = True
        if not request.has_stale_kv:
            self._donors.add(request, request.chain)

    def _make_room(self, request: Request) -> bool:
        """Shape the arena for one more request within the token bound; False when it must wait."""
        arena, num_slots = self.arena, len(self._requests) + 1
        most = max((other.most_tokens for other in self._requests), default=0)
        capacity = arena.rounded(max(request.most_tokens, most))
        if num_slots * capacity > self._max_total_tokens and num_slots > 1:
            return False
        if not capacity <= arena.capacity < 4 * capacity or num_slots > arena.num_slots:
            room = max(self._max_total_tokens // capacity, num_slots)
            wanted = max(min(2 * num_slots, self._max_running), arena.num_slots)
            arena.resize(min(room, wanted), capacity, len(self._requests))
            self.decoding_changed = True
        self._cache.shrink(self._max_total_tokens - num_slots * arena.capacity)
        return True

    def leave(self, request: Request, *, spoiled: bool) -> None:
        """Take a finished request out of its slot and keep its keys and values for later requests.

        `spoiled` ones (not finite) are zeroed instead.
        """
        if spoiled:
            self.arena.clear(request.slot)
        if request.slot < self._num_decoding:
            if not spoiled and not request.has_stale_kv:
                self._keep(request)
            self._donors.remove(request, request.chain)
            self._exchange(request.slot, self._num_decoding - 1)
            self._num_decoding -= 1
            self.decoding_changed = True
        else:
            self._arriving.remove(request, request.chain)
        self._exchange(request.slot, len(self._requests) - 1)
        self._requests.pop()
        request.slot = -1

    def _keep(self, request: Request) -> None:
        ids = request.sequence()[:-1]  # the last token's keys and values are never computed
        chain = block_chain(ids, request.chain[: len(ids) // BLOCK])
        sequence = CachedSequence(ids, chain, self.arena.read(request.slot, len(ids)))
        if self._cache.insert(sequence, self._max_total_tokens - len(self._requests) * self.arena.capacity):
            sequence.kv = sequence.kv.clone()

    def _exchange(self, left: int, right: int) -> None:
        """Swap two slots; of one that has finished nothing is copied."""
        if left == right:
            return
        a, b = self._requests[left], self._requests[right]
        self.arena.swap(left, right, a.num_tokens, b.num_tokens, discard_left=a.finish is not None)
        self._requests[left], self._requests[right] = b, a
        a.slot, b.slot = right, left

    def empty(self) -> list[Request]:
        """Take everyone out, ready to enter again from the start; nothing is kept."""
        left = list(self._requests)
        self._requests.clear()
        self._num_decoding = 0
        self.decoding_changed = True
        self._donors.clear()
        self._arriving.clear()
        for request in left:
            request.slot = -1
            request.prefilled = 0
            request.has_stale_kv = False
        return left

    def weights_changed(self, version: str) -> None:
        """Other weights are served from now on: nothing computed so far may be given to a new request."""
        self.flush()
        self._donors.clear()
        for request in self._requests:
            request.has_stale_kv = True
            request.enter_version(version)

    def flush(self) -> None:
        """Forget the kept sequences."""
        self._cache.flush()

    def reset(self) -> list[Request]:
        """After a failed step: trust nothing, take everyone out."""
        left = self.empty()
        self.flush()
        self.arena = KvArena(self._model.config, self._model.dtype)
        return left
