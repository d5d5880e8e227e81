"""Sandboxes at a reward service that goes away and comes back, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from practicum.clock import SystemClock
from practicum.rpc.client import connect
from practicum.rpc.codes import RpcUnavailable
from practicum.rpc.server import RpcServer, start_server
from practicum.v1 import reward_pb2
from practicum.v1.reward_pb2_grpc import add_SandboxServiceServicer_to_server
from services.rollout.rpc.sandboxes import RemoteSandboxes, ToolCatalogue
from services.rollout.tasks import Split, Task, TaskState
from tests.fixtures.rollout import TOKEN, TOOLS, ScriptedReward

TASK = Task(
    task_id="task_1",
    suite_id="suite_1",
    position=0,
    name="one",
    split=Split.TRAIN,
    instruction="Fix calc.py.",
    tools=TOOLS,
    tags=(),
    session_wall_s=20,
    spec=reward_pb2.TaskSpec(
        limits=reward_pb2.SandboxLimits(session_wall_s=20, call_wall_s=5)
    ).SerializeToString(),
    reference=None,
    state=TaskState.ADMITTED,
)


class RecordingReward(ScriptedReward):
    """Keeps what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[reward_pb2.SandboxLimits] = []

    async def Open(self, request: reward_pb2.OpenRequest, context: Any) -> reward_pb2.OpenResponse:
        self.limits.append(request.limits)
        return await super().Open(request, context)


async def serve(reward: ScriptedReward, port: int = 0) -> RpcServer:
    return await start_server(
        [lambda server: add_SandboxServiceServicer_to_server(reward, server)],
        service_names=[],
        address=f"127.0.0.1:{port}",
        token=TOKEN,
    )


def sandboxes_at(channel: grpc.aio.Channel, patience_s: float = 30) -> RemoteSandboxes:
    return RemoteSandboxes(
        channel,
        dial=partial(connect, token=TOKEN),
        clock=SystemClock(),
        call_deadline_s=5,
        session_wall_s=600,
        patience_s=patience_s,
    )


@asynccontextmanager
async def away() -> AsyncIterator[tuple[ScriptedReward, grpc.aio.Channel, int]]:
    """A service that was there, with a channel to it."""
    reward = RecordingReward()
    server = await serve(reward)
    channel = connect(f"127.0.0.1:{server.port}", token=TOKEN)
    async with sandboxes_at(channel).open("ep_0-1", TASK):
        pass
    await server.stop(0)
    yield reward, channel, server.port
    await channel.close()


async def test_sandbox_when_the_service_is_away_for_seconds_is_waited_for() -> None:
    async with away() as (reward, channel, port):
        catalogue = ToolCatalogue(channel, clock=SystemClock())
        sandboxes = sandboxes_at(channel)

        async def play(number: int) -> str:
            tools = await catalogue.awaited_tools()
            async with sandboxes.open(f"ep_{number}-1", TASK) as sandbox:
                return (await sandbox.call_tool("0", next(iter(tools)), "{}")).output

        playing = [asyncio.ensure_future(play(number)) for number in range(1, 9)]
        await asyncio.sleep(2.0)
        assert not any(task.done() for task in playing)
        server = await serve(reward, port)
        assert await asyncio.gather(*playing) == ["read_file: done"] * 8
        await server.stop(0)


async def test_sandbox_when_the_service_stays_away_fails_in_time() -> None:
    async with away() as (_, channel, _):
        with pytest.raises(RpcUnavailable):
            await ToolCatalogue(channel, clock=SystemClock()).tools()
        with pytest.raises(RpcUnavailable):
            async with sandboxes_at(channel, patience_s=0.6).open("ep_1-1", TASK):
                pass


async def test_sandbox_when_opened_lives_as_long_as_an_attempt() -> None:
    async with away() as (reward, _, _):
        assert isinstance(reward, RecordingReward)
        [limits] = reward.limits
        assert (limits.session_wall_s, limits.call_wall_s) == (600, 5)


class AddressedReward(ScriptedReward):
    """A replica that says where its sessions are called."""

    address = ""

    async def Open(self, request: reward_pb2.OpenRequest, context: Any) -> reward_pb2.OpenResponse:
        answer = await super().Open(request, context)
        answer.address = self.address
        return answer


async def test_sandboxes_when_there_are_replicas_are_opened_in_turn_and_called_where_they_are() -> None:
    rewards = [AddressedReward(), AddressedReward()]
    servers = [await serve(reward) for reward in rewards]
    for reward, server in zip(rewards, servers, strict=True):
        reward.address = f"127.0.0.1:{server.port}"
    channel = connect("ipv4:" + ",".join(reward.address for reward in rewards), token=TOKEN)
    sandboxes = sandboxes_at(channel)

    async def play(number: int) -> None:
        async with sandboxes.open(f"ep_{number}-1", TASK) as sandbox:
            for turn in range(3):  # a session is known at one replica alone
                assert (await sandbox.call_tool(str(turn), "read_file", "{}")).output == "read_file: done"
            await sandbox.snapshot()

    # One after the other too: which replica is next does not hang on how many are open.
    for number in range(2):
        await play(number)
    await asyncio.gather(*(play(number) for number in range(2, 16)))
    assert min(len(reward.opened) for reward in rewards) >= 4
    assert len(rewards[0].calls) + len(rewards[1].calls) == 48
    assert [reward.open_sessions for reward in rewards] == [set(), set()]
    await sandboxes.close()
    await channel.close()
    for server in servers:
        await server.stop(0)


async def test_sandbox_when_its_replica_is_gone_fails_and_the_next_is_opened_at_another() -> None:
    rewards = [AddressedReward(), AddressedReward()]
    servers = [await serve(reward) for reward in rewards]
    for reward, server in zip(rewards, servers, strict=True):
        reward.address = f"127.0.0.1:{server.port}"
    channel = connect("ipv4:" + ",".join(reward.address for reward in rewards), token=TOKEN)
    sandboxes = sandboxes_at(channel)
    with pytest.raises(RpcUnavailable):
        async with sandboxes.open("ep_0-1", TASK) as sandbox:
            [gone] = [index for index, reward in enumerate(rewards) if reward.opened]
            await servers[gone].stop(0)
            await sandbox.call_tool("0", "read_file", "{}")
    for number in range(1, 5):
        async with sandboxes.open(f"ep_{number}-1", TASK) as sandbox:
            await sandbox.call_tool("0", "read_file", "{}")
    assert len(rewards[1 - gone].opened) == 4
    await sandboxes.close()
    await channel.close()
    await servers[1 - gone].stop(0)
