"""What reward workers see of the environment: what programs need to run, and of everything else what is named.

    environment(("OPENAI_API_KEY",))        # PATH, HOME, PYTHONPATH, ... and OPENAI_API_KEY

A reward function runs code that judges what a model wrote, so keys and tokens of the user are not its business unless
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
"""Not passed, whatever their names begin with: HF_TOKEN."""


def environment(named: Sequence[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a reward worker, out of ``given`` or of this process's own."""
    given = os.environ if given is None else given
    if missing := [name for name in named if name not in given]:
        raise RewardError(f"reward.environment names {missing[0]}, which is not set: export it, or leave it out")
    passed = {name: value for name, value in given.items() if PASSED.fullmatch(name) and not SECRET.search(name)}
    return {"OMP_NUM_THREADS": "1"} | passed | {name: given[name] for name in named}
