"""A taskset of verifiers whose reward asks a model of its own."""

import verifiers.v1 as vf


class YesJudge(vf.Judge[bool]):
    prompt = "Is {response} right for {question}? yes/no"

    def parse(self, response):
        return response.text.strip().lower().startswith("yes")


class JudgedConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig()


class JudgedTask(vf.Task[vf.TaskData, vf.State, JudgedConfig]):
    @vf.reward(weight=1.0)
    async def approved(self, task: vf.TaskData, trace: vf.Trace) -> float:
        judge = YesJudge(self.config.judge)
        asked = {"question": task.prompt_text, "response": trace.last_reply}
        return float((await judge.evaluate(trace=trace, **asked)).parsed)


class JudgedTasksetConfig(vf.TasksetConfig):
    task: JudgedConfig = JudgedConfig()


class JudgedTaskset(vf.Taskset[JudgedTask, JudgedTasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield JudgedTask(vf.TaskData(prompt=f"Riddle {number}"), self.config.task)
            number += 1


__all__ = ["JudgedTaskset"]
