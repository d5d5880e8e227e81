"""The engine's Prometheus metrics, read from the batcher when they are asked for. Ids never become labels."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engines.cpu.batcher import Batcher

_NAME = "practicum_engine"


class BatcherCollector(Collector):
    """Figures of one batcher."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def collect(self) -> Iterable[Metric]:
        """One sample a figure; the weight version has none while its name is no integer."""
        batcher, counters = self._batcher, self._batcher.counters
        for name, text, value in (
            ("running_requests", "Requests in slots.", batcher.num_running),
            ("waiting_requests", "Requests that have no slot yet.", batcher.num_waiting),
            ("paused", "1 while generation is paused.", batcher.paused),
        ):
            yield GaugeMetricFamily(f"{_NAME}_{name}", text, value)
        for name, text, value in (
            ("generated_tokens", "Sampled tokens.", counters.output_tokens),
            ("prompt_tokens", "Tokens of prompts, cached or not.", counters.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that the prefix cache gave.", counters.cached_tokens),
            ("weight_updates", "Weights swapped in since the start.", counters.weight_updates),
        ):
            yield CounterMetricFamily(f"{_NAME}_{name}", text, value)
        version = GaugeMetricFamily(f"{_NAME}_weight_version", "The version of the weights served.")
        if batcher.version.isdecimal():
            version.add_metric([], int(batcher.version))
        yield version
