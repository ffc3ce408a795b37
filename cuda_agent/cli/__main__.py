"""The entry point of ``python -m cuda_agent.cli``."""

from cuda_agent.cli.main import main

main()
