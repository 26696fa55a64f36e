"""A taskset in the v1 API of verifiers: sums of two digits, with a tool, a metric and tasks that misbehave."""

import asyncio

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str
    trouble: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        if self.data.trouble == "raise":
            raise RuntimeError("the judge is away")
        if self.data.trouble == "nan":
            return float("nan")
        if self.data.trouble == "hang":
            await asyncio.sleep(60)
        last = trace.branches[-1].messages[-1].content
        return float(str(last).strip().endswith(self.data.answer))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(str(trace.branches[-1].messages[-1].content)))


class SumsConfig(vf.TasksetConfig):
    trouble: str = ""
    num: int = 50


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for i in range(self.config.num):
            a, b = 10 + i % 80, 11 + (7 * i) % 80
            data = SumData(prompt=f"{a}+{b}=", answer=str(a + b), trouble=self.config.trouble)
            yield SumTask(data, self.config.task)
