"""The HTTP edge: SGLang's native endpoints over a batcher.

Owns: routes, status codes, and the requests in flight by id; beside them what every process of the house
answers (/healthz, /readyz, /metrics). Never touches tensors; everything about a running request goes through
the batcher.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from engines.cpu import answers
from engines.cpu.batcher import Batcher, EngineStopped, PauseMode
from engines.cpu.generate_request import GenerateCall, Limits, read_generate
from engines.cpu.request import Request
from engines.cpu.tokens import Tokens
from engines.cpu.weights import WeightsRefused, checksums, load_weights
from practicum.telemetry.logs import get_logger

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_UPDATE_KEYS = frozenset(("model_path", "weight_version", "flush_cache", "abort_all_requests"))

log = get_logger("engines.cpu")


class EngineApi:
    """Handlers over one batcher. `logs_requests` writes one line for each finished generation."""

    def __init__(
        self,
        batcher: Batcher,
        tokens: Tokens,
        *,
        tokenizer_path: str,
        logs_requests: bool,
        registry: CollectorRegistry,
    ) -> None:
        self._batcher = batcher
        self._registry = registry
        self._tokens = tokens
        self._tokenizer_path = tokenizer_path
        self._logs_requests = logs_requests
        self._in_flight: set[str] = set()
        self._updating = asyncio.Lock()  # one update at a time: two would race for the version
        config = batcher.model.config
        self._limits = Limits(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            max_total_tokens=batcher.max_total_tokens,
        )

    async def generate(self, http_request: HttpRequest) -> Response:
        """POST /generate: wait for the tokens; a client that goes away ends its requests."""
        try:
            call = read_generate(await _read_json(http_request), self._limits, self._tokens)
            self._claim([request.rid for request in call.requests])
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        try:
            for request in call.requests:
                self._batcher.submit(request)
            await self._finished(http_request, call.requests)
        except EngineStopped as error:
            return JSONResponse(answers.error(str(error)), status_code=503)
        finally:
            self._in_flight.difference_update(request.rid for request in call.requests)
        return JSONResponse(self._answer(call))

    def _claim(self, rids: Sequence[str]) -> None:
        for index, rid in enumerate(rids):
            if rid in self._in_flight or rid in rids[:index]:
                raise ValueError(f"Duplicate request ID detected: {rid}")
        self._in_flight.update(rids)

    async def _finished(self, http_request: HttpRequest, requests: Sequence[Request]) -> None:
        futures = [asyncio.wrap_future(request.future) for request in requests]
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._abort_when_gone(http_request, requests))
            try:
                await asyncio.gather(*futures)
            finally:
                watcher.cancel()

    async def _abort_when_gone(self, http_request: HttpRequest, requests: Sequence[Request]) -> None:
        while (await http_request.receive())["type"] != "http.disconnect":
            pass
        for request in requests:
            self._batcher.abort(request.rid)

    def _answer(self, call: GenerateCall) -> Any:
        found = [
            answers.generation(request, wants_logprobs=wants, decode=self._tokens.decode)
            for request, wants in zip(call.requests, call.wants_logprobs, strict=True)
        ]
        if self._logs_requests:
            for item in found:
                meta = item["meta_info"]
                log.info(
                    "engine.generated",
                    rid=meta["id"],
                    finish=meta["finish_reason"],
                    seconds=meta["e2e_latency"],
                )
        return found if call.is_batch else found[0]

    async def abort_request(self, http_request: HttpRequest) -> Response:
        """POST /abort_request: end `rid`, or everything with `abort_all`; an unknown rid is no error."""
        try:
            body = _object(await _read_json(http_request), ("rid", "abort_all"))
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        rid = body.get("rid")
        if body.get("abort_all") or rid:
            await asyncio.wrap_future(self._batcher.abort(None if body.get("abort_all") else rid))
        return Response()

    async def pause_generation(self, http_request: HttpRequest) -> Response:
        """POST /pause_generation."""
        try:
            body = _object(await _read_json(http_request), ("mode",))
            mode = PauseMode(body.get("mode", PauseMode.ABORT))
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        await asyncio.wrap_future(self._batcher.pause(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http_request: HttpRequest) -> Response:
        """POST /continue_generation."""
        try:
            _object(await _read_json(http_request), ())
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        await asyncio.wrap_future(self._batcher.resume())
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, timeout: float = 0.0) -> Response:
        """POST /flush_cache: 400 while requests run, after waiting up to `timeout` seconds for them."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not await asyncio.wrap_future(self._batcher.flush_cache()):
            if asyncio.get_running_loop().time() >= deadline:
                return PlainTextResponse("Flush cache failed.\n", status_code=400)
            await asyncio.sleep(0.05)
        return PlainTextResponse(_FLUSHED)

    async def update_weights_from_disk(self, http_request: HttpRequest) -> Response:
        """POST /update_weights_from_disk: all tensors of the folder, or none."""
        try:
            body = _read_update(await _read_json(http_request))
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        model, folder, version = self._batcher.model, body["model_path"], body.get("weight_version")
        async with self._updating:
            try:
                weights = await asyncio.to_thread(load_weights, Path(folder), model.config, model.dtype)
            except WeightsRefused as error:
                log.warning("engine.update_refused", model_path=folder, reason=str(error))
                answer = {"success": False, "message": str(error), "num_paused_requests": 0}
                return JSONResponse(answer, status_code=400)
            swapped = self._batcher.update_weights(
                weights, version=version, model_path=folder, abort_all=bool(body.get("abort_all_requests"))
            )
            num_paused = await asyncio.wrap_future(swapped)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": num_paused})

    async def weights_checker(self, http_request: HttpRequest) -> Response:
        """POST /weights_checker, action checksum: what is served, hashed now."""
        try:
            action = _object(await _read_json(http_request), ("action",)).get("action")
            if action != "checksum":
                raise ValueError(f"action {action!r} is not supported, only checksum")
        except ValueError as error:
            return JSONResponse(answers.error(str(error)), status_code=400)
        weights = await asyncio.wrap_future(self._batcher.served_weights())
        found = await asyncio.to_thread(checksums, weights, self._batcher.model.config)
        return JSONResponse(answers.weights_checked(found))

    async def model_info(self) -> Response:
        """GET /model_info."""
        return JSONResponse(answers.model_info(self._batcher, tokenizer_path=self._tokenizer_path))

    async def server_info(self) -> Response:
        """GET /server_info."""
        return JSONResponse(answers.server_info(self._batcher))

    async def loads(self) -> Response:
        """GET /v1/loads."""
        return JSONResponse(answers.loads(self._batcher))

    async def health(self) -> Response:
        """GET /health: the worker is alive, paused or not."""
        return Response(status_code=200 if self._batcher.is_alive else 503)

    async def ready(self) -> Response:
        """GET /ready: requests are being served; 503 while paused."""
        return Response(status_code=503 if self._not_ready() else 200)

    async def healthz(self) -> Response:
        """GET /healthz: as /health, with a body like that of the services."""
        if not self._batcher.is_alive:
            return JSONResponse({"status": "the worker has ended"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> Response:
        """GET /readyz: as /ready, with the reason."""
        reason = self._not_ready()
        return JSONResponse({"engine": reason or "ok"}, status_code=503 if reason else 200)

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _not_ready(self) -> str:
        if not self._batcher.is_alive:
            return "the worker has ended"
        return "paused" if self._batcher.paused else ""


def create_app(api: EngineApi) -> FastAPI:
    """The application over `api`."""
    app = FastAPI(
        title="Practicum CPU engine",
        description="The subset of SGLang's native API that Practicum uses, on CPU.",
        openapi_url=None,
    )
    for path, handler in (
        ("/generate", api.generate),
        ("/abort_request", api.abort_request),
        ("/pause_generation", api.pause_generation),
        ("/continue_generation", api.continue_generation),
        ("/flush_cache", api.flush_cache),
        ("/update_weights_from_disk", api.update_weights_from_disk),
        ("/weights_checker", api.weights_checker),
    ):
        app.add_api_route(path, handler, methods=["POST"], response_model=None)
    for path, reader in (
        ("/model_info", api.model_info),
        ("/server_info", api.server_info),
        ("/v1/loads", api.loads),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/healthz", api.healthz),
        ("/readyz", api.readyz),
        ("/metrics", api.metrics),
    ):
        app.add_api_route(path, reader, methods=["GET"], response_model=None)
    return app


async def _read_json(http_request: HttpRequest) -> object:
    try:
        return json.loads(await http_request.body())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error


def _object(body: object, keys: Sequence[str]) -> Mapping[str, Any]:
    """`body` as an object with no key beside `keys` set."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    unknown = [key for key, value in body.items() if key not in keys and value is not None]
    if unknown:
        raise ValueError(f"field `{unknown[0]}` is not supported by this engine")
    return body


def _read_update(raw: object) -> Mapping[str, Any]:
    body = _object(raw, tuple(_UPDATE_KEYS))
    if not isinstance(body.get("model_path"), str):
        raise ValueError("model_path must be a string")
    if not isinstance(body.get("weight_version"), str | None):
        raise ValueError("weight_version must be a string")
    if body.get("flush_cache") is False:
        raise ValueError("flush_cache=false is not supported: a prefix of other weights is never used again")
    return body
