"""A real vLLM server on loopback, for as long as a block runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx


@contextmanager
def server(folder: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of a server of the checkpoint in a folder, which stands there as `smol`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "smol",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        *arguments,
    ]  # fmt: skip
    settings = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(environment or {})}
    log: list[str] = []
    settled = threading.Event()

    def read(process: subprocess.Popen[str]) -> None:
        """Take what the server writes, or it would wait for its pipe."""
        for line in process.stdout or ():
            log.append(line)
            if "Application startup complete" in line:
                settled.set()
        settled.set()

    with subprocess.Popen(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=settings
    ) as process:
        reader = threading.Thread(target=read, args=(process,))
        reader.start()
        try:
            settled.wait()
            assert process.poll() is None, "".join(log[-20:])
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                yield client
        finally:
            process.terminate()
            reader.join()
