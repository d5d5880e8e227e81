"""The JSON that the engine answers with: SGLang's names and shapes.

Owns: turning finished requests and the engine's state into dictionaries. Never waits and never decides
anything.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from engines.cpu.batcher import Batcher
from engines.cpu.request import AbortMessage, Finish, FinishKind, Request

API_VERSION = "0.5.23"  # the release of SGLang whose API this is

Json = dict[str, Any]
Decode = Callable[[Sequence[int], bool], str]


def error(message: str) -> Json:
    """The body of a 400."""
    return {"error": {"message": message}}


def generation(request: Request, *, wants_logprobs: bool, decode: Decode) -> Json:
    """The answer of /generate for one finished request."""
    assert request.finish is not None
    logprobs = _logprobs(request) if wants_logprobs else {}
    spans = [
        {"version": span.version, "start": span.start, "end": span.end} for span in request.version_spans()
    ]
    latency_s = time.monotonic() - request.arrived_s
    meta: Json = {"id": request.rid, "finish_reason": _finish_reason(request)}
    if request.finish.message is AbortMessage.WAITING:
        # SGLang's queue answers with less than a batch does
        meta |= {
            "weight_version": request.finished_version,
            "e2e_latency": latency_s,
            "weight_versions": spans,
        }
        meta |= {**logprobs, "completion_tokens": len(request.output_ids)}
    else:
        cached = request.cached_tokens or 0
        meta |= {
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": request.finished_version,
            "num_retractions": request.num_retractions,
            **logprobs,
            "reasoning_tokens": 0,
            "completion_tokens": len(request.output_ids),
            "cached_tokens": cached,
            "weight_versions": spans,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "dp_rank": None,
            "e2e_latency": latency_s,
        }
    meta["response_sent_to_client_ts"] = time.time()
    return {
        "text": _text(request, request.finish, decode),
        "output_ids": request.output_ids,
        "meta_info": meta,
    }


def _logprobs(request: Request) -> Json:
    prompt: list[list[float | int | None]] = []
    if request.logprob_start is not None and request.logprob_start < len(request.prompt_ids):
        ids = request.prompt_ids[request.logprob_start :].tolist()
        values = [None, *request.prompt_logprobs]  # the first token has no logprob, as in SGLang
        prompt = [[value, token, None] for value, token in zip(values, ids, strict=False)]
    output = zip(request.output_logprobs, request.output_ids, strict=True)
    return {
        "input_token_logprobs": prompt,
        "output_token_logprobs": [[value, token, None] for value, token in output],
        "output_token_logprobs_length": len(request.output_ids),
    }


def _finish_reason(request: Request) -> Json:
    assert request.finish is not None
    match request.finish.kind:
        case FinishKind.STOP:
            return {"type": "stop", "matched": request.finish.matched}
        case FinishKind.LENGTH:
            return {"type": "length", "length": len(request.output_ids)}
        case FinishKind.ABORT:
            reason: Json = {"type": "abort", "message": request.finish.message}
            if request.finish.message is not AbortMessage.WAITING:
                reason |= {"status_code": None, "err_type": None}
            return reason


def _text(request: Request, finish: Finish, decode: Decode) -> str:
    """The output as text, without what ended it (unless `no_stop_trim`)."""
    params, ids = request.params, request.output_ids
    trims = finish.kind is FinishKind.STOP and not params.no_stop_trim
    if trims and isinstance(finish.matched, int):
        ids = ids[:-1]
    text = decode(ids, params.skip_special_tokens)
    if trims and isinstance(finish.matched, str) and finish.matched in text:
        text = text[: text.index(finish.matched)]
    return text


def model_info(batcher: Batcher, *, tokenizer_path: str) -> Json:
    """The answer of /model_info."""
    architecture = batcher.model.config.architecture
    return {
        "model_path": batcher.model_path,
        "served_model_name": batcher.model_path,
        "tokenizer_path": tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": batcher.version,
        "load_format": "auto",
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "architectures": [architecture],
    }


def server_info(batcher: Batcher) -> Json:
    """The answer of /server_info; `counters` are this engine's own running totals."""
    counters = batcher.counters
    return {
        "model_path": batcher.model_path,
        "served_model_name": batcher.model_path,
        "context_length": batcher.model.config.context_length,
        "max_total_tokens": batcher.max_total_tokens,
        "max_total_num_tokens": batcher.max_total_tokens,
        "max_running_requests": batcher.max_running,
        "max_req_input_len": min(batcher.model.config.context_length, batcher.max_total_tokens) - 1,
        "dtype": str(batcher.model.dtype).removeprefix("torch."),
        "device": "cpu",
        "weight_version": batcher.version,
        "version": API_VERSION,
        "engine": "practicum-cpu",
        "status": "ready" if batcher.is_alive else "stopped",
        "disable_radix_cache": False,
        "counters": {name: getattr(counters, name) for name in type(counters).__dataclass_fields__},
    }


def loads(batcher: Batcher) -> Json:
    """The answer of /v1/loads."""
    used, limit, counters = batcher.num_used_tokens, batcher.max_total_tokens, batcher.counters
    seconds = counters.prefill_s + counters.decode_s
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": batcher.num_running,
        "num_waiting_reqs": batcher.num_waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "num_cached_tokens": batcher.num_cached_tokens,
        "max_total_num_tokens": limit,
        "max_running_requests": batcher.max_running,
        "token_usage": round(used / limit, 4),
        "gen_throughput": counters.output_tokens / seconds if seconds else 0.0,
        "cache_hit_rate": counters.cached_tokens / counters.prompt_tokens if counters.prompt_tokens else 0.0,
        "total_prefill_uncached_tokens": counters.prefill_tokens,
        "total_prefill_busy_us": int(counters.prefill_s * 1e6),
        "total_output_tokens": counters.output_tokens,
        "busy_slot_seconds": counters.busy_slot_s,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": API_VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [load],
    }


def weights_checked(checksums: dict[str, str]) -> Json:
    """The answer of /weights_checker for action checksum: SHA-256 per tensor, and one over all of them."""
    total = hashlib.sha256(
        "".join(f"{name}={checksums[name]}\n" for name in sorted(checksums)).encode()
    ).hexdigest()
    rank = {"checksums": checksums, "per_gpu_checksum": total}
    return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": total}
