"""vLLM: what `LLM` and `AsyncLLM` return, as records. `record(llm, writer)` is the one line that keeps all of it.

Which distribution a log-prob is of is read from the engine's configuration (`logprobs_mode`), never from the numbers.
"""

from rollstore.writers.vllm.configuration import Configuration, configuration
from rollstore.writers.vllm.outputs import logprob_kind, replies, rollouts, sampler, stream_replies, stream_rollouts
from rollstore.writers.vllm.record import Recording, record

__all__ = [
    "Configuration",
    "Recording",
    "configuration",
    "logprob_kind",
    "record",
    "replies",
    "rollouts",
    "sampler",
    "stream_replies",
    "stream_rollouts",
]
