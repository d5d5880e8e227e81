"""Sampled tokens/s of the CPU engine over HTTP against transformers' `generate`, one request at a time.

Both sides serve the same random model of the demo's shape, on one thread, the same kind of requests: groups
of 8 that share a prompt of 100 to 300 tokens, 20 to 50 new tokens each. They take turns, round after round,
and each figure is the median over the rounds. Figures in tokens per second of CPU time say what a side costs
where other processes share the machine. Prints a table, then one JSON line.

    python -m benchmarks.engine [--rounds 3] [--threads 1]
"""

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

CONCURRENCY = (1, 8, 32, 64)
GROUP_SIZE = 8
VOCAB_SIZE = 1024
SPEEDUP_BAR = 10.0
DIFFERENCE_BAR = 1e-3
START_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the workload."""

    ids: list[int]
    new_tokens: int


def make_jobs(count: int, seed: int) -> list[Job]:
    """`count` requests in groups that share a prompt; another seed gives other prompts."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(100, 300))]
        jobs += [Job(ids=prompt, new_tokens=rng.randint(20, 50)) for _ in range(GROUP_SIZE)]
    return jobs[:count]


def make_model(folder: Path) -> Any:
    """Write a random model with the shape of `tiny` and give it back."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def engine(folder: Path, threads: int) -> Iterator[tuple[str, int]]:
    """A CPU engine in a process of its own; gives its URL and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "engines.cpu.main", "--model", str(folder), "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    server = subprocess.Popen([*command, "--threads", str(threads)], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the engine did not start")
            time.sleep(0.1)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait(timeout=30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def run_engine(url: str, jobs: Sequence[Job], concurrency: int) -> tuple[float, list[Any]]:
    """Tokens/s of the jobs with `concurrency` of them in flight, and the answers."""
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(job: Job) -> Any:
            params = {"max_new_tokens": job.new_tokens, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": job.ids, "return_logprob": True, "sampling_params": params}
            async with slots:
                return (await client.post("/generate", json=body)).raise_for_status().json()

        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        seconds = time.perf_counter() - started_s
    return num_tokens(jobs) / seconds, [task.result() for task in tasks]


def num_tokens(jobs: Sequence[Job]) -> int:
    """New tokens of all jobs."""
    return sum(job.new_tokens for job in jobs)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_transformers(model: Any, jobs: Sequence[Job]) -> float:
    """Tokens/s of `generate`, one job after the other."""
    started_s = time.perf_counter()
    for job in jobs:
        options = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens, "do_sample": True}
        ids = torch.tensor([job.ids])
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, top_k=0, **options)
    return num_tokens(jobs) / (time.perf_counter() - started_s)


def largest_difference(model: Any, jobs: Sequence[Job], answers: Sequence[Any]) -> float:
    """Largest gap between the engine's logprobs and those of transformers on the same tokens."""
    worst = 0.0
    for job, answer in zip(jobs, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([job.ids + answer["output_ids"]])).logits[0]
        scored = torch.log_softmax(logits[len(job.ids) - 1 : -1], -1)
        for row, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
            worst = max(worst, abs(logprob - float(scored[row, token])))
    return worst


def measure(rounds: int, threads: int) -> dict[str, float]:
    """Every figure, medians over the rounds."""
    torch.set_num_threads(threads)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name))
        with engine(Path(name), threads) as (url, pid):
            asyncio.run(run_engine(url, make_jobs(16, seed=999), 8))  # warm both sides
            run_transformers(model, make_jobs(1, seed=999))
            difference = 0.0
            for turn in range(rounds):
                cpu_s = time.process_time()
                jobs = make_jobs(8, seed=turn)
                alone = run_transformers(model, jobs)
                alone_cpu = num_tokens(jobs) / (time.process_time() - cpu_s)
                found.setdefault("transformers_tokens_s", []).append(alone)
                found.setdefault("transformers_tokens_cpu_s", []).append(alone_cpu)
                for concurrency in CONCURRENCY:
                    jobs = make_jobs(max(16, 12 * concurrency), seed=1000 * concurrency + turn)
                    cpu_s = cpu_seconds(pid)
                    speed, answers = asyncio.run(run_engine(url, jobs, concurrency))
                    speed_cpu = num_tokens(jobs) / (cpu_seconds(pid) - cpu_s)
                    found.setdefault(f"engine_{concurrency}_tokens_cpu_s", []).append(speed_cpu)
                    found.setdefault(f"speedup_{concurrency}_cpu", []).append(speed_cpu / alone_cpu)
                    found.setdefault(f"engine_{concurrency}_tokens_s", []).append(speed)
                    found.setdefault(f"speedup_{concurrency}", []).append(speed / alone)
                    difference = max(difference, largest_difference(model, jobs[:4], answers[:4]))
    figures = {name: statistics.median(values) for name, values in found.items()}
    return figures | {"logprob_difference_max": difference}


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and exit with 0 whatever the bars say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parsed = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    figures = measure(parsed.rounds, parsed.threads)
    columns = ("in flight", "tokens/s", "times", "tokens/CPU-s", "times")
    table = Table(*columns, title="CPU engine, 2.8M parameters, against transformers")
    for concurrency in CONCURRENCY:
        speed, speedup = figures[f"engine_{concurrency}_tokens_s"], figures[f"speedup_{concurrency}"]
        cpu, times = figures[f"engine_{concurrency}_tokens_cpu_s"], figures[f"speedup_{concurrency}_cpu"]
        table.add_row(str(concurrency), f"{speed:,.0f}", f"{speedup:.1f}", f"{cpu:,.0f}", f"{times:.1f}")
    table.caption = (
        f"transformers generate, one at a time: {figures['transformers_tokens_s']:,.0f} tokens/s, "
    )
    table.caption += f"{figures['transformers_tokens_cpu_s']:,.0f} tokens/CPU-s"
    Console(width=80).print(table)
    speedup, difference = figures["speedup_32"], figures["logprob_difference_max"]
    bars = [
        {
            "figure": "speedup_32",
            "op": ">=",
            "bar": SPEEDUP_BAR,
            "value": speedup,
            "ok": speedup >= SPEEDUP_BAR,
        },
        {
            "figure": "logprob_difference_max",
            "op": "<=",
            "bar": DIFFERENCE_BAR,
            "value": difference,
            "ok": difference <= DIFFERENCE_BAR,
        },
    ]
    print(json.dumps({"name": "engine", "figures": figures, "bars": bars}))


if __name__ == "__main__":
    main(sys.argv[1:])
