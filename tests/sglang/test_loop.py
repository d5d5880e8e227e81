"""One whole loop against a real SGLang server: episodes → grade → step → publish → new version served."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from practicum.cli.main import TINY_FOLDER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PROBE = [5, 17, 42, 99, 7, 64, 3, 80]


def served_logprobs(url: str) -> list[float]:
    body = {
        "input_ids": PROBE,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = httpx.post(url + "/generate", json=body, timeout=60).raise_for_status().json()
    return [pair[0] for pair in answer["meta_info"]["input_token_logprobs"][1:]]


def logprobs_of(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROBE])).logits[0]
    scored = torch.log_softmax(logits[:-1], dim=-1)
    return [float(scored[t, PROBE[t + 1]]) for t in range(len(PROBE) - 1)]


def test_demo_when_the_engine_is_sglang_serves_the_trained_version(sglang_url: str, tmp_path: Path) -> None:
    before = served_logprobs(sglang_url)
    assert before == pytest.approx(logprobs_of(TINY_FOLDER), abs=1e-3)
    command = [sys.executable, "-c", "from practicum.cli.main import main; main()", "demo"]
    command += ["--engine-url", sglang_url, "--steps", "2", "--heldout", "8", "--train", "32"]
    command += ["--data-dir", str(tmp_path / "data"), "--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["heldout_after"]["weight_version"] == 2
    assert report["episodes_infra_failed"] == 0
    info = httpx.get(sglang_url + "/model_info", timeout=30).json()
    assert info["weight_version"].partition(".")[0] == "2"  # then the number of the load
    after = served_logprobs(sglang_url)
    assert after == pytest.approx(logprobs_of(Path(info["model_path"])), abs=1e-3)
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 1e-4, "training changed nothing"
