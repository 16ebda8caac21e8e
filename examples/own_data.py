"""A chat model on your own JSON lines, with rewards written here."""

import sys

import staleflow as sf


def correct(problem, response):
    return float(problem.facts["answer"] in response.text)


def whole(problem, response):
    return 0.0 if response.cut else 1.0


config = sf.load("arithmetic-smollm", ["data.prompt=question", *sys.argv[1:]])
result = sf.train(config, reward={correct: 1.0, whole: 0.1}, data="questions.jsonl")
print(result.reward, result.best)
