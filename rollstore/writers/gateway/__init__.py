"""The gateway: a proxy between an agent's client and an engine's OpenAI-compatible server, that records every call.

It asks the engine for token ids and log-probs, hides from the client what that one did not ask for, and makes rollouts
of what was drawn: token in, token out, nothing is rebuilt from text. Needs the extra `gateway`.
"""

from rollstore.writers.gateway.conversations import Conversations
from rollstore.writers.gateway.proxy import Gateway
from rollstore.writers.gateway.serve import serve

__all__ = ["Conversations", "Gateway", "serve"]
