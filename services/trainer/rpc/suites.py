"""What the trainer asks the rollout service about suites."""

from collections.abc import Awaitable, Callable

import grpc

from practicum.errors import InvalidInput, NotFound
from practicum.rpc.client import call
from practicum.v1 import rollout_pb2, rollout_pb2_grpc

DEADLINE_S = 10.0


def suite_check(channel: grpc.aio.Channel) -> Callable[[str], Awaitable[None]]:
    """The check of the suite that a run names: id, name, or name@version.

    It raises `InvalidInput` where a run could never sample from it, `RpcUnavailable` where nobody knows.
    """
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

    async def check(reference: str) -> None:
        request = rollout_pb2.GetSuiteRequest(suite=reference)
        try:
            suite = await call(stub.GetSuite, request, timeout_s=DEADLINE_S)
        except NotFound as error:
            raise InvalidInput("rollout.suite", f"{error}; the rollout service lists them") from error
        # A task that waits for its verdict may still be admitted, and the run waits for it.
        if suite.num_train_admitted + suite.num_train_admitting == 0:
            raise InvalidInput("rollout.suite", f"no task of {reference!r}'s train split may be sampled")

    return check
