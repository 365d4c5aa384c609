"""OpenAI-compatible replies over HTTP: chat and completions, whole or streamed, and vLLM's `/inference/v1/generate`.

Ask the server for `return_token_ids`: without ids a reply is refused, since nothing is rebuilt from text. Ask for
`return_tokens_as_token_ids` to have heads: their entries are texts otherwise. Which distribution the log-probs are of
is not in a reply; a caller who knows how the server runs says it as `logprob_kind`.
"""

from rollstore.writers.openai.body import Body, decode
from rollstore.writers.openai.choices import Server, replies, rollouts, sampler
from rollstore.writers.openai.stream import events, joined

__all__ = ["Body", "Server", "decode", "events", "joined", "replies", "rollouts", "sampler"]
