"""vLLM's statistics as metrics of the server, reported from a thread."""

import queue
import threading

import triton_python_backend_utils as pb_utils
from vllm.v1.metrics.loggers import StatLoggerBase, build_1_2_5_buckets


class StatLogger(StatLoggerBase):
    def __init__(self, labels, vllm_config, engine_index):
        super().__init__(vllm_config=vllm_config, engine_index=engine_index)
        self._tokens = pb_utils.MetricFamily(
            name="vllm:generation_tokens_total", description="Tokens", kind=pb_utils.MetricFamily.COUNTER
        ).Metric(labels=labels)
        self._lengths = pb_utils.MetricFamily(
            name="vllm:request_prompt_tokens", description="Lengths", kind=pb_utils.MetricFamily.HISTOGRAM
        ).Metric(labels=labels, buckets=build_1_2_5_buckets(vllm_config.model_config.max_model_len))
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._report)
        self._thread.start()

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self._queue.put((self._tokens.increment, iteration_stats.num_generation_tokens))
        for ended in iteration_stats.finished_requests:
            self._queue.put((self._lengths.observe, ended.num_prompt_tokens))

    def _report(self):
        while (item := self._queue.get()) is not None:
            call, value = item
            call(value)

    def stop(self):
        self._queue.put(None)
        self._thread.join()


class LoggerFactory:
    def __init__(self, labels):
        self._labels, self._made = labels, []

    def __call__(self, vllm_config, engine_index):
        self._made.append(StatLogger(self._labels, vllm_config, engine_index))
        return self._made[-1]

    def stop(self):
        for made in self._made:
            made.stop()
