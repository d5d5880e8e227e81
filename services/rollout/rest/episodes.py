"""Episodes over REST, down to their tokens."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from practicum.auth.scopes import Scope
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.models import Page
from practicum.rest.paging import DEFAULT_PAGE_SIZE, decode_page_token, encode_page_token
from practicum.trajectory import Row
from practicum.v1 import trajectory_pb2 as pb
from practicum.wire import grade_from_pb, trajectory_from_pb
from services.rollout.rest.models import EpisodeDetail, EpisodeView, ReasonSpan, RowView, WeightSpan
from services.rollout.rest.suites import PageSize, PageToken
from services.rollout.scheduler.reconciler import Reconciler
from services.rollout.store.episodes import EpisodeState, EpisodeStore, StoredEpisode

EpisodeId = Annotated[str, Path(description="The episode.", examples=["ep_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])]


def episode_router(*, store: EpisodeStore, reconciler: Reconciler) -> APIRouter:
    """The routes of episodes."""
    router = APIRouter(prefix="/v1", tags=["episodes"], route_class=ScopedRoute)

    @router.get(
        "/episodes/{episode_id}",
        dependencies=[needs(Scope.SUBMIT)],
        summary="One episode with its turns and token-level rows",
    )
    async def get_episode(episode_id: EpisodeId) -> EpisodeDetail:
        """Rows hold ids, mask reasons, logprobs and weight versions; empty until the episode has ended."""
        episode = await store.get(episode_id)
        stored = await store.trajectory(episode_id, episode.attempt)
        return _detail(episode, None if stored is None else stored[0])

    @router.get("/episodes", dependencies=[needs(Scope.SUBMIT)], summary="Episodes, oldest first")
    async def list_episodes(
        run_id: Annotated[str | None, Query(description="Only episodes of this run.")] = None,
        evaluation_id: Annotated[str | None, Query(description="Only episodes of this evaluation.")] = None,
        state: Annotated[EpisodeState | None, Query(description="Only episodes in this state.")] = None,
        page_size: PageSize = DEFAULT_PAGE_SIZE,
        page_token: PageToken = None,
    ) -> Page[EpisodeView]:
        """Filters join by and."""
        after = decode_page_token(page_token) if page_token else None
        found = await store.list_episodes(
            run_id=run_id, evaluation_id=evaluation_id, state=state, after=after, limit=page_size + 1
        )
        more, found = len(found) > page_size, found[:page_size]
        token = encode_page_token(found[-1].created_at, found[-1].episode_id) if more else None
        return Page(items=[EpisodeView(**_plain(episode)) for episode in found], next_page_token=token)

    @router.post(
        "/episodes/{episode_id}:cancel", dependencies=[needs(Scope.OPERATE)], summary="End an episode"
    )
    async def cancel_episode(episode_id: EpisodeId) -> EpisodeView:
        """409 where it has ended. The episode's group closes without it."""
        return EpisodeView(**_plain(await reconciler.cancel(episode_id)))

    return router


def _plain(episode: StoredEpisode) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in EpisodeView.model_fields}


def _detail(episode: StoredEpisode, stored: bytes | None) -> EpisodeDetail:
    trajectory = None if stored is None else trajectory_from_pb(pb.Trajectory.FromString(stored))
    grade = None if episode.grade is None else grade_from_pb(pb.Grade.FromString(episode.grade))
    return EpisodeDetail(
        **_plain(episode),
        turns=[] if trajectory is None else [asdict(turn) for turn in trajectory.turns],
        rows=[] if trajectory is None else [_row(row) for row in trajectory.rows],
        grade=None if grade is None else asdict(grade),
        sampling=None if trajectory is None else asdict(trajectory.sampling),
    )


def _row(row: Row) -> RowView:
    return RowView(
        token_ids=row.token_ids_T.tolist(),
        logprobs=row.logprobs_T.tolist(),
        reasons=[ReasonSpan(start=span.start, end=span.end, reason=span.reason) for span in row.mask_spans],
        weight_versions=[
            WeightSpan(
                start=span.start,
                end=span.end,
                weight_version=span.weight_version,
                engine_id=span.engine_id,
            )
            for span in row.version_spans
        ],
    )
