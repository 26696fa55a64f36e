"""A taskset of verifiers with a tool server that all tasks share."""

import verifiers.v1 as vf
from gspo_sums import SumData, SumTask

__all__ = ["ToolSums"]


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolSums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(SumData(prompt="Add 10 and 11.", answer="21"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


if __name__ == "__main__":  # verifiers starts the server as `python -m gspo_tools`
    Adder.run()
