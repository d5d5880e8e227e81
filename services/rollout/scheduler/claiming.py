"""Takes a replica's share of the episodes that nobody owns, as far as it has places for them."""

from practicum.clock import Clock
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.membership import Membership
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.store.claims import ClaimStore, Whose
from services.rollout.store.episodes import StoredEpisode


class Claimer:
    """Claims for evaluations and demonstrations, whichever replica they were submitted to."""

    def __init__(
        self,
        *,
        store: ClaimStore,
        capacity: Capacity,
        runner: EpisodeRunner,
        membership: Membership,
        clock: Clock,
    ) -> None:
        self._store = store
        self._capacity = capacity
        self._runner = runner
        self._membership = membership
        self._clock = clock

    async def take(self, whose: Whose) -> list[StoredEpisode]:
        """Episodes to be played, each with a place that the caller gives back; waits for the first place.

        Not everything at once: what is left after a share is for the others, or for the next call.
        """
        num_unowned = await self._store.num_unowned(whose)
        if num_unowned == 0:
            return []
        num_places = await self._capacity.take_some(self._membership.share(num_unowned))
        claimed: list[StoredEpisode] = []
        try:
            if not self._runner.is_draining:
                claimed = await self._store.claim(whose, num_places, self._clock.now())
        finally:
            self._capacity.give_back(num_places - len(claimed))
        return claimed
