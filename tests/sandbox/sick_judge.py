"""Runs a judge whose device fails its first health probes and is healthy afterwards.

A number in the file ``sick`` in the cache says how many probes still fail. Used by ``test_faults``."""

import types
from pathlib import Path

from cuda_agent.sandbox.judge import judge
from cuda_agent.sandbox.judge.memory import host
from cuda_agent.sandbox.messages import JudgeSettings


class SickMemory(types.ModuleType):
    def __init__(self, file: Path) -> None:
        super().__init__("sick")
        vars(self).update({name: vars(host)[name] for name in host.__all__})

        def healthy() -> bool:
            left = int(file.read_text()) if file.exists() else 0
            if left:
                file.write_text(str(left - 1))
            return not left and host.healthy()

        vars(self)["healthy"] = healthy


class SickJudge(judge.Judge):
    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self.memory = SickMemory(Path(settings.cache) / "sick")


if __name__ == "__main__":
    vars(judge)["Judge"] = SickJudge
    judge.main()
