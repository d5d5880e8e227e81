"""The continuous batcher: one worker thread that owns the model, the slots and the queue.

Other threads talk to it in two ways: `submit` a request and wait for its future, or post a command (abort,
pause, update) that runs between two steps. Nothing else reads or writes a running request, so there are no
locks but the inbox's.

A step admits waiting requests, prefills up to a bound of new tokens, then decodes one token for every running
request.

Invariants:
- a weight update is built whole before it is handed over, so a swap cannot fail half-way;
- the version moves in the same moment as the weights.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from threading import Condition, Thread
from typing import TypeVar, assert_never

import torch

from engines.cpu.model import Model, Segment, kv_rows
from engines.cpu.request import AbortMessage, Finish, FinishKind, Request
from engines.cpu.sampling import SamplingPlan, sample
from engines.cpu.slots import Slots
from engines.cpu.weights import Weights
from practicum.telemetry.logs import get_logger

_PREFILL_TOKENS = 512  # new tokens in one prefill step: the longest wait it puts on running requests

log = get_logger("engines.cpu")

T = TypeVar("T")


class PauseMode(StrEnum):
    """What a pause does with running requests."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class EngineStopped(RuntimeError):
    """The worker is not running any more."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since the start, read by other threads for their answers."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_s: float = 0.0
    busy_slot_s: float = 0.0
    failures: int = 0
    weight_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    weights: Weights
    version: str | None
    model_path: str
    done: Future[int]


class Batcher:
    """See the module. `start` before use, `stop` once."""

    def __init__(
        self,
        model: Model,
        *,
        model_path: str,
        version: str,
        max_running: int,
        max_total_tokens: int,
        decode_text: Callable[[Sequence[int]], str],
        seed: int,
    ) -> None:
        self.model = model
        self.model_path = model_path
        self.version = version
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens
        self.counters = Counters()
        self.paused = False
        self._decode_text = decode_text
        self._generator = torch.Generator().manual_seed(seed)
        self._slots = Slots(model, max_running=max_running, max_total_tokens=max_total_tokens)
        self._waiting: deque[Request] = deque()
        self._updates: list[_Update] = []
        self._plan = SamplingPlan.of(())
        self._ids_N = self._positions_N = self._rows_N2K = torch.empty(0, dtype=torch.int64)
        self._longest = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = Condition()
        self._stopping = False
        self._thread = Thread(target=self._run, name="engine-batcher", daemon=True)

    # the side of other threads

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def stop(self) -> None:
        """End what is in flight with an abort, then end the worker; returns when it has ended.

        A second call does nothing.
        """
        if not self._stopping:
            self._post(self._shut_down)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True while the worker runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_used_tokens(self) -> int:
        """Tokens of running requests."""
        return sum(request.num_tokens for request in self._slots.requests())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of finished requests in the prefix cache."""
        return self._slots.num_cached_tokens

    def submit(self, request: Request) -> None:
        """Queue a request; its future gives it back when it has ended."""
        self._post(lambda: self._waiting.append(request))

    def abort(self, rid: str | None) -> Future[None]:
        """End the request `rid`, or every request for None, with what it has; unknown ids are ignored."""
        return self._command(lambda: self._abort(rid))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling until `resume`; requests that come meanwhile wait."""
        return self._command(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on after a pause."""
        return self._command(self._resume)

    def flush_cache(self) -> Future[bool]:
        """Forget finished sequences; False (nothing done) while requests run or wait unpaused."""
        return self._command(self._flush)

    def update_weights(
        self, weights: Weights, *, version: str | None, model_path: str, abort_all: bool
    ) -> Future[int]:
        """Swap in complete weights; the future gives the number of requests paused in place.

        Paused, it happens between two steps; otherwise after the running requests have ended (new ones wait).
        """
        update = _Update(weights=weights, version=version, model_path=model_path, done=Future())

        def enqueue() -> None:
            if abort_all:
                self._abort(None)
            self._updates.append(update)

        self._post(enqueue)
        return update.done

    def served_weights(self) -> Future[Weights]:
        """The weights as they are between two steps."""
        return self._command(lambda: self.model.weights)

    def _command(self, action: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001  the caller gets it
                done.set_exception(error)

        self._post(run)
        return done

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise EngineStopped("the engine has stopped")
            self._inbox.append(action)
            self._wake.notify()

    # the worker's side

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                try:
                    self._drain_inbox()
                    worked = not self._stopping and self._step()
                except Exception:
                    # the worker outlives a failed step: its requests fail, the next ones start clean
                    log.exception("engine.step_failed", running=len(self._slots))
                    self._fail_running()
                    worked = True
                if not worked:
                    with self._wake:
                        if not self._inbox and not self._stopping:
                            self._wake.wait()

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> bool:
        """Do one round of work; False when there is nothing to do."""
        if self._updates and (self.paused or not len(self._slots)):
            self._commit_updates()
        if self.paused:
            return False
        started_s = time.perf_counter()
        if not self._updates:
            for request in self._slots.admit(self._waiting, self.version):
                if request.cached_tokens is None:  # its first time: a retracted one comes again
                    request.cached_tokens = request.prefilled
                    self.counters.cached_tokens += request.prefilled
                    self.counters.prompt_tokens += len(request.prompt_ids)
        if not len(self._slots):
            return False
        num_busy = len(self._slots)
        if self._slots.prefilling():
            self._prefill_step()
        if self._slots.decoding():
            self._decode_step()
        self.counters.busy_slot_s += num_busy * (time.perf_counter() - started_s)
        return True

    # the two kinds of step

    def _prefill_step(self) -> None:
        started_s = time.perf_counter()
        budget = _PREFILL_TOKENS
        segments: list[Segment] = []
        requests: list[Request] = []
        ids: list[int] = []
        for request in self._slots.prefilling():
            length = min(request.num_tokens - request.prefilled, budget)
            if not length:
                break
            budget -= length
            segments.append(Segment(slot=request.slot, start=request.prefilled, length=length))
            requests.append(request)
            ids.extend(request.sequence()[request.prefilled : request.prefilled + length].tolist())
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
        hidden = self.model.prefill(self._slots.arena, torch.tensor(ids), positions, segments)
        self._take_prompt_logprobs(hidden, requests, segments)
        lasts: list[int] = []
        complete: list[Request] = []
        offset = 0
        for request, segment in zip(requests, segments, strict=True):
            offset += segment.length
            request.prefilled += segment.length
            if request.prefilled == request.num_tokens:
                complete.append(request)
                lasts.append(offset - 1)
        self.counters.prefill_tokens += len(ids)
        if complete:
            self._finish_prefill(complete, hidden[lasts])
        self.counters.prefill_s += time.perf_counter() - started_s

    def _finish_prefill(self, requests: list[Request], hidden: torch.Tensor) -> None:
        for request in requests:
            self._slots.start_decoding(request)
        tokens, logprobs = sample(
            self.model.logits(hidden),
            SamplingPlan.of([request.params for request in requests]),
            _forbidden(requests),
            [len(request.output_ids) for request in requests],
            self._generator,
        )
        self._take_tokens(requests, tokens.tolist(), logprobs.tolist())

    def _take_prompt_logprobs(
        self, hidden: torch.Tensor, requests: list[Request], segments: list[Segment]
    ) -> None:
        """Logprobs of prompt tokens are those of the plain distribution, whatever the temperature."""
        offset = 0
        for request, segment in zip(requests, segments, strict=True):
            if request.logprob_start is not None and request.wants_prompt_logprobs:
                first = max(segment.start, request.logprob_start)
                last = min(segment.start + segment.length, len(request.prompt_ids) - 1)
                rows = hidden[offset + first - segment.start : offset + last - segment.start]
                targets = torch.from_numpy(request.prompt_ids[first + 1 : last + 1]).long().unsqueeze(1)
                logprobs = torch.log_softmax(self.model.logits(rows), -1).gather(1, targets)
                request.prompt_logprobs.extend(logprobs.squeeze(1).tolist())
            offset += segment.length

    def _decode_step(self) -> None:
        started_s = time.perf_counter()
        requests = self._slots.decoding()
        if self._slots.decoding_changed:
            self._plan_decode(requests)
        logits = self.model.decode(
            self._slots.arena, self._ids_N, self._positions_N, self._rows_N2K, self._longest
        )
        num_sampled = [len(r.output_ids) for r in requests] if self._plan.seeded else ()
        tokens_N, logprobs_N = sample(logits, self._plan, _forbidden(requests), num_sampled, self._generator)
        self._ids_N = tokens_N
        self._positions_N += 1
        self._rows_N2K += 1
        self._longest += 1
        self._take_tokens(requests, tokens_N.tolist(), logprobs_N.tolist())
        self.counters.decode_steps += 1
        self.counters.decode_s += time.perf_counter() - started_s

    def _plan_decode(self, requests: list[Request]) -> None:
        self._slots.decoding_changed = False
        self._plan = SamplingPlan.of([request.params for request in requests])
        self._ids_N = torch.tensor([request.last_id for request in requests])
        self._positions_N = torch.tensor([request.num_tokens - 1 for request in requests])
        self._rows_N2K = kv_rows(self.model.config, self._slots.arena, self._positions_N)
        self._longest = max(request.num_tokens for request in requests)

    def _take_tokens(self, requests: list[Request], tokens: list[int], logprobs: list[float]) -> None:
        """Append what was sampled and end the requests that it ends.

        The inner loop of the engine's Python.
        """
        ended: list[Request] = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            output = request.output_ids
            if request.max_new_tokens == 0 or logprob != logprob:  # a prompt alone, or NaN
                request.finish = _finish_without_token(request)
                ended.append(request)
                continue
            output.append(token)
            request.output_logprobs.append(logprob)
            if token in request.stop_ids:
                request.finish = Finish(kind=FinishKind.STOP, matched=token)
            elif request.params.stop and (matched := self._matched_stop(request)):
                request.finish = Finish(kind=FinishKind.STOP, matched=matched)
            elif len(output) >= request.max_new_tokens:
                request.finish = Finish(kind=FinishKind.LENGTH)
            if request.finish is not None:
                ended.append(request)
        self.counters.output_tokens += len(tokens)
        for request in ended:
            self._end_running(request)

    def _matched_stop(self, request: Request) -> str | None:
        longest = max(len(stop.encode()) for stop in request.params.stop)
        tail = self._decode_text(request.output_ids[-(longest + 1) :])
        return next((stop for stop in request.params.stop if stop in tail), None)

    # leaving

    def _end_running(self, request: Request) -> None:
        """Take a request out of its slot, keep its keys and values for later requests, and answer."""
        assert request.finish is not None
        spoiled = request.finish.message is AbortMessage.NOT_FINITE
        self._slots.leave(request, spoiled=spoiled)
        self._answer(request)

    def _answer(self, request: Request) -> None:
        request.finished_version = self.version
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(request)

    def _fail_running(self) -> None:
        self.counters.failures += 1
        failed = self._slots.reset()
        for request in failed:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(RuntimeError("the engine failed in a step; see its log"))

    # commands

    def _abort(self, rid: str | None) -> None:
        for request in [r for r in self._slots.requests() if rid is None or r.rid == rid]:
            request.finish = Finish(kind=FinishKind.ABORT, message=AbortMessage.RUNNING)
            self._end_running(request)
        for request in [r for r in self._waiting if rid is None or r.rid == rid]:
            self._waiting.remove(request)
            request.finish = Finish(kind=FinishKind.ABORT, message=AbortMessage.WAITING)
            self._answer(request)

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        match mode:
            case PauseMode.ABORT:
                self._abort(None)
            case PauseMode.RETRACT:
                self._retract()
            case PauseMode.IN_PLACE:
                pass
            case _:
                assert_never(mode)

    def _retract(self) -> None:
        """Running requests keep their tokens and go back to the head of the queue, to be prefilled again."""
        retracted = self._slots.empty()
        for request in retracted:
            request.num_retractions += 1
        self._waiting.extendleft(reversed(retracted))

    def _resume(self) -> None:
        self.paused = False

    def _flush(self) -> bool:
        if len(self._slots) or (self._waiting and not self.paused):
            return False
        self._slots.flush()
        return True

    def _commit_updates(self) -> None:
        for update in self._updates:
            self.model.weights = update.weights
            self.model_path = update.model_path
            if update.version is not None:
                self.version = update.version
            self.counters.weight_updates += 1
            self._slots.weights_changed(self.version)
            log.info("engine.weights_updated", weight_version=self.version, model_path=self.model_path)
            update.done.set_result(len(self._slots))
        self._updates.clear()

    def _shut_down(self) -> None:
        with self._wake:
            self._stopping = True
        message = AbortMessage.SHUTDOWN
        for request in [*self._slots.empty(), *self._waiting]:
            request.finish = Finish(kind=FinishKind.ABORT, message=message)
            self._answer(request)
        self._waiting.clear()
        for update in self._updates:
            update.done.set_exception(EngineStopped(message))
        self._drain_inbox()


def _forbidden(requests: Sequence[Request]) -> list[tuple[int, Sequence[int]]]:
    return [
        (row, request.forbidden_ids)
        for row, request in enumerate(requests)
        if request.forbidden_ids and len(request.output_ids) < request.params.min_new_tokens
    ]


def _finish_without_token(request: Request) -> Finish:
    if request.max_new_tokens == 0:
        return Finish(kind=FinishKind.LENGTH)
    return Finish(kind=FinishKind.ABORT, message=AbortMessage.NOT_FINITE)
