"""Arithmetic tasks with a verifier, and a calculator that answers between two turns."""

from __future__ import annotations

import re
from dataclasses import dataclass

DIRECT = "You are a careful assistant. Answer with the number only."
CALCULATOR = (
    "You have a calculator. Write the expression to compute between << and >>, for example <<3 * 4>>. "
    "When the calculator has answered, repeat its number."
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt: the messages that the policy sees, and what is right."""

    prompt_id: str
    question: str
    answer: int
    uses_calculator: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        if not self.uses_calculator:
            return [{"role": "system", "content": DIRECT}, {"role": "user", "content": self.question}]
        shown = [("user", "What is 2 + 2?"), ("assistant", "<<2 + 2>>"), ("tool", "4"), ("assistant", "4")]
        example = [{"role": role, "content": content} for role, content in shown]
        return [{"role": "system", "content": CALCULATOR}, *example, {"role": "user", "content": self.question}]


TASKS = (
    Task(prompt_id="7+5", question="What is 7 + 5?", answer=12),
    Task(prompt_id="6*3", question="What is 6 times 3?", answer=18),
    Task(prompt_id="8+9", question="What is 8 + 9?", answer=17),
    Task(prompt_id="10-4", question="What is 10 - 4?", answer=6),
    Task(prompt_id="12+30", question="What is 12 + 30?", answer=42),
    Task(prompt_id="5*5", question="What is 5 times 5?", answer=25),
    Task(prompt_id="17*23", question="What is 17 * 23?", answer=391, uses_calculator=True),
    Task(prompt_id="48+77", question="What is 48 + 77?", answer=125, uses_calculator=True),
)


def verify(text: str, answer: int) -> float:
    """1 if the last number of the text is the answer, else 0."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == answer)


def calculate(text: str) -> str | None:
    """What the calculator says to the last <<a op b>> of the text; None when nothing was asked of it."""
    asked = re.findall(r"<<\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*>>", text)
    if not asked:
        return None
    left, operator, right = asked[-1]
    results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
    return str(results[operator])
