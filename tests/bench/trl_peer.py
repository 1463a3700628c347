"""The TRL side of `bench_peer.py`. It runs in a virtual environment that has TRL but not Tidemill.

python trl_peer.py MODEL QUESTIONS OUT SEED STEPS LEARNING_RATE TOKENS EVERY
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP, GROUPS = 8, 8
EVALUATED = 512
"""Number of held-out rollouts of an evaluation."""


def solved(text: str, payload: str) -> float:
    """Return 1 if the last number of an answer is correct: chain_sum's own score, with `last_number`."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == json.loads(payload)["answer"])


def main() -> None:
    directory, asked, out, seed, steps, rate, tokens, every = sys.argv[1:]
    torch.manual_seed(int(seed))
    questions = json.loads(Path(asked).read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = [{"prompt": [{"role": "user", "content": q["prompt"]}], "payload": q["payload"]} for q in questions["train"]]
    curve: list[dict[str, float]] = []
    trained_s = [0.0]

    def reward(completions: list[Any], payload: list[str], **_rest: Any) -> list[float]:
        return [solved(each[0]["content"], right) for each, right in zip(completions, payload, strict=True)]

    def evaluate(step: int) -> None:
        held_out = questions["eval"] * (EVALUATED // len(questions["eval"]))
        right = 0.0
        model.eval()
        for start in range(0, len(held_out), 64):
            part = held_out[start : start + 64]
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": q["prompt"]}], add_generation_prompt=True, tokenize=False
                )
                for q in part
            ]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.no_grad():
                made = model.generate(**inputs, max_new_tokens=int(tokens), do_sample=True, temperature=1.0, top_k=0)
            answers = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(solved(text, q["payload"]) for text, q in zip(answers, part, strict=True))
        model.train()
        curve.append(
            {
                "version": step,
                "rate": right / len(held_out),
                "rollouts": len(held_out),
                "seconds": round(trained_s[0], 1),
                "trained": step * GROUP * GROUPS,
            }
        )

    class Clock(TrainerCallback):
        def on_step_begin(self, *_arguments: Any, **_rest: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, _settings: Any, state: Any, *_arguments: Any, **_rest: Any) -> None:
            trained_s[0] += time.monotonic() - self.began
            if state.global_step % int(every) == 0:
                evaluate(state.global_step)

    evaluate(0)
    settings = GRPOConfig(
        output_dir=f"{out}.trl",
        learning_rate=float(rate),
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=int(steps),
        per_device_train_batch_size=GROUP * GROUPS,
        num_generations=GROUP,
        max_completion_length=int(tokens),
        temperature=1.0,
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=int(seed),
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    found = {
        "rollouts_per_s": round(int(steps) * GROUP * GROUPS / trained_s[0], 3),
        "learning_rate": float(rate),
        "reward": [round(each, 4) for each in rewards],
        "curve": curve,
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
