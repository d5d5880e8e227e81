"""Composition root: `python -m engines.cpu.main --model PATH --port N`.

Parts: the tokenizer (`tokens`), the weights (`weights`), the model (`model`), the worker (`batcher`) and the
HTTP edge (`api`); none of them refers back here. SIGTERM and SIGINT end running requests with what they have,
answer them, and leave.
"""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from prometheus_client import CollectorRegistry

from engines.cpu.api import EngineApi, create_app
from engines.cpu.batcher import Batcher
from engines.cpu.config import ModelConfig, UnsupportedModel, read_config
from engines.cpu.metrics import BatcherCollector
from engines.cpu.model import Model
from engines.cpu.tokens import Tokens
from engines.cpu.weights import WeightsRefused, load_weights
from practicum.telemetry.logs import configure_logs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_KV_BYTES = 2 * 2**30
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SWITCH_INTERVAL_S = 0.0005  # the HTTP thread must not hold the worker up for Python's usual 5 ms


class EngineServer(uvicorn.Server):
    """Ends the batcher before it waits for connections: open requests answer with partial output at once."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher) -> None:
        super().__init__(config)
        self._batcher = batcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker, then the connections."""
        await asyncio.to_thread(self._batcher.stop)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals as uvicorn does, but do not raise them again: a clean end exits with 0."""
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m engines.cpu.main", description=__doc__)
    parser.add_argument(
        "--model", required=True, type=Path, help="Hugging Face folder of a Llama-family model"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument(
        "--max-total-tokens", type=int, default=0, help="0: what 2 GiB of keys and values hold"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument(
        "--log-requests", action="store_true", help="one log line for each finished generation"
    )
    return parser.parse_args(arguments)


def default_total_tokens(config: ModelConfig, dtype: torch.dtype, max_running: int) -> int:
    """Tokens whose keys and values fill the default memory, at least one context, at most 4,096 a request."""
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return max(config.context_length, min(_DEFAULT_KV_BYTES // token_bytes, 4096 * max_running))


def build(arguments: argparse.Namespace) -> tuple[Batcher, EngineApi]:
    """Load the model and wire the parts; nothing runs yet.

    Raises UnsupportedModel, WeightsRefused or OSError.
    """
    dtype = _DTYPES[arguments.dtype]
    config = read_config(arguments.model)
    tokens = Tokens.of_folder(arguments.model)
    model = Model(config, load_weights(arguments.model, config, dtype), dtype)
    batcher = Batcher(
        model,
        model_path=str(arguments.model),
        version=arguments.weight_version,
        max_running=arguments.max_running_requests,
        max_total_tokens=arguments.max_total_tokens
        or default_total_tokens(config, dtype, arguments.max_running_requests),
        decode_text=tokens.decode_all,
        seed=arguments.random_seed,
    )
    registry = CollectorRegistry()
    registry.register(BatcherCollector(batcher))
    api = EngineApi(
        batcher,
        tokens,
        tokenizer_path=str(arguments.model),
        logs_requests=arguments.log_requests,
        registry=registry,
    )
    return batcher, api


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; the exit code is 0, or 1 when the model cannot be served."""
    parsed = parse_arguments(arguments)
    configure_logs("engine", parsed.log_level)
    torch.set_num_threads(parsed.threads)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        batcher, api = build(parsed)
    except (UnsupportedModel, WeightsRefused, OSError) as error:
        print(f"cannot serve {parsed.model}: {error}", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        create_app(api),
        host=parsed.host,
        port=parsed.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    batcher.start()
    EngineServer(config, batcher).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
