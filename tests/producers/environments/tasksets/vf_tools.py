"""A taskset of verifiers with a tool server that all its tasks share."""

import verifiers.v1 as vf


class CalculatorConfig(vf.SharedToolsetConfig):
    offset: int = 0


class Calculator(vf.Toolset[CalculatorConfig, vf.State]):
    TOOL_PREFIX = "calc"

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """a + b"""
        return a + b + self.config.offset


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, task: ToolData, trace: vf.Trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class ToolConfig(vf.TasksetConfig):
    calculator: CalculatorConfig = CalculatorConfig()


class ToolTaskset(vf.Taskset[ToolTask, ToolConfig]):
    def load(self):
        for a in range(50):
            yield ToolTask(ToolData(prompt=f"Use the tool: {a}+9", answer=str(a + 9)), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)]


__all__ = ["ToolTaskset"]

if __name__ == "__main__":
    Calculator.run()
