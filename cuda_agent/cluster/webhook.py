"""Tells a webhook how a run ended."""

import sys
from typing import Any


def tell(url: str, facts: dict[str, Any]) -> None:
    """Posts ``facts`` about the run's end to the webhook at ``url``.  If the request fails, only prints a line to
    stderr, and neither raises an exception nor tries again."""
    import httpx

    from cuda_agent.mlflow_api import trusted

    text = f"cuda-agent run {facts['run']}: " + ("done" if not facts["code"] else f"ended with {facts['code']}")
    try:
        httpx.post(url.strip(), json={"text": text} | facts, timeout=10, verify=trusted()).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        print(f"the webhook did not take it: {type(error).__name__}", file=sys.stderr)  # the address is a secret
