"""A game with ``reset``, ``step`` and ``close``: guess a number by halves.

staleflow train plain model=MODEL data.source=examples.agents.guess:problems data.chat=true environment.play=gym \\
    environment.arguments='{make: "examples.agents.guess:Guess"}'
"""

import random
import re

MOST = 100


class Guess:
    """Rewards 1 for the number, less the more guesses it took."""

    def __init__(self, task, tries=7):
        self.number = task.facts["number"]
        self.left = self.tries = tries

    def reset(self):
        return "", {}  # the prompt of the row has asked already

    def step(self, text):
        self.left -= 1
        found = re.findall(r"\d+", text)
        guess = int(found[-1]) if found else -1
        if guess == self.number:
            return "", 0.5 + 0.5 * self.left / self.tries, True, False, {}
        answer = "Higher." if guess < self.number else "Lower."
        return answer, 0.0, self.left == 0, False, {}

    def close(self):
        pass


def problems(count=1000, seed=0):
    for number in random.Random(seed).choices(range(1, MOST + 1), k=count):
        asked = f"Guess my number between 1 and {MOST}. I say whether it is higher or lower. Answer with a number only."
        yield {"prompt": [{"role": "user", "content": asked}], "answer": str(number), "number": number}
