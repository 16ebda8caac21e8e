"""The environment variables that reward workers see: what programs need to run, and what is named.

    environment(("OPENAI_API_KEY",))        # PATH, HOME, PYTHONPATH, ... and OPENAI_API_KEY

A reward function runs code that judges what a model wrote, so it does not see the user's keys and tokens unless
``reward.environment`` names them.
"""

import os
import re
from collections.abc import Mapping, Sequence

from staleflow.reward.function import RewardError

PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|LANG|LANGUAGE|VIRTUAL_ENV|LD_LIBRARY_PATH|SYSTEMROOT"
    r"|(?:LC|XDG|PYTHON|CONDA|OMP|MKL|OPENBLAS|NUMEXPR|CUDA|NVIDIA|HF|TRANSFORMERS|TOKENIZERS|SSL_CERT)_?\w*"
    r"|(?:http|https|no|all)_proxy|(?:HTTP|HTTPS|NO|ALL)_PROXY|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|AUTH|PRIVATE")
"""Never passed unless named, such as HF_TOKEN."""


def environment(
    named: Sequence[str], given: Mapping[str, str] | None = None, setting: str = "reward.environment"
) -> dict[str, str]:
    """The variables for a worker, from ``given`` or from this process; ``setting`` has those that are ``named``."""
    given = os.environ if given is None else given
    if missing := [name for name in named if name not in given]:
        raise RewardError(f"{setting} names {missing[0]}, which is not set: export it, or leave it out")
    passed = {name: value for name, value in given.items() if PASSED.fullmatch(name) and not SECRET.search(name)}
    return {"OMP_NUM_THREADS": "1"} | passed | {name: given[name] for name in named}
