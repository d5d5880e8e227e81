"""What a replica of the reward service calls itself, and where its sessions are called."""

import socket

import pytest

from practicum.instance import instance_name
from services.reward.settings import RewardSettings


@pytest.mark.parametrize(
    ("values", "advertised"),
    [
        ({"rpc_port": 50052}, "127.0.0.1:50052"),
        ({"rpc_port": 50052, "rpc_host": "0.0.0.0"}, f"{socket.gethostname()}:50052"),
        ({"rpc_port": 50052, "rpc_host": "0.0.0.0", "reward_advertise": "10.0.0.7:9"}, "10.0.0.7:9"),
        ({}, ""),
    ],
)
def test_sessions_when_opened_are_called_where_the_replica_listens(
    values: dict[str, object], advertised: str
) -> None:
    assert RewardSettings.model_validate(values).advertised == advertised


def test_instance_when_not_named_has_the_machines_name() -> None:
    assert RewardSettings().reward_instance == instance_name("reward")
    assert socket.gethostname() in instance_name("reward")
    assert instance_name("reward") != instance_name("rollout")
