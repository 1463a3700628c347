"""A taskset of verifiers: one turn, two rewards and a metric. An option makes it misbehave."""

import asyncio

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTaskConfig(vf.TaskConfig):
    mode: str = ""


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, task: SumData, trace: vf.Trace) -> float:
        if self.config.mode == "raise":
            raise KeyError("the reward's defect")
        if self.config.mode == "hang":
            await asyncio.Event().wait()
        if self.config.mode == "nan":
            return float("nan")
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    most: int = 200


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.most):
            prompt = f"What is {a}+7?"
            data = SumData(prompt=prompt, answer=str(a + 7), system_prompt="Add.", timeout=vf.TaskTimeout(agent=1e-3))
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
