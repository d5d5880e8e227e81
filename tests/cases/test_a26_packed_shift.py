"""Case A26: in a packed row, the last state of one sample never predicts the first token of the next."""

from pathlib import Path

import pytest

from services.trainer.algorithms.objective import SftObjective
from services.trainer.megatron.backend import MegatronBackend, OptimizerConfig
from tests.fixtures.megatron import model_folder, train_row


def test_A26_packed_loss_is_the_sum_over_the_samples_alone(tmp_path: Path) -> None:
    # The second sample has no prompt: its first token has no context, so it cannot be trained at all.
    first = train_row([1, 2], [False, True], trajectory_id="a")
    second = train_row([3, 4], [False, True], trajectory_id="b")
    folder = model_folder(tmp_path / "base")
    losses = []
    for rows in ([first], [second], [first, second]):
        backend = MegatronBackend.load(folder, optimizer=OptimizerConfig())
        result = backend.train(rows, SftObjective())
        losses.append(result.loss * result.num_tokens_trained)
        if len(rows) == 2:
            assert result.num_microbatches == 1
            with pytest.raises(ValueError, match="first token"):
                backend.train([first, train_row([3, 4], [True, True])], SftObjective())
        backend.close()
    assert losses[2] == pytest.approx(losses[0] + losses[1], rel=1e-5)
