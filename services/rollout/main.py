"""The rollout service's process: `python -m services.rollout.main`. The only reader of the environment."""

import asyncio
import json
from functools import partial
from pathlib import Path
from random import Random

import httpx
import uvloop

from practicum.clock import SystemClock
from practicum.db.engine import create_engine
from practicum.errors import InvalidInput
from practicum.ids import new_id
from practicum.queue.redis_streams import RedisQueue
from practicum.rpc.client import connect
from practicum.rpc.server import start_server
from practicum.service import run_service
from practicum.startup import start
from practicum.telemetry.logs import get_logger
from services.rollout.assembly import Seams, assemble
from services.rollout.chat import ChatTemplate
from services.rollout.engine.client import EngineClient
from services.rollout.engine.pool import Engine
from services.rollout.engine.transport import EngineTransport
from services.rollout.rpc.trainer import RemoteTrainer
from services.rollout.settings import RolloutSettings

MIGRATIONS = str(Path(__file__).parent / "store" / "migrations")

log = get_logger("rollout.main")


def main() -> None:
    """The process's entry."""
    settings = start("rollout", RolloutSettings, migrations=MIGRATIONS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


async def serve(settings: RolloutSettings) -> None:
    """Make every connection, run the service, close every connection."""
    clock = SystemClock()
    token = settings.keyring
    chat = ChatTemplate.load(settings.model_path)
    context_length = context_length_of(settings.model_path)
    log.info("chat.loaded", fingerprint=chat.fingerprint, report=str(chat.report), context=context_length)
    database = create_engine(settings.database_url)
    queue = RedisQueue(
        settings.redis_url, claim_after_s=settings.claim_after_s, max_deliveries=settings.max_deliveries
    )
    reward = connect(settings.reward_rpc, token=token)
    trainer = connect(settings.trainer_rpc, token=token)
    http = httpx.AsyncClient(mounts={"http://": EngineTransport()}, trust_env=False)
    service = assemble(
        settings,
        Seams(
            database=database,
            queue=queue,
            reward=reward,
            dial=partial(connect, token=token),
            trainer=RemoteTrainer(trainer),
            engines=make_engines(settings, http, chat, context_length, clock),
            chat=chat,
            context_length=context_length,
            clock=clock,
            random=Random(),
            new_id=new_id,
        ),
    )
    rpc = await start_server(
        [service.register],
        service_names=["practicum.v1.RolloutService"],
        intake=["/practicum.v1.RolloutService/PublishWeights"],
        address=f"{settings.rpc_host}:{settings.rpc_port}",
        token=token,
    )
    async with service.membership.kept():
        await run_service(
            name="rollout",
            app=service.app,
            host=settings.rest_host,
            port=settings.rest_port,
            rpc=rpc,
            workers=service.workers,
            drain_timeout_s=settings.drain_timeout_s,
            close=[service.close, http.aclose, reward.close, trainer.close, queue.close, database.dispose],
        )


def make_engines(
    settings: RolloutSettings,
    http: httpx.AsyncClient,
    chat: ChatTemplate,
    context_length: int,
    clock: SystemClock,
) -> list[Engine]:
    """One engine a URL, named by its place in the list."""
    return [
        Engine(
            EngineClient(
                http,
                engine_id=f"engine-{index}",
                base_url=url,
                vocab_size=chat.tokenizer.vocab_size,
                context_length=context_length,
            ),
            num_slots=settings.engine_slots,
            clock=clock,
        )
        for index, url in enumerate(settings.engine_urls.split(","))
    ]


def context_length_of(folder: Path) -> int:
    """Tokens the model's positions reach, from its config.json; `InvalidInput` where it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput("model_path", f"{folder}/config.json has no max_position_embeddings") from error


if __name__ == "__main__":
    main()
