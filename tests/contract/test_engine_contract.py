"""What the rollout service relies on in an engine: run against engines/cpu, and against a real SGLang server.

The real server is that of `--sglang-venv`, or the one at PRACTICUM_SGLANG_URL, which serves
PRACTICUM_SGLANG_MODEL.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from practicum.cli.main import TINY_FOLDER
from tests.fixtures.engine_models import Reference, changed_copy, disturb, llama_config, save_random_model
from tests.fixtures.engine_server import Engine, Json, cpu_engine

TOLERANCE = 1e-3
PROMPT = [11, 57, 30, 101, 99, 34, 201, 45, 12, 88, 90, 17, 143, 76, 25, 31, 64, 19, 120, 55, 87, 23, 150, 61]
LONG = 1500  # tokens: long enough that it still runs when the test acts


@pytest.fixture(scope="module", params=["cpu", pytest.param("sglang", marks=pytest.mark.sglang)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Path]]:
    """URL of an engine, the folder it serves, and a folder of other weights."""
    folder = tmp_path_factory.mktemp("models")
    if request.param == "cpu":
        model = save_random_model(folder / "model", llama_config())
        other = changed_copy(model, folder / "other", disturb)
        with cpu_engine(model, "--max-running-requests", "8", "--max-total-tokens", "16384") as (url, _):
            yield url, model, other
        return
    if "PRACTICUM_SGLANG_URL" in os.environ:
        url, model = os.environ["PRACTICUM_SGLANG_URL"], Path(os.environ["PRACTICUM_SGLANG_MODEL"])
    else:
        url, model = request.getfixturevalue("sglang_url"), TINY_FOLDER
    yield url, model, changed_copy(model, folder / "other", disturb)


@pytest.fixture(scope="module")
def references(served: tuple[str, Path, Path]) -> tuple[Reference, Reference]:
    """transformers on the two folders."""
    return Reference(served[1]), Reference(served[2])


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, served: tuple[str, Path, Path], references: tuple[Reference, Reference]
) -> Iterator[Engine]:
    """An idle engine that serves `model` as version "a"."""
    url, model, other = served
    config = json.loads((model / "config.json").read_text())
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(12) as pool:
        found = Engine(
            client=client,
            pool=pool,
            model=model,
            other=other,
            reference=references[0],
            other_reference=references[1],
            vocab_size=config["vocab_size"],
            context_length=config["max_position_embeddings"],
            is_ours="cpu" in request.node.callspec.params.values(),
        )
        found.rest()
        answer = found.update(model, "a")
        assert answer.status_code == 200, answer.text
        try:
            yield found
        finally:
            found.rest()


def only_ours(engine: Engine, why: str) -> None:
    if not engine.is_ours:
        pytest.skip(why)


def output_logprobs(answer: Json) -> list[float]:
    pairs = answer["meta_info"]["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == answer["output_ids"]
    return [pair[0] for pair in pairs]


def check_logprobs(answer: Json, ids: list[int], reference: Reference, temperature: float = 1.0) -> None:
    expected = reference.logprobs(ids + answer["output_ids"], len(ids), temperature)
    assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    """Polls until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def until_held(engine: Engine, num_waiting: int) -> None:
    """Waits until a paused engine holds so many requests."""
    if engine.is_ours:
        until(lambda: load(engine.client)["num_waiting_reqs"] == num_waiting, "the engine holds no request")
    else:
        time.sleep(0.3)  # SGLang holds them before its scheduler, where nothing shows them


def load(client: httpx.Client) -> Json:
    return dict(client.get("/v1/loads").json()["loads"][0])


# what a generation says


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_generate_when_sampled_gives_logprobs_of_the_sampling_distribution(
    engine: Engine, temperature: float
) -> None:
    answer = engine.generate(PROMPT, rid="x-1", max_new_tokens=24, temperature=temperature, ignore_eos=True)
    check_logprobs(answer, PROMPT, engine.reference, temperature)
    meta = answer["meta_info"]
    assert meta["id"] == "x-1"
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 24)
    assert meta["weight_version"] == "a"
    assert meta["weight_versions"] == [{"version": "a", "start": 0, "end": 24}]
    assert meta["num_retractions"] == 0
    assert meta["input_token_logprobs"] == []


def test_generate_when_greedy_gives_the_likeliest_tokens_each_time(engine: Engine) -> None:
    first = engine.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
    again = engine.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
    assert first["output_ids"] == again["output_ids"]
    logits = engine.reference.logits(PROMPT + first["output_ids"])
    assert first["output_ids"] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    check_logprobs(first, PROMPT, engine.reference)


@pytest.mark.parametrize("start", [0, 5])
def test_prompt_logprobs_when_asked_are_those_of_the_plain_distribution(engine: Engine, start: int) -> None:
    engine.generate(PROMPT, max_new_tokens=1)  # now the prefix cache could get in the way
    answer = engine.generate(PROMPT, start=start, max_new_tokens=1, temperature=0.5)
    pairs = answer["meta_info"]["input_token_logprobs"]
    assert [pair[1] for pair in pairs] == PROMPT[start:]
    assert pairs[0][0] is None
    expected = engine.reference.logprobs(PROMPT, start + 1)
    assert [pair[0] for pair in pairs[1:]] == pytest.approx(expected, abs=TOLERANCE)


def test_generate_when_given_a_batch_answers_each_in_order(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:]]
    body = {
        "input_ids": prompts,
        "rid": ["b-0", "b-1", "b-2"],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
    }
    answers = engine.post("/generate", body).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["b-0", "b-1", "b-2"]
    for prompt, answer in zip(prompts, answers, strict=True):
        check_logprobs(answer, prompt, engine.reference)


def test_generate_when_many_run_at_once_keeps_their_tokens_apart(engine: Engine) -> None:
    prompts = [PROMPT[: 4 + index] for index in range(20)]
    futures = [
        engine.pool.submit(engine.generate, prompt, max_new_tokens=8 + index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    for index, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        answer = future.result(60)
        assert len(answer["output_ids"]) == 8 + index
        check_logprobs(answer, prompt, engine.reference)


def test_generate_when_max_new_tokens_is_0_scores_the_prompt_only(engine: Engine) -> None:
    answer = engine.generate(PROMPT, start=0, max_new_tokens=0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


# how a generation ends


def test_stop_token_ids_when_sampled_end_the_output_and_stay_in_it(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)["output_ids"]
    stop = free[5]
    answer = engine.generate(PROMPT, max_new_tokens=16, temperature=0, stop_token_ids=[stop])
    assert answer["output_ids"] == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    check_logprobs(answer, PROMPT, engine.reference)


def test_stop_token_ids_when_ignore_eos_are_ignored(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)["output_ids"]
    answer = engine.generate(
        PROMPT, max_new_tokens=16, temperature=0, stop_token_ids=[free[3]], ignore_eos=True
    )
    assert answer["output_ids"] == free


def test_min_new_tokens_when_set_takes_stop_ids_out_of_the_distribution(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)["output_ids"]
    answer = engine.generate(
        PROMPT, max_new_tokens=16, temperature=0, stop_token_ids=[free[0]], min_new_tokens=6
    )
    assert free[0] not in answer["output_ids"][:6]
    assert len(answer["output_ids"]) > 6 or answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_stop_strings_when_met_end_the_output_and_leave_the_text(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
    stop = next(letter for letter in free["text"] if letter.isascii() and letter.isprintable())
    answer = engine.generate(PROMPT, max_new_tokens=24, temperature=0, stop=[stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]


def test_abort_when_running_gives_partial_tokens_with_logprobs(engine: Engine) -> None:
    running = engine.begin(PROMPT, rid="ab-1", max_new_tokens=LONG, ignore_eos=True)
    answer = engine.post("/abort_request", {"rid": "ab-1"})
    assert (answer.status_code, answer.text) == (200, "")
    partial = running.result(20)
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(partial["output_ids"]) < LONG
    check_logprobs(partial, PROMPT, engine.reference)
    assert partial["meta_info"]["weight_versions"][-1]["end"] == len(partial["output_ids"])


def test_abort_when_the_id_is_unknown_is_no_error_and_ends_nothing(engine: Engine) -> None:
    running = engine.begin(PROMPT, rid="ab-2", max_new_tokens=LONG, ignore_eos=True)
    assert engine.post("/abort_request", {"rid": "nobody"}).status_code == 200
    before = load(engine.client)["num_used_tokens"]
    until(lambda: load(engine.client)["num_used_tokens"] > before, "the request does not go on")
    assert not running.done()
    engine.post("/abort_request", {"abort_all": True})
    assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_when_queued_gives_an_empty_output(engine: Engine) -> None:
    only_ours(engine, "SGLang loses an abort that arrives while it is paused")
    engine.post("/pause_generation", {"mode": "retract"})
    queued = engine.pool.submit(engine.generate, PROMPT, rid="qu-1", max_new_tokens=4)
    until_held(engine, 1)
    engine.post("/abort_request", {"rid": "qu-1"})
    answer = queued.result(10)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert answer["meta_info"]["completion_tokens"] == 0


def test_generate_when_the_client_goes_away_stops_running(engine: Engine) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{engine.client.base_url}/generate", json=body, timeout=0.3)
    until(lambda: not engine.num_running(), "the request outlived its client", timeout_s=6)


# weights


def test_update_when_running_requests_are_retracted_starts_a_version_span(engine: Engine) -> None:
    running = engine.begin(PROMPT, max_new_tokens=LONG, ignore_eos=True)
    assert engine.post("/pause_generation", {"mode": "retract"}).json()["status"] == "ok"
    assert engine.client.get("/ready").status_code == 503
    answer = engine.update(engine.other, "b")
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    waiting = engine.pool.submit(engine.generate, PROMPT, max_new_tokens=4, ignore_eos=True)
    until_held(engine, 2)  # it, and the retracted one
    assert not waiting.done()
    assert engine.post("/continue_generation").status_code == 200
    assert engine.client.get("/ready").status_code == 200
    answer_of_waiting = waiting.result(30)
    assert answer_of_waiting["meta_info"]["weight_versions"] == [{"version": "b", "start": 0, "end": 4}]
    spanning = running.result(60)
    cut = spanning["meta_info"]["weight_versions"][0]["end"]
    assert 0 < cut < LONG
    assert spanning["meta_info"]["weight_versions"] == [
        {"version": "a", "start": 0, "end": cut},
        {"version": "b", "start": cut, "end": LONG},
    ]
    assert (spanning["meta_info"]["weight_version"], spanning["meta_info"]["num_retractions"]) == ("b", 1)
    ids = PROMPT + spanning["output_ids"]
    expected = engine.reference.logprobs(ids, len(PROMPT))[:cut]
    # after the cut the whole context was computed again: nothing of the old weights is left
    expected += engine.other_reference.logprobs(ids, len(PROMPT))[cut:]
    assert output_logprobs(spanning) == pytest.approx(expected, abs=TOLERANCE)


def test_D05_prefix_cache_when_weights_change_is_not_used_again(engine: Engine) -> None:
    engine.generate(PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)
    warm = engine.generate(PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)
    assert warm["meta_info"]["cached_tokens"] > 0, "without a cached prefix this test cannot fail"
    assert engine.update(engine.other, "b").status_code == 200
    with_cache = engine.generate(PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)
    assert engine.post("/flush_cache").status_code == 200
    without = engine.generate(PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True)
    assert with_cache["output_ids"] == without["output_ids"]
    assert output_logprobs(with_cache) == pytest.approx(output_logprobs(without), abs=1e-4)
    check_logprobs(with_cache, PROMPT, engine.other_reference)


def test_D20_update_when_it_fails_leaves_version_and_weights(engine: Engine, tmp_path: Path) -> None:
    answer = engine.update(tmp_path / "nothing-here", "b")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert engine.version == "a"
    after = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert after["meta_info"]["weight_version"] == "a"
    check_logprobs(after, PROMPT, engine.reference)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "truncated", "not_finite"])
def test_D07_update_when_the_folder_is_damaged_changes_no_tensor(
    engine: Engine, tmp_path: Path, damage: str
) -> None:
    only_ours(engine, "SGLang takes folders with missing tensors: the checksums show it, its answer does not")

    def change(tensors: dict[str, object]) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        tensor = tensors[name]
        match damage:
            case "missing":
                del tensors[name]
            case "unknown":
                tensors["model.layers.9.mlp.down_proj.weight"] = tensor.clone()  # type: ignore[attr-defined]
            case "shape":
                tensors[name] = tensor[:, :8].contiguous()  # type: ignore[index]
            case "not_finite":
                tensor[0, 0] = float("nan")  # type: ignore[index]

    folder = changed_copy(engine.other, tmp_path / damage, change)  # type: ignore[arg-type]
    if damage == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
    before = engine.post("/weights_checker", {"action": "checksum"}).json()
    answer = engine.update(folder, "b")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert engine.version == "a"
    assert engine.post("/weights_checker", {"action": "checksum"}).json() == before
    check_logprobs(engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True), PROMPT, engine.reference)


def test_weights_checker_when_weights_change_gives_other_checksums(engine: Engine) -> None:
    def sums() -> Json:
        return dict(engine.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"])

    before = sums()
    assert "model.embed_tokens.weight" in before
    engine.update(engine.other, "b")
    changed = sums()
    assert changed.keys() == before.keys()
    assert changed["model.embed_tokens.weight"] != before["model.embed_tokens.weight"]
    engine.update(engine.model, "a")
    assert sums() == before


def test_update_when_unpaused_waits_for_running_requests(engine: Engine) -> None:
    running = engine.begin(PROMPT, max_new_tokens=400, ignore_eos=True)
    assert engine.update(engine.other, "b").status_code == 200
    answer = running.result(30)
    assert answer["meta_info"]["weight_versions"] == [{"version": "a", "start": 0, "end": 400}]
    check_logprobs(answer, PROMPT, engine.reference)
    assert engine.version == "b"


def test_pause_when_abort_ends_running_requests_and_holds_new_ones(engine: Engine) -> None:
    running = engine.begin(PROMPT, max_new_tokens=LONG, ignore_eos=True)
    assert engine.post("/pause_generation", {"mode": "abort"}).status_code == 200
    partial = running.result(20)
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert partial["output_ids"]
    held = engine.pool.submit(engine.generate, PROMPT, max_new_tokens=2, ignore_eos=True)
    until_held(engine, 1)
    assert not held.done()
    engine.post("/continue_generation")
    assert len(held.result(20)["output_ids"]) == 2


def test_pause_when_in_place_keeps_old_keys_for_the_running_request_only(engine: Engine) -> None:
    only_ours(engine, "SGLang answers 400 here although it changed the weights")
    running = engine.begin(PROMPT, max_new_tokens=LONG, ignore_eos=True)
    engine.post("/pause_generation", {"mode": "in_place"})
    assert engine.update(engine.other, "b").json()["num_paused_requests"] == 1
    engine.post("/continue_generation")
    fresh = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert fresh["meta_info"]["cached_tokens"] == 0
    check_logprobs(fresh, PROMPT, engine.other_reference)
    spanning = running.result(60)
    assert [span["version"] for span in spanning["meta_info"]["weight_versions"]] == ["a", "b"]
    assert spanning["meta_info"]["num_retractions"] == 0


# the prefix cache


def test_prefix_cache_when_a_turn_follows_computes_new_tokens_only(engine: Engine) -> None:
    first = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    prompt = PROMPT + first["output_ids"] + PROMPT[:9]
    second = engine.generate(prompt, max_new_tokens=8, ignore_eos=True)
    assert second["meta_info"]["cached_tokens"] >= len(PROMPT) + 19
    check_logprobs(second, prompt, engine.reference)


def test_prefix_cache_when_a_group_shares_a_prompt_prefills_it_once(engine: Engine) -> None:
    only_ours(engine, "reads this engine's counters")

    def prefilled() -> int:
        return int(engine.client.get("/server_info").json()["counters"]["prefill_tokens"])

    before = prefilled()
    prompt = PROMPT * 5
    body = {"input_ids": [prompt] * 8, "return_logprob": True, "sampling_params": {"max_new_tokens": 12}}
    answers = engine.post("/generate", body).json()
    assert prefilled() - before == len(prompt)
    for answer in answers:
        check_logprobs(answer, prompt, engine.reference)
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0] + [len(prompt) - 1] * 7


def test_flush_cache_when_a_request_runs_is_refused(engine: Engine) -> None:
    running = engine.begin(PROMPT, rid="fl", max_new_tokens=LONG, ignore_eos=True)
    assert engine.post("/flush_cache").status_code == 400
    engine.post("/abort_request", {"rid": "fl"})
    running.result(20)


# bad input


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"max_tokens": 4}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens"),
        ({"max_new_tokens": 4000}, "4000"),
    ],
)
def test_generate_when_a_sampling_parameter_is_wrong_answers_400_naming_it(
    engine: Engine, params: Json, word: str
) -> None:
    answer = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert answer.status_code == 400
    assert word in answer.text


@pytest.mark.parametrize("body", [{}, {"input_ids": []}, {"input_ids": "abc"}, {"input_ids": [5] * 2100}])
def test_generate_when_the_prompt_is_wrong_answers_400(engine: Engine, body: Json) -> None:
    answer = engine.post("/generate", body | {"sampling_params": {"max_new_tokens": 1}})
    assert answer.status_code == 400


def test_generate_when_the_id_is_in_flight_answers_400(engine: Engine) -> None:
    running = engine.begin(PROMPT, rid="dup", max_new_tokens=LONG, ignore_eos=True)
    answer = engine.post("/generate", {"input_ids": PROMPT, "rid": "dup"})
    assert answer.status_code == 400
    assert "dup" in answer.text
    engine.post("/abort_request", {"rid": "dup"})
    running.result(20)


@pytest.mark.parametrize("wrong", [-1, "vocab_size", 2**40])
def test_generate_when_an_id_is_outside_the_vocabulary_answers_400(engine: Engine, wrong: int | str) -> None:
    only_ours(engine, "such an id kills a real SGLang server")
    token = engine.vocab_size if wrong == "vocab_size" else wrong
    answer = engine.post("/generate", {"input_ids": [*PROMPT, token]})
    assert answer.status_code == 400
    assert str(token) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"frequency_penalty": 0.5}},
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"json_schema": "{}"}},
        {"stream": True},
        {"top_logprobs_num": 2},
        {"lora_path": "x"},
    ],
)
def test_generate_when_a_feature_is_not_implemented_refuses_it_by_name(engine: Engine, body: Json) -> None:
    only_ours(engine, "SGLang implements these")
    answer = engine.post("/generate", {"input_ids": PROMPT} | body)
    assert answer.status_code == 400
    name = next(iter(body.get("sampling_params") or body))
    assert f"`{name}`" in answer.json()["error"]["message"]


def test_health_when_paused_says_alive_but_not_ready(engine: Engine) -> None:
    only_ours(engine, "SGLang's health check takes 20 s to fail while paused")
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.client.get("/health").status_code == 200
    assert engine.client.get("/ready").status_code == 503


def test_sigterm_when_requests_run_answers_them_and_leaves(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", llama_config(), with_tokenizer=False)
    with cpu_engine(model) as (url, server), ThreadPoolExecutor(1) as pool:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        running = pool.submit(httpx.post, f"{url}/generate", json=body, timeout=30)
        with httpx.Client(base_url=url, timeout=30) as client:
            until(lambda: load(client)["total_output_tokens"] > 0, "the engine does not run the request")
        server.terminate()
        answer = running.result(20).json()
        assert server.wait(20) == 0
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 2000
