"""What the engines served last: lets a restarted service recognise the weights it finds on them."""

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import reading, transaction
from services.rollout.engine.pool import Serving
from services.rollout.store.tables import serving


class ServingStore:
    """The one row of what is served."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def save(self, served: Serving) -> None:
        """Replace the row."""
        async with transaction(self._engine) as connection:
            await connection.execute(delete(serving))
            await connection.execute(
                insert(serving).values(
                    only_row=True,
                    run_id=served.run_id,
                    weight_version=served.weight_version,
                    label=served.label,
                    path=served.path,
                    manifest_sha256=served.manifest_sha256,
                )
            )

    async def load(self) -> Serving | None:
        """The row; None = nothing was ever published."""
        async with reading(self._engine) as connection:
            row = (await connection.execute(select(serving))).one_or_none()
        if row is None:
            return None
        return Serving(
            run_id=row.run_id,
            weight_version=row.weight_version,
            label=row.label,
            path=row.path,
            manifest_sha256=row.manifest_sha256,
        )
