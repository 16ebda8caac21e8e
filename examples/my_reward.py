"""The reward that own_data.yaml names."""


def correct(problem, response):
    return float(problem.facts["answer"] in response.text)
