"""The continuous batcher: one worker thread that owns the model, the arena and the prefix cache.

Other threads talk to it in two ways: `submit` a request and wait for its future, or post a command (abort,
pause, update) that runs between two steps. Nothing else reads or writes a running request, so there are no
locks but the inbox's.

A step admits waiting requests, prefills up to a bound of new tokens, then decodes one token for every running
request. Slots 0..d-1 decode, slots d..n-1 still prefill; both ranges have no holes.

Invariants:
- keys and values of other weights are never given to a new request: a swap flushes the cache, and a request
  that keeps its own across a swap (pause mode in_place) never becomes a donor;
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

from engines.cpu.arena import KvArena
from engines.cpu.model import Model, Segment, kv_rows
from engines.cpu.prefix_cache import BLOCK, CachedSequence, PrefixCache, PrefixIndex, block_chain
from engines.cpu.request import AbortMessage, Finish, FinishKind, Request
from engines.cpu.sampling import SamplingPlan, sample
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
        self._arena = KvArena(model.config, model.dtype)
        self._cache = PrefixCache()
        self._donors: PrefixIndex[Request] = PrefixIndex()  # decoding requests whose prompt may be copied
        self._arriving: PrefixIndex[Request] = PrefixIndex()  # prefilling requests that will be donors
        self._waiting: deque[Request] = deque()
        self._slots: list[Request] = []
        self._num_decoding = 0
        self._updates: list[_Update] = []
        self._plan: SamplingPlan | None = None  # None = the batch changed since the last decode
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
        return sum(request.num_tokens for request in list(self._slots))

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of finished requests in the prefix cache."""
        return self._cache.num_tokens

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
        if self._updates and (self.paused or not self._slots):
            self._commit_updates()
        if self.paused:
            return False
        started_s = time.perf_counter()
        if not self._updates:
            self._admit()
        if not self._slots:
            return False
        num_busy = len(self._slots)
        if len(self._slots) > self._num_decoding:
            self._prefill_step()
        if self._num_decoding:
            self._decode_step()
        self.counters.busy_slot_s += num_busy * (time.perf_counter() - started_s)
        return True

    # admission

    def _admit(self) -> None:
        """Give slots to waiting requests in order; one that would repeat a running prefill waits for it."""
        deferred: list[Request] = []
        while self._waiting and len(self._slots) < self.max_running:
            request = self._waiting.popleft()
            ids = request.sequence()
            chain = block_chain(ids, request.chain)
            finished, in_cache = self._cache.longest(ids, chain)
            running, in_slots = self._donors.longest(ids, chain)
            _, arriving = self._arriving.longest(ids, chain)
            most = len(ids) - 1  # the last token is always computed: its logits are wanted
            if request.logprob_start is not None and request.wants_prompt_logprobs:
                request.prompt_logprobs.clear()
                most = min(most, request.logprob_start)
            if min(arriving, most) >= max(in_cache, in_slots) + BLOCK:
                deferred.append(request)
                continue
            if not self._make_room(request):
                self._waiting.appendleft(request)
                break
            slot = len(self._slots)
            cached = min(max(in_cache, in_slots), most)
            if running is not None and in_slots >= in_cache:
                self._arena.write(slot, self._arena.read(running.slot, cached))
            elif finished is not None:
                self._arena.write(slot, finished.kv[:, :, :, :cached])
            self._enter_slot(request, cached)
        self._waiting.extendleft(reversed(deferred))

    def _enter_slot(self, request: Request, cached: int) -> None:
        request.slot = len(self._slots)
        request.prefilled = cached
        request.enter_version(self.version)
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.counters.cached_tokens += cached
            self.counters.prompt_tokens += len(request.prompt_ids)
        self._slots.append(request)
        if request.num_tokens - cached == 1 and request.max_new_tokens > 0:
            self._start_decoding(request)
        else:
            self._arriving.add(request, request.chain)

    def _start_decoding(self, request: Request) -> None:
        self._exchange(request.slot, self._num_decoding)
        self._num_decoding += 1
        self._plan = None
        if not request.has_stale_kv:
            self._donors.add(request, request.chain)

    def _make_room(self, request: Request) -> bool:
        """Shape the arena for one more request within the token bound; False when it must wait."""
        arena, num_slots = self._arena, len(self._slots) + 1
        most = max((other.most_tokens for other in self._slots), default=0)
        capacity = arena.rounded(max(request.most_tokens, most))
        if num_slots * capacity > self.max_total_tokens and num_slots > 1:
            return False
        if not capacity <= arena.capacity < 4 * capacity or num_slots > arena.num_slots:
            room = max(self.max_total_tokens // capacity, num_slots)
            wanted = max(min(2 * num_slots, self.max_running), arena.num_slots)
            arena.resize(min(room, wanted), capacity, len(self._slots))
            self._plan = None
        self._cache.shrink(self.max_total_tokens - num_slots * arena.capacity)
        return True

    def _cache_budget(self) -> int:
        """Tokens that finished sequences may hold beside the slots in use."""
        return self.max_total_tokens - len(self._slots) * self._arena.capacity

    # the two kinds of step

    def _prefill_step(self) -> None:
        started_s = time.perf_counter()
        budget = _PREFILL_TOKENS
        segments: list[Segment] = []
        requests: list[Request] = []
        ids: list[int] = []
        for request in self._slots[self._num_decoding :]:
            length = min(request.num_tokens - request.prefilled, budget)
            if not length:
                break
            budget -= length
            segments.append(Segment(slot=request.slot, start=request.prefilled, length=length))
            requests.append(request)
            ids.extend(request.sequence()[request.prefilled : request.prefilled + length].tolist())
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
        hidden = self.model.prefill(self._arena, torch.tensor(ids), positions, segments)
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
            self._arriving.remove(request, request.chain)
            self._start_decoding(request)
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
        requests = self._slots[: self._num_decoding]
        if self._plan is None:
            self._plan_decode(requests)
        assert self._plan is not None
        logits = self.model.decode(self._arena, self._ids_N, self._positions_N, self._rows_N2K, self._longest)
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
        self._plan = SamplingPlan.of([request.params for request in requests])
        self._ids_N = torch.tensor([request.last_id for request in requests])
        self._positions_N = torch.tensor([request.num_tokens - 1 for request in requests])
        self._rows_N2K = kv_rows(self.model.config, self._arena, self._positions_N)
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
        if request.finish.message is AbortMessage.NOT_FINITE:
            self._arena.clear(request.slot)
        elif not request.has_stale_kv and request.slot < self._num_decoding:
            self._remember(request)
        self._leave_slot(request)
        self._answer(request)

    def _remember(self, request: Request) -> None:
        ids = request.sequence()[:-1] if request.output_ids else request.prompt_ids[:-1]
        sequence = CachedSequence(
            ids,
            block_chain(ids, request.chain[: len(ids) // BLOCK]),
            self._arena.read(request.slot, len(ids)),
        )
        if self._cache.insert(sequence, self._cache_budget()):
            sequence.kv = sequence.kv.clone()

    def _leave_slot(self, request: Request) -> None:
        if request.slot < self._num_decoding:
            self._donors.remove(request, request.chain)
            self._exchange(request.slot, self._num_decoding - 1)
            self._num_decoding -= 1
            self._plan = None
        else:
            self._arriving.remove(request, request.chain)
        self._exchange(request.slot, len(self._slots) - 1)
        self._slots.pop()
        request.slot = -1

    def _exchange(self, left: int, right: int) -> None:
        """Swap two slots; only as much is copied as the two hold."""
        if left == right:
            return
        a, b = self._slots[left], self._slots[right]
        self._arena.swap(left, right, a.num_tokens, b.num_tokens, discard_left=a.finish is not None)
        self._slots[left], self._slots[right] = b, a
        a.slot, b.slot = right, left

    def _answer(self, request: Request) -> None:
        request.finished_version = self.version
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(request)

    def _fail_running(self) -> None:
        self.counters.failures += 1
        failed = list(self._slots)
        self._forget_slots()
        self._cache.flush()
        self._arena = KvArena(self.model.config, self.model.dtype)
        for request in failed:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(RuntimeError("the engine failed in a step; see its log"))

    def _forget_slots(self) -> None:
        self._slots.clear()
        self._num_decoding = 0
        self._plan = None
        self._donors.clear()
        self._arriving.clear()

    # commands

    def _abort(self, rid: str | None) -> None:
        for request in [r for r in self._slots if rid is None or r.rid == rid]:
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
        retracted = list(self._slots)
        self._forget_slots()
        for request in retracted:
            request.slot = -1
            request.prefilled = 0
            request.has_stale_kv = False
            request.num_retractions += 1
        self._waiting.extendleft(reversed(retracted))

    def _resume(self) -> None:
        self.paused = False

    def _flush(self) -> bool:
        if self._slots or (self._waiting and not self.paused):
            return False
        self._cache.flush()
        return True

    def _commit_updates(self) -> None:
        for update in self._updates:
            self.model.weights = update.weights
            self.model_path = update.model_path
            if update.version is not None:
                self.version = update.version
            self._cache.flush()
            self._donors.clear()
            for request in self._slots:
                request.has_stale_kv = True
                request.enter_version(self.version)
            log.info("engine.weights_updated", weight_version=self.version, model_path=self.model_path)
            update.done.set_result(len(self._slots))
        self._updates.clear()

    def _shut_down(self) -> None:
        with self._wake:
            self._stopping = True
        message = AbortMessage.SHUTDOWN
        for request in [*self._slots, *self._waiting]:
            request.finish = Finish(kind=FinishKind.ABORT, message=message)
            self._answer(request)
        self._forget_slots()
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
